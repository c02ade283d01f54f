"""Measure how far a tuned model has moved from its base on general prompts, which the run was not about."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from finetune.data.templates import AnswerTokens
from finetune.data.values import quote
from finetune.distributed.runtime import Runtime
from finetune.errors import DataError
from finetune.inference.decoding import Decoding, generate_answers, group_prompts
from finetune.inference.prompts import encode_prompts, read_general_prompts
from finetune.inference.verdict import standard_error
from finetune.logs import waiting
from finetune.runs.model_files import has_adapter
from finetune.units import counted, format_duration

if TYPE_CHECKING:
    from finetune.runs.model_files import LoadedRun

MAX_NEW_TOKENS = 32
AT_ONCE = 4
"""Prompts that are answered together. After each such batch, the remaining time is predicted."""
_LEAST_SECONDS = 5.0
"""What the measurement is expected to take before anything is known."""
_NUM_LISTED = 3


@dataclass(frozen=True, kw_only=True)
class Forgetting:
    """The divergence of a tuned model from its base on the base's own greedy answers to general prompts."""

    base_name: str = "the base"
    """The name of the other model in sentences."""
    num_prompts: int = 0
    divergence: float = 0.0
    """KL(base || tuned) in nats per token: the mean over prompts of the mean over an answer's tokens."""
    standard_error: float = 0.0
    base_log_probability: float = 0.0
    """Log-probability per token of the base's answers, the mean over prompts; likewise for the tuned model."""
    tuned_log_probability: float = 0.0
    most_changed: Sequence[tuple[str, float]] = ()
    why_not: str = ""
    """The reason why nothing was measured."""

    def __str__(self) -> str:
        """Return the result in a sentence."""
        if self.why_not:
            return f"What it forgot was not measured: {self.why_not}"
        listed = ", ".join(f"{quote(prompt)} ({divergence:.2f})" for prompt, divergence in self.most_changed)
        base, count = self.base_name, counted(self.num_prompts, "general prompt")
        return (
            f"What it forgot: over {count}, the model diverges from {base} by {self.divergence:.4f} ± "
            f"{self.standard_error:.4f} nats per token. It gives the answers of {base} a log-probability of "
            f"{self.tuned_log_probability:.3f} per token; {base} itself gives them {self.base_log_probability:.3f}. "
            f"Most changed: {listed}"
        )

    def as_record(self) -> dict[str, Any]:
        """Return plain values: the sentence, and the reason or the numbers."""
        return {"sentence": str(self), **({"why_not": self.why_not} if self.why_not else asdict(self))}


def measure_forgetting(
    runtime: Runtime,
    tuned: LoadedRun,
    general_prompts: str,
    *,
    base: LoadedRun | None = None,
    base_name: str = "the base",
    has_random_base: bool = False,
    max_seconds: float = math.inf,
    is_alone: bool = False,
) -> Forgetting | None:
    """Measure KL(base || tuned) on the base's greedy answers to general prompts; None if there are to be none.

    Both models are placed. Without `base`, the adapter is switched off. The measurement does not begin if one forward
    shows that it takes longer than `max_seconds`, and ends as soon as its batches show it. Collective: every rank
    answers some of the prompts, unless `is_alone`.
    """
    prompts = read_general_prompts(general_prompts)
    if not prompts:
        return None
    if has_random_base:
        return Forgetting(why_not="the base has random weights, so it knows nothing that could be forgotten")
    if runtime.placement.shard_size is not None:
        return Forgetting(why_not="the weights are sharded; measure in processes that hold all weights")
    if base is None and not has_adapter(tuned.model):
        return Forgetting(why_not="every weight was trained: `finetune evaluate RUN` loads the base, and measures it")
    reference = tuned.model if base is None else base.model
    try:
        ids, others = (encode_prompts(AnswerTokens(loaded.tokenizer), prompts) for loaded in (tuned, base or tuned))
        if ids != others:
            return Forgetting(why_not="the two models read the prompts as different tokens")
        batches = group_prompts(reference, ids, batch_size=AT_ONCE, max_new_tokens=MAX_NEW_TOKENS)
    except DataError as error:
        return Forgetting(why_not=str(error))
    rank, world_size = (0, 1) if is_alone else (runtime.rank, runtime.world_size)
    if max_seconds < _LEAST_SECONDS:
        return _too_slow(_LEAST_SECONDS, max_seconds)
    from finetune.inference.divergence import compare_answers, least_seconds

    measured = [[0.0, 0.0, 0.0] for _ in ids]
    predicted = _LEAST_SECONDS
    if max_seconds < math.inf:
        predicted = max(predicted, least_seconds(runtime, reference, [ids[row] for row in batches[0]], len(batches)))
    begun = time.monotonic()
    for number, rows in enumerate(own := batches[rank::world_size], start=1):
        if predicted > max_seconds:
            return _too_slow(predicted, max_seconds)
        with waiting(f"measuring what it forgot, batch {number} of {len(own)}"):
            asked = [ids[row] for row in rows]
            compared = compare_answers(runtime, tuned, base, asked, _answers_of_base(tuned, base, asked))
            for row, values in zip(rows, compared, strict=True):
                measured[row] = values
        predicted = (time.monotonic() - begun) / number * len(own)
    if world_size > 1:
        sums = iter(runtime.collectives.sum([value for values in measured for value in values]))
        measured = [list(values) for values in zip(sums, sums, sums, strict=True)]
    divergences, of_base, of_tuned = zip(*measured, strict=True)
    listed = sorted(range(len(ids)), key=lambda row: -divergences[row])[:_NUM_LISTED]
    return Forgetting(
        base_name=base_name,
        num_prompts=len(ids),
        divergence=fmean(divergences),
        standard_error=standard_error(divergences),
        base_log_probability=fmean(of_base),
        tuned_log_probability=fmean(of_tuned),
        most_changed=[(prompts[row].shown, divergences[row]) for row in listed],
    )


def _too_slow(predicted: float, max_seconds: float) -> Forgetting:
    takes, limit = format_duration(predicted), format_duration(max_seconds)
    return Forgetting(
        why_not=f"it may take {takes}, and a tenth of the run's time is {limit}; `finetune evaluate RUN` measures it"
    )


def _answers_of_base(tuned: LoadedRun, base: LoadedRun | None, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the base's greedy answers, each with the token that ends it."""
    model = tuned.model if base is None else base.model
    decoding = Decoding.greedy(model, tuned.tokenizer, MAX_NEW_TOKENS, keeps_stop=True)
    with tuned.model.disable_adapter() if base is None else nullcontext():
        return generate_answers(model, prompts, decoding, batch_size=AT_ONCE)
