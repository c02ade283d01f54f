"""Attention over packed rows against plain attention on each row alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from finetune.engine import attention_cuda
from finetune.engine.attention import MOST_COST, attention, choose_kernel, dense_attention, prepare_blocks
from finetune.engine.attention_cuda import (
    EQUAL_ROWS_MULTIPLE,
    VarlenRuns,
    attend_in_runs,
    attention_fallback,
    prepare_efficient,
    prepare_varlen,
    take_keys,
    varlen_attention,
    why_not_varlen,
)
from finetune.engine.layout import Layout, PackedMicrobatch, dense_mask, pack
from tests.engine.prefix_rows import Row, random_rows, rows_of

HEAD_DIM = 8


def tensors(tokens: int, heads: int, kv_heads: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, count, HEAD_DIM, dtype=dtype, generator=generator).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


def paths(packed: PackedMicrobatch) -> list[list[int]]:
    """For each flat token its row up to itself, found through the parents and not through the mask."""
    layout = packed.layout
    found = []
    for index, segment in enumerate(layout.segments):
        before = [token for i in layout.path(index)[:-1] for token in range(*layout.segments[i][:2])]
        found += [before + list(range(segment.start, token + 1)) for token in range(segment.start, segment.end)]
    return found


def by_row(packed: PackedMicrobatch, q, k, v, index: list[int], window: int | None = None) -> torch.Tensor:
    """Softmax over each query's own row and nothing else."""
    rows = paths(packed)
    hidden = torch.ones(len(index), len(k), dtype=torch.bool)
    for query, token in enumerate(index):
        hidden[query, rows[token][-window:] if window else rows[token]] = False
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * HEAD_DIM**-0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def assert_same(actual, expected, inputs, tolerance: float) -> None:
    assert torch.allclose(actual, expected, atol=tolerance, rtol=tolerance)
    weights = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(9))
    ours = torch.autograd.grad((actual * weights).sum(), inputs, allow_unused=True)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs, allow_unused=True)
    for one, two in zip(ours, theirs, strict=True):
        two = torch.zeros_like(one) if two is None else two
        assert (one - two).norm() <= 10 * tolerance * max(1.0, float(two.norm()))


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("seed", range(8))
def test_packed_rows_attend_as_if_alone(seed: int, window: int | None, heads: tuple[int, int]) -> None:
    packed = pack(random_rows(seed, longest=50))
    inputs = tensors(packed.num_computed, *heads, torch.float64)
    out = attention(*inputs, packed.layout, window=window)
    assert_same(out, by_row(packed, *inputs, list(range(packed.num_computed)), window), inputs, 1e-12)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("seed", range(8))
def test_queries_at_predicting_positions_alone(seed: int, window: int | None) -> None:
    packed = pack(random_rows(seed, longest=50))
    index = packed.positions
    q, k, v = tensors(packed.num_computed, 4, 2, torch.float64)
    some = q.detach()[index].requires_grad_()
    expected = by_row(packed, some, k, v, index.tolist(), window)
    assert_same(attention(some, k, v, packed.layout, queries=index, window=window), expected, [some, k, v], 1e-12)


def test_one_token_and_many_short_rows() -> None:
    for rows in (rows_of([3]), rows_of(*[[i] for i in range(30)]), rows_of(*[[i, i] for i in range(90)])):
        packed = pack(rows)
        inputs = tensors(packed.num_computed, 2, 1, torch.float64)
        out = attention(*inputs, packed.layout)
        assert_same(out, by_row(packed, *inputs, list(range(packed.num_computed))), inputs, 1e-12)
        assert len(prepare_blocks(packed.layout, packed.layout.tokens)) < max(
            2, len(rows) // 4
        )  # not a kernel call for each


def test_no_query_at_all() -> None:
    packed = pack(rows_of([1, 2, 3], targets=0.0))
    q, k, v = tensors(3, 2, 1, torch.float32)
    out = attention(q[:0], k, v, packed.layout, queries=packed.positions)
    assert out.shape == (0, 2, HEAD_DIM)
    (grad,) = torch.autograd.grad(out.sum(), k)
    assert not grad.any()


def test_views_of_a_fused_projection_and_any_strides() -> None:
    packed = pack(random_rows(2))
    tokens = packed.num_computed
    fused = torch.randn(tokens, 8 * HEAD_DIM).unflatten(1, (8, HEAD_DIM))
    views = [fused[:, :4], fused[:, 4:6], fused[:, 6:]]
    expected = attention(*(x.contiguous() for x in views), packed.layout)
    assert torch.equal(attention(*views, packed.layout), expected)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in views]
    assert torch.equal(attention(*turned, packed.layout), expected)


def test_bf16_is_computed_in_fp32_and_rounded_once() -> None:
    packed = pack(random_rows(5, longest=120))
    inputs = [x.detach().bfloat16() for x in tensors(packed.num_computed, 4, 2, torch.float32)]
    out = attention(*inputs, packed.layout)
    assert torch.equal(out, attention(*(x.float() for x in inputs), packed.layout).bfloat16())
    inputs = [x.requires_grad_() for x in inputs]
    grads = torch.autograd.grad(attention(*inputs, packed.layout).sum(), inputs)
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 3


def test_the_gradient_of_a_value_that_many_blocks_read_is_added_up_in_fp32() -> None:
    packed = pack(rows_of(list(range(800))))
    inputs = [x.detach().bfloat16().requires_grad_() for x in tensors(800, 2, 1, torch.float32)]
    assert len(prepare_blocks(packed.layout, packed.layout.tokens)) > 5
    wide = [x.detach().float().requires_grad_() for x in inputs]
    (of_values,) = torch.autograd.grad(attention(*inputs, packed.layout).sum(), inputs[2])
    (expected,) = torch.autograd.grad(attention(*wide, packed.layout).sum(), wide[2])
    assert torch.equal(of_values, expected.bfloat16())


def test_a_window_that_hides_one_token_alone() -> None:
    packed = pack(rows_of(list(range(9))))
    inputs = tensors(9, 2, 1, torch.float64)
    out = attention(*inputs, packed.layout, window=8)
    assert_same(out, by_row(packed, *inputs, list(range(9)), 8), inputs, 1e-12)
    assert not torch.allclose(out, attention(*inputs, packed.layout))


def test_gradcheck() -> None:
    packed = pack(rows_of([*range(18), 1, 2], [*range(18), 3], [5, 6]))
    inputs = tensors(packed.num_computed, 2, 1, torch.float64)
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, packed.layout), inputs, fast_mode=True)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("seed", range(6))
def test_blocks_hold_every_query_once_and_only_keys_that_are_seen(seed: int, window: int | None) -> None:
    packed = pack(random_rows(seed))
    layout = packed.layout
    for queries in (layout.tokens, packed.positions):
        mask = dense_mask(layout, queries, window)
        blocks = prepare_blocks(layout, queries, window)
        assert [row for block in blocks for row in range(block.first, block.last)] == list(range(len(mask)))
        for block in blocks:
            keys = [key for start, end in block.keys for key in range(start, end)]
            seen = mask[block.first : block.last]
            assert seen[:, keys].sum() == seen.sum()


def test_a_causal_row_costs_little_more_than_half_of_its_square() -> None:
    packed = pack(rows_of(list(range(512))))
    pairs = sum(
        (b.last - b.first) * sum(end - start for start, end in b.keys)
        for b in prepare_blocks(packed.layout, packed.layout.tokens)
    )
    assert pairs < 0.6 * 512**2


def test_the_biases_of_a_long_row_do_not_grow_with_its_square() -> None:
    """With 33,000 tokens they took 4 GB."""
    layout = pack(rows_of(list(range(8192)))).layout
    blocks = prepare_blocks(layout, layout.tokens)
    assert max(block.bias.numel() for block in blocks if block.bias is not None) < MOST_COST
    assert len(blocks) < 32


def test_which_kernel() -> None:
    assert choose_kernel("cpu", torch.bfloat16, has_varlen=True) == "blocks"
    assert choose_kernel("cuda", torch.bfloat16, has_varlen=True) == "varlen"
    assert choose_kernel("cuda", torch.bfloat16, has_varlen=False) == "efficient"
    assert choose_kernel("cuda", torch.float32, has_varlen=True) == "efficient"
    assert choose_kernel("mps", torch.float32, has_varlen=False) == "dense"


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("seed", range(4))
def test_what_cuda_kernels_are_told_is_the_mask(seed: int, window: int | None) -> None:
    packed = pack(random_rows(seed))
    layout = packed.layout
    for queries in (layout.tokens, packed.positions):
        mask = dense_mask(layout, queries, window)
        if len(mask):
            assert torch.equal(mask_of_runs(prepare_varlen(layout, queries, window), layout), mask)
            square = prepare_efficient(layout, queries, window)
            assert torch.equal(mask_of_runs(square, layout), mask)
            assert window is None or torch.equal(square.query_edges, square.key_edges)


def mask_of_runs(runs: VarlenRuns, layout: Layout) -> torch.Tensor:
    """What the kernels compute for a plan: each run causal and windowed, aligned to the lower right."""
    mask = torch.zeros(runs.num_slots, len(layout.tokens), dtype=torch.bool)
    index = layout.tokens if runs.key_index is None else runs.key_index
    for run in range(len(runs.query_edges) - 1):
        (first, last), (start, end) = runs.query_edges[run : run + 2].tolist(), runs.key_edges[run : run + 2].tolist()
        assert last - first <= runs.most_queries
        assert end - start <= runs.most_keys
        mask[first:last, index[start:end]] = band_of_run(last - first, end - start, runs.window)
    return mask if runs.slots is None else mask[runs.slots]


def band_of_run(queries: int, keys: int, window: int | None) -> torch.Tensor:
    band = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return band if window is None else band.triu(keys - queries - window + 1)


AS_MANY_LABELS_MORE_AS_TOKENS_WITHOUT = [
    (torch.arange(25), (torch.arange(25) >= 20) & (torch.arange(25) != 22)),
    (torch.tensor([*range(20), 30, 31]), torch.arange(22) >= 20),
]
"""The last shared token has two labels, and in the first row a token between others has none."""


@pytest.mark.parametrize("prepare", [prepare_varlen, prepare_efficient])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    "rows",
    [
        rows_of([*range(20), 1, 2], [*range(20), 3]),
        rows_of([*range(20), 1, 2], [*range(20), 3], [*range(20), 4, 5]),
        AS_MANY_LABELS_MORE_AS_TOKENS_WITHOUT,
        random_rows(5, targets=0.9),
    ],
)
def test_what_cuda_kernels_compute_at_targets_is_the_mask_and_so_are_gradients(rows, window, prepare) -> None:
    packed = pack(rows)
    x = torch.randn(packed.num_computed, 4, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    k, v = (y.detach().requires_grad_() for y in tensors(packed.num_computed, 4, 2, torch.float64)[1:])
    runs = prepare(packed.layout, packed.positions, window)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        edges = [[slice(*edge) for edge in pairwise(e.tolist())] for e in (runs.query_edges, runs.key_edges)]
        outs = []
        for own, seen in zip(*edges, strict=True):
            mask = band_of_run(own.stop - own.start, seen.stop - seen.start, runs.window)
            outs.append(dense_attention(q[own], k[seen], v[seen], mask, HEAD_DIM**-0.5))
        return torch.cat(outs)

    out = packed.at_terms(attend_in_runs(x[packed.positions], k, v, runs, attend))[packed.target_term]
    # Each target is predicted at the token before it in its row, whatever else is.
    places = [flat[place - 1] for flat, place in targets_of(packed, rows)]
    assert_same(out, by_row(packed, x[places], k, v, places, window), [x, k, v], 1e-12)


def targets_of(packed: PackedMicrobatch, rows: list[Row]) -> list[tuple[list[int], int]]:
    """For each target the flat tokens of its row, and its place in the row."""
    by_ids = {tuple(packed.input_ids[path].tolist()): path for path in paths(packed)}
    found = [(by_ids[tuple(ids.tolist())], is_target) for ids, is_target in rows]
    return [(flat, place) for flat, is_target in found for place in range(1, len(flat)) if is_target[place]]


def test_a_row_with_many_turns_gathers_its_keys_once() -> None:
    turn = [False] * 12 + [True] * 28
    packed = pack([(torch.arange(400), torch.tensor(turn * 10))])
    runs = prepare_varlen(packed.layout, packed.positions, None)
    assert runs.key_edges.tolist() == [0, 399]  # the last token predicts nothing
    far = pack([(torch.arange(400), torch.tensor(([False] * 60 + [True] * 40) * 4))])
    runs = prepare_varlen(far.layout, far.positions, None)
    assert (runs.key_edges.tolist(), runs.query_edges.tolist()) == ([0, 399], [0, 340])
    nested = [(torch.arange(end), torch.arange(end) >= end - 40) for end in (100, 200, 400)]
    runs = prepare_varlen((packed := pack(nested)).layout, packed.positions, None)
    assert (packed.num_rows, packed.num_computed, runs.key_edges.tolist()) == (3, 400, [0, 399])


def test_whole_rows_of_one_length_are_a_batch() -> None:
    length = 2 * EQUAL_ROWS_MULTIPLE

    def row_length(*lengths: int, window: int | None = None) -> int | None:
        layout = pack(rows_of(*([*range(size)] for size in lengths)), share_prefixes=False).layout
        return prepare_varlen(layout, layout.tokens, window).row_length

    assert row_length(length) == row_length(length, length, length) == length
    assert row_length(length, length - EQUAL_ROWS_MULTIPLE) is None
    assert row_length(length - 1, length - 1) is None
    assert row_length(length, length, window=7) is None
    sharing = pack(rows_of([*range(length)], [*range(length - 1), 0])).layout
    assert prepare_varlen(sharing, sharing.tokens, None).row_length is None
    packed = pack(rows_of([*range(length)]))
    assert prepare_varlen(packed.layout, packed.positions, None).row_length is None  # the last token has no query


@pytest.mark.parametrize("number", [1, 3])
def test_a_batch_of_rows_attends_as_a_mask_says(number: int) -> None:
    layout = pack(rows_of(*([*range(EQUAL_ROWS_MULTIPLE)] for _ in range(number))), share_prefixes=False).layout
    inputs = tensors(number * EQUAL_ROWS_MULTIPLE, 4, 2, torch.float64)
    runs = prepare_varlen(layout, layout.tokens, None)
    dense = dense_attention(*inputs, dense_mask(layout, layout.tokens), HEAD_DIM**-0.5)
    assert_same(varlen_attention(*inputs, runs, HEAD_DIM**-0.5), dense, inputs, 1e-12)


def test_varlen_gathers_nothing_where_nothing_is_shared() -> None:
    rows = random_rows(4)
    apart, packed = pack(rows, share_prefixes=False), pack(rows)
    assert prepare_varlen(apart.layout, apart.layout.tokens, None).key_index is None
    assert len(prepare_varlen(packed.layout, packed.layout.tokens, None).key_index) <= packed.num_tokens


@pytest.mark.parametrize("window", [None, 6])
def test_the_dense_form_says_the_same(window: int | None) -> None:
    packed = pack(random_rows(6))
    inputs = tensors(packed.num_computed, 4, 2, torch.float64)
    dense = dense_attention(*inputs, dense_mask(packed.layout, packed.layout.tokens, window), HEAD_DIM**-0.5)
    assert_same(attention(*inputs, packed.layout, window=window), dense, inputs, 1e-12)


GPU = torch.device("cuda", 0)
WHOLE = frozenset({"window_size", "scale", "enable_gqa"})


@pytest.fixture
def says(monkeypatch):
    """Answers of a torch and a GPU that are not there."""

    def say(options: frozenset[str] = WHOLE, capability: tuple[int, int] = (9, 0)) -> None:
        why_not_varlen.cache_clear()
        monkeypatch.setattr(attention_cuda, "_varlen_options", lambda: options)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Old GPU")

    yield say
    why_not_varlen.cache_clear()


def test_which_attention_is_a_downgrade(says) -> None:
    says()
    assert attention_fallback(GPU, torch.bfloat16) is None
    says(frozenset({"scale", "enable_gqa"}))
    assert why_not_varlen(GPU) == f"torch {torch.__version__} has no varlen_attn with window_size"
    used, why = attention_fallback(GPU, torch.bfloat16)[1:]
    assert (used, why) == ("memory-efficient attention", why_not_varlen(GPU))
    assert attention_fallback(GPU, torch.float32) is None  # flash attention has no fp32
    says(capability=(7, 5))
    assert "Old GPU is older than" in attention_fallback(GPU, torch.bfloat16)[2]


def test_the_gradients_of_a_key_that_many_rows_take_are_added_up_before_they_are_rounded() -> None:
    keys = torch.randn(3, 2, 4).bfloat16().requires_grad_()
    index = torch.tensor([0, 2, *[1] * 1000])
    taken = take_keys(keys, index)
    assert torch.equal(taken, keys[index])
    (grad,) = torch.autograd.grad(taken, keys, torch.ones_like(taken))
    assert grad.dtype == torch.bfloat16
    assert grad[:, 0, 0].tolist() == [1.0, 1000.0, 1.0]  # sums in bf16 stop at 256
    wide = keys.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: take_keys(x, index[:5]), [wide], fast_mode=True)
