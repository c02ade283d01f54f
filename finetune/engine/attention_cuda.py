"""Attention over a layout on CUDA: variable-length flash attention, or FlexAttention with the layout as its mask."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from finetune.engine.layout import Change, Layout, is_seen
from finetune.engine.products import wide_type

VARLEN_TYPES = (torch.float16, torch.bfloat16)
"""Types that variable-length flash attention computes in."""
MOST_FILLERS = 32
"""The most tokens between two runs of queries that are made one. With more, at four query heads to a key head, the
fillers' scores cost more than gathering the earlier keys once more."""


class VarlenRuns(NamedTuple):
    """Runs of successive queries of a row, with all tokens of the row up to the end of the run as keys.

    This makes the causal mask of flash attention, which is aligned to the lower right, exact for shared beginnings too.
    The keys of a run are gathered for it alone. So two runs with few tokens between them, as in the last layer, where
    there are queries at targets only, become one with filler queries between them.
    """

    query_edges: torch.Tensor
    """int32, shape (runs + 1,)."""
    key_edges: torch.Tensor
    """int32, shape (runs + 1,), in gathered keys."""
    key_index: torch.Tensor | None
    """Flat tokens to gather, int64, shape (gathered keys,); None: all of them, in order."""
    most_queries: int
    most_keys: int
    window: int | None
    slots: torch.Tensor | None
    """The place of each query among queries and fillers, int64, shape (queries,); None: there are no fillers."""
    num_slots: int

    def map(self, change: Change) -> VarlenRuns:
        """Apply a function to every tensor."""
        return VarlenRuns._make(change(value) if isinstance(value, torch.Tensor) else value for value in self)


def prepare_varlen(layout: Layout, queries: torch.Tensor, window: int | None) -> VarlenRuns:
    """Prepare variable-length attention, on the device of the queries. Where that is a GPU, the host waits for them."""
    device = queries.device
    runs = list(_runs(layout, queries.cpu()))
    index = torch.cat([torch.arange(start, end) for _, keys in runs for start, end in keys])
    is_plain = torch.equal(index, torch.arange(len(layout.position_ids)))
    num_queries = [int(tokens[-1] - tokens[0]) + 1 for tokens, _ in runs]
    num_keys = [sum(end - start for start, end in keys) for _, keys in runs]
    starts = [0, *accumulate(num_queries)]
    slots = torch.cat([start + tokens - tokens[0] for start, (tokens, _) in zip(starts, runs, strict=False)])
    return VarlenRuns(
        query_edges=_edges(num_queries).to(device),
        key_edges=_edges(num_keys).to(device),
        key_index=None if is_plain else index.to(device),
        most_queries=max(num_queries),
        most_keys=max(num_keys),
        window=window,
        slots=None if starts[-1] == len(queries) else slots.to(device),
        num_slots=starts[-1],
    )


def _runs(layout: Layout, queries: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[tuple[int, int]]]]:
    """Yield for each run its queries and the flat tokens of its row up to its end."""
    ends = torch.tensor([stretch.end for stretch in layout.stretches])
    owner = torch.searchsorted(ends, queries, right=True)
    goes_on = torch.tensor([stretch.parent for stretch in layout.stretches])[owner[1:]] == owner[:-1]
    steps = queries.diff()
    is_filled = (owner.diff() == 0) & (steps > 1) & (steps <= MOST_FILLERS)
    breaks = ((steps != 1) & ~is_filled) | ((owner.diff() != 0) & ~goes_on)
    edges = [0, *(breaks.nonzero()[:, 0] + 1).tolist(), len(queries)]
    for first, last in pairwise(edges):
        path = [layout.stretches[index] for index in layout.path(int(owner[last - 1]))]
        ends_of_path = [stretch.end for stretch in path[:-1]] + [int(queries[last - 1]) + 1]
        yield queries[first:last], [(stretch.start, end) for stretch, end in zip(path, ends_of_path, strict=True)]


def _edges(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def varlen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: VarlenRuns, scale: float) -> torch.Tensor:
    """Attend with flash attention: CUDA, fp16 or bf16; shapes as in `attention`."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {}
        if k.shape[1] != q.shape[1]:
            if "enable_gqa" in _varlen_options():
                options["enable_gqa"] = True
            else:
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        edges, sizes = (runs.query_edges, runs.key_edges), (runs.most_queries, runs.most_keys)
        window = (-1 if runs.window is None else runs.window - 1, 0)
        out: Any = varlen_attn(q, k, v, *edges, *sizes, scale=scale, window_size=window, **options)
        return out  # type: ignore[no-any-return]

    return attend_in_runs(q, k, v, runs, attend)


def attend_in_runs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    runs: VarlenRuns,
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Gather the keys of the runs, put fillers between the queries, attend, and leave the fillers out again."""
    if runs.key_index is not None:
        k, v = (take_keys(x, runs.key_index) for x in (k, v))
    if runs.slots is None:
        return attend(q, k, v)
    filled = q.new_zeros((runs.num_slots, *q.shape[1:])).index_copy(0, runs.slots, q)
    return attend(filled, k, v).index_select(0, runs.slots)


def take_keys(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return `x[index]`; the gradients of a key that several rows take are added up in fp32 or better."""
    taken: torch.Tensor = _TakeKeys.apply(x, index)  # type: ignore[no-untyped-call]
    return taken


class _TakeKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_keys = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (index,) = ctx.saved_tensors
        sums = grad.new_zeros((ctx.num_keys, *grad.shape[1:]), dtype=wide_type(grad))
        return sums.index_add_(0, index, grad.to(sums.dtype)).to(grad.dtype), None


@cache
def why_not_varlen(device: torch.device) -> str | None:
    """Return why variable-length flash attention with a window and a scale is not there for a GPU; None if it is."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than flash attention's kernels, which need Ampere"
    missing = sorted({"window_size", "scale"} - _varlen_options())
    return f"torch {torch.__version__} has no varlen_attn with {' and '.join(missing)}" if missing else None


def attention_downgrade(device: torch.device, dtype: torch.dtype, *, shares_keys: bool) -> tuple[str, str, str] | None:
    """Return what attention a model should have, what it gets instead and why; None where it gets what it should.

    Args:
        device: of the model.
        dtype: in which it computes.
        shares_keys: several query heads have one key head.
    """
    if device.type != "cuda" or dtype not in VARLEN_TYPES:
        return None
    why = why_not_varlen(device)
    if why is not None:
        return "variable-length flash attention", "FlexAttention", why
    if shares_keys and "enable_gqa" not in _varlen_options():
        why = f"torch {torch.__version__} has no varlen_attn with enable_gqa"
        return "flash attention with shared key heads", "a copy of the keys for each query head", why
    return None


@cache
def _varlen_options() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: Any, scale: float) -> torch.Tensor:
    """Attend with FlexAttention, which skips blocks that are fully masked; shapes as in `attention`."""
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    out: torch.Tensor = _compiled_flex_attention()(
        *heads_first, block_mask=block_mask, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    return out[0].transpose(0, 1)


def prepare_flex(layout: Layout, queries: torch.Tensor, window: int | None) -> Any:
    """Prepare the block mask of a layout, on the device of the queries."""
    from torch.nn.attention.flex_attention import create_block_mask

    sizes = len(queries), len(layout.position_ids)
    return create_block_mask(mask_of(layout, queries, window), None, None, *sizes, device=queries.device)


def mask_of(layout: Layout, queries: torch.Tensor, window: int | None) -> Callable[..., torch.Tensor]:
    """Return `Layout.sees` as a mask function for FlexAttention.

    The function holds only tensors, which torch.compile takes as inputs; with a layout it would recompile each time.
    """
    until, positions = layout.visible_until, layout.position_ids

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return is_seen(queries[query], key, until, positions, window)

    return sees


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention as plain

    return torch.compile(plain, dynamic=True)
