"""Exact causal attention over a layout: each query sees only its own row, however rows are packed.

The entry point is `attention`. Each type of device has its own kernel. A CPU computes blocks of queries with torch's
kernel. CUDA uses flash attention for 16-bit types and memory-efficient attention for others (`attention_cuda`). Other
devices use a dense mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from finetune.engine.layout import Layout, dense_mask
from finetune.engine.products import wide_type

Kernel = Literal["blocks", "varlen", "efficient", "dense"]
Range = tuple[int, int]

BLOCK_QUERIES = 64
"""A causal row of n tokens costs n * (n + 64) / 2 pairs of query and key in blocks of 64, and n * n in one block."""
BLOCK_OVERHEAD = 600
"""The cost of one more kernel call, in pairs of query and key."""
KEY_OVERHEAD = 16
"""The cost of gathering a key and adding up its gradient, in pairs of query and key."""
MOST_COST = 1 << 22
"""The largest cost of a merged block. Its bias takes 4 bytes for each pair. Rows of 4,096 tokens stay below it."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    queries: torch.Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend along each row.

    Args:
        q: (queries, heads, head_dim).
        k: (tokens, kv_heads, head_dim); kv_heads divides heads.
        v: like k.
        layout: of the tokens.
        queries: the flat tokens that the rows of q belong to, ascending, each once, int64, (queries,); None: all.
        window: the number of tokens of its row that a token sees, itself included; None: all before it.
        scale: of the scores; None: head_dim ** -0.5.

    Returns:
        (queries, heads, head_dim), in q's type.
    """
    if not len(q):
        return q + (k[:0].sum() + v[:0].sum())  # keys and values have gradients, of zero
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kernel = _kernel_of(q.device, q.dtype)
    if kernel == "blocks":
        return attend_in_blocks(q, k, v, layout.prepared(prepare_blocks, queries, window), scale)
    if kernel == "dense":
        return dense_attention(q, k, v, layout.prepared(dense_mask, queries, window), scale)
    from finetune.engine import attention_cuda as cuda  # only where there is a GPU

    if kernel == "varlen":
        return cuda.varlen_attention(q, k, v, layout.prepared(cuda.prepare_varlen, queries, window), scale)
    return cuda.efficient_attention(q, k, v, layout.prepared(cuda.prepare_efficient, queries, window), scale)


def prepared_by_the_host(device: torch.device, dtype: torch.dtype) -> Callable[..., Any] | None:
    """Return the function that prepares attention for a device and dtype while the micro-batch is still on the CPU.

    Return None if attention can be prepared on the device without making the host wait.
    """
    if (kernel := _kernel_of(device, dtype)) in ("blocks", "dense"):
        return None
    from finetune.engine import attention_cuda as cuda

    return cuda.prepare_varlen if kernel == "varlen" else cuda.prepare_efficient


def _kernel_of(device: torch.device, dtype: torch.dtype) -> Kernel:
    if device.type != "cuda":
        return choose_kernel(device.type, dtype, has_varlen=False)
    from finetune.engine.attention_cuda import why_not_varlen

    return choose_kernel(device.type, dtype, has_varlen=why_not_varlen(device) is None)


def choose_kernel(device_type: str, dtype: torch.dtype, *, has_varlen: bool) -> Kernel:
    """Choose the attention kernel for a device and dtype."""
    if device_type == "cpu":
        return "blocks"
    if device_type != "cuda":
        return "dense"
    from finetune.engine.attention_cuda import VARLEN_TYPES  # see `attention`

    if dtype in VARLEN_TYPES and has_varlen:
        return "varlen"
    return "efficient"


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend with a mask of (queries, tokens): simple, but wasteful for more than a few rows."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


class Block(NamedTuple):
    """Queries for one kernel call."""

    first: int
    last: int
    """The index after the last query."""
    keys: tuple[Range, ...]
    """Flat tokens that at least one of the queries sees, ascending."""
    bias: torch.Tensor | None
    """0 where a query sees a key and -inf elsewhere, fp32, shape (queries, keys); None: 0 everywhere."""
    is_causal: bool
    """Whether the block is causal: query i attends to keys 0 to i, and no bias is needed."""


def prepare_blocks(layout: Layout, queries: torch.Tensor, window: int | None = None) -> list[Block]:
    """Split queries into blocks, with the keys that each block attends to."""
    pieces: list[_Piece] = []
    for piece in _pieces(layout, queries, window):
        merged = _merge(pieces[-1], piece) if pieces else piece
        if pieces and merged.cost <= min(pieces[-1].cost + piece.cost, MOST_COST):
            pieces[-1] = merged
        else:
            pieces.append(piece)
    return [_block(layout, queries[piece.first : piece.last], piece, window) for piece in pieces]


class _Piece(NamedTuple):
    """A block without its bias."""

    first: int
    last: int
    keys: tuple[Range, ...]

    @property
    def num_keys(self) -> int:
        return sum(end - start for start, end in self.keys)

    @property
    def cost(self) -> int:
        return (self.last - self.first + KEY_OVERHEAD) * self.num_keys + BLOCK_OVERHEAD


def _pieces(layout: Layout, queries: torch.Tensor, window: int | None) -> Iterator[_Piece]:
    """Split the queries of each segment into pieces of about `BLOCK_QUERIES`, with the keys that they see."""
    edges = torch.tensor([0, *(segment.end for segment in layout.segments)])
    bounds = torch.searchsorted(queries, edges).tolist()
    for index, (low, high) in enumerate(pairwise(bounds)):
        if low == high:
            continue
        path = [layout.segments[i] for i in layout.path(index)]
        number = max(1, round((high - low) / BLOCK_QUERIES))  # pieces, of nearly equal length
        for first, last in pairwise(low + (high - low) * i // number for i in range(number + 1)):
            # The first query of a piece sees positions from `oldest` on. Take the keys from there to the end of each
            # segment on the path, in the last segment to the piece's last query.
            position = path[-1].position + int(queries[first]) - path[-1].start
            oldest = 0 if window is None else position - window + 1
            ends = [segment.end for segment in path[:-1]] + [int(queries[last - 1]) + 1]
            ranges = [(s.start + max(0, oldest - s.position), end) for s, end in zip(path, ends, strict=True)]
            yield _Piece(first, last, tuple((a, b) for a, b in ranges if a < b))


def _merge(earlier: _Piece, later: _Piece) -> _Piece:
    keys: list[Range] = []
    for start, end in sorted(earlier.keys + later.keys):
        if keys and start <= keys[-1][1]:
            keys[-1] = (keys[-1][0], max(end, keys[-1][1]))
        else:
            keys.append((start, end))
    return _Piece(earlier.first, later.last, tuple(keys))


def _block(layout: Layout, queries: torch.Tensor, piece: _Piece, window: int | None) -> Block:
    keys = torch.cat([torch.arange(start, end) for start, end in piece.keys])
    visible = layout.sees(queries[:, None], keys, window)
    if visible.all():
        return Block(*piece, bias=None, is_causal=False)
    rows, columns = visible.shape
    if torch.equal(visible, torch.ones_like(visible).tril(columns - rows)):
        is_causal = rows == columns  # the kernel aligns to the upper left
        return Block(*piece, bias=None if is_causal else _lower_right_bias(rows, columns), is_causal=is_causal)
    return Block(*piece, bias=torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf), is_causal=False)


def _lower_right_bias(rows: int, columns: int) -> torch.Tensor:
    """Return the bias of a block as a view of one shared tensor, because separate tensors would need much memory."""
    offset = columns - rows
    height, room = _power_of_two(rows), _power_of_two(offset)
    return _strip(height, room)[:rows, room - offset : room - offset + columns]


@lru_cache(maxsize=8)
def _strip(height: int, room: int) -> torch.Tensor:
    return torch.full((height, height + room), -torch.inf).triu(room + 1)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def attend_in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: list[Block], scale: float
) -> torch.Tensor:
    """Compute `attention` with the CPU kernel, for the queries of these blocks; the rest of the result is not set."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out: torch.Tensor = _BlockAttention.apply(q, k, v, blocks, scale)  # type: ignore[no-untyped-call]
    return out


class _BlockAttention(torch.autograd.Function):
    """Attention with the CPU kernel, one block after the other. It keeps each block's logsumexp and not its scores.

    Query heads that share a key head form a batch dimension in which the keys have stride 0. Inputs of lower precision
    are converted to fp32 once for all blocks, because the CPU kernel is slower in bf16.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: list[Block], scale: float
    ) -> torch.Tensor:
        ctx.blocks, ctx.scale = blocks, scale
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        wide_q, wide_k, wide_v = map(_wide, (q, k, v))
        queries, outs = (_group(x, k.shape[1]) for x in (wide_q, out))
        sums = []
        for block in blocks:
            rows = slice(block.first, block.last)
            outs[..., rows, :], logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries[..., rows, :],
                _selected_keys(wide_k, block.keys, len(queries)),
                _selected_keys(wide_v, block.keys, len(queries)),
                is_causal=block.is_causal,
                attn_mask=_bias(block, q),
                scale=scale,
            )
            sums.append(logsumexp)
        ctx.save_for_backward(q, k, v, out, *sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, *sums = ctx.saved_tensors
        wide_q, wide_k, wide_v, wide_out, wide_grad = map(_wide, (q, k, v, out, grad.contiguous()))
        d_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        d_k, d_v = (torch.zeros(k.shape, dtype=wide_type(k), device=k.device) for _ in "kv")
        queries, outs, grads, d_queries = (_group(x, k.shape[1]) for x in (wide_q, wide_out, wide_grad, d_q))
        for block, logsumexp in zip(ctx.blocks, sums, strict=True):
            rows = slice(block.first, block.last)
            d_queries[..., rows, :], *d_keys = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grads[..., rows, :],
                queries[..., rows, :],
                _selected_keys(wide_k, block.keys, len(queries)),
                _selected_keys(wide_v, block.keys, len(queries)),
                outs[..., rows, :],
                logsumexp,
                0.0,
                block.is_causal,
                attn_mask=_bias(block, q),
                scale=ctx.scale,
            )
            for total, part in zip((d_k, d_v), d_keys, strict=True):
                _add(total, part, block.keys)
        return d_q, d_k.to(k.dtype), d_v.to(v.dtype), None, None


def _group(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """View (queries, heads, head_dim) as (heads per key head, kv_heads, queries, head_dim)."""
    return x.view(len(x), kv_heads, x.shape[1] // kv_heads, x.shape[-1]).permute(2, 1, 0, 3)


def _selected_keys(x: torch.Tensor, keys: tuple[Range, ...], groups: int) -> torch.Tensor:
    """Take keys from (tokens, kv_heads, head_dim) as (groups, kv_heads, keys, head_dim)."""
    parts = [x[start:end] for start, end in keys]
    selected = parts[0] if len(parts) == 1 else torch.cat(parts)
    return selected.transpose(0, 1).expand(groups, -1, -1, -1)


def _add(total: torch.Tensor, part: torch.Tensor, keys: tuple[Range, ...]) -> None:
    """Compute the backward pass of `_selected_keys`."""
    summed = (part[0] if len(part) == 1 else part.sum(0)).transpose(0, 1)
    sizes = [end - start for start, end in keys]
    for (start, end), piece in zip(keys, torch.split(summed, sizes), strict=True):
        total[start:end] += piece


def _bias(block: Block, q: torch.Tensor) -> torch.Tensor | None:
    return None if block.bias is None else block.bias.to(wide_type(q))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(wide_type(x))
