"""A device that is not there: its tensors lie in main memory, and every operation on them is watched.

An operation that takes tensors of this device and of the CPU fails as it would on a GPU. Results are those of the CPU,
so that a whole step can be compared with one on the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from finetune.engine import attention
from finetune.engine.fused import FORMULAS

KIND = "fakegpu"
_ACROSS = {"aten::_to_copy", "aten::copy_"}
"""Operations that may take tensors of two devices."""
_WAITS = {
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::bincount"),
    *("aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave"),
}
"""Operations for whose result, or its shape, the CPU waits."""
_WITH_INDICES = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""Operations for which the CPU waits if an index is a mask."""


class DeviceTensor(torch.Tensor):
    """A tensor on the device; its data lies in `data_on_cpu`."""

    data_on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, data_on_cpu: torch.Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            data_on_cpu.size(),
            strides=data_on_cpu.stride(),
            storage_offset=data_on_cpu.storage_offset(),
            dtype=data_on_cpu.dtype,
            device=torch.device(KIND, 0),
        )
        made.data_on_cpu = data_on_cpu
        return made

    def tolist(self) -> Any:
        """Copy to the CPU, as a GPU's tensor does."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{function} on a tensor of the fake device, outside of `FakeDevice`")


class FakeDevice(TorchDispatchMode):
    """Runs every operation inside, and fails those across devices.

    Args:
        has_float64: whether the device has this type; Apple's GPUs do not.

    Attributes:
        waits: how often the CPU waited for the device, by operation. It waits for a copy to the CPU, and for one to the
            device too, if that is not told otherwise (`non_blocking`) or does not start from page-locked memory.
    """

    def __init__(self, *, has_float64: bool = True) -> None:
        super().__init__()
        self._has_float64 = has_float64
        register_device()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = function.name().partition(".")[0]
        tensors: list[torch.Tensor] = []
        _replace((args, kwargs), torch.Tensor, tensors.append)
        there = {id(tensor.data_on_cpu): tensor for tensor in tensors if isinstance(tensor, DeviceTensor)}
        strangers = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
        if there and any(tensor.ndim for tensor in strangers) and name not in _ACROSS:
            raise AssertionError(f"{function} takes tensors of two devices: {[str(x.device) for x in tensors]}")
        is_there = self._is_result_there(name, args, kwargs, there)
        if there or is_there:
            self.waits.update(self._waits(name, args, kwargs, strangers=strangers, is_there=is_there))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        run: Callable[..., Any] = _STAND_INS.get(name) or FORMULAS.get(name, function)
        given, named = _replace((args, kwargs), DeviceTensor, lambda tensor: tensor.data_on_cpu)
        made = run(*given, **named)

        def wrapped(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in there:  # the operation worked in place
                return there[id(tensor)]
            if not is_there:
                return tensor
            if tensor.dtype == torch.float64 and not self._has_float64:
                raise AssertionError(f"{function} makes float64, which the device does not have")
            return DeviceTensor(tensor)

        return _replace(made, torch.Tensor, wrapped)

    @staticmethod
    def _waits(
        name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, strangers: Sequence[torch.Tensor], is_there: bool
    ) -> list[str]:
        """Return the operation if the CPU waits for it."""
        if name in _ACROSS and is_there:
            is_queued = kwargs.get("non_blocking", True in args[2:])
            waits = not all(is_queued and hasattr(tensor, _IS_LOCKED) for tensor in strangers)
            return [f"{name} to the device"] if waits else []
        has_mask = name in _WITH_INDICES and any(x is not None and x.dtype == torch.bool for x in args[1])
        return [name] if has_mask or name in _WAITS | _ACROSS else []

    @staticmethod
    def _is_result_there(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], there: Mapping[int, Any]) -> bool:
        if kwargs.get("device") is not None:
            return torch.device(kwargs["device"]).type == KIND
        return isinstance(args[0], DeviceTensor) if name == "aten::copy_" else bool(there)


def _replace(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Change the tensors of a kind in arguments or results. `tree_map_only` takes longer than what it is told to do."""
    if isinstance(tree, kind):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)([_replace(part, kind, change) for part in tree])
    if type(tree) is dict:
        return {name: _replace(part, kind, change) for name, part in tree.items()}
    return tree_map_only(kind, change, tree) if isinstance(tree, (tuple, list, Mapping)) else tree


def use_there(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Make this the attention of the device."""
    choose = attention.choose_kernel
    monkeypatch.setattr(
        attention, "choose_kernel", lambda kind, *a, **b: kernel if kind == KIND else choose(kind, *a, **b)
    )


def move(model: torch.nn.Module) -> torch.nn.Module:
    """Move a model to the device, inside of it; tied weights stay tied."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    moved[id(tensor)] = _moved(tensor)
                table[name] = moved[id(tensor)]
    return model


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    copy = DeviceTensor(tensor.detach().clone())
    if not isinstance(tensor, torch.nn.Parameter):
        return copy
    weight = torch.nn.Parameter(copy, tensor.requires_grad)
    for hook in (tensor._backward_hooks or {}).values():
        weight.register_hook(hook)
    return weight


@cache
def register_device() -> None:
    """Tell torch that there is such a device. This holds until the process ends."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices made in Python")

    class Backend(backend_registration._DummyBackendModule):  # type: ignore[name-defined, misc]
        _initialized = False

        def is_available(self) -> bool:
            return False  # to a run, which would miss it

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16]

    backend_registration._setup_privateuseone_for_python_backend(rename=KIND, backend_module=Backend())


def _varlen_forward(q: Any, k: Any, v: Any, query_edges: Any, key_edges: Any, *more: Any, **named: Any) -> Any:
    """What variable-length flash attention computes: each run causal and windowed, aligned to the lower right."""
    settings = _settings(more, named, first=3)
    outs = [
        torch.einsum("hqk,khd->qhd", _weights(q[rows], _wide(k[keys], q), *settings), _wide(v[keys], q)).to(q.dtype)
        for rows, keys in _runs(query_edges, key_edges)
    ]
    return torch.cat(outs), torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)


def _varlen_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    logsumexp: Any,
    query_edges: Any,
    key_edges: Any,
    *more: Any,
    **named: Any,
) -> Any:
    scale, window = _settings(more, named, first=4)
    made = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in _runs(query_edges, key_edges):
        wide_k, wide_v, d_out = _wide(k[keys], q), _wide(v[keys], q), grad[rows].float()
        weights = _weights(q[rows], wide_k, scale, window)
        d_weights = torch.einsum("qhd,khd->hqk", d_out, wide_v)
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) * scale
        d_k = torch.einsum("hqk,qhd->khd", d_scores, q[rows].float())
        d_v = torch.einsum("hqk,qhd->khd", weights, d_out)
        made[0][rows] = torch.einsum("hqk,khd->qhd", d_scores, wide_k).to(q.dtype)
        for whole, part in zip(made[1:], (d_k, d_v), strict=True):
            whole[keys] = part.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype)
    return made


def _runs(query_edges: torch.Tensor, key_edges: torch.Tensor) -> list[tuple[slice, slice]]:
    edges = zip(pairwise(query_edges.tolist()), pairwise(key_edges.tolist()), strict=True)
    return [(slice(*rows), slice(*keys)) for rows, keys in edges]


def _weights(q: torch.Tensor, keys: torch.Tensor, scale: float, window: Sequence[int]) -> torch.Tensor:
    """The weights of attention, (heads, queries, keys)."""
    offset = len(keys) - len(q)
    seen = torch.ones(len(q), len(keys), dtype=torch.bool).tril(offset + window[1])
    if window[0] >= 0:
        seen = seen.triu(offset - window[0])
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def _wide(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values in fp32, one head for each head of the queries."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).float()


def _settings(more: Sequence[Any], named: Mapping[str, Any], *, first: int) -> tuple[float, Sequence[int]]:
    """Scale and window of torch's own operators, which follow after the two maxima and some other arguments."""
    rest = dict(enumerate(more))
    return named.get("scale", rest.get(first)), named.get("window_size", rest.get(first + 1))


def _lock(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """What a copy into page-locked memory is here: one that is marked."""
    copy = tensor.clone()
    setattr(copy, _IS_LOCKED, True)
    return copy


_IS_LOCKED = "is_in_page_locked_memory"
_STAND_INS: Mapping[str, Callable[..., Any]] = {
    "aten::_pin_memory": _lock,
    "torch_attn::_varlen_attn": _varlen_forward,
    "torch_attn::_varlen_attn_backward": _varlen_backward,
}
"""In place of operators that only a machine with a GPU has; `FORMULAS` stand in for those that torch.compile makes."""
