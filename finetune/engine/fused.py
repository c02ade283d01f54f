"""Fuse formulas of the engine into a few GPU kernels with torch.compile.

Each fused function is registered as an operator of torch, so a dispatch mode sees one call. Fake tensors use the
formula itself. If fusing is off, which is the default, the formula runs as ordinary torch operations.

The module also has the switch of the other way to spare the host launches: replaying a step as a CUDA graph.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from finetune.errors import first_line

Formula = TypeVar("Formula", bound=Callable[..., Any])

LAUNCHES: dict[str, int] = {}
"""The most kernels that each operator launches, by its name: `finetune::gated`."""
FORMULAS: dict[str, Callable[..., Any]] = {}
"""What torch.compile compiles for each operator."""

_FOLDER_OF_KERNELS = "TORCHINDUCTOR_CACHE_DIR"
_is_on = False
_replays = False


def switch_fused(on: bool) -> None:
    """Turn fused functions on or off for this process. Ask `why_not_fused` before."""
    global _is_on
    _is_on = on


def is_fused() -> bool:
    """Return whether fused functions are on."""
    return _is_on


@contextmanager
def fused_or_not(on: bool) -> Iterator[None]:
    """Turn fused functions on or off inside."""
    before = _is_on
    switch_fused(on)
    try:
        yield
    finally:
        switch_fused(before)


def switch_replays(on: bool) -> None:
    """Turn replayed answers on or off for this process, see `SteppedDecoder`."""
    global _replays
    _replays = on


def replays_answers() -> bool:
    """Return whether answers are generated in steps that CUDA graphs replay."""
    return _replays


@contextmanager
def replayed_or_not(on: bool) -> Iterator[None]:
    """Turn replayed answers on or off inside."""
    before = _replays
    switch_replays(on)
    try:
        yield
    finally:
        switch_replays(before)


@contextmanager
def kernels_kept_in(folder: Path) -> Iterator[None]:
    """Within the block, torch keeps compiled kernels in this folder, where later runs and other ranks find them.

    torch writes each file under a temporary name and renames it, so ranks may write at the same time. It keeps the
    user's TORCHINDUCTOR_CACHE_DIR, and its own folder if this one cannot be written, because its import makes it.
    """
    before = os.environ.get(_FOLDER_OF_KERNELS)
    if before is None or before == _torchs_own_folder():
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                os.environ[_FOLDER_OF_KERNELS] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(_FOLDER_OF_KERNELS, None)
        if before is not None:
            os.environ[_FOLDER_OF_KERNELS] = before


def _torchs_own_folder() -> str:
    """Return the folder that torch writes into the variable when a library imports torch's compiler."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def fused(*, launches: int, compiled: Callable[..., Any] | None = None) -> Callable[[Formula], Formula]:
    """Turn a formula into a fused function, which reads its inputs once and writes its outputs once.

    In an argument with two dimensions or more, the first one counts the rows; the first argument must have rows.
    Results are new tensors.

    Args:
        launches: the most kernels that it takes.
        compiled: the same formula in a form that compiles to fewer kernels; None: the formula itself.
    """

    def decorate(formula: Formula) -> Formula:
        name = f"finetune::{formula.__name__.strip('_')}"
        LAUNCHES[name], FORMULAS[name] = launches, compiled or formula
        schema = torch.library.infer_schema(FORMULAS[name], mutates_args=())
        operator: Any = torch.library.custom_op(name, partial(_run, FORMULAS[name]), mutates_args=(), schema=schema)
        operator.register_fake(FORMULAS[name])

        @wraps(formula)
        def call(*args: Any) -> Any:
            if not _is_on:
                return formula(*args)
            return operator(*args) if _is_watched(args) else _runner()(FORMULAS[name], *args)

        return cast(Formula, call)

    return decorate


def _is_watched(args: tuple[Any, ...]) -> bool:
    """Return whether a dispatch mode, a profiler or a tensor subclass must see the operator, which takes longer."""
    if torch._C._len_torch_dispatch_stack() or torch._C._autograd._profiler_enabled():
        return True
    flat = (arg for group in args for arg in (group if isinstance(group, list) else [group]))
    return any(isinstance(arg, torch.Tensor) and type(arg) not in _PLAIN_TENSORS for arg in flat)


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


@cache
def _runner() -> Callable[..., Any]:
    """Return `run_compiled`. It is imported once, and only where functions are fused."""
    from finetune.engine.compiled import run_compiled

    return run_compiled


def _run(formula: Callable[..., Any], *args: Any) -> Any:
    return _runner()(formula, *args)


@fused(launches=1)
def _probe(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@cache
def why_not_fused(device: torch.device) -> str | None:
    """Return why torch.compile cannot make kernels for a device; None if it can. The first call compiles one."""
    try:
        _run(FORMULAS["finetune::probe"], torch.ones(2, 2, device=device))
    except Exception as error:  # of any layer: no C++ compiler, no Triton, a GPU that Triton does not know
        return f"torch.compile fails there ({type(error).__name__}: {first_line(error)})"
    return None
