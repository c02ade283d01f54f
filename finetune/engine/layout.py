"""Pack the rows of a micro-batch into one sequence of tokens, with each shared prefix only once and padding on request.

The flat tokens are the nodes of a prefix tree, depth first; a node is called a segment. Token i attends to token j if
j <= i < visible_until[j]: i is after j in the same segment, or in the subtree below it. Without shared prefixes, each
row is one segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy
import torch

from finetune.engine.prefixes import PrefixTree, Tokens, build_prefix_tree, separate_rows
from finetune.units import ceil_bucket

TOKENS_WITHOUT_PADDING = 8192
"""From this many tokens on, a GPU takes longer for a micro-batch than its host (estimated)."""
Made = TypeVar("Made")
Change = Callable[[torch.Tensor], torch.Tensor]
"""A function that is applied to each tensor, for example one that moves it to a device."""


class Segment(NamedTuple):
    """Flat tokens `start` to `end`, which are contiguous in every row that has them."""

    start: int
    end: int
    parent: int
    """Index of the segment that comes before it in its rows, or -1."""
    position: int
    """The position of its first token in the row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The flat tokens of a micro-batch and the attention between them.

    Attributes:
        position_ids: each token's position in its rows, int64, shape (tokens,).
        visible_until: for each token, the index after the last token that attends to it, int64, shape (tokens,).
        segments: the tree, depth first, from flat token 0 on without a gap.
    """

    position_ids: torch.Tensor
    visible_until: torch.Tensor
    segments: tuple[Segment, ...]
    _prepared: list[_Prepared] = field(default_factory=list, init=False, repr=False)

    @property
    def tokens(self) -> torch.Tensor:
        """All flat tokens: 0, 1, ..., shape (tokens,)."""
        return torch.arange(len(self.position_ids), device=self.position_ids.device)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row."""
        return max(segment.position + segment.end - segment.start for segment in self.segments)

    def path(self, segment: int) -> list[int]:
        """Return the segments from the root down to this one."""
        path = [segment]
        while self.segments[path[-1]].parent >= 0:
            path.append(self.segments[path[-1]].parent)
        return path[::-1]

    def sees(self, query: torch.Tensor, key: torch.Tensor, window: int | None = None) -> torch.Tensor:
        """Return whether flat token `query` attends to flat token `key`; the two are broadcast.

        `window` is the number of tokens of its row that a token sees, itself included; None: all before it.
        """
        visible = (key <= query) & (query < self.visible_until[key])
        return visible if window is None else visible & (self.position_ids[query] - self.position_ids[key] < window)

    def prepared(
        self,
        prepare: Callable[[Layout, torch.Tensor, int | None], Made],
        queries: torch.Tensor | None,
        window: int | None,
    ) -> Made:
        """Call `prepare(layout, queries, window)` once for all layers.

        Args:
            prepare: makes what a kernel needs, on the device of the queries.
            queries: flat indices, the same tensor for all layers that share the result; None: all tokens.
            window: see `sees`; one that is as long as the longest row is None to `prepare`.
        """
        window = None if window is None or window >= self.longest_row else window
        for known in self._prepared:
            if known.prepare is prepare and known.queries is queries and known.window == window:
                return known.value  # type: ignore[no-any-return]
        value = prepare(self, self.tokens if queries is None else queries, window)
        self._prepared.append(_Prepared(prepare, queries, window, value))
        return value

    def map(self, change: Change) -> Layout:
        """Apply a function to every tensor, also to those of what is prepared, if that can move to another device."""
        changed = replace(self, position_ids=change(self.position_ids), visible_until=change(self.visible_until))
        for prepare, queries, window, value in self._prepared:
            if isinstance(value, Movable):
                there = None if queries is None else change(queries)
                changed._prepared.append(_Prepared(prepare, there, window, value.map(change)))
        return changed


@runtime_checkable
class Movable(Protocol):
    """What is prepared on the CPU for a kernel of another device."""

    def map(self, change: Change) -> Any:
        """Apply a function to every tensor."""


class _Prepared(NamedTuple):
    """A result of `Layout.prepared` and what it was made from."""

    prepare: Callable[..., Any]
    queries: torch.Tensor | None
    window: int | None
    value: Any


def dense_mask(layout: Layout, queries: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Return the tokens that each query sees, bool, shape (queries, tokens)."""
    return layout.sees(queries[:, None], layout.tokens, window)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedMicrobatch:
    """The packed rows of one forward pass, and the terms of their loss.

    A term is a (position, label) pair. Rows that share a position and the token after it share the term. If rows differ
    after a shared position, the position has one term for each label.

    Attributes:
        input_ids: flat tokens, int64, shape (tokens,).
        layout: of the tokens.
        positions: the flat tokens at which terms are predicted, ascending, each once, int64, shape (positions,). The
            last layer computes hidden states there.
        term_position: the index in `positions` of each term, ascending, int64, shape (terms,); None: no position has
            several terms, so that they are the same in number and order.
        labels: the token to predict, int64, shape (terms,).
        counts: the number of rows that have each term, int64, shape (terms,).
        target_term: the term of each target, row after row, int64, shape (targets,).
        target_row: the row of each target, int64, shape (targets,).
        num_rows: the number of rows.
        num_tokens: the number of tokens; a shared token counts once for each row.
        num_padding: the number of flat tokens after those of the rows, which carry no loss.
        angles: the rotation at each token, see `finetune.engine.decoder.Angles`; None: the decoder computes it.
    """

    input_ids: torch.Tensor
    layout: Layout
    positions: torch.Tensor
    term_position: torch.Tensor | None
    labels: torch.Tensor
    counts: torch.Tensor
    target_term: torch.Tensor
    target_row: torch.Tensor
    num_rows: int
    num_tokens: int
    num_padding: int = 0
    angles: Mapping[str | None, tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def num_targets(self) -> int:
        """Tokens that carry loss; a shared token counts once for each row."""
        return len(self.target_term)

    @property
    def num_computed(self) -> int:
        """Tokens that go through the model, padding left out."""
        return len(self.input_ids) - self.num_padding

    def at_terms(self, hidden: torch.Tensor) -> torch.Tensor:
        """Repeat hidden states for the terms of each position: (positions, hidden) to (terms, hidden)."""
        return hidden if self.term_position is None else hidden.index_select(0, self.term_position)

    def to(self, device: torch.device) -> PackedMicrobatch:
        """A copy on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PackedMicrobatch:
        """A copy in page-locked memory, for a loader with `pin_memory`."""
        return self._map(torch.Tensor.pin_memory)

    def prepare_attention(
        self, prepare: Callable[[Layout, torch.Tensor, int | None], Any], windows: Sequence[int | None]
    ) -> None:
        """Prepare attention for all layers: the last one has queries at `positions`, the others at all tokens.

        Some kernels need a plan that is computed from Python numbers. On a GPU, the host would have to wait for
        `positions`. So the plan is made here, while the micro-batch is on the CPU, and is copied to the GPU with it.
        `finetune.engine.decoder.layer_windows` returns the windows.
        """
        *before, last = windows
        for window in dict.fromkeys(before):
            self.layout.prepared(prepare, None, window)
        if len(self.positions):
            self.layout.prepared(prepare, self.positions, last)

    def _map(self, change: Change) -> PackedMicrobatch:
        changed: dict[int, torch.Tensor] = {}

        def once(tensor: torch.Tensor) -> torch.Tensor:
            """Change a tensor that is used in two places, such as the positions, only once."""
            if id(tensor) not in changed:
                changed[id(tensor)] = change(tensor)
            return changed[id(tensor)]

        return replace(
            self,
            input_ids=once(self.input_ids),
            layout=self.layout.map(once),
            positions=once(self.positions),
            term_position=None if self.term_position is None else once(self.term_position),
            labels=once(self.labels),
            counts=once(self.counts),
            target_term=once(self.target_term),
            target_row=once(self.target_row),
        )


def padding_of(num_tokens: int) -> int:
    """Return the number of tokens by which a micro-batch is padded, so that small ones have one of few sizes."""
    return ceil_bucket(num_tokens) - num_tokens if num_tokens < TOKENS_WITHOUT_PADDING else 0


def pack(
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    share_prefixes: bool = True,
    to_bucket: bool = False,
    prepare_attention: Callable[[Layout, torch.Tensor, int | None], Any] | None = None,
    windows: Sequence[int | None] = (None,),
) -> PackedMicrobatch:
    """Pack rows.

    Args:
        rows: (token ids, is target) of each row, int64 and bool, both of shape (time,). The mark of a row's first token
            is ignored, since nothing predicts it.
        share_prefixes: compute shared prefixes only once.
        to_bucket: append as much padding as `padding_of` says. By default there is none.
        prepare_attention: prepares attention for the windows of the model's layers here, perhaps in a worker. Without
            it, the first layer that attends does.
        windows: of the model's layers.

    Raises:
        ValueError: there is no row, or one without a token.
    """
    tokens = [ids.numpy() for ids, _ in rows]
    if not tokens or not all(map(len, tokens)):
        raise ValueError(
            f"got rows of {[len(ids) for ids in tokens]} tokens; expected rows of at least one token each."
        )
    tree = build_prefix_tree(tokens) if share_prefixes else separate_rows(tokens)
    layout, input_ids = lay_out(tree, tokens)
    flat = flat_tokens_of_rows(layout, tree.last_node, [len(ids) for ids in tokens])
    num_padding = padding_of(len(input_ids)) if to_bucket else 0
    if num_padding:
        layout, input_ids = _with_padding(layout, input_ids, num_padding)

    marks = [is_target.numpy()[1:] for _, is_target in rows]
    predictor = numpy.concatenate([row[:-1][mark] for row, mark in zip(flat, marks, strict=True)])
    label = numpy.concatenate([ids[1:][mark] for ids, mark in zip(tokens, marks, strict=True)])
    terms, target_term, counts = numpy.unique(predictor << _ID_BITS | label, return_inverse=True, return_counts=True)
    positions, term_position = numpy.unique(terms >> _ID_BITS, return_inverse=True)
    target_row = numpy.repeat(numpy.arange(len(rows)), [int(mark.sum()) for mark in marks])
    packed = PackedMicrobatch(
        input_ids=input_ids,
        layout=layout,
        positions=torch.from_numpy(positions),
        term_position=None if len(positions) == len(terms) else torch.from_numpy(term_position),
        labels=torch.from_numpy(terms & ((1 << _ID_BITS) - 1)),
        counts=torch.from_numpy(counts),
        target_term=torch.from_numpy(target_term),
        target_row=torch.from_numpy(target_row),
        num_rows=len(rows),
        num_tokens=sum(map(len, tokens)),
        num_padding=num_padding,
    )
    if prepare_attention is not None:
        packed.prepare_attention(prepare_attention, windows)
    return packed


_ID_BITS = 32


def flat_tokens_of_rows(
    layout: Layout, last_node: Sequence[int], lengths: Sequence[int]
) -> list[numpy.typing.NDArray[numpy.int64]]:
    """Return the flat tokens of each row, in the order of the row."""
    return [
        numpy.concatenate([numpy.arange(*layout.segments[index][:2]) for index in layout.path(last)])[:length]
        for last, length in zip(last_node, lengths, strict=True)
    ]


def _with_padding(layout: Layout, input_ids: torch.Tensor, num_padding: int) -> tuple[Layout, torch.Tensor]:
    """Append rows of zeros. None is longer than the longest row, which decides the factors of LongRoPE."""
    first, longest = len(input_ids), layout.longest_row
    edges = [*range(first, first + num_padding, longest), first + num_padding]
    rows = [Segment(start, end, -1, 0) for start, end in pairwise(edges)]
    padded = Layout(
        position_ids=torch.cat([layout.position_ids, torch.arange(num_padding) % longest]),
        visible_until=torch.cat([layout.visible_until, *(torch.full((end - start,), end) for start, end, *_ in rows)]),
        segments=(*layout.segments, *rows),
    )
    return padded, torch.cat([input_ids, input_ids.new_zeros(num_padding)])


def lay_out(tree: PrefixTree, rows: Sequence[Tokens]) -> tuple[Layout, torch.Tensor]:
    """Return the layout and the flat tokens of rows, with each prefix that rows share only once."""
    segments: list[Segment] = []
    start = 0
    for _, begin, end, parent in tree.nodes:
        segments.append(Segment(start, start + end - begin, parent, begin))
        start = segments[-1].end
    subtree_ends = [segment.end for segment in segments]
    for index in reversed(range(len(segments))):
        if (parent := segments[index].parent) >= 0:
            subtree_ends[parent] = max(subtree_ends[parent], subtree_ends[index])
    lengths = [segment.end - segment.start for segment in segments]
    layout = Layout(
        position_ids=torch.from_numpy(numpy.concatenate([numpy.arange(begin, end) for _, begin, end, _ in tree.nodes])),
        visible_until=torch.from_numpy(numpy.repeat(subtree_ends, lengths)),
        segments=tuple(segments),
    )
    input_ids = numpy.concatenate([rows[row][begin:end] for row, begin, end, _ in tree.nodes])
    return layout, torch.from_numpy(input_ids)
