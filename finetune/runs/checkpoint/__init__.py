"""Checkpoints that are whole or not there, in formats that others read, without a pickle anywhere.

Each name is imported when it is first used: to verify needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.runs.checkpoint.checkpoints import Snapshot as Snapshot
    from finetune.runs.checkpoint.checkpoints import commit_snapshot as commit_snapshot
    from finetune.runs.checkpoint.checkpoints import load_checkpoint as load_checkpoint
    from finetune.runs.checkpoint.checkpoints import prune as prune
    from finetune.runs.checkpoint.checkpoints import publish_adapter as publish_adapter
    from finetune.runs.checkpoint.checkpoints import save_base as save_base
    from finetune.runs.checkpoint.checkpoints import take_snapshot as take_snapshot
    from finetune.runs.checkpoint.disk_space import disk_need as disk_need
    from finetune.runs.checkpoint.model_files import load_model as load_model
    from finetune.runs.checkpoint.verification import newest_valid as newest_valid
    from finetune.runs.checkpoint.verification import read_state as read_state
    from finetune.runs.checkpoint.verification import verify as verify
    from finetune.runs.checkpoint.verification import verify_published as verify_published

_HOMES = {
    **dict.fromkeys(("Snapshot", "commit_snapshot", "load_checkpoint", "prune"), "checkpoints"),
    **dict.fromkeys(("publish_adapter", "save_base", "take_snapshot"), "checkpoints"),
    **dict.fromkeys(("newest_valid", "read_state", "verify", "verify_published"), "verification"),
    "disk_need": "disk_space",
    "load_model": "model_files",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'finetune.runs.checkpoint' has no attribute {name!r}")
    return getattr(import_module(f"finetune.runs.checkpoint.{_HOMES[name]}"), name)
