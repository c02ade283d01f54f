"""Say at the end of a QLoRA run what merging changes: compare the loss in 4 bits with the loss on the base on disk."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from finetune.engine.supported import called_layers
from finetune.errors import FinetuneError
from finetune.inference.losses import measure_losses
from finetune.inference.verdict import judge_distinct_rows
from finetune.logs import waiting
from finetune.model.base import evaluation_mode, states_in_4_bits
from finetune.model.quantized import weights_from_disk
from finetune.terminal import say
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.data.batches import EvaluationLoader
    from finetune.inference.scores import Evaluation
    from finetune.training.objective import Setup

_MOST_ROWS = 256


def say_what_merging_changes(
    setup: Setup, loader: EvaluationLoader, evaluation: Evaluation, *, max_seconds: float
) -> None:
    """Measure the published adapter on the base on disk, print the verdict, and record it in run.json.

    The main process measures alone, on batches of the tested rows that are drawn with a fixed seed, until it has
    `_MOST_ROWS` rows or has taken `max_seconds`; at least two rows. A weight is read where the engine would dequantize
    it, so no second base is in memory. The rounding of a merge is not in it.
    """
    runtime, model, tested, path = setup.runtime, setup.model, evaluation.rows["tuned"], setup.folder.path
    nats, why_not = dict[int, float](), ""
    if runtime.placement.shard_size is not None:
        why_not = "the weights are sharded"
    elif not setup.is_packed or called_layers(model):
        why_not = "the engine does not compute all layers"
    begun = time.monotonic()
    try:
        with (
            weights_from_disk(setup.config.model, {} if why_not else states_in_4_bits(model)),
            evaluation_mode(model),
            waiting("measuring what merging changes"),
        ):
            for batch in random.Random(0).sample(loader.row_batches, 0 if why_not else len(loader.row_batches)):
                if len(nats) >= _MOST_ROWS or (len(nats) > 1 and time.monotonic() - begun > max_seconds):
                    break
                microbatch = loader.collate_fn([loader.dataset[row] for row in batch])
                nats |= zip(batch, measure_losses(runtime, model, microbatch).nats.tolist(), strict=True)
    except (FinetuneError, OSError) as error:  # the base may be gone by now; the run is complete all the same
        why_not = str(error).removesuffix(".")
    rows = [row for row in nats if tested.num_targets[row]]
    sizes, after, before = ([of[row] for row in rows] for of in (tested.num_targets, nats, tested.nats))
    contents = [evaluation.contents["loss"][row] for row in rows]
    verdict = judge_distinct_rows("loss", after, before, contents, weights=sizes)
    if verdict is None:
        why_not = why_not or "it takes two different rows"
        sentence = f"What merging changes was not measured: {why_not}. `finetune verify {path}` measures it."
        record = {}
    else:
        loss, loss_in_4_bits = sum(after) / sum(sizes), sum(before) / sum(sizes)
        record = {**verdict.as_record(), "loss": loss, "loss_in_4_bits": loss_in_4_bits, "num_rows": len(rows)}
        sentence = (
            "Merging moves the adapter from the base in 4 bits to the base on disk. "
            f"Over {counted(len(rows), 'row')}, the loss is {loss_in_4_bits:.4f} in 4 bits and {loss:.4f} on disk "
            f"({verdict}). `finetune merge` also measures the merged weights"
        )
    say(sentence, indent="  ")
    if setup.journal is not None and not setup.journal.is_closed:
        setup.journal.result["merging"] = {**record, "sentence": sentence}
