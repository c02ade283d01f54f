"""Find the prefixes that rows share, and split a global batch into micro-batches so that each prefix is computed once.

In a causal model, the hidden states of a shared prefix are the same for every row that has it. The rows form a prefix
tree, and each of its nodes is computed once. The split depends only on the rows and not on the world size, so it is the
same under every launcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy
import numpy.typing

from finetune.units import ceil_div

Tokens = numpy.typing.NDArray[numpy.integer]
"""Token ids of one row, shape (time,)."""

MIN_SHARED = 16
"""Rows share a further node only if it has at least this many tokens: for fewer, bookkeeping would cost more."""

_NEVER = 1 << 62
_MOST_OF_A_SIZE = 8
"""The lower bound on the number of micro-batches counts parts so large that fewer than this many fit into one."""


class Node(NamedTuple):
    """Tokens `begin` to `end` of `row`. All rows of the subtree share them, up to their own length."""

    row: int
    begin: int
    end: int
    parent: int
    """Index of the parent node, or -1."""


class PrefixTree(NamedTuple):
    """Rows as paths from a root."""

    nodes: tuple[Node, ...]
    """Depth first: a node's subtree follows it."""
    last_node: tuple[int, ...]
    """The node of the last token of each row; the row may end before the node does."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens to compute."""
        return sum(node.end - node.begin for node in self.nodes)


class RowGroup(NamedTuple):
    """Rows that are computed in one micro-batch."""

    rows: list[int]
    num_tokens: int
    """The number of tokens to compute, counted in the prefix tree of the whole global batch."""


def num_shared(first: Tokens, second: Tokens) -> int:
    """Return the length of the longest common prefix of two rows."""
    return min(_fork(first, second), len(first), len(second))


def separate_rows(rows: Sequence[Tokens]) -> PrefixTree:
    """Return a tree in which rows share nothing."""
    nodes = tuple(Node(row, 0, len(tokens), -1) for row, tokens in enumerate(rows))
    return PrefixTree(nodes, tuple(range(len(rows))))


def build_prefix_tree(rows: Sequence[Tokens], min_shared: int = MIN_SHARED) -> PrefixTree:
    """Build the prefix tree of rows. A row that is the beginning of another, or equal to it, adds nothing to the tree.

    Args:
        rows: token ids from 0 on; no row is empty.
        min_shared: the tokens that a branch must save per row.
    """
    order = sorted(range(len(rows)), key=lambda row: (rows[row].astype(">u4").tobytes(), row))
    forks = [_fork(rows[a], rows[b]) for a, b in pairwise(order)]

    def split(first: int, last: int, shared: int, parent: int) -> list[tuple[int, int, int, int]]:
        """Split rows that share `shared` tokens into groups that share more, last group first."""
        ends = [i + 1 for i in range(first, last - 1) if forks[i] < shared + min_shared]
        edges = [first, *ends, last] if first < last else []
        return [(a, b, shared, parent) for a, b in pairwise(edges)][::-1]

    nodes: list[Node] = []
    last_node = [-1] * len(rows)
    groups = split(0, len(order), 0, -1)
    while groups:
        first, last, begin, parent = groups.pop()
        row, here = order[last - 1], len(nodes)
        end = min([len(rows[row]), *forks[first : last - 1]])
        nodes.append(Node(row, begin, end, parent))
        while first < last and len(rows[order[first]]) <= end:  # these sort before all that go on
            last_node[order[first]] = here
            first += 1
        groups += split(first, last, end, here)
    return PrefixTree(tuple(nodes), tuple(last_node))


def split_global_batch(
    rows: Sequence[Tokens],
    *,
    max_rows: int,
    max_tokens: int | None = None,
    is_long: Sequence[bool] | None = None,
    share: bool = True,
) -> list[RowGroup]:
    """Split a global batch into micro-batches of similar size. Rows with long shared prefixes stay together.

    A whole subtree of the prefix tree goes into one micro-batch if it fits. Otherwise its parts are put into as
    few micro-batches as possible: the largest part first, and each into the smallest micro-batch that has room. If
    `max_tokens` determines the number of micro-batches, it is even if possible, so that two ranks have equal work.

    Args:
        rows: the token ids of each row.
        max_rows: the most rows of a micro-batch.
        max_tokens: the most tokens that a micro-batch computes, counted in the tree of the whole global batch: the
            micro-batch's own tree may need a few more. A longer row is a micro-batch of its own.
        is_long: whether each row is beyond a LongRoPE model's boundary. Such rows are never with others.
        share: whether rows may share prefixes.

    Returns:
        The micro-batches, the largest first, each with its rows in ascending order.
    """
    is_long = [False] * len(rows) if is_long is None else is_long
    groups: list[RowGroup] = []
    for side in (False, True):
        members = [row for row, long in enumerate(is_long) if long is side]
        tokens = [rows[row] for row in members]
        tree = build_prefix_tree(tokens) if share else separate_rows(tokens)
        # `_split_tree` counts rows within this side. `members` has their numbers in the global batch.
        groups += [
            RowGroup([members[i] for i in group.rows], group.num_tokens)
            for group in _split_tree(tree, [len(row) for row in tokens], max_rows, max_tokens)
        ]
    return sorted((RowGroup(sorted(group.rows), group.num_tokens) for group in groups), key=_heaviest_first)


def assign_to_ranks(weights: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Assign micro-batches to ranks: the largest first, each to the rank that has the fewest tokens so far.

    Args:
        weights: tokens of each micro-batch.
        num_ranks: the world size.

    Returns:
        For each rank the indices of its micro-batches, ascending. No rank has more than its even share, rounded up.
    """
    of_ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    lightest = [(0, rank) for rank in range(num_ranks)]  # a heap of the ranks that may get more, by their tokens
    most = ceil_div(len(weights), num_ranks)
    for index in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        load, rank = heappop(lightest)
        of_ranks[rank].append(index)
        if len(of_ranks[rank]) < most:
            heappush(lightest, (load + weights[index], rank))
    return [sorted(indices) for indices in of_ranks]


def _fork(first: Tokens, second: Tokens) -> int:
    """Return the number of tokens that two rows share; `_NEVER` if one is the beginning of the other."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    fork = int(differs.argmax())
    return fork if differs[fork] else _NEVER


def _split_tree(tree: PrefixTree, lengths: Sequence[int], max_rows: int, max_tokens: int | None) -> list[RowGroup]:
    """Group the rows of each node, from the leaves to the roots, so that rows with long shared prefixes stay together.

    A group of a node's rows counts min(end, longest row) - begin more tokens at its parent, because the rows share the
    node's tokens from begin to end.
    """
    limits = (max_rows, max_tokens if max_tokens is not None else _NEVER)
    parts: list[list[RowGroup]] = [[] for _ in tree.nodes]
    roots: list[RowGroup] = []
    for row, node in enumerate(tree.last_node):
        parts[node].append(RowGroup([row], 0))
    for index, (_, begin, end, parent) in reversed(list(enumerate(tree.nodes))):
        above = parts[parent] if parent >= 0 else roots
        for group in _fill(parts[index], end, *limits):
            longest = max(lengths[row] for row in group.rows)
            above.append(RowGroup(group.rows, group.num_tokens + min(end, longest) - begin))
    return _fill(roots, 0, *limits, is_whole=True)


def _fill(
    parts: list[RowGroup], before: int, max_rows: int, max_tokens: int, *, is_whole: bool = False
) -> list[RowGroup]:
    """Put parts after the same `before` tokens into as few micro-batches as possible; for the root, an even number."""
    num_rows = sum(len(part.rows) for part in parts)
    tokens = sum(part.num_tokens for part in parts)
    room = max(1, max_tokens - before)
    by_rows, by_tokens = ceil_div(num_rows, max_rows), ceil_div(tokens, room)
    step = 2 if is_whole and by_tokens > max(1, by_rows) else 1
    fewest = ceil_div(min(max(by_rows, by_tokens), len(parts)), step) * step
    # Of parts with more than room / (most + 1) tokens, at most so many go into one micro-batch.
    large = [sum(part.num_tokens * (most + 1) > room for part in parts) for most in range(1, _MOST_OF_A_SIZE)]
    needed = max(ceil_div(number, most) for most, number in enumerate(large, start=1))
    for number in range(fewest + ceil_div(max(0, needed - fewest), step) * step, len(parts), step):
        groups = _fill_exactly(number, parts, max_rows, room)
        if groups:
            return groups
    return parts


def _fill_exactly(number: int, parts: list[RowGroup], max_rows: int, room: int) -> list[RowGroup] | None:
    """Put each part, the heaviest first, into the lightest group that has room; None if it fits into none."""
    rows: list[list[int]] = [[] for _ in range(number)]
    sizes = [0] * number
    lightest = [(0, index) for index in range(number)]  # a heap of groups with room for a row, by their tokens
    for part in sorted(parts, key=_heaviest_first):
        passed_over = []
        while lightest:
            tokens, index = heappop(lightest)
            fits = len(rows[index]) + len(part.rows) <= max_rows and tokens + part.num_tokens <= room
            if fits or not rows[index]:
                break
            passed_over.append((tokens, index))
        else:
            return None
        rows[index] += part.rows
        for group in passed_over:
            heappush(lightest, group)
        if len(rows[index]) < max_rows:
            heappush(lightest, (tokens + part.num_tokens, index))
        sizes[index] = tokens + part.num_tokens
    return [RowGroup(*group) for group in zip(rows, sizes, strict=True)]


def _heaviest_first(group: RowGroup) -> tuple[int, list[int]]:
    return -group.num_tokens, group.rows
