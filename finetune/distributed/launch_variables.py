"""Changes to this process's launch variables, and the way back: only what we changed is taken back."""

from __future__ import annotations

import os
from collections.abc import Mapping

from finetune.distributed.environment import WORLD_VARIABLES

_changed: dict[str, tuple[str | None, str | None]] = {}
"""What stood there before us, and what we made of it; None for nothing."""


def write_missing(variables: Mapping[str, str]) -> None:
    """Set those that are not set: Accelerate adopts a group only where the launch variables are there."""
    for name, value in variables.items():
        if name not in os.environ:
            _change(name, value)


def hide_world() -> None:
    """Let this process look alone: Accelerate would wait for the other ranks of a launch."""
    for name in WORLD_VARIABLES:
        if name in os.environ:
            _change(name, None)


def restore() -> None:
    """Take back what was written and hidden, unless somebody else has changed it since."""
    while _changed:
        name, (before, ours) = _changed.popitem()
        if os.environ.get(name) == ours:
            _set(name, before)


def _change(name: str, value: str | None) -> None:
    before = _changed[name][0] if name in _changed else os.environ.get(name)
    _changed[name] = (before, value)
    _set(name, value)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
