"""Check, name, fingerprint and call the code that a script gives to a run: see `Hooks`."""

from __future__ import annotations

import hashlib
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from finetune.errors import ConfigError, RunFailedError
from finetune.inference.answers import METRICS
from finetune.runs.metrics import FORGOTTEN, OF_EVERY_VALIDATION
from finetune.signals import Terminated

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.distributed.runtime import Runtime
    from finetune.engine.given_loss import GivenLoss
    from finetune.inference.answers import Metric

_log = logging.getLogger(__name__)
CALLBACKS = ("on_step", "on_validation", "on_save", "on_end")
"""The methods that a callback may define."""
_REQUESTS = ("stop", "save")


def check_own_code(
    config: Config,
    loss: GivenLoss | None,
    metrics: Mapping[str, Metric],
    optimizer: object,
    callbacks: Sequence[object],
) -> None:
    """Raise ConfigError for code that the run would not use."""
    functions: dict[str, object] = {f"metrics[{name!r}]": metric for name, metric in metrics.items()}
    functions |= {"loss": loss, "optimizer": None if is_optimizer(optimizer) else optimizer}
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigError(f"{name} is {function!r}; expected a function.")
    if (loss or metrics) and not config.objective.learns_answers:
        argument = "loss" if loss else "metrics"
        raise ConfigError(
            f"{argument} is given, but training.objective is {config.training.objective}. A script's own "
            f"{argument} applies to the objective sft only. Remove one of the two."
        )
    if metrics:
        own = {*OF_EVERY_VALIDATION, *METRICS, FORGOTTEN, "model", "perplexity"}
        if reserved := sorted(name for name in metrics if name.partition("/")[0] in own):
            raise ConfigError(f"metrics has {reserved[0]}, a name that finetune uses itself. Choose another name.")
    for callback in callbacks:
        _check_callback(callback)


def fingerprint_code(loss: GivenLoss | None, optimizer: Any) -> dict[str, str]:
    """Return a fingerprint of each that is given."""
    settings: Any = optimizer
    if is_optimizer(settings):  # its class and its settings, without the weights
        groups = [{**group, "params": len(group["params"])} for group in settings.param_groups]
        optimizer_class: Callable[..., Any] = type(settings)
        settings = partial(optimizer_class, groups=groups)
    functions = {"loss": loss, "optimizer": settings}
    return {name: _fingerprint(code) for name, code in functions.items() if code is not None}


def call_callbacks(runtime: Runtime, callbacks: Sequence[object], name: str, result: object) -> set[str]:
    """Call a method of all callbacks that define it. Return what they request on any rank. Collective.

    Raises:
        RunFailedError: one fails, on any rank.
    """
    import torch

    error: Exception | None = None
    answers: set[str] = set()
    for callback in callbacks:
        method = getattr(callback, name, None)
        if method is None or error is not None:
            continue
        where = f"{type(callback).__name__}.{name}"
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled()):  # restores what the callback leaves behind
                answer = method(result)
        except Terminated:
            raise
        except (Exception, SystemExit) as raised:  # it is the user's own code
            _log.error("the callback %s failed", where, exc_info=raised)
            instead = ', or return "stop" to end training' if isinstance(raised, SystemExit) else ""
            kind = type(raised).__name__
            error = RunFailedError(f"the callback {where} raised {kind}: {raised}. Correct it{instead}.")
            continue
        if isinstance(answer, str) and answer in _REQUESTS:
            answers.add(answer)
        elif answer is not None:
            error = RunFailedError(f'{where} returned {answer!r}; expected None, "stop" or "save". Correct it.')
    failed, *counts = runtime.collectives.sum(
        [float(error is not None), *(float(request in answers) for request in _REQUESTS)]
    )
    if failed:
        runtime.collectives.agree(error, f"a callback's {name}")
    return {request for request, number in zip(_REQUESTS, counts, strict=True) if number}


def _check_callback(callback: object) -> None:
    methods = {name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))}
    kind, known = type(callback).__name__, ", ".join(CALLBACKS)
    if isinstance(callback, type):
        raise ConfigError(f"the callback {callback.__name__} is a class. Give an object: {callback.__name__}().")
    if unknown := sorted(methods.difference(CALLBACKS)):
        raise ConfigError(f"the callback {kind} defines {unknown[0]}, which is not called. Expected any of {known}.")
    if not methods:
        raise ConfigError(f"the callback {kind} defines none of the methods that are called: {known}.")


def is_optimizer(optimizer: object) -> bool:
    """Return whether an object is an optimizer, and not a function or a class that makes one."""
    return hasattr(optimizer, "param_groups")


def name_of_code(code: Any) -> str:
    """Return the module and the name of a function or class, or of an object's class."""
    if isinstance(code, partial):
        return f"{name_of_code(code.func)} with other arguments"
    named = code if hasattr(code, "__qualname__") else type(code)
    return f"{named.__module__}.{named.__qualname__}"


def _fingerprint(code: Any) -> str:
    """Return the name and a digest of the source; only the name if Python has no source, as in a terminal."""
    values: dict[str, object] = {}
    functions = ""
    while isinstance(code, partial):
        values |= {"args": code.args, **code.keywords}
        given = filter(callable, (*code.args, *code.keywords.values()))
        functions += "".join(_fingerprint(value) for value in given if " at 0x" in repr(value))
        code = code.func
    named = code if hasattr(code, "__qualname__") else type(code)
    try:
        source = inspect.getsource(named)
    except (OSError, TypeError):
        return name_of_code(code)
    text = source + re.sub(" at 0x[0-9A-Fa-f]+", "", str(values)) + functions  # addresses differ by process
    return f"{name_of_code(code)} {hashlib.sha256(text.encode()).hexdigest()[:12]}"
