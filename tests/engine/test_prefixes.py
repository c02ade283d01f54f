"""Prefix trees of rows, and cutting and dealing by them."""

from __future__ import annotations

import random
import sys

import numpy
import pytest

from finetune.engine.prefixes import assign_to_ranks, build_prefix_tree, separate_rows, split_global_batch
from tests.engine.prefix_rows import random_rows

SEEDS = range(40)


def ids(*lists: list[int]) -> list[numpy.ndarray]:
    return [numpy.array(tokens) for tokens in lists]


def tokens_of(rows) -> list[numpy.ndarray]:
    return [tokens.numpy() for tokens, _ in rows]


def seeded(*, rows: int, mean: int, shared: int = 0, seed: int = 0) -> list[numpy.ndarray]:
    generator = numpy.random.default_rng(seed)
    beginning = generator.integers(0, 1000, shared)
    lengths = generator.lognormal(numpy.log(mean), 0.5, rows).astype(int).clip(8, 512)
    return [numpy.concatenate([beginning, generator.integers(0, 1000, length)]) for length in lengths]


def test_a_shared_beginning_is_one_segment_and_what_follows_one_segment_each() -> None:
    tree = build_prefix_tree(ids([1, 2, 3, 4], [1, 2, 5], [9]), min_shared=2)
    assert [(node.begin, node.end, node.parent) for node in tree.nodes] == [
        (0, 2, -1),
        (2, 4, 0),
        (2, 3, 0),
        (0, 1, -1),
    ]
    assert tree.last_node == (1, 2, 3)


def test_no_branching_for_fewer_tokens_than_it_is_worth() -> None:
    rows = ids([1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6])
    assert build_prefix_tree(rows, min_shared=4).num_tokens == 4 + 3 + 4
    assert build_prefix_tree(rows, min_shared=3).num_tokens == 3 + 1 + 1 + 3
    assert build_prefix_tree(rows, min_shared=2).num_tokens == 2 + 2 + 1 + 2  # one more token is not worth a branching
    assert build_prefix_tree(rows, min_shared=1).num_tokens == 2 + 1 + 1 + 1 + 1


def test_equal_rows_and_beginnings_of_others_add_nothing() -> None:
    tree = build_prefix_tree(ids([1, 2, 3], [1], [1, 2, 3], [1, 2, 3, 4]))
    assert len(tree.nodes) == 1
    assert tree.num_tokens == 4
    assert tree.last_node == (0, 0, 0, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_row_is_a_path(seed: int) -> None:
    rows = tokens_of(random_rows(seed))
    for tree in (build_prefix_tree(rows, min_shared=1), build_prefix_tree(rows), separate_rows(rows)):
        for row, last in zip(rows, tree.last_node, strict=True):
            path = []
            while last >= 0:
                node = tree.nodes[last]
                path[:0] = rows[node.row][node.begin : node.end].tolist()
                last = node.parent
            assert path[: len(row)] == row.tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_with_every_token_worth_it_no_beginning_is_computed_twice(seed: int) -> None:
    rows = tokens_of(random_rows(seed))
    beginnings = {row[: end + 1].tobytes() for row in rows for end in range(len(row))}
    assert build_prefix_tree(rows, min_shared=1).num_tokens == len(beginnings)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cut_holds_each_row_once_and_keeps_the_limits(seed: int) -> None:
    rows = tokens_of(random_rows(seed))
    cuts = split_global_batch(rows, max_rows=3, max_tokens=70, is_long=[len(row) > 30 for row in rows])
    assert sorted(row for cut in cuts for row in cut.rows) == list(range(len(rows)))
    for cut in cuts:
        assert len(cut.rows) <= 3
        assert cut.num_tokens <= max(70, *(len(rows[row]) for row in cut.rows))
        assert len({len(rows[row]) > 30 for row in cut.rows}) == 1
        assert abs(build_prefix_tree([rows[row] for row in cut.rows]).num_tokens - cut.num_tokens) < 16 * 3
    assert [cut.num_tokens for cut in cuts] == sorted((cut.num_tokens for cut in cuts), reverse=True)


def test_families_stay_together() -> None:
    generator = numpy.random.default_rng(0)
    families = [generator.integers(0, 1000, 150) for _ in range(4)]
    rows = [numpy.append(families[row % 4], generator.integers(0, 1000, 20 + row)) for row in range(16)]
    cuts = split_global_batch(rows, max_rows=4)
    assert sorted(sorted(cut.rows) for cut in cuts) == [
        [family, family + 4, family + 8, family + 12] for family in range(4)
    ]
    assert all(cut.num_tokens == 150 + sum(20 + row for row in cut.rows) for cut in cuts)


def test_a_family_too_large_is_cut_evenly_and_shares_in_every_part() -> None:
    rows = seeded(rows=16, mean=100, shared=150)
    cuts = split_global_batch(rows, max_rows=4)
    assert [len(cut.rows) for cut in cuts] == [4] * 4
    assert sum(cut.num_tokens for cut in cuts) == sum(map(len, rows)) - 12 * 150
    assert max(cut.num_tokens for cut in cuts) < 1.15 * min(cut.num_tokens for cut in cuts)


def test_a_token_limit_counts_what_is_shared_once() -> None:
    rows = seeded(rows=16, mean=100, shared=150)
    shared = split_global_batch(rows, max_rows=16, max_tokens=1000)
    apart = split_global_batch(rows, max_rows=16, max_tokens=1000, share=False)
    assert len(shared) < len(apart)
    assert max(cut.num_tokens for cut in shared + apart) <= 1000
    assert sum(cut.num_tokens for cut in apart) == sum(map(len, rows))


def test_rows_that_fill_a_microbatch_exactly_go_into_it() -> None:
    rows = ids(*[list(range(start, start + 30)) for start in (0, 100, 200, 300)])
    cuts = split_global_batch(rows, max_rows=16, max_tokens=60)
    assert [(len(cut.rows), cut.num_tokens) for cut in cuts] == [(2, 60), (2, 60)]


def test_a_microbatch_without_room_for_a_family_takes_a_later_row() -> None:
    families = [
        [[*range(a, a + 20), *range(b, b + tail)] for b in (a + 50, a + 80)] for a, tail in ((0, 18), (200, 16))
    ]
    rows = ids(list(range(400, 460)), *families[0], *families[1], list(range(500, 540)))
    cuts = split_global_batch(rows, max_rows=3, max_tokens=200)
    assert sorted(cut.rows for cut in cuts) == [[0, 3, 4], [1, 2, 5]]


def test_where_tokens_decide_two_ranks_have_equal_work() -> None:
    batches = [seeded(rows=16, mean=180, seed=seed) for seed in range(20)]
    weights = [[cut.num_tokens for cut in split_global_batch(rows, max_rows=16, max_tokens=640)] for rows in batches]
    assert all(len(each) % 2 == 0 for each in weights)
    slower = sum(max(sum(each[index] for index in hand) for hand in assign_to_ranks(each, 2)) for each in weights)
    assert sum(map(sum, weights)) / slower > 1.95
    assert len(split_global_batch(batches[0], max_rows=6, max_tokens=4000)) == 3  # the limit of rows decides


def test_the_order_in_which_rows_come_changes_no_cut() -> None:
    rows = seeded(rows=12, mean=60, shared=40)
    forwards = split_global_batch(rows, max_rows=3)
    backwards = split_global_batch(rows[::-1], max_rows=3)
    assert [cut.num_tokens for cut in forwards] == [cut.num_tokens for cut in backwards]
    assert forwards == split_global_batch(rows, max_rows=3)


def test_rows_go_to_the_rank_with_the_least() -> None:
    assert assign_to_ranks([5, 9, 4, 4, 2], 2) == [[1, 3], [0, 2, 4]]
    assert assign_to_ranks([3, 3, 3], 2) == [[0, 2], [1]]
    assert assign_to_ranks([9, 1, 1, 1], 2) == [[0, 3], [1, 2]]  # two each at most
    assert assign_to_ranks([7], 3) == [[0], [], []]
    assert assign_to_ranks([], 2) == [[], []]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_split_is_the_first_number_of_microbatches_into_which_the_rows_go(seed: int) -> None:
    """The heaviest row first, each into the lightest micro-batch with room: the rule without its shortcuts."""
    rng = random.Random(seed)
    rows = seeded(rows=rng.randrange(1, 50), mean=rng.choice([20, 60, 200]), seed=seed)
    max_rows, max_tokens = rng.choice([1, 2, 5, 50]), rng.choice([100, 150, 300, 900])
    heaviest_first = sorted(range(len(rows)), key=lambda row: (-len(rows[row]), row))

    def into(number: int) -> list[list[int]] | None:
        groups: list[list[int]] = [[] for _ in range(number)]
        sizes = [0] * number
        for row in heaviest_first:
            fits = [
                place
                for place, group in enumerate(groups)
                if not group or (len(group) < max_rows and sizes[place] + len(rows[row]) <= max_tokens)
            ]
            if not fits:
                return None
            place = min(fits, key=lambda place: sizes[place])
            groups[place].append(row)
            sizes[place] += len(rows[row])
        return groups

    by_rows, by_tokens = -(-len(rows) // max_rows), -(-sum(map(len, rows)) // max_tokens)
    step = 2 if by_tokens > max(1, by_rows) else 1
    first = -(-min(max(by_rows, by_tokens), len(rows)) // step) * step
    expected = next(filter(None, map(into, range(first, len(rows), step))), [[row] for row in range(len(rows))])
    found = split_global_batch(rows, max_rows=max_rows, max_tokens=max_tokens, share=False)
    assert sorted(group.rows for group in found) == sorted(sorted(group) for group in expected)


@pytest.mark.parametrize("mean", [40, 1200], ids=["short rows", "rows longer than half a micro-batch"])
def test_eight_times_the_rows_take_about_eight_times_as_long_to_split(mean: int) -> None:
    def calls(number: int) -> int:
        generator = numpy.random.default_rng(0)
        rows = [generator.integers(0, 9, mean + int(extra)) for extra in generator.integers(0, 99, number)]
        num_calls = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        sys.setprofile(count)  # a limit in seconds would depend on the machine
        try:
            split_global_batch(rows, max_rows=8, max_tokens=2048, share=False)
        finally:
            sys.setprofile(None)
        return num_calls

    assert calls(4096) < 12 * calls(512)
