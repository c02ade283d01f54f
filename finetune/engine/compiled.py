"""Run formulas of the engine as kernels that torch.compile makes once, for any number of rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from finetune.logs import waiting
from finetune.units import format_duration

_log = logging.getLogger(__name__)
_compiled_here: set[Callable[..., Any]] = set()


def run_compiled(formula: Callable[..., Any], *args: Any) -> Any:
    """Run the compiled kernels. torch.compile makes them once, for any number of rows."""
    flat = [arg for group in args for arg in (group if isinstance(group, list) else [group])]
    rows = {arg.shape[0] for arg in flat if isinstance(arg, torch.Tensor) and arg.ndim > 1}
    if min(rows) < 2:  # torch.compile would make kernels for no row and for one row alone
        return formula(*args)
    dynamic_args = [_any_number_of_rows(arg) for arg in args]
    compiled = _compiled(formula, tuple((arg.shape[1:], arg.dtype) for arg in flat if isinstance(arg, torch.Tensor)))
    if formula in _compiled_here:
        return compiled(*dynamic_args)
    _compiled_here.add(formula)
    name, begun = formula.__name__.strip("_"), time.perf_counter()
    with waiting(f"compiling kernels: {name}"):
        result = compiled(*dynamic_args)
    seconds = format_duration(time.perf_counter() - begun)
    _log.info("kernels of %s are ready after %s; they are kept in %s", name, seconds, cache_dir())
    return result


@cache
def _compiled(formula: Callable[..., Any], form: tuple[tuple[torch.Size, torch.dtype], ...]) -> Callable[..., Any]:
    """Compile a formula for tensors of a form: their sizes without the first, and their types.

    Each form has a copy of the function, because torch compiles one function for eight forms at most. fp8 alone has
    more of them in one model.
    """
    code = formula.__code__.replace()
    copy = FunctionType(code, formula.__globals__, formula.__name__, formula.__defaults__, formula.__closure__)
    # Without `fullgraph`, torch goes on without kernels of its own, in silence, where it can make none; without
    # `deterministic`, kernels are chosen by their speed in this process, and sums by the kernel.
    return torch.compile(copy, fullgraph=True, dynamic=False, options={"deterministic": True})


def _any_number_of_rows(arg: Any) -> Any:
    if isinstance(arg, list):
        return [_any_number_of_rows(part) for part in arg]
    if not isinstance(arg, torch.Tensor):
        return arg
    arg = arg.detach()  # what needs a gradient would be compiled once more
    if arg.ndim > 1:
        torch._dynamo.mark_dynamic(arg, 0)
    return arg
