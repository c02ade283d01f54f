"""Answer prompts in the validations of a run, and measure the answers by `validation.metrics`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finetune.distributed.runtime import Runtime
from finetune.inference.answers import Metric
from finetune.inference.decoding import Decoding, count_unended, generate_answers
from finetune.inference.evaluation import Dialogues, measured_values
from finetune.inference.scores import mean_metrics
from finetune.inference.subset_scores import values_in_subset
from finetune.own_calls import saving_first
from finetune.runs.metrics import subset_key
from finetune.units import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


def measure_answers(
    runtime: Runtime,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    dialogue: Dialogues,
    *,
    metrics: Mapping[str, Metric],
    max_new_tokens: int,
    batch_size: int,
) -> dict[str, float] | None:
    """Answer prompts greedily, and return the mean of each metric, the same on all ranks. Collective: every rank.

    Returns:
        The means by name, of all rows and of each subset (`subset_key`); None if a rank was asked to stop meanwhile.

    Raises:
        DataError: a user's own metric failed; PeerFailedError on the other ranks. The loop saves the steps first.
    """
    decoding = Decoding.greedy(model, tokenizer, max_new_tokens)
    ids = answer_unless_stopped(runtime, model, dialogue.prompts, decoding, batch_size=batch_size)
    if ids is None:
        return None
    means: dict[str, float] = {}
    with runtime.collectives.failing_together("measuring answers"):
        if runtime.is_main_process:
            answers = [dialogue.reader.read(row).text for row in ids]
            if num_unended := count_unended(model, dialogue.prompts, ids, max_new_tokens):
                _log.info(
                    "Validation: %d of %s did not end within %d tokens (validation.max_new_tokens)",
                    *(num_unended, counted(len(ids), "answer"), max_new_tokens),
                )
            with saving_first():
                measured = measured_values(metrics, answers, dialogue.expected)
            means = mean_metrics(measured)
            for subset in dict.fromkeys(dialogue.subsets):
                means_of_subset = mean_metrics(values_in_subset(measured, dialogue.subsets, subset))
                means |= {subset_key(name, subset): mean for name, mean in means_of_subset.items()}
    return runtime.collectives.broadcast_from_main(means)


def answer_unless_stopped(
    runtime: Runtime, model: Any, prompts: Sequence[Sequence[int]], decoding: Decoding, *, batch_size: int
) -> list[list[int]] | None:
    """Answer prompts with all ranks; None if a rank was asked to stop meanwhile. Collective: every rank."""
    is_cut_short = False

    def is_to_stop() -> bool:
        nonlocal is_cut_short
        is_cut_short = is_cut_short or runtime.stop_requests.is_on_any_rank()
        return is_cut_short

    ids = generate_answers(model, prompts, decoding, batch_size=batch_size, runtime=runtime, is_to_stop=is_to_stop)
    return None if sum(runtime.collectives.sum([float(is_cut_short)])) else ids
