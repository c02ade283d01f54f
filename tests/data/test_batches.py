import itertools
import random

import numpy
import pytest
import torch

from finetune.config.schema import TestingSection as LoaderSection  # a name that pytest does not collect
from finetune.config.schema import TrainingSection
from finetune.data.batches import BatchRule, EvaluationLoader, TrainLoader, derived_seed, pad
from finetune.data.encoded import EncodedExample, EncodedExamples
from finetune.engine.padded import PaddedMicrobatch
from tests.tiny_models import tiny_examples


def lengths_of(num_rows, seed=0):
    rng = random.Random(seed)
    return [rng.randint(1, 60) for _ in range(num_rows)]


def rule_of(num_rows=37, **keys):
    return BatchRule(**{"lengths": lengths_of(num_rows), "global_batch_size": 8, "batch_size": 3, **keys})


def steps_of_all_ranks(rule, world_size, epoch=0, first_step=0):
    """For each step, the (index, rows) pairs of all ranks together, in the order of the index."""
    by_rank = [list(rule.steps_of_rank(epoch, first_step, rank, world_size)) for rank in range(world_size)]
    return [sorted(itertools.chain(*step)) for step in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("global_batch_size", [1, 7, 37, 50])
def test_each_row_is_seen_exactly_once_per_epoch(global_batch_size, batch_size, world_size):
    rule = rule_of(global_batch_size=global_batch_size, batch_size=batch_size)
    steps = steps_of_all_ranks(rule, world_size)
    assert len(steps) == rule.steps_per_epoch == -(-37 // global_batch_size)
    rows = [row for step in steps for _, rows, _ in step for row in rows]
    assert sorted(rows) == list(range(37))
    assert all(len(rows) <= batch_size for step in steps for _, rows, _ in step)
    sizes = [sum(len(rows) for _, rows, _ in step) for step in steps]
    assert sizes[:-1] == [global_batch_size] * (len(steps) - 1)


@pytest.mark.parametrize("world_size", [2, 3, 16])
def test_the_micro_batches_do_not_depend_on_the_world_size(world_size):
    rule = rule_of(max_tokens=120, boundary=30)
    assert steps_of_all_ranks(rule, world_size) == steps_of_all_ranks(rule, 1)


def test_every_epoch_has_its_own_order_and_every_seed_too():
    rule = rule_of()
    orders = [rule.order(epoch) for epoch in range(3)] + [rule_of(seed=1).order(0)]
    assert len(set(map(tuple, orders))) == 4
    assert rule.order(1) == rule_of().order(1)


@pytest.mark.parametrize("first_step", range(6))
def test_resuming_within_an_epoch_gives_the_same_micro_batches(first_step):
    rule = rule_of()
    for rank in range(2):
        whole = list(rule.steps_of_rank(3, 0, rank, 2))
        assert list(rule.steps_of_rank(3, first_step, rank, 2)) == whole[first_step:]


def test_drop_last_leaves_out_only_a_batch_that_is_not_full():
    assert rule_of(37, drop_last=True).steps_per_epoch == 4
    assert rule_of(40, drop_last=True).steps_per_epoch == rule_of(40).steps_per_epoch == 5
    assert rule_of(7, drop_last=True).steps_per_epoch == 0
    seen = [row for step in steps_of_all_ranks(rule_of(37, drop_last=True), 2) for _, rows, _ in step for row in rows]
    assert len(seen) == len(set(seen)) == 32


@pytest.mark.parametrize(
    ("lengths", "keys", "groups"),
    [
        ([9, 2, 8, 1], {"batch_size": 2}, [([0, 2], 18), ([1, 3], 4)]),  # similar lengths share a micro-batch
        ([10, 9, 8, 7], {"max_tokens": 40, "each": 2}, [([0, 1], 40), ([2, 3], 32)]),  # both sides of a pair count
        ([50, 4, 4], {"max_tokens": 10}, [([0], 50), ([1, 2], 8)]),  # a row over max_tokens is alone and not lost
        ([30, 31, 29], {"boundary": 30}, [([1], 31), ([0, 2], 60)]),  # as long as the boundary: with the short rows
    ],
)
def test_how_padded_rows_are_split(lengths, keys, groups):
    rule = BatchRule(**{"lengths": lengths, "global_batch_size": 4, "batch_size": 4, **keys})
    assert rule.split(range(len(lengths))) == groups


def test_pad_pads_on_the_right_and_counts():
    examples = EncodedExamples.from_rows([([5, 6, 7], [False, True, True]), ([8, 9], [False, True])], end_id=9)
    batch = pad(list(examples))
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.is_target.tolist() == [[False, True, True], [False, True, False]]
    assert (batch.num_tokens, batch.num_targets) == (5, 3)
    marked = EncodedExample(torch.tensor([5, 6]), torch.tensor([True, True]))
    assert pad([marked]).num_targets == 1, "nothing predicts a first token"


def loaded(loader, epoch=0, first_step=0):
    return [
        [(index, batch.input_ids.tolist(), batch.is_target.tolist()) for index, batch in step]
        for step in loader.steps(epoch, first_step)
    ]


def train_loader(rank=0, world_size=1, **keys):
    examples = tiny_examples(21)
    rule = BatchRule(lengths=examples.lengths.tolist(), global_batch_size=8, batch_size=3)
    return TrainLoader(examples, rule, TrainingSection(**keys), rank=rank, world_size=world_size)


def test_the_train_loader_gives_the_planned_rows_with_their_place_in_the_global_batch():
    examples = tiny_examples(21)
    for rank in range(2):
        loader = train_loader(rank, 2)
        expected_steps = loader.rule.steps_of_rank(1, 0, rank, 2)
        for step, expected in zip(loaded(loader, epoch=1), expected_steps, strict=True):
            assert [index for index, _, _ in step] == [part.microbatch for part in expected]
            for (_, ids, _), part in zip(step, expected, strict=True):
                assert ids == pad([examples[row] for row in part.rows]).input_ids.tolist()


def test_worker_processes_give_the_same_micro_batches():
    assert loaded(train_loader(num_workers=2, prefetch_factor=2), first_step=1) == loaded(train_loader(), first_step=1)


def test_the_loader_is_iterated_as_torch_loaders_are():
    loader = train_loader(rank=1, world_size=2)
    microbatches = [ids for step in loaded(loader) for _, ids, _ in step]
    list(loader.steps(3))
    assert [batch.input_ids.tolist() for batch in loader] == microbatches
    assert len(loader) == len(microbatches)


@pytest.mark.parametrize("world_size", [1, 2, 3, 10])
def test_evaluation_sees_each_row_once_over_all_ranks(world_size):
    examples = tiny_examples(13)
    section = LoaderSection(batch_size=4)
    loaders = [EvaluationLoader(examples, section, rank=rank, world_size=world_size) for rank in range(world_size)]
    rows = sorted(row for loader in loaders for rows in loader.row_batches for row in rows)
    assert rows == list(range(13))
    assert {loader.most_batches for loader in loaders} == {max(len(loader.row_batches) for loader in loaders)}
    for loader in loaders:
        for rows, batch in zip(loader.row_batches, loader, strict=True):
            assert batch.input_ids.tolist() == pad([examples[row] for row in rows]).input_ids.tolist()


def test_evaluation_respects_the_boundary_and_drop_last():
    examples = tiny_examples(13)
    lengths = examples.lengths.tolist()
    loader = EvaluationLoader(examples, LoaderSection(batch_size=4), boundary=10)
    assert all(len({lengths[row] <= 10 for row in rows}) == 1 for rows in loader.row_batches)
    full = EvaluationLoader(examples, LoaderSection(batch_size=4, drop_last=True))
    assert [len(rows) for rows in full.row_batches] == [4, 4, 4]
    assert (loader.num_left_out, full.num_left_out) == (0, 1)


def test_a_derived_seed_depends_on_every_part_and_is_a_known_number():
    seeds = {derived_seed(*parts) for parts in [(0, 1, 2), (0, 2, 1), (0, 12), (0, "1", "3"), ("order", 0)]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Another number here would change every run's order and dropout: old checkpoints would not go on as they were.
    assert derived_seed(0, "order", 0) == 3955691223199900983


def test_answers_of_a_conversation_on_both_sides_of_the_boundary_share_no_microbatch():
    lengths = [3, 4, 6, 7]
    tokens = [numpy.arange(length) for length in lengths]
    rule = BatchRule(
        lengths=lengths,
        global_batch_size=1,
        batch_size=4,
        boundary=5,
        tokens=tokens.__getitem__,
        examples=[[0, 1, 2, 3]],
    )
    assert rule.units(0) == [[0, 1], [2, 3]]
    assert rule.computed_again() == (1, 4, 7), "the shared tokens of the short rows"


def test_microbatches_are_halved_until_each_has_one_row_or_equal_rows():
    rule, limits = BatchRule(lengths=[8, 8, 4, 2], global_batch_size=4, batch_size=4), []
    while (smaller := rule.halved(0, 0)) is not None:
        rule = smaller
        limits.append(rule.max_tokens)
    assert limits == [16, 8, 4], "from 32 tokens, padded"
    assert [len(group.rows) for group in rule.microbatches_of_step(0, 0)] == [1] * 4
    equal = BatchRule(lengths=[3, 3], global_batch_size=2, batch_size=2, tokens=lambda _: numpy.arange(3))
    assert equal.halved(0, 0) is None, "equal rows are computed once"


def test_what_cannot_be_halved_does_not_keep_others_from_it():
    rule = BatchRule(lengths=[100, 10, 10], global_batch_size=3, batch_size=3, max_tokens=100)
    assert [len(group.rows) for group in rule.microbatches_of_step(0, 0)] == [1, 2]
    smaller = rule.halved(0, 0)
    assert [len(group.rows) for group in smaller.microbatches_of_step(0, 0)] == [1, 1, 1]


def packed_rule(*rows, **keys):
    return BatchRule(
        **{"lengths": list(map(len, rows)), "global_batch_size": 4, "batch_size": 4, "tokens": rows.__getitem__, **keys}
    )


def test_packed_rows_as_long_as_the_boundary_go_with_the_short_ones():
    rule = packed_rule(numpy.arange(8), numpy.arange(100, 109), numpy.arange(200, 207), boundary=8)
    assert sorted(group.rows for group in rule.split(range(3))) == [[0, 2], [1]]


@pytest.mark.parametrize(("share_prefixes", "together"), [(True, 30), (False, 50)])
def test_a_limit_of_tokens_is_reached_and_counts_a_prefix_once_where_it_is_shared(share_prefixes, together):
    rows = numpy.arange(25), numpy.array([*range(20), *range(50, 55)])
    for max_tokens, number in ((together, 1), (together - 1, 2)):
        keys = {"max_tokens": max_tokens, "share_prefixes": share_prefixes}
        assert len(packed_rule(*rows, **keys).split(range(2))) == number
        assert len(packed_rule(*rows, **keys, examples=[[0, 1]]).units(0)) == number


def test_repeated_steps_have_the_same_rows():
    steps = steps_of_all_ranks(rule_of(16, repeats=2), 2)
    assert steps[0] == steps[1]
    assert steps[2] == steps[3]
    rows = [sorted(row for part in step for row in part.rows) for step in steps]
    assert sorted(rows[0] + rows[2]) == list(range(16))


def test_the_row_before_each_is_of_its_global_batch_or_of_the_step_before():
    rule = BatchRule(lengths=[1] * 7, global_batch_size=3, batch_size=2)
    a, b, c, d, e, f, alone = rule.order(0)
    microbatches = itertools.chain(*rule.steps_of_rank(0, 0, 0, 1))
    before = dict(itertools.chain(*(zip(part.rows, part.before, strict=True) for part in microbatches)))
    assert before == {a: c, b: a, c: b, d: f, e: d, f: e, alone: f}


def test_a_padded_micro_batch_counts_tokens_without_padding_and_targets_that_are_predicted():
    is_target = torch.tensor([[True, True, False], [False, True, True]])
    batch = PaddedMicrobatch(input_ids=torch.ones(2, 3).long(), is_target=is_target, num_tokens=5, num_targets=3)
    assert (batch.num_rows, batch.num_computed) == (2, 5)
    assert batch.target_row.tolist() == [0, 1, 1], "nothing predicts a first token"
