"""Train as a configuration describes, in one call. The recipes make the same steps explicit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.config.schema import Config
from finetune.distributed.environment import read_environment
from finetune.distributed.launch import launch
from finetune.distributed.runtime import Runtime
from finetune.errors import ConfigError, FinetuneError
from finetune.inference.losses import LossSums
from finetune.model.base import build_base_model
from finetune.model.lora import add_lora
from finetune.model.tokens import build_run_tokenizer
from finetune.runs.folder import RunFolder
from finetune.training.checks import check_inputs, check_paths
from finetune.training.hooks import Hooks
from finetune.training.objective import encode_for_objective
from finetune.training.setup import check_config
from finetune.training.trainer import Trainer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from finetune.engine.given_loss import GivenLoss
    from finetune.inference.answers import Metric
    from finetune.inference.scores import Evaluation


class TrainResult(NamedTuple):
    """The result of `train`, on each rank."""

    metrics: Mapping[str, float]
    """`loss` of the last step, and `validation/loss` and other metrics of the last validation. On rank 0 also the
    losses and metrics of the tuned model, `test/loss`, and of the base, `base/loss`. Losses are in nats per token."""
    folder: Path
    """The run's."""
    model: Any
    """The trained model, on its device. On rank 0, and if it is sharded on all ranks, with the weights of `adapter/`;
    on other ranks with those of the last step. It is in evaluation mode."""
    tokenizer: PreTrainedTokenizerBase

    def __repr__(self) -> str:
        """Name the model and the tokenizer by their classes: in full, they fill a screen."""
        parts = f"metrics={self.metrics}, folder={str(self.folder)!r}"
        return f"TrainResult({parts}, model={type(self.model).__name__}, tokenizer={type(self.tokenizer).__name__})"


def train(
    config: Config | None = None,
    *,
    model: Any = None,
    data: Any = None,
    task: str = "finetune_lora",
    overrides: Sequence[str] | Mapping[str, object] = (),
    callbacks: Sequence[object] = (),
    metrics: Mapping[str, Metric] = MappingProxyType({}),
    loss: GivenLoss | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | torch.optim.Optimizer | None = None,
    **unknown: object,
) -> TrainResult:
    """Train an adapter or a model and test it.

    Collective: every process of the launch. Every process gives the same arguments.

    Args:
        config: the whole run, from `load_config`. Without it, the next four arguments describe the run.
        model: a name, a path or a hub id; or a transformers model, or a PEFT model with one LoRA adapter.
        data: a name, a path or a hub id; or rows, see `write_given_rows`. A run in whose folder other rows were trained
            on refuses to resume.
        task: the name of a task, see `finetune config list`.
        overrides: `["optim.learning_rate=1e-4"]` or `{"optim.learning_rate": 1e-4}`.
        callbacks: objects with `on_step` or other methods. `Hooks` describes this and the three arguments after it.
        metrics: functions of (generated answer, expected answer), by name.
        loss: a function of (logits, target tokens) of a chunk. It returns the sum of their losses.
        optimizer: a function or a class that makes a torch optimizer, or a torch optimizer.
        unknown: no other argument is taken. The error names the key or the argument that it means.

    Raises:
        FinetuneError: see its subclasses in `finetune.errors`. `finetune.command` turns it into a message.
    """
    if unknown:
        from finetune.training.given import refuse_unknown

        refuse_unknown(unknown, train)
    hooks = Hooks(callbacks=callbacks, metrics=metrics, loss=loss, optimizer=optimizer)
    is_given = model is not None and not isinstance(model, (str, os.PathLike))
    if config is None:
        from finetune.training.given import configure

        config = configure(model, data, task, overrides)
    elif not isinstance(config, Config) or model is not None or data is not None or overrides:
        takes = "a configuration from load_config as its first argument, or model=, data= and overrides= by name"
        raise ConfigError(f"train takes {takes}. Give one of the two.")
    if read_environment(os.environ).world_size == 1:  # several ranks check after they have met: none waits for another
        check_paths(config)
    with launch(hooks.config(config)) as runtime:  # the record of a run to resume names the script's optimizer
        trainer = build_trainer(runtime, config, hooks=hooks, given_model=model if is_given else None)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        results, validation = trainer.run_training(train_loader, val_loader)
        evaluation = trainer.run_test(test_loader)
        if test_loader is None:
            trainer.load_published()
        scores = {"loss": results.loss, **_metrics_of(validation, trainer.validation_metrics, evaluation)}
        return TrainResult(scores, trainer.folder, trainer.model.eval(), trainer.tokenizer)


def _metrics_of(
    validation: LossSums | None, measured: Mapping[str, float], evaluation: Evaluation | None
) -> dict[str, float]:
    """Return the metrics of the last validation and of the test phase, by name."""
    scores = {} if validation is None else {"validation": {"loss": validation.loss, **measured}}
    for model, tested in ({} if evaluation is None else evaluation.scores).items():
        scores["base" if model == "base" else "test"] = {"loss": tested.loss, **tested.metrics}
    return {f"{prefix}/{name}": value for prefix, values in scores.items() for name, value in values.items()}


def build_trainer(
    runtime: Runtime,
    config: Config,
    *,
    rewards_answers: bool = True,
    hooks: Hooks | None = None,
    given_model: Any = None,
) -> Trainer:
    """Build a trainer with its model and rows. Collective: every rank.

    With `rewards_answers=False`, no reward function will be called: a replay has their recorded rewards.
    """
    hooks = hooks or Hooks()
    checked = check_config(config, hooks, runtime=runtime, rewards_answers=rewards_answers)
    trained = [] if given_model is None else [weight for weight in given_model.parameters() if weight.requires_grad]
    parts = build_parts(runtime, config, given_model)
    try:
        return Trainer(runtime, config, *parts, hooks, checked)
    except FinetuneError:
        if given_model not in (None, parts.model) and runtime.placement.shard_size is None:
            from finetune.training.given import remove_adapter

            remove_adapter(parts.model, trained)
        raise


class Parts(NamedTuple):
    """Model, tokenizer and rows, in the order in which a trainer takes them."""

    model: Any
    """A PEFT model, or a transformers model where every weight trains; on the CPU, or on the GPU if quantized."""
    tokenizer: PreTrainedTokenizerBase
    """With the tokens that the run adds."""
    splits: Any
    """Encoded for the objective."""


def build_parts(runtime: Runtime, config: Config, given_model: Any = None) -> Parts:
    """Load the tokenizer, encode the rows and build the model, for a configuration that `check_config` accepts.

    Collective: every rank.

    Raises:
        CheckpointError: the run's folder cannot be written.
        ConfigError: the configuration asks for something that this machine or model cannot do.
        DataError: a row cannot be used.
        ModelError: the model or the tokenizer cannot be loaded.
    """
    has_adapter = config.training.method == "lora"
    if config.is_quantized and given_model is not None:
        raise ConfigError("lora.quantize is set, but a model is given. Give its name, or remove lora.quantize.")
    if config.is_quantized:  # before any file is read
        from finetune.model.quantized import refuse_where_quantizing_is_impossible

        refuse_where_quantizing_is_impossible(config.lora, config.model, runtime.device)
    with runtime.collectives.failing_together("looking for the model and the rows"):
        if runtime.is_main_process:
            RunFolder(config.output_dir).check_writable()
        check_inputs(config, needs_weights=given_model is None)
        if given_model is not None:
            from finetune.training.given import check_given_base

            check_given_base(given_model, config, runtime.precision, runtime.fallbacks)
    tokenizer = build_run_tokenizer(config)
    splits = encode_for_objective(config, tokenizer, fallbacks=runtime.fallbacks)
    if given_model is not None:
        from finetune.training.given import adopt_given_model

        return Parts(adopt_given_model(given_model, config, tokenizer), tokenizer, splits)
    if config.is_quantized:
        from finetune.model.quantized import build_quantized_base

        base = build_quantized_base(config.model, config.lora, runtime.device)
    else:
        base = build_base_model(config.model)
    return Parts(add_lora(base, config.lora, tokenizer) if has_adapter else base, tokenizer, splits)
