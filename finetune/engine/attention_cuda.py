"""Attention over a layout on CUDA: variable-length flash attention, or FlexAttention with the layout as its mask."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from finetune.engine.layout import Layout, is_seen


class VarlenRuns(NamedTuple):
    """Runs of successive queries of a row, with all tokens of the row up to the end of the run as keys.

    This makes the causal mask of flash attention, which is aligned to the lower right, exact for shared beginnings too.
    The keys of a shared beginning are gathered for each row that has it.
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


def prepare_varlen(layout: Layout, queries: torch.Tensor, window: int | None) -> VarlenRuns:
    """Prepare variable-length attention, on the device of the queries."""
    device = queries.device
    runs = list(_runs(layout, queries.cpu()))
    index = torch.cat([torch.arange(start, end) for _, keys in runs for start, end in keys])
    is_plain = torch.equal(index, torch.arange(len(layout.position_ids)))
    num_queries = [queries for queries, _ in runs]
    num_keys = [sum(end - start for start, end in keys) for _, keys in runs]
    return VarlenRuns(
        query_edges=_edges(num_queries).to(device),
        key_edges=_edges(num_keys).to(device),
        key_index=None if is_plain else index.to(device),
        most_queries=max(num_queries),
        most_keys=max(num_keys),
        window=window,
    )


def _runs(layout: Layout, queries: torch.Tensor) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield for each run the number of its queries and the flat tokens of its row up to its end."""
    ends = torch.tensor([stretch.end for stretch in layout.stretches])
    owner = torch.searchsorted(ends, queries, right=True)
    goes_on = torch.tensor([stretch.parent for stretch in layout.stretches])[owner[1:]] == owner[:-1]
    breaks = (queries.diff() != 1) | ((owner.diff() != 0) & ~goes_on)
    edges = [0, *(breaks.nonzero()[:, 0] + 1).tolist(), len(queries)]
    for first, last in pairwise(edges):
        path = [layout.stretches[index] for index in layout.path(int(owner[last - 1]))]
        ends_of_path = [stretch.end for stretch in path[:-1]] + [int(queries[last - 1]) + 1]
        yield last - first, [(stretch.start, end) for stretch, end in zip(path, ends_of_path, strict=True)]


def _edges(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def varlen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: VarlenRuns, scale: float) -> torch.Tensor:
    """Attend with flash attention: CUDA, fp16 or bf16; shapes as in `attention`."""
    from torch.nn.attention.varlen import varlen_attn

    if runs.key_index is not None:
        k, v = (x.index_select(0, runs.key_index) for x in (k, v))
    options: dict[str, Any] = {}
    if k.shape[1] != q.shape[1]:
        if "enable_gqa" in _varlen_options():
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out: Any = varlen_attn(
        q,
        k,
        v,
        runs.query_edges,
        runs.key_edges,
        runs.most_queries,
        runs.most_keys,
        scale=scale,
        window_size=(-1 if runs.window is None else runs.window - 1, 0),
        **options,
    )
    return out  # type: ignore[no-any-return]


def has_varlen() -> bool:
    """Return whether torch and the GPU support variable-length flash attention with a window and a scale."""
    is_there = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    return is_there and {"window_size", "scale"} <= _varlen_options()


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
