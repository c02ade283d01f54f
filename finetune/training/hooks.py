"""A script's own code in a run: a loss, metrics, an optimizer, and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from finetune.config.schema import Config
    from finetune.distributed.runtime import Runtime
    from finetune.engine.given_loss import GivenLoss
    from finetune.inference.answers import Metric

GIVEN = "given by the script"
"""The origin of the keys that describe a given model or given rows."""
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

    @property
    def _is_given(self) -> bool:
        return bool(self.metrics or self.callbacks) or self.loss is not None or self.optimizer is not None

    def check(self, config: Config) -> None:
        """Raise ConfigError for hooks that the run would not use."""
        if not isinstance(self.metrics, Mapping):
            raise ConfigError(f'metrics is {self.metrics!r}; expected functions by name: metrics={{"name": function}}.')
        if not isinstance(self.callbacks, Sequence):
            raise ConfigError(f"callbacks is {self.callbacks!r}; expected a list of objects: callbacks=[object].")
        if self._is_given:
            from finetune.training.own_code import check_own_code

            check_own_code(config, self.loss, self.metrics, self.optimizer, self.callbacks)

    def config(self, config: Config, model: Any = None) -> Config:
        """Return the configuration with the script's optimizer. A given optimizer object needs the model to be used."""
        if self.optimizer is None:
            return config
        from finetune.training.own_code import is_optimizer, name_of_code

        factory: Any = self.optimizer
        if is_optimizer(factory) and model is not None:
            from finetune.training.given_optimizer import same_optimizer
            from finetune.training.optim import trainable_parameters

            factory = same_optimizer(factory, trainable_parameters(model))
        optim = config.optim.with_factory(factory, name_of_code(self.optimizer))
        return config.model_copy(update={"optim": optim})

    def refuse_no_sum(self, model: Any, device: torch.device) -> None:
        """Raise a ConfigError if the loss is not a sum over its targets."""
        if self.loss is not None:
            from finetune.engine.given_loss import refuse_no_sum

            refuse_no_sum(self.loss, len(model.get_output_embeddings().weight), device, of_model=model.parameters())

    def fingerprints(self, config: Config) -> dict[str, str]:
        """Describe the code that decides about the updates and their measure. A resumed run must have the same."""
        of_script: dict[str, str] = {}
        if self.loss is not None or self.optimizer is not None:
            from finetune.training.own_code import fingerprint_code

            of_script = fingerprint_code(self.loss, self.optimizer)
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

    def former_fingerprints(self) -> dict[str, str]:
        """Describe the script's code as earlier versions did, for the comparison with their runs."""
        if self.loss is None and self.optimizer is None:
            return {}
        from finetune.training.own_code import fingerprint_code

        return fingerprint_code(self.loss, self.optimizer, is_former=True)

    def as_record(self, config: Config, model: Any) -> dict[str, Any]:
        """Return the names of the given code, and of the classes of a given model. Empty if nothing is given."""
        has_base, has_adapter = (config.origin(key) == GIVEN for key in ("model.path", "lora.r"))
        if not (has_base or has_adapter or self._is_given):
            return {}
        from finetune.training.own_code import name_of_code

        base = model.get_base_model() if hasattr(model, "peft_config") else model
        record = {
            "model": name_of_code(type(base)) if has_base else None,
            "adapter": name_of_code(type(model)) if has_adapter else None,
            "loss": None if self.loss is None else name_of_code(self.loss),
            "optimizer": None if self.optimizer is None else name_of_code(self.optimizer),
            "metrics": {name: name_of_code(metric) for name, metric in self.metrics.items()},
            "callbacks": [name_of_code(type(callback)) for callback in self.callbacks],
        }
        return {name: value for name, value in record.items() if value}


class Callbacks:
    """Calls the callbacks of a script, and remembers the requests of any rank since the last step."""

    def __init__(self, runtime: Runtime, callbacks: Sequence[object], model: Any) -> None:
        self.requests: set[str] = set()
        self._runtime, self._callbacks, self._model = runtime, callbacks, model

    def listen_to(self, name: str) -> bool:
        """Return whether a callback defines this method."""
        return any(hasattr(callback, name) for callback in self._callbacks)

    def call(self, name: str, result: object) -> None:
        """Call a method of all callbacks that define it. Collective.

        Raises:
            RunFailedError: one fails, on any rank.
        """
        if self.listen_to(name):
            from finetune.training.own_code import call_callbacks

            self.requests |= call_callbacks(self._runtime, self._callbacks, self._model, name, result)


def refuse_ignored_methods(trainer: object) -> None:
    """Raise ConfigError for a subclass with a method that other libraries' trainers call: `compute_loss`."""
    for name, instead in _IN_PLACE_OF.items():
        if hasattr(type(trainer), name):
            kind = type(trainer).__name__
            raise ConfigError(f"{kind} defines {name}, which this trainer does not call: {instead} (docs/python.md).")
