"""Say what ended a process that reported no error: it was killed, perhaps by the kernel for lack of memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.main_memory import memory_kills


def killed_since(before: Mapping[str, int]) -> bool:
    """Return whether the kernel of this machine has killed a process for memory since `memory_kills` was read."""
    return any(count > before.get(boot, count) for boot, count in memory_kills().items())


def why_killed(record: Mapping[str, Any]) -> str:
    """Say what ended the last start of a run, from a run.json that has no end of it, if its process is gone."""
    cause = "its process was killed, or its machine went down"
    if killed_since(record.get("memory_kills") or {}):
        return f"{cause}; the kernel's out-of-memory killer has been at work on this machine since that start"
    return cause
