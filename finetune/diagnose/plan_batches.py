"""How the rows of a run become steps and micro-batches, and which micro-batch takes most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.data.batches import BatchPlan, packer, pad
from finetune.data.encoded import EncodedExamples
from finetune.engine.microbatch import Microbatch
from finetune.model.base import longrope_boundary

if TYPE_CHECKING:
    from finetune.config.schema import Config

_MOST_STEPS_LOOKED_AT = 500
_LARGEST_BATCH_TRIED = 128
_FILLER_TOKEN = 1


@dataclass(frozen=True, kw_only=True)
class Batches:
    """How rows become steps."""

    rows: int | None
    """Of an epoch; None where the data could not be read."""
    tokens: int | None
    """Of an epoch."""
    target_tokens: int | None
    computed_share: float | None
    """Tokens that go through the model, over all tokens: shared beginnings count once, padding counts."""
    global_batch_size: int
    global_batch_from: str
    """How it is made up, in words."""
    world_size: int
    steps_per_epoch: int | None
    steps: int | None
    microbatches_per_step: int
    """On the busiest rank."""
    largest_microbatch_rows: int
    largest_microbatch_tokens: int
    """Computed."""


class Largest(NamedTuple):
    """The micro-batch of a run that takes most."""

    microbatch: Microbatch
    per_step: int
    """Micro-batches in a step, on the busiest rank."""


class Batching:
    """How the rows of a run become micro-batches, for any `training.batch_size`."""

    def __init__(
        self, config: Config, model: Any, rows: EncodedExamples | None, *, packs: bool, world_size: int
    ) -> None:
        self._config = config
        self._boundary = longrope_boundary(model)
        self._packs = packs
        self._collate = (
            packer(share_prefixes=config.training.packing and config.training.share_prefixes) if packs else pad
        )
        self._is_known = rows is not None
        self.world_size = world_size
        self._rows = rows if rows is not None else _filler(config, self.global_batch_size(config.training.batch_size))
        self._weights: dict[int, list[list[int]]] = {}

    def global_batch_size(self, batch_size: int) -> int:
        """As `Trainer.global_batch_size`, for another batch size."""
        return self._config.training.global_batch_size or batch_size * self.world_size

    @property
    def end(self) -> int:
        """The largest batch size that makes a difference."""
        most = self._config.training.global_batch_size or _LARGEST_BATCH_TRIED
        return max(1, min(most, len(self._rows) if self._is_known else most, _LARGEST_BATCH_TRIED))

    def plan(self, batch_size: int) -> BatchPlan:
        """As `Trainer.prepare_dataloaders` makes it."""
        training = self._config.training
        rows = self._rows
        if not self._is_known and batch_size > len(rows):
            rows = self._rows = _filler(self._config, self.global_batch_size(batch_size))
        return BatchPlan(
            lengths=rows.lengths.tolist(),
            global_batch_size=self.global_batch_size(batch_size),
            batch_size=batch_size,
            max_tokens=training.max_tokens_per_microbatch,
            boundary=self._boundary,
            drop_last=training.drop_last,
            seed=self._config.seed,
            tokens=rows.tokens if self._packs and training.packing else None,
            share_prefixes=training.share_prefixes,
        )

    def largest(self, batch_size: int) -> Largest:
        """The micro-batch of the first epoch that computes most; of very many steps some are looked at."""
        plan = self.plan(batch_size)
        best: tuple[int, list[int]] = (-1, [])
        per_step, weights = 1, []
        for rows in _some_global_batches(plan):
            cuts = plan.cut(rows)
            per_step = max(per_step, -(-len(cuts) // self.world_size))
            weights.append([cut.num_tokens for cut in cuts])
            best = max(best, *((cut.num_tokens, cut.rows) for cut in cuts))
        self._weights[batch_size] = weights
        return Largest(self._collate([self._rows[row] for row in best[1]]), per_step)

    def computed_per_step(self) -> float:
        """Tokens that go through the model in a step, on all ranks: the mean."""
        weights = self._weights[self._config.training.batch_size]
        return sum(map(sum, weights)) / max(1, len(weights))

    def targets_per_step(self) -> float:
        """Tokens with loss in a step, on all ranks: the mean."""
        each = int(self._rows.num_targets.sum()) / max(1, len(self._rows))
        return each * self.global_batch_size(self._config.training.batch_size)

    def describe(self, largest: Largest, rows: EncodedExamples | None) -> Batches:
        """The figures of the run as it is configured."""
        training = self._config.training
        plan = self.plan(training.batch_size)
        steps = training.max_steps or training.num_epochs * plan.steps_per_epoch
        size = self.global_batch_size(training.batch_size)
        words = f"training.batch_size={training.batch_size} x {self.world_size} processes"
        if training.global_batch_size is not None:
            words = "training.global_batch_size, whatever the number of processes"
        share = None
        if rows is not None:
            share = self.computed_per_step() * plan.steps_per_epoch / int(rows.lengths.sum())
        return Batches(
            rows=None if rows is None else len(rows),
            tokens=None if rows is None else int(rows.lengths.sum()),
            target_tokens=None if rows is None else int(rows.num_targets.sum()),
            computed_share=share,
            global_batch_size=size,
            global_batch_from=words,
            world_size=self.world_size,
            steps_per_epoch=None if rows is None else plan.steps_per_epoch,
            steps=steps if rows is not None else training.max_steps,
            microbatches_per_step=largest.per_step,
            largest_microbatch_rows=largest.microbatch.num_rows,
            largest_microbatch_tokens=largest.microbatch.num_computed,
        )


def _filler(config: Config, number: int) -> EncodedExamples:
    """Rows of the greatest length, with loss on all of it and nothing in common, where the real ones are not known."""
    length = config.data.max_length
    ids = [_FILLER_TOKEN] * (length - 1)
    rows = [([row, *ids], [False] + [True] * (length - 1)) for row in range(max(1, number))]
    return EncodedExamples.from_rows(rows, end_id=_FILLER_TOKEN)


def _some_global_batches(plan: BatchPlan) -> Iterator[Sequence[int]]:
    """The global batches of the first epoch, or some of them, evenly."""
    order, size, steps = plan.order(0), plan.global_batch_size, max(1, plan.steps_per_epoch)
    stride = -(-steps // _MOST_STEPS_LOOKED_AT)
    return (order[step * size : (step + 1) * size] for step in range(0, steps, stride))
