"""A script's own code in a run: a loss, metrics, an optimizer, and callbacks."""

from __future__ import annotations

import hashlib
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.errors import ConfigError, RunFailedError
from finetune.runs.metrics import FORGOTTEN, OF_EVERY_VALIDATION
from finetune.signals import Terminated

if TYPE_CHECKING:
    import torch

    from finetune.config.schema import Config
    from finetune.distributed.runtime import Runtime
    from finetune.engine.given_loss import GivenLoss
    from finetune.inference.answers import Metric

_log = logging.getLogger(__name__)
CALLBACKS = ("on_step", "on_validation", "on_save", "on_end")
"""The methods that a callback may define."""
GIVEN = "given by the script"
"""The origin of the keys that describe a given model or given rows."""
_REQUESTS = ("stop", "save")
_IN_PLACE_OF = {
    "compute_loss": "give loss=function, which gets logits and targets",
    "training_step": "give loss=function for another loss, or a callback with on_step(result) to watch steps",
    "compute_metrics": 'give metrics={"name": function}',
    "create_optimizer": "give optimizer=function to Hooks, or set optim.optimizer",
    "create_scheduler": "set optim.schedule",
    "prediction_step": 'give metrics={"name": function}',
    "evaluation_loop": 'give metrics={"name": function}',
    "log": "give a callback with on_step(result)",
}
"""Methods that subclasses of other trainers override, and what does the same here."""


class ValidationResult(NamedTuple):
    """The argument of `on_validation`: the scores of a validation, over all ranks."""

    step: int
    """The optimizer steps done so far."""
    loss: float
    """Cross-entropy in nats per target token, also with a loss of the script's own."""
    metrics: Mapping[str, float]
    """The other metrics, by name."""


class SaveResult(NamedTuple):
    """The argument of `on_save`: a checkpoint that is complete on disk."""

    step: int
    path: Path
    """In the run's folder."""


class EndResult(NamedTuple):
    """The argument of `on_end`: the end of training, when `adapter/` is published."""

    step: int
    reason: str
    """`complete`, `no improvement`, `forgot too much`, or `stopped` if a callback ended training."""
    loss: float
    """The loss of the last step, in nats per target token; nan if no step was left to do."""
    folder: Path
    """The run's folder."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """A script's own code in a run. Every rank of a launch gives the same.

    Attributes:
        loss: returns the summed loss of a chunk of target tokens, given fp32 logits (n, vocabulary) and the target
            tokens (n,). The sums over chunks, micro-batches and ranks are the trainer's. Only with the objective sft.
        metrics: functions of (generated answer, expected answer), by name. Validations and the test phase report the
            mean over the rows, and `early_stopping.metric` and `checkpoint.best_metric` may name them.
        optimizer: a function or a class that returns a torch optimizer. If it takes `lr`, it gets parameter groups and
            `lr=`, and `optim.*` applies. Otherwise it gets the list of the trained weights. Or a torch optimizer that
            has made no step, over all trained weights of the given model: see `same_optimizer`.
        callbacks: objects that define any of `on_step(StepResult)`, `on_validation(ValidationResult)`,
            `on_save(SaveResult)` and `on_end(EndResult)`. They are called on every rank. If one returns "stop" or
            "save" on any rank, all ranks stop or save after this step.
    """

    loss: GivenLoss | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] | torch.optim.Optimizer | None = None
    callbacks: Sequence[object] = ()

    def check(self, config: Config) -> None:
        """Raise ConfigError for hooks that the run would not use."""
        if not isinstance(self.metrics, Mapping):
            raise ConfigError(f'metrics is {self.metrics!r}; expected functions by name: metrics={{"name": function}}.')
        if not isinstance(self.callbacks, Sequence):
            raise ConfigError(f"callbacks is {self.callbacks!r}; expected a list of objects: callbacks=[object].")
        functions: dict[str, object] = {f"metrics[{name!r}]": metric for name, metric in self.metrics.items()}
        functions |= {"loss": self.loss, "optimizer": None if _is_object(self.optimizer) else self.optimizer}
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise ConfigError(f"{name} is {function!r}; expected a function.")
        if (self.loss or self.metrics) and not config.objective.learns_answers:
            argument = "loss" if self.loss else "metrics"
            raise ConfigError(
                f"{argument} is given, but training.objective is {config.training.objective}. A script's own "
                f"{argument} applies to the objective sft only. Remove one of the two."
            )
        if self.metrics:
            from finetune.inference.answers import METRICS

            own = {*OF_EVERY_VALIDATION, *METRICS, FORGOTTEN, "model", "perplexity"}
            if reserved := sorted(name for name in self.metrics if name.partition("/")[0] in own):
                raise ConfigError(f"metrics has {reserved[0]}, a name that finetune uses itself. Choose another name.")
        for callback in self.callbacks:
            _check_callback(callback)

    def config(self, config: Config, model: Any = None) -> Config:
        """Return the configuration with the script's optimizer. A given optimizer object needs the model to be used."""
        if self.optimizer is None:
            return config
        factory: Any = self.optimizer
        if _is_object(factory) and model is not None:
            from finetune.training.optim import same_optimizer

            factory = same_optimizer(factory, model)
        optim = config.optim.with_factory(factory, _name_of(self.optimizer))
        return config.model_copy(update={"optim": optim})

    def refuse_no_sum(self, model: Any, device: torch.device) -> None:
        """Raise a ConfigError if the loss is not a sum over its targets."""
        if self.loss is not None:
            from finetune.engine.given_loss import refuse_no_sum

            refuse_no_sum(self.loss, len(model.get_output_embeddings().weight), device)

    def fingerprints(self, config: Config) -> dict[str, str]:
        """Describe the code that decides about the updates and their measure. A resumed run must have the same."""
        settings: Any = self.optimizer
        if _is_object(settings):  # its class and its settings, without the weights
            groups = [{**group, "params": len(group["params"])} for group in settings.param_groups]
            optimizer_class: Callable[..., Any] = type(settings)
            settings = partial(optimizer_class, groups=groups)
        functions = {"loss": self.loss, "optimizer": settings}
        of_script = {name: _fingerprint(code) for name, code in functions.items() if code is not None}
        sources = {
            "reward.functions": (config.reward.functions, config.reward.functions_from),
            "rollout.tools": (config.rollout.tools, config.rollout.tools_from),
            "rollout.environment": (config.rollout.environment, config.rollout.environment_from),
            "validation.metrics": (config.validation.metrics, config.validation.metrics_from),
        }
        if any(allowed for _, allowed in sources.values()):
            from finetune.config.own_functions import fingerprint_functions

            of_keys = {key: fingerprint_functions(*named) for key, named in sources.items()}
            of_script |= {key: value for key, value in of_keys.items() if value}
        return of_script

    def as_record(self, config: Config, model: Any) -> dict[str, Any]:
        """Return the names of the given code, and of the classes of a given model. Empty if nothing is given."""
        has_base, has_adapter = (config.origin(key) == GIVEN for key in ("model.path", "lora.r"))
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        record = {
            "model": _name_of(type(base)) if has_base else None,
            "adapter": _name_of(type(model)) if has_adapter else None,
            "loss": None if self.loss is None else _name_of(self.loss),
            "optimizer": None if self.optimizer is None else _name_of(self.optimizer),
            "metrics": {name: _name_of(metric) for name, metric in self.metrics.items()},
            "callbacks": [_name_of(type(callback)) for callback in self.callbacks],
        }
        return {name: value for name, value in record.items() if value}


class Callbacks:
    """Calls the callbacks of a script, and remembers the requests of any rank since the last step."""

    def __init__(self, runtime: Runtime, callbacks: Sequence[object]) -> None:
        self.requests: set[str] = set()
        self._runtime = runtime
        self._callbacks = callbacks

    def listen_to(self, name: str) -> bool:
        """Return whether a callback defines this method."""
        return any(hasattr(callback, name) for callback in self._callbacks)

    def call(self, name: str, result: object) -> None:
        """Call a method of all callbacks that define it. Collective.

        Raises:
            RunFailedError: one fails, on any rank.
        """
        if not self.listen_to(name):
            return
        import torch

        error: Exception | None = None
        answers: set[object] = set()
        for callback in self._callbacks:
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
            if answer is not None and answer not in _REQUESTS:
                error = RunFailedError(f'{where} returned {answer!r}; expected None, "stop" or "save". Correct it.')
            answers.add(answer)
        failed, *counts = self._runtime.collectives.sum(
            [float(error is not None), *(float(request in answers) for request in _REQUESTS)]
        )
        if failed:
            self._runtime.collectives.agree(error, f"a callback's {name}")
        self.requests |= {request for request, number in zip(_REQUESTS, counts, strict=True) if number}


def refuse_ignored_methods(trainer: object) -> None:
    """Raise ConfigError for a subclass with a method that other libraries' trainers call: `compute_loss`."""
    for name, instead in _IN_PLACE_OF.items():
        if hasattr(type(trainer), name):
            kind = type(trainer).__name__
            raise ConfigError(f"{kind} defines {name}, which this trainer does not call: {instead} (docs/python.md).")


def _check_callback(callback: object) -> None:
    methods = {name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))}
    kind, known = type(callback).__name__, ", ".join(CALLBACKS)
    if isinstance(callback, type):
        raise ConfigError(f"the callback {callback.__name__} is a class. Give an object: {callback.__name__}().")
    if unknown := sorted(methods.difference(CALLBACKS)):
        raise ConfigError(f"the callback {kind} defines {unknown[0]}, which is not called. Expected any of {known}.")
    if not methods:
        raise ConfigError(f"the callback {kind} defines none of the methods that are called: {known}.")


def _is_object(optimizer: object) -> bool:
    return hasattr(optimizer, "param_groups")


def _name_of(code: Any) -> str:
    if isinstance(code, partial):
        return f"{_name_of(code.func)} with other arguments"
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
        return _name_of(code)
    text = source + re.sub(" at 0x[0-9A-Fa-f]+", "", str(values)) + functions  # addresses differ by process
    return f"{_name_of(code)} {hashlib.sha256(text.encode()).hexdigest()[:12]}"
