"""Check, name, fingerprint and call the code that a script gives to a run: see `Hooks`."""

from __future__ import annotations

import ast
import hashlib
import inspect
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import finetune.forked_children  # noqa: F401  # for the processes that these functions fork
from finetune.errors import ConfigError, ModelError, RunFailedError
from finetune.inference.answers import METRICS
from finetune.runs.metrics import FORGOTTEN, OF_EVERY_VALIDATION
from finetune.runs.model_files import has_adapter
from finetune.signals import Terminated
from finetune.units import name_first

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.distributed.runtime import Runtime
    from finetune.engine.given_loss import GivenLoss
    from finetune.inference.answers import Metric

_log = logging.getLogger(__name__)
CALLBACKS = ("on_step", "on_validation", "on_save", "on_end")
"""The methods that a callback may define."""
_REQUESTS = ("stop", "save")
_ADDRESS = " at 0x[0-9A-Fa-f]+"
_DEEPEST = 4
"""Functions that functions hold are described down to this depth."""
_MOST_VALUES = 1 << 20
"""A tensor with more values is described by its shape."""


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
        if isinstance(function, type) and name == "loss":
            raise ConfigError(f"loss is the class {function.__name__}. Give an object: {function.__name__}(…).")
    if (loss or metrics) and not config.objective.learns_answers:
        argument = "loss" if loss else "metrics"
        raise ConfigError(
            f"{argument} is given, but training.objective is {config.training.objective}. A script's own "
            f"{argument} applies to the objective sft only. Remove one of the two."
        )
    if metrics:
        from finetune.config.own_functions import METRIC_PARAMETERS, refuse_uncallable

        for name, metric in metrics.items():
            refuse_uncallable(metric, f"metrics[{name!r}]", METRIC_PARAMETERS)
        own = {*OF_EVERY_VALIDATION, *METRICS, FORGOTTEN, "model", "perplexity"}
        if others := [name for name in metrics if not isinstance(name, str) or not name]:
            raise ConfigError(f'metrics has the name {others[0]!r}; expected text: metrics={{"name": function}}.')
        if reserved := sorted(name for name in metrics if name.partition("/")[0] in own):
            raise ConfigError(f"metrics has {reserved[0]}, a name that finetune uses itself. Choose another name.")
    for callback in callbacks:
        _check_callback(callback)


def fingerprint_code(loss: GivenLoss | None, optimizer: Any, *, is_former: bool = False) -> dict[str, str]:
    """Return a fingerprint of each that is given; with `is_former`, as earlier versions took it."""
    settings: Any = optimizer
    if is_optimizer(settings):  # its class and its settings, without the weights
        groups = [{**group, "params": len(group["params"])} for group in settings.param_groups]
        optimizer_class: Callable[..., Any] = type(settings)
        settings = partial(optimizer_class, groups=groups)
    functions = {"loss": loss, "optimizer": settings}
    return {name: _fingerprint(code, is_former=is_former) for name, code in functions.items() if code is not None}


def call_callbacks(runtime: Runtime, callbacks: Sequence[object], model: Any, name: str, result: object) -> set[str]:
    """Call a method of all callbacks that define it. Return what they request on any rank. Collective.

    Gradients and the mode of the model are as before afterwards: a script often leaves a model in evaluation mode.

    Raises:
        RunFailedError: one fails, on any rank.
        ModelError: one changes more of the model than the values of its weights, on any rank.
    """
    import torch

    from finetune.own_calls import without_exit

    error: Exception | None = None
    answers: set[str] = set()
    callbacks = [callback for callback in callbacks if hasattr(callback, name)]
    is_compared = bool(callbacks) and runtime.placement.shard_size is None  # sharding exchanges weights
    before = _forms_of(model) if is_compared else None
    modes = [(module, module.training) for module in model.modules()] if callbacks else []
    for callback in callbacks:
        if error is not None:
            break
        where = f"{type(callback).__name__}.{name}"
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled()):  # restores what the callback leaves behind
                answer = without_exit(getattr(callback, name))(result)
        except Terminated:
            raise
        except (Exception, SystemExit) as raised:  # it is the user's own code
            _log.error("the callback %s failed", where, exc_info=raised)
            instead = ', or return "stop" to end training' if isinstance(raised, SystemExit) else ""
            kind = type(raised).__name__
            error = RunFailedError(f"the callback {where} raised {kind}: {raised}. Correct it{instead}.")
            continue
        if before is not None and (change := _change_of(before, model)):
            error = ModelError(
                f"the callback {where} changed the model that trains: {change}. Undo this before the callback returns, "
                "or change a copy (copy.deepcopy)."
            )
        elif isinstance(answer, str) and answer in _REQUESTS:
            answers.add(answer)
        elif answer is not None:
            error = RunFailedError(f'{where} returned {answer!r}; expected None, "stop" or "save". Correct it.')
    for module, is_training in modes:
        module.training = is_training
    failed, *counts = runtime.collectives.sum(
        [float(error is not None), *(float(request in answers) for request in _REQUESTS)]
    )
    if failed:
        runtime.collectives.agree(error, f"a callback's {name}")
    return {request for request, number in zip(_REQUESTS, counts, strict=True) if number}


class _Form(NamedTuple):
    """What a callback may not change of a weight, or of a layer's adapters."""

    identity: int
    dtype: object
    shape: tuple[int, ...]
    trains: bool


def _forms_of(model: Any) -> dict[str, _Form]:
    """Describe each weight, and of each layer with adapters how many are merged and whether they are switched off."""
    forms = {}
    for name, module in model.named_modules():  # one pass, since a callback may be called after each step
        for key, weight in module._parameters.items():
            if weight is not None:
                forms[f"{name}.{key}"] = _Form(id(weight), weight.dtype, tuple(weight.shape), weight.requires_grad)
        if "merged_adapters" in vars(module):
            forms[name] = _Form(id(module), None, (len(module.merged_adapters), int(module.disable_adapters)), False)
    return forms


def _change_of(before: Mapping[str, _Form], model: Any) -> str:
    """Say what a callback changed in a model; empty if nothing.

    Without an adapter, a callback may freeze some weights. With one it may not: PEFT unfreezes the whole adapter when
    it switches the adapter on.
    """
    after = _forms_of(model)
    if after == before:
        return ""
    common = [name for name in before if name in after]
    frozen = [name for name in common if before[name].trains and not after[name].trains]
    may_freeze = not has_adapter(model) and any(form.trains for form in after.values())
    changes = {
        "are missing": [name for name in before if name not in after],
        "are new": [name for name in after if name not in before],
        "are other objects": [name for name in common if before[name].identity != after[name].identity],
        "have another dtype": [name for name in common if before[name].dtype != after[name].dtype],
        "have another shape, are merged or are switched off": [
            name for name in common if before[name].shape != after[name].shape
        ],
        "are frozen": [] if may_freeze else frozen,
        "are no longer frozen": [name for name in common if after[name].trains and not before[name].trains],
    }
    return next((f"{len(names)} {what} ({name_first(names, 3)})" for what, names in changes.items() if names), "")


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


def _fingerprint(code: Any, *, is_former: bool = False, depth: int = 0) -> str:
    """Return the name and a digest of source and settings; only the name if Python has no source, as in a terminal.

    With `is_former`, the digest is that of earlier versions: without settings, and with all of a lambda's statement.
    """
    values: dict[str, object] = {}
    functions, outer = "", code
    while isinstance(code, partial):
        values |= {"args": code.args, **code.keywords}
        given = [value for value in (*code.args, *code.keywords.values()) if callable(value)]
        given = [value for value in given if " at 0x" in repr(value)]
        functions += "".join(_fingerprint(value, is_former=is_former, depth=depth + 1) for value in given)
        code = code.func
    named = code if hasattr(code, "__qualname__") else type(code)
    settings = "" if is_former or depth > _DEEPEST else _settings(code, depth)
    try:
        source = inspect.getsource(named) if is_former else _source(named)
    except (OSError, TypeError):
        return f"{name_of_code(outer)} {_digest(settings)}" if settings else name_of_code(code)
    text = source + re.sub(_ADDRESS, "", str(values)) + functions + settings
    return f"{name_of_code(code)} {_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _source(named: Any) -> str:
    """Return the source of a function or class; of a lambda, without the rest of its statement, which may change."""
    source = inspect.getsource(named)
    if getattr(named, "__name__", "") != "<lambda>":
        return source
    module = "".join(inspect.findsource(named)[0])
    places = [((line, column), (end, to)) for line, end, column, to in named.__code__.co_positions() if to]
    found = []
    try:
        nodes = [node for node in ast.walk(ast.parse(module)) if isinstance(node, ast.Lambda)]
    except SyntaxError:  # cells of a notebook may hold other commands
        return source
    for node in nodes:
        body = node.body
        start, end = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
        if places and all(start <= first and last <= end for first, last in places):
            found.append((start, ast.unparse(node)))
    return max(found)[1] if found else source  # of nested ones the innermost


def _settings(code: Any, depth: int) -> str:
    """Describe the values that code holds: a function's closure and defaults, an object's attributes. Empty if none."""
    bound, function = getattr(code, "__self__", None), getattr(code, "__func__", code)
    held: dict[str, object] = {}
    if inspect.isfunction(function):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # nothing is assigned to it yet
                held[name] = cell.cell_contents
        if defaults := [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]:
            held["defaults"] = defaults
        held |= getattr(bound, "__dict__", {})
    elif not isinstance(code, type) and not inspect.isroutine(code):
        held = dict(getattr(code, "__dict__", {}))
    module: Any = bound if inspect.ismethod(code) else code
    if hasattr(module, "named_buffers"):
        import torch

        has_weights = any(True for _ in module.parameters())  # as a model that a function holds, which trains
        kept = set() if has_weights else held.keys() - vars(torch.nn.Module()).keys() | {"_buffers", "_modules"}
        held = {name: held[name] for name in held if name in kept}
    return _described(held, depth) if held else ""


def _described(value: Any, depth: int) -> str:
    """Describe a value by its content, without its address, which differs by process."""
    if isinstance(value, Mapping):
        return str(sorted(f"{name}={_described(each, depth)}" for name, each in value.items()))
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [_described(each, depth) for each in value]
        return str(sorted(parts) if isinstance(value, (set, frozenset)) else parts)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        trains, has_data = getattr(value, "requires_grad", False), not getattr(value, "is_meta", False)
        is_setting = has_data and not trains and math.prod(value.shape) <= _MOST_VALUES
        digest = _digest(re.sub(_ADDRESS, "", str(value.tolist()))) if is_setting else ""
        return f"{value.dtype}{list(value.shape)}{digest}"
    is_function = inspect.isroutine(value) or isinstance(value, partial)
    if not isinstance(value, type) and (is_function or hasattr(value, "named_buffers")):
        return _fingerprint(value, depth=depth + 1)
    return re.sub(_ADDRESS, "", repr(value))
