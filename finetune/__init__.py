"""Fine-tune Phi models with LoRA on Hugging Face Accelerate. Every launcher gives the same loss curve.

Recipes import their names from here. A name is loaded when it is used, so that `finetune --help` does not import torch.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import DISTRIBUTION, SUMMARY
from finetune.threads import set_waiting

__version__ = "0.3.0"

set_waiting()  # before any name below loads torch


def _warn_of_other_product() -> None:
    """Warn if the package `finetune` of PyPI is installed. It is another product and uses the same folder."""
    for folder in sys.path:
        for about in Path(folder).glob("finetune-*.dist-info/METADATA"):  # importlib.metadata takes 10 ms to import
            with suppress(OSError):
                if SUMMARY not in about.read_text(encoding="utf-8", errors="replace"):
                    warnings.warn(
                        f"{about.parent} is another product called finetune. Its files replace files of "
                        f"{DISTRIBUTION}, or lie among them. Run `pip uninstall finetune`, then install "
                        f"{DISTRIBUTION} again.",
                        stacklevel=2,
                    )


_warn_of_other_product()

if TYPE_CHECKING:
    from finetune.cli import command as command
    from finetune.cli.evaluate import evaluate as evaluate
    from finetune.cli.export import merge as merge
    from finetune.cli.generate import generate as generate
    from finetune.config.compose import load_config as load_config
    from finetune.data.encode import encode_examples as encode_examples
    from finetune.data.examples import load_examples as load_examples
    from finetune.data.preferences import encode_labelled as encode_labelled
    from finetune.data.preferences import encode_preferences as encode_preferences
    from finetune.data.templates import stop_ids as stop_ids
    from finetune.distributed.ddp_init import cleanup_ddp as cleanup_ddp
    from finetune.distributed.ddp_init import initialize_ddp as initialize_ddp
    from finetune.distributed.launch import launch as launch
    from finetune.model.base import build_base_model as build_base_model
    from finetune.model.lora import add_lora as add_lora
    from finetune.model.new_tokens import add_tokens as add_tokens
    from finetune.model.quantized import build_quantized_base as build_quantized_base
    from finetune.model.tokens import build_tokenizer as build_tokenizer
    from finetune.training.hooks import Hooks as Hooks
    from finetune.training.objective import encode_for_objective as encode_for_objective
    from finetune.training.train import train as train
    from finetune.training.trainer import Trainer as Trainer
    from finetune.training.trainer_ddp import TrainerDDP as TrainerDDP

_HOMES = {
    "add_lora": "finetune.model.lora",
    "add_tokens": "finetune.model.new_tokens",
    "build_base_model": "finetune.model.base",
    "build_quantized_base": "finetune.model.quantized",
    "build_tokenizer": "finetune.model.tokens",
    "cleanup_ddp": "finetune.distributed.ddp_init",
    "command": "finetune.cli",
    "encode_examples": "finetune.data.encode",
    "encode_for_objective": "finetune.training.objective",
    "encode_labelled": "finetune.data.preferences",
    "encode_preferences": "finetune.data.preferences",
    "evaluate": "finetune.cli.evaluate",
    "generate": "finetune.cli.generate",
    "initialize_ddp": "finetune.distributed.ddp_init",
    "launch": "finetune.distributed.launch",
    "load_config": "finetune.config.compose",
    "load_examples": "finetune.data.examples",
    "merge": "finetune.cli.export",
    "stop_ids": "finetune.data.templates",
    "train": "finetune.training.train",
    "Hooks": "finetune.training.hooks",
    "Trainer": "finetune.training.trainer",
    "TrainerDDP": "finetune.training.trainer_ddp",
}
__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in ("PreferenceTrainer", "RewardTrainer"):
        raise ImportError(f"finetune {__version__} has no {name}. Use Trainer: training.objective says what it does.")
    if name not in _HOMES:
        raise AttributeError(f"module 'finetune' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
