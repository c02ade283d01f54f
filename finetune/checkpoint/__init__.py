"""Checkpoints that are whole or not there, in formats that others read, without a pickle anywhere."""

from finetune.checkpoint.checkpoints import (
    load_checkpoint,
    newest_valid,
    prune,
    publish_adapter,
    read_state,
    save_base,
    save_checkpoint,
    verify,
    verify_published,
)
from finetune.checkpoint.model_files import load_model

__all__ = [
    "load_checkpoint",
    "load_model",
    "newest_valid",
    "prune",
    "publish_adapter",
    "read_state",
    "save_base",
    "save_checkpoint",
    "verify",
    "verify_published",
]
