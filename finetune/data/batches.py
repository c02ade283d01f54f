"""Assign rows to steps and ranks, as a function of seed and epoch. No state is kept.

The order of an epoch is a permutation of all rows. It is split into global batches, and each global batch into
micro-batches, by one rule that does not use the world size. Each rank computes whole micro-batches with about as many
tokens as the others. So a step has the same micro-batches at every world size, and resuming needs only its number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy
import torch
from torch.utils.data import DataLoader, Sampler

from finetune.config.schema import LoaderKeys
from finetune.data.encoded import EncodedExample, EncodedExamples
from finetune.engine.microbatch import Microbatch
from finetune.engine.prefixes import RowGroup, Tokens, assign_to_ranks, num_shared, split_global_batch
from finetune.units import ceil_div

if TYPE_CHECKING:
    from finetune.engine.padded import PaddedMicrobatch

Collate: TypeAlias = Callable[[Sequence[EncodedExample]], Microbatch]
Keys = TypeVar("Keys", bound=LoaderKeys)

_CUDA_WORKERS = 2
"""Processes that prepare micro-batches ahead of a GPU, for each loader."""


class MicrobatchRows(NamedTuple):
    """The rows of a micro-batch, and its number in the global batch of its step."""

    microbatch: int
    rows: list[int]
    before: list[int]
    """For each row, the row before it in the global batch. The last row counts as the row before the first."""


@dataclass(frozen=True, kw_only=True)
class BatchRule:
    """The rule by which rows become steps.

    Attributes:
        lengths: tokens of each row.
        global_batch_size: rows per optimizer step over all ranks.
        batch_size: maximum number of rows in a micro-batch.
        max_tokens: maximum number of tokens in a micro-batch, or None. Padding counts; a shared prefix counts once.
        each: without `tokens`: how many rows the model computes for each entry of `lengths`. For a pair, 2.
        boundary: rows up to this length are never in a micro-batch with longer ones, or None. LongRoPE models choose
            their factors for a whole batch from its longest row.
        drop_last: leave out the last global batch if it is not full.
        seed: the seed of the order.
        tokens: returns the token ids of a row. Rows are then packed without padding, and rows that begin alike are put
            together. None: rows are padded, and rows of similar length are put together.
        share_prefixes: with `tokens`: a prefix that packed rows share counts once.
        repeats: steps in a row that have the same rows.
        examples: the rows of each example, where examples are counted and not rows; None: each row is one. With
            `tokens`, the rows of an example share a micro-batch if they fit into one.
    """

    lengths: Sequence[int]
    global_batch_size: int
    batch_size: int
    max_tokens: int | None = None
    each: int = 1
    boundary: int | None = None
    drop_last: bool = False
    seed: int = 0
    tokens: Callable[[int], Tokens] | None = None
    share_prefixes: bool = True
    examples: Sequence[Sequence[int]] | None = None
    repeats: int = 1

    @property
    def num_examples(self) -> int:
        """Examples of an epoch."""
        return len(self.lengths if self.examples is None else self.examples)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the examples."""
        full, rest = divmod(self.num_examples, self.global_batch_size)
        return self.repeats * (full + (1 if rest and not self.drop_last else 0))

    def order(self, epoch: int) -> list[int]:
        """All examples in this epoch's order."""
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "order", epoch))
        return torch.randperm(self.num_examples, generator=generator).tolist()

    def steps_of_rank(self, epoch: int, first_step: int, rank: int, world_size: int) -> Iterator[list[MicrobatchRows]]:
        """Yield the micro-batches of one rank, perhaps none, for each step of an epoch from `first_step` on."""
        order = self.order(epoch)
        for step in range(first_step, self.steps_per_epoch):
            examples = self.examples_of_step(order, step)
            rows = self._rows_of(examples)
            # If a step has one row only, the row before it is the last row of the step before.
            start = step // self.repeats * self.global_batch_size
            last = rows[-1] if len(rows) > 1 else self._rows_of([order[start - 1]])[-1]
            before = dict(zip(rows, [last, *rows], strict=False))
            groups = self.split(examples)
            microbatches = assign_to_ranks([group.num_tokens for group in groups], world_size)[rank]
            yield [MicrobatchRows(n, groups[n].rows, [before[row] for row in groups[n].rows]) for n in microbatches]

    def split(self, examples: Sequence[int]) -> list[RowGroup]:
        """Split a global batch into micro-batches. The world size does not matter."""
        if self.tokens is None:
            return self._split_padded(self._rows_of(examples))
        units = [unit for example in examples for unit in self.units(example)]
        groups = split_global_batch(
            [self._tokens_of(unit) for unit in units],
            max_rows=self.batch_size,
            max_tokens=self.max_tokens,
            is_long=[self._is_long(unit[0]) for unit in units],
            share=self.share_prefixes,
        )
        # A group holds indices of units. Replace each by the rows of its unit.
        return [RowGroup([row for index in group.rows for row in units[index]], group.num_tokens) for group in groups]

    def units(self, example: int) -> list[list[int]]:
        """Return the rows of an example that share a micro-batch: all of them, unless they are too many tokens."""
        if self.examples is None:
            return [[example]]
        units: list[list[int]] = []
        for row in self.examples[example]:
            is_even = bool(units) and self._is_long(units[-1][0]) is self._is_long(row)
            if is_even and (self.max_tokens is None or len(self._tokens_of([*units[-1], row])) <= self.max_tokens):
                units[-1].append(row)
            else:
                units.append([row])
        return units

    def computed_again(self) -> tuple[int, int, int]:
        """Count the examples in several micro-batches, the tokens that these compute again, and all other tokens."""
        unsplit = replace(self, max_tokens=None, boundary=None)
        num_split = again = total = 0
        for example in range(self.num_examples):
            units = self.units(example)
            tokens = sum(len(unsplit._tokens_of(unit)) for unit in unsplit.units(example))
            total += tokens
            if len(units) > 1:
                num_split += 1
                again += sum(len(self._tokens_of(unit)) for unit in units) - tokens
        return num_split, again, total

    def microbatches_of_step(self, epoch: int, step: int) -> list[RowGroup]:
        """Return the micro-batches of a step, counted in its epoch from 0."""
        return self.split(self.examples_of_step(self.order(epoch), step))

    def halved(self, epoch: int, step: int) -> BatchRule | None:
        """Return a rule by which the micro-batches of a step have at most half the tokens.

        None if each has one row already, or rows that are equal and are computed once.
        """
        groups = self.microbatches_of_step(epoch, step)
        most = max((group.num_tokens for group in groups if len(group.rows) > 1), default=0)
        halved = replace(self, max_tokens=max(1, most // 2))
        return halved if most and halved.microbatches_of_step(epoch, step) != groups else None

    def examples_of_step(self, order: list[int], step: int) -> list[int]:
        """Return the global batch of a step, counted in its epoch from 0, given the epoch's order."""
        start = step // self.repeats * self.global_batch_size
        return order[start : start + self.global_batch_size]

    def _rows_of(self, examples: Sequence[int]) -> list[int]:
        return (
            list(examples) if self.examples is None else [row for example in examples for row in self.examples[example]]
        )

    def _is_long(self, row: int) -> bool:
        return self.boundary is not None and self.lengths[row] > self.boundary

    def _tokens_of(self, rows: Sequence[int]) -> Tokens:
        """Return the tokens of rows in one line, each without what it shares with the row before it."""
        assert self.tokens is not None
        each = [self.tokens(row) for row in rows]
        if len(each) == 1:
            return each[0]
        own = (b[num_shared(a, b) if self.share_prefixes else 0 :] for a, b in pairwise(each))
        return numpy.concatenate([each[0], *own])

    def _split_padded(self, rows: Sequence[int]) -> list[RowGroup]:
        """Longest rows first, so that rows of similar length are padded together."""
        groups: list[list[int]] = []
        for row in sorted(rows, key=lambda row: (-self.lengths[row], row)):
            if not groups or not self._fits(groups[-1], row):
                groups.append([])
            groups[-1].append(row)
        return [RowGroup(group, self.lengths[group[0]] * len(group) * self.each) for group in groups]

    def _fits(self, group: list[int], row: int) -> bool:
        longest = self.lengths[group[0]]
        crosses = self.boundary is not None and self.lengths[row] <= self.boundary < longest
        too_many = self.max_tokens is not None and longest * (len(group) + 1) * self.each > self.max_tokens
        return len(group) < self.batch_size and not crosses and not too_many


class TrainLoader(DataLoader[Microbatch]):
    """Loads the micro-batches of this rank step by step. `collate` makes a micro-batch of rows; None: `pad`."""

    generates_rows = False

    def __init__(
        self,
        examples: EncodedExamples,
        rule: BatchRule,
        keys: LoaderKeys,
        *,
        rank: int,
        world_size: int,
        collate: Collate | None = None,
    ) -> None:
        self.rule = rule
        self._rank = rank
        self._world_size = world_size
        self._sampler = _EpochSampler()
        super().__init__(
            examples,  # type: ignore[arg-type]  # the collation makes micro-batches of rows
            batch_sampler=self._sampler,
            collate_fn=collate or pad,
            **_loader_options(keys),
        )

    def metrics_of(self, step: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics of a step. Nothing is measured of its rows."""
        return step

    def halve(self, epoch: int, step: int) -> int | None:
        """Halve the micro-batches of this and later steps. Return their limit in tokens; None if that is impossible."""
        smaller = self.rule.halved(epoch, step)
        if smaller is None:
            return None
        self.rule = smaller
        return smaller.max_tokens

    def steps(self, epoch: int, first_step: int = 0) -> Iterator[list[tuple[int, Microbatch]]]:
        """Yield for each step of an epoch the (index in the global batch, micro-batch) pairs of this rank, if any."""
        # The steps are computed twice, here and for the sampler, which runs ahead if there are workers.
        steps = partial(self.rule.steps_of_rank, epoch, first_step, self._rank, self._world_size)
        choose = getattr(self.dataset, "with_rows_before", lambda rows, _: rows)
        self._sampler.rows = lambda: (choose(part.rows, part.before) for step in steps() for part in step)
        loaded = super().__iter__()
        for step in steps():
            yield [(part.microbatch, next(loaded)) for part in step]

    def __iter__(self) -> Any:
        """Yield this rank's micro-batches of the first epoch, in the order in which they are trained."""
        return (microbatch for step in self.steps(0) for _, microbatch in step)

    def __len__(self) -> int:
        """Count this rank's micro-batches of the first epoch."""
        return sum(len(step) for step in self.rule.steps_of_rank(0, 0, self._rank, self._world_size))


class _EpochSampler(Sampler[Any]):
    """Yields the rows of each micro-batch of the current epoch."""

    def __init__(self) -> None:
        self.rows: Callable[[], Iterator[Any]] = lambda: iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.rows()


def evaluation_batches(examples: EncodedExamples, keys: LoaderKeys, boundary: int | None = None) -> list[list[int]]:
    """Return the batches of rows of all ranks. See `EvaluationLoader` for the arguments."""
    lengths = examples.lengths.tolist()
    rule = BatchRule(lengths=lengths, global_batch_size=len(lengths), batch_size=keys.batch_size, boundary=boundary)
    groups = [group.rows for group in rule.split(range(len(lengths)))]
    return [group for group in groups if len(group) == keys.batch_size] if keys.drop_last else groups


class EvaluationLoader(DataLoader[Microbatch]):
    """Loads this rank's part of a split, each row once over all ranks.

    Rows are batched longest first. So `keys.drop_last`, which leaves out batches that are not full, leaves out the
    shortest rows, or all of a split smaller than a batch; and rows just above the boundary, for which see `BatchRule`.
    `collate` makes a micro-batch of rows; None: `pad`.

    Attributes:
        row_batches: the rows of each batch.
        most_batches: the number of batches of the rank that has most.
        num_left_out: rows of the split that `drop_last` leaves out.
    """

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
        groups = evaluation_batches(examples, keys, boundary)
        self.row_batches = groups[rank::world_size]
        self.most_batches = ceil_div(len(groups), world_size)
        self.num_left_out = len(examples) - sum(map(len, groups))
        super().__init__(
            examples,  # type: ignore[arg-type]
            batch_sampler=self.row_batches,
            collate_fn=collate or pad,
            **_loader_options(keys),
        )


def pad(examples: Sequence[EncodedExample]) -> PaddedMicrobatch:
    """Pad rows on the right with zeros. Padding is known by its position, never by its id."""
    from finetune.engine.padded import PaddedMicrobatch

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
    """Derive a seed from parts, the same on every machine: 63 bits of their SHA-256."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def loader_keys_on(device_type: str, keys: Keys) -> Keys:
    """Return the keys with the defaults of a device type in place of those that are not set."""
    is_cuda = device_type == "cuda"
    defaults = {
        "num_workers": _CUDA_WORKERS * is_cuda if keys.num_workers is None else keys.num_workers,
        "pin_memory": is_cuda if keys.pin_memory is None else keys.pin_memory,
    }
    return keys.model_copy(update=defaults)


def _loader_options(keys: LoaderKeys) -> dict[str, Any]:
    return {
        "num_workers": keys.num_workers or 0,
        "pin_memory": bool(keys.pin_memory) and torch.cuda.is_available(),
        "prefetch_factor": keys.prefetch_factor,
    }
