"""Rows laid out flat, and back."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
import torch

from finetune.engine.attention_cuda import prepare_efficient, prepare_varlen
from finetune.engine.layout import dense_mask, pack
from tests.engine.prefix_rows import random_rows, rows_of

SEEDS = range(20)


def seen_by(packed) -> list[list[int]]:
    """For each flat token those that it attends to, in order: its row up to itself."""
    return [row.nonzero()[:, 0].tolist() for row in dense_mask(packed.layout, packed.layout.tokens)]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_each_row_is_what_one_token_sees(seed: int, share: bool) -> None:
    rows = random_rows(seed)
    packed = pack(rows, share_prefixes=share)
    seen = Counter(tuple(packed.input_ids[tokens].tolist()) for tokens in seen_by(packed))
    for ids, _ in rows:
        for end in range(1, len(ids) + 1):
            assert tuple(ids[:end].tolist()) in seen
    every = Counter(tuple(ids[:end].tolist()) for ids, _ in rows for end in range(1, len(ids) + 1))
    assert set(every) == set(seen)  # and nothing else is computed
    if not share:
        assert every == seen


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_positions_count_along_each_row(seed: int, share: bool) -> None:
    packed = pack(random_rows(seed), share_prefixes=share)
    for seen, position in zip(seen_by(packed), packed.layout.position_ids.tolist(), strict=True):
        assert len(seen) == position + 1
        assert packed.layout.position_ids[seen].tolist() == list(range(position + 1))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_loss_has_exactly_the_targets_of_all_rows(seed: int, share: bool) -> None:
    rows = random_rows(seed)
    packed = pack(rows, share_prefixes=share)
    expected = [
        (row, tuple(ids[:place].tolist()), int(ids[place]))
        for row, (ids, is_target) in enumerate(rows)
        for place in range(1, len(ids))
        if is_target[place]
    ]
    seen = seen_by(packed)
    tokens = packed.at_terms(packed.positions).tolist()
    contexts = [tuple(packed.input_ids[seen[token]].tolist()) for token in tokens]
    terms = list(zip(contexts, packed.labels.tolist(), strict=True))
    found = [
        (row, *terms[term]) for row, term in zip(packed.target_row.tolist(), packed.target_term.tolist(), strict=True)
    ]
    assert found == expected
    assert packed.num_targets == len(expected)
    counted = Counter(dict.fromkeys(terms, 0))
    for term, count in zip(terms, packed.counts.tolist(), strict=True):
        counted[term] += count
    assert counted == Counter((context, label) for _, context, label in expected)
    if share:
        assert len(set(zip(tokens, packed.labels.tolist(), strict=True))) == len(terms)


def test_a_shared_target_counts_once_for_each_row_and_a_fork_predicts_both_ways() -> None:
    packed = pack(rows_of([*range(20), 5, 6], [*range(20), 7]))
    assert packed.input_ids.tolist() == [*range(20), 5, 6, 7]
    assert packed.layout.position_ids.tolist() == [*range(20), 20, 21, 20]
    assert packed.positions.tolist() == [*range(21)]
    assert packed.term_position.tolist() == [*range(20), 19, 20]
    assert packed.labels.tolist() == [*range(1, 20), 5, 7, 6]
    assert packed.counts.tolist() == [2] * 19 + [1, 1, 1]
    assert (packed.num_tokens, packed.num_computed, packed.num_targets) == (43, 23, 41)


def test_the_window_is_counted_along_the_row() -> None:
    packed = pack(rows_of(list(range(30)), [*range(20), 50, 51]))
    mask = dense_mask(packed.layout, packed.layout.tokens, window=5)
    assert mask[31].nonzero()[:, 0].tolist() == [17, 18, 19, 30, 31]


def test_a_microbatch_without_targets_has_no_terms() -> None:
    packed = pack(rows_of([1, 2, 3], targets=0.0))
    assert packed.num_targets == len(packed.labels) == len(packed.positions) == 0
    first_only = pack([(torch.tensor([1, 2]), torch.tensor([True, False]))])
    assert first_only.num_targets == 0  # nothing predicts a row's first token
    for prepare in (prepare_varlen, prepare_efficient):  # a loader prepares attention for whatever rows it gets
        assert pack(rows_of([1, 2, 3], targets=0.0), prepare_attention=prepare).num_targets == 0


def test_rows_without_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of \[2, 0\] tokens"):
        pack([(torch.tensor([1, 2]), torch.zeros(2, dtype=torch.bool)), (torch.zeros(0).long(), torch.zeros(0).bool())])
    with pytest.raises(ValueError, match=r"rows of \[\] tokens"):
        pack([])


def test_it_travels_to_workers_and_devices() -> None:
    packed = pack(random_rows(7))
    there = pickle.loads(pickle.dumps(packed)).to(torch.device("meta"))
    assert there.layout.segments == packed.layout.segments
    tensors = [value for value in vars(there).values() if isinstance(value, torch.Tensor)]
    tensors += [there.layout.position_ids, there.layout.visible_until]
    assert len(tensors) == 8
    assert all(tensor.device.type == "meta" for tensor in tensors)


def test_attention_that_is_prepared_travels_along() -> None:
    packed = pack(random_rows(7))
    packed.prepare_attention(prepare_varlen, windows=[5, 5])
    there = pickle.loads(pickle.dumps(packed)).to(torch.device("meta"))
    for queries in (None, there.positions):  # without what was prepared, this would fail: these tensors have no values
        runs = there.layout.prepared(prepare_varlen, queries, 5)
        assert runs.query_edges.is_meta
        assert runs.key_edges.is_meta
