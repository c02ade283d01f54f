"""Attention over a layout on CUDA: flash attention in 16 bits, memory-efficient attention in others and on older GPUs.

Both kernels take rows of any length, one after the other, so both compute the same runs of queries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from finetune.engine.layout import Change, Layout
from finetune.engine.products import wide_type

VARLEN_TYPES = (torch.float16, torch.bfloat16)
"""Types that variable-length flash attention computes in."""
EQUAL_ROWS_MULTIPLE = 128
"""Rows of equal length use torch's batched attention if this number divides their length. cuDNN makes a plan for each
new length, so lengths that are equal only by chance would make it create many plans."""
_CAUSAL_TO_THE_LOWER_RIGHT = 2
"""The mask of memory-efficient attention in which the last query of a run sees all its keys."""


class VarlenRuns(NamedTuple):
    """Runs of queries of one row, with all tokens of the row up to the end of the run as keys.

    The causal mask of flash attention is aligned to the lower right, so it is exact for such runs, even if rows share
    prefixes. Each run gathers its own keys, so runs are as long as possible: a run ends only where the next flat token
    belongs to another branch of the tree. In the last layer, only targets have queries, and fillers take the places
    between them. Each branch then gathers its keys once, however many turns carry loss.
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

    @property
    def row_length(self) -> int | None:
        """The length of the rows, if they make a batch: whole, equally long, without a window; None otherwise."""
        num_rows = len(self.query_edges) - 1
        is_whole = self.key_index is None and self.slots is None and self.most_queries == self.most_keys
        is_batch = is_whole and self.window is None and self.num_slots == num_rows * self.most_queries
        return self.most_queries if is_batch and self.most_queries % EQUAL_ROWS_MULTIPLE == 0 else None

    def map(self, change: Change) -> VarlenRuns:
        """Apply a function to every tensor."""
        return VarlenRuns._make(change(value) if isinstance(value, torch.Tensor) else value for value in self)


def prepare_varlen(layout: Layout, queries: torch.Tensor, window: int | None, *, is_square: bool = False) -> VarlenRuns:
    """Prepare variable-length attention on the device of the queries. If this is a GPU, the host waits for it.

    See `attention` for the first arguments. If `is_square` is true, fillers are put before the queries of each
    run, so that it has as many queries as keys.
    """
    device = queries.device
    runs = list(_runs(layout, queries.cpu()))
    index = torch.cat([torch.arange(start, end) for _, keys in runs for start, end in keys])
    is_plain = torch.equal(index, torch.arange(len(layout.position_ids)))
    num_keys = [sum(end - start for start, end in keys) for _, keys in runs]
    num_queries = num_keys if is_square else [int(tokens[-1] - tokens[0]) + 1 for tokens, _ in runs]
    ends = list(accumulate(num_queries))
    slots = torch.cat([end - 1 + tokens - tokens[-1] for end, (tokens, _) in zip(ends, runs, strict=True)])
    return VarlenRuns(
        query_edges=_edges(num_queries).to(device),
        key_edges=_edges(num_keys).to(device),
        key_index=None if is_plain else index.to(device),
        most_queries=max(num_queries),
        most_keys=max(num_keys),
        window=window,
        slots=None if ends[-1] == len(queries) else slots.to(device),
        num_slots=ends[-1],
    )


def prepare_efficient(layout: Layout, queries: torch.Tensor, window: int | None) -> VarlenRuns:
    """Prepare memory-efficient attention as `prepare_varlen` does.

    Its backward pass applies a window as if the first query saw the first key (seen with torch 2.11 on an H200).
    """
    return prepare_varlen(layout, queries, window, is_square=window is not None)


def _runs(layout: Layout, queries: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[tuple[int, int]]]]:
    """Yield for each run its queries and the flat tokens of its row up to its end."""
    ends = torch.tensor([segment.end for segment in layout.segments])
    parents = torch.tensor([segment.parent for segment in layout.segments])
    branch = (parents != torch.arange(-1, len(parents) - 1)).cumsum(0)  # its segments follow each other
    owner = torch.searchsorted(ends, queries, right=True)
    edges = [0, *(branch[owner].diff().nonzero()[:, 0] + 1).tolist(), len(queries)]
    for first, last in pairwise(edges):
        path = [layout.segments[index] for index in layout.path(int(owner[last - 1]))]
        ends_of_path = [segment.end for segment in path[:-1]] + [int(queries[last - 1]) + 1]
        yield queries[first:last], [(segment.start, end) for segment, end in zip(path, ends_of_path, strict=True)]


def _edges(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def varlen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: VarlenRuns, scale: float) -> torch.Tensor:
    """Attend in fp16 or bf16: with cuDNN if rows form a batch, else with flash attention. Shapes: see `attention`."""
    if runs.row_length is not None:
        return _attend_in_a_batch(q, k, v, runs.row_length, scale)
    from torch.nn.attention.varlen import varlen_attn

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Older versions of torch have no such option, and pass shared key heads on to the kernel, which knows them.
        shares_keys = k.shape[1] != q.shape[1] and "enable_gqa" in _varlen_options()
        options: dict[str, Any] = {"enable_gqa": True} if shares_keys else {}
        edges, sizes = (runs.query_edges, runs.key_edges), (runs.most_queries, runs.most_keys)
        window = (-1 if runs.window is None else runs.window - 1, 0)
        out: Any = varlen_attn(q, k, v, *edges, *sizes, scale=scale, window_size=window, **options)
        return out  # type: ignore[no-any-return]

    return attend_in_runs(q, k, v, runs, attend)


def _attend_in_a_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row_length: int, scale: float
) -> torch.Tensor:
    """Attend along rows of one length with the fastest kernel of torch, which on Hopper is cuDNN's."""
    q, k, v = (x.view(-1, row_length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=k.shape[1] != q.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


def efficient_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: VarlenRuns, scale: float
) -> torch.Tensor:
    """Attend with memory-efficient attention: any CUDA GPU and type; shapes as in `attention`."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _EfficientAttention.apply(q, k, v, runs, scale)  # type: ignore[no-untyped-call]
        return out

    return attend_in_runs(q, k, v, runs, attend)


class _EfficientAttention(torch.autograd.Function):
    """Attend with torch's kernel. It has no shared key heads, so keys are copied; its backward pass has no window."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: VarlenRuns, scale: float
    ) -> torch.Tensor:
        out, logsumexp, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
            *(x[None] for x in (q, *_for_each_head(q, k, v))),
            *(None, runs.query_edges, runs.key_edges, runs.most_queries, runs.most_keys),
            *(0.0, _CAUSAL_TO_THE_LOWER_RIGHT, True),
            scale=scale,
            window_size=runs.window,
        )
        ctx.runs, ctx.scale = runs, scale
        ctx.save_for_backward(q, k, v, out, logsumexp, seed, offset)
        return out[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, logsumexp, seed, offset = ctx.saved_tensors
        runs = ctx.runs
        d_q, d_k, d_v, _ = torch.ops.aten._efficient_attention_backward(
            *(x[None] for x in (grad.contiguous(), q, *_for_each_head(q, k, v))),
            *(None, out, runs.query_edges, runs.key_edges, runs.most_queries, runs.most_keys),
            *(logsumexp, 0.0, seed, offset, _CAUSAL_TO_THE_LOWER_RIGHT, False),
            scale=ctx.scale,
            num_splits_key=1 if torch.are_deterministic_algorithms_enabled() else None,
            window_size=runs.window,
        )
        d_k, d_v = (x.view(*k.shape[:2], -1, k.shape[2]).sum(2) for x in (d_k, d_v))
        return d_q[0], d_k, d_v, None, None


def _for_each_head(q: torch.Tensor, *keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copy keys and values that several heads of q share."""
    groups = q.shape[1] // keys[0].shape[1]
    return keys if groups == 1 else tuple(x.repeat_interleave(groups, dim=1) for x in keys)


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
    selected: torch.Tensor = _TakeKeys.apply(x, index)  # type: ignore[no-untyped-call]
    return selected


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
    """Return why a GPU cannot use variable-length flash attention with a window and a scale; None if it can."""
    if _is_before_ampere(device):
        return f"{torch.cuda.get_device_name(device)} is older than flash attention's kernels, which need Ampere"
    missing = sorted({"window_size", "scale"} - _varlen_options())
    return f"torch {torch.__version__} has no varlen_attn with {' and '.join(missing)}" if missing else None


def attention_fallback(device: torch.device, dtype: torch.dtype) -> tuple[str, str, str] | None:
    """Return the fastest attention, the attention that this GPU uses instead, and why; None if it uses the fastest."""
    if dtype not in VARLEN_TYPES or (dtype == torch.float16 and _is_before_ampere(device)):
        return None  # fp16 is the type of GPUs before Ampere, and memory-efficient attention the fastest that they have
    reason = why_not_varlen(device)
    return None if reason is None else ("variable-length flash attention", "memory-efficient attention", reason)


def _is_before_ampere(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) < (8, 0)


@cache
def _varlen_options() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)
