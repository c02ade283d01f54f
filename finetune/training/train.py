"""Train as a configuration describes, in one call. The recipes make the same steps explicit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.data.objective import encode_for_objective
from finetune.distributed.environment import read_environment
from finetune.distributed.launch import launch
from finetune.distributed.runtime import Runtime
from finetune.model.base import build_base_model
from finetune.model.fp8_base import refuse_where_fp8_is_impossible
from finetune.model.lora import add_lora
from finetune.model.quantized import build_quantized_base, refuse_where_quantizing_is_impossible
from finetune.model.tokens import build_run_tokenizer
from finetune.runs.folder import RunFolder
from finetune.training.checks import check_inputs, check_objective, check_paths
from finetune.training.objective import TrainingObjective
from finetune.training.trainer import Trainer, training_objective
from finetune.training.validation import check_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config


def train(config: Config) -> None:
    """Train the adapter or model that the configuration describes, by its `training.objective`, and test it.

    Collective: every process of the launch.
    """
    if read_environment(os.environ).world_size == 1:  # several ranks check after they have met: none waits for another
        check_paths(config)
    with launch(config) as runtime:
        trainer = build_trainer(runtime, config)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
        trainer.run_test(test_loader)


def build_trainer(runtime: Runtime, config: Config, *, rewards_answers: bool = True) -> Trainer:
    """Build a trainer with its model and rows. Collective: every rank.

    With `rewards_answers=False`, no reward function will be called: a replay has their recorded rewards.
    """
    checked_objective(config, rewards_answers=rewards_answers)  # before anything slow
    return Trainer(runtime, config, *build_parts(runtime, config))


def checked_objective(config: Config, *, rewards_answers: bool = True) -> TrainingObjective:
    """Return the functions of the configuration's objective. For `rewards_answers` see `build_trainer`.

    Raises:
        ConfigError: the configuration does not suit the objective.
    """
    check_objective(config)
    objective = training_objective(config.training.objective)
    objective.check(config, rewards_answers)
    check_metrics(config, objective.metrics)
    return objective


class Parts(NamedTuple):
    """Model, tokenizer and rows, in the order in which a trainer takes them."""

    model: Any
    """A PEFT model, or a transformers model where every weight trains; on the CPU, or on the GPU if quantized."""
    tokenizer: PreTrainedTokenizerBase
    """With the tokens that the run adds."""
    splits: Any
    """Encoded for the objective."""


def build_parts(runtime: Runtime, config: Config) -> Parts:
    """Load the tokenizer, encode the rows and build the model.

    Collective: every rank.

    Raises:
        CheckpointError: the run's folder cannot be written.
        ConfigError: the configuration asks for something that this machine or model cannot do.
        DataError: a row cannot be used.
        ModelError: the model or the tokenizer cannot be loaded.
    """
    has_adapter = config.training.method == "lora"
    is_quantized = has_adapter and config.lora.quantize != "none"
    if is_quantized:  # before any file is read
        refuse_where_quantizing_is_impossible(config.lora, config.model, runtime.device)
    refuse_where_fp8_is_impossible(config, precision=runtime.precision, device=runtime.device)
    with runtime.collectives.failing_together("looking for the model and the rows"):
        if runtime.is_main_process:
            RunFolder(config.output_dir).check_writable()
        check_inputs(config, needs_weights=True)
    tokenizer = build_run_tokenizer(config)
    splits = encode_for_objective(config, tokenizer, fallbacks=runtime.fallbacks)
    if is_quantized:
        base = build_quantized_base(config.model, config.lora, runtime.device)
    else:
        base = build_base_model(config.model)
    return Parts(add_lora(base, config.lora, tokenizer) if has_adapter else base, tokenizer, splits)
