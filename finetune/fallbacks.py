"""Fallbacks: what a run used instead of what was asked for. They are logged, recorded, and refused if strict."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from finetune.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """A setting that could not be followed."""

    what: str
    """The setting or feature concerned, for example ``parallel.backend``."""
    wanted: str
    used: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: wanted {self.wanted}, using {self.used}: {self.why}"


class Fallbacks:
    """The fallbacks of one run, in the order in which they were taken. If it is strict, the first is refused."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._taken: list[Fallback] = []

    def take(self, fallback: Fallback, *, warning: str | None = None) -> None:
        """Log a fallback, with its own text or with `warning`, and record it. An equal one was said before.

        Raises:
            ConfigError: the run is strict.
        """
        if self.strict:
            raise ConfigError(f"{fallback}. The run is strict; drop strict=true to accept this.")
        if fallback not in self._taken:
            _log.warning("%s", warning or fallback)
            self._taken.append(fallback)

    def __iter__(self) -> Iterator[Fallback]:
        return iter(self._taken)

    def as_records(self) -> list[dict[str, str]]:
        """Convert the fallbacks to plain values for run.json."""
        return [asdict(fallback) for fallback in self._taken]
