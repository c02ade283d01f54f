"""What goes into which step and onto which rank: functions of (seed, epoch), never state.

The order of an epoch is a permutation of all rows. It is cut into global batches, each global batch into micro-batches
by one rule that does not look at the world size, and the ranks are dealt whole micro-batches, about as many tokens to
each. So a step holds the same micro-batches under every world size, and resuming needs only the step's number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import DataLoader, Sampler

from finetune.config.schema import LoaderKeys
from finetune.data.encoded import EncodedExample, EncodedExamples
from finetune.engine.layout import pack
from finetune.engine.microbatch import Microbatch, PaddedMicrobatch
from finetune.engine.prefixes import Cut, Tokens, cut_global_batch, deal

Collate: TypeAlias = Callable[[Sequence[EncodedExample]], Microbatch]


class Share(NamedTuple):
    """A micro-batch's number in the global batch of its step, and the rows in it."""

    microbatch: int
    rows: list[int]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How rows become steps.

    Attributes:
        lengths: tokens of each row.
        global_batch_size: rows per optimizer step over all ranks.
        batch_size: the most rows of a micro-batch.
        max_tokens: the most tokens of a micro-batch: with its padding, or with what rows share counted once; or None.
        boundary: rows up to this length never share a micro-batch with longer ones, or None. LongRoPE models choose
            their factors for a whole batch from its longest row.
        drop_last: leave out a last global batch that is not full.
        seed: of the order.
        tokens: the token ids of a row, where rows are packed without padding and those that begin alike are put
            together; None: rows are padded, and those of like length are put together.
        share_prefixes: with `tokens`: what packed rows begin with alike counts once.
    """

    lengths: Sequence[int]
    global_batch_size: int
    batch_size: int
    max_tokens: int | None = None
    boundary: int | None = None
    drop_last: bool = False
    seed: int = 0
    tokens: Callable[[int], Tokens] | None = None
    share_prefixes: bool = True

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that one pass over the rows takes."""
        full, rest = divmod(len(self.lengths), self.global_batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def order(self, epoch: int) -> list[int]:
        """All rows in this epoch's order."""
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "order", epoch))
        return torch.randperm(len(self.lengths), generator=generator).tolist()

    def epoch_share(self, epoch: int, first_step: int, rank: int, world_size: int) -> Iterator[list[Share]]:
        """What one rank computes in each step of an epoch from `first_step` on; a step may hold nothing for it."""
        order = self.order(epoch)
        size = self.global_batch_size
        for step in range(first_step, self.steps_per_epoch):
            cuts = self.cut(order[step * size : (step + 1) * size])
            dealt = deal([cut.num_tokens for cut in cuts], world_size)[rank]
            yield [Share(index, cuts[index].rows) for index in dealt]

    def cut(self, rows: Sequence[int]) -> list[Cut]:
        """Cut a global batch into micro-batches, by a rule that knows nothing of ranks."""
        if self.tokens is None:
            return self._cut_padded(rows)
        cuts = cut_global_batch(
            [self.tokens(row) for row in rows],
            max_rows=self.batch_size,
            max_tokens=self.max_tokens,
            boundary=self.boundary,
            share=self.share_prefixes,
        )
        return [Cut([rows[index] for index in cut.rows], cut.num_tokens) for cut in cuts]

    def _cut_padded(self, rows: Sequence[int]) -> list[Cut]:
        """Longest rows first, so that rows of like length share their padding."""
        cuts: list[list[int]] = []
        for row in sorted(rows, key=lambda row: (-self.lengths[row], row)):
            if not cuts or not self._fits(cuts[-1], row):
                cuts.append([])
            cuts[-1].append(row)
        return [Cut(cut, self.lengths[cut[0]] * len(cut)) for cut in cuts]

    def _fits(self, cut: list[int], row: int) -> bool:
        longest = self.lengths[cut[0]]
        crosses = self.boundary is not None and self.lengths[row] <= self.boundary < longest
        too_many = self.max_tokens is not None and longest * (len(cut) + 1) > self.max_tokens
        return len(cut) < self.batch_size and not crosses and not too_many


class PlannedSampler(Sampler[list[int]]):
    """Yields lists of rows as they are planned, which takes no more of a plan than a loader asks for."""

    def __init__(self, plan: Callable[[], Iterator[list[int]]] = lambda: iter(())) -> None:
        self.plan = plan

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rows of one micro-batch after the other."""
        return self.plan()


class TrainLoader(DataLoader[Microbatch]):
    """This rank's micro-batches, a step at a time.

    Args:
        examples: the training rows.
        plan: how they become steps.
        keys: workers, pinning, prefetching.
        rank: this process.
        world_size: over how many processes the micro-batches are dealt.
        collate: what puts rows together; None: padded.
    """

    def __init__(
        self,
        examples: EncodedExamples,
        plan: BatchPlan,
        keys: LoaderKeys,
        *,
        rank: int,
        world_size: int,
        collate: Collate | None = None,
    ) -> None:
        self.plan = plan
        self._rank = rank
        self._world_size = world_size
        self._sampler = PlannedSampler()
        super().__init__(
            examples,  # type: ignore[arg-type]  # the collation makes micro-batches of rows
            batch_sampler=self._sampler,
            collate_fn=collate or pad,
            **_loader_options(keys),
        )

    def steps(self, epoch: int, first_step: int = 0) -> Iterator[list[tuple[int, Microbatch]]]:
        """Yield, step by step of an epoch, this rank's (index in the global batch, micro-batch) pairs; perhaps none."""
        # Planned twice, here and by the sampler, which runs ahead of the steps where there are workers.
        plan = partial(self.plan.epoch_share, epoch, first_step, self._rank, self._world_size)
        self._sampler.plan = lambda: (share.rows for step in plan() for share in step)
        loaded = iter(self)
        for step in plan():
            yield [(share.microbatch, next(loaded)) for share in step]


class EvaluationLoader(DataLoader[Microbatch]):
    """This rank's part of a split, each row once over all ranks. `row_batches` tells which rows a batch holds."""

    def __init__(
        self,
        examples: EncodedExamples,
        keys: LoaderKeys,
        *,
        boundary: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        collate: Collate | None = None,
    ) -> None:
        lengths = examples.lengths.tolist()
        plan = BatchPlan(lengths=lengths, global_batch_size=len(lengths), batch_size=keys.batch_size, boundary=boundary)
        cuts = [cut.rows for cut in plan.cut(range(len(lengths)))]
        if keys.drop_last:
            cuts = [cut for cut in cuts if len(cut) == keys.batch_size]
        self.row_batches = cuts[rank::world_size]
        sampler = PlannedSampler(lambda: iter(self.row_batches))
        super().__init__(
            examples,  # type: ignore[arg-type]
            batch_sampler=sampler,
            collate_fn=collate or pad,
            **_loader_options(keys),
        )


def packer(*, share_prefixes: bool) -> Collate:
    """What packs rows without padding."""
    return partial(pack, share_prefixes=share_prefixes)


def pad(examples: Sequence[EncodedExample]) -> PaddedMicrobatch:
    """Put rows together, padded on the right with zeros: padding is known by its position, never by its id."""
    longest = max(len(example.input_ids) for example in examples)
    input_ids = torch.zeros(len(examples), longest, dtype=torch.int64)
    is_target = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        input_ids[row, : len(example.input_ids)] = example.input_ids
        is_target[row, : len(example.is_target)] = example.is_target
    return PaddedMicrobatch(
        input_ids=input_ids,
        is_target=is_target,
        num_tokens=sum(len(example.input_ids) for example in examples),
        num_targets=int(is_target[:, 1:].sum()),  # nothing predicts a row's first token
    )


def derived_seed(*parts: int | str) -> int:
    """A seed from parts, alike on every machine: 63 bits of their SHA-256."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _loader_options(keys: LoaderKeys) -> dict[str, Any]:
    return {
        "num_workers": keys.num_workers,
        "pin_memory": keys.pin_memory and torch.cuda.is_available(),
        "prefetch_factor": keys.prefetch_factor,
    }
