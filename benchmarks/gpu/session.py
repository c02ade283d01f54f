"""The settings of a session: where it computes, and the jobs of its parts. No torch is imported here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from benchmarks.job import Job

Kind = Literal["phi4", "mini", "short", "chat", "prompt"]
"""Long rows of phi-4's shape or of Phi-4-mini's; of the latter also rows of 1,024 tokens, and chat rows, without or
with a shared prompt."""

_SIZES: dict[Kind, tuple[str, str]] = {
    "phi4": ("phi4", "tiny-long"),
    "mini": ("phi4-mini", "tiny-long"),
    "short": ("phi4-mini-short", "tiny-long"),
    "chat": ("phi4-mini-chat", "tiny"),
    "prompt": ("phi4-mini-chat", "tiny"),
}


@dataclass(frozen=True, kw_only=True)
class Session:
    """Where a session computes.

    Attributes:
        device: `cuda` or `cpu`.
        is_tiny: every model and every repetition is so small that a CPU computes it in seconds.
    """

    device: str
    is_tiny: bool

    def job(self, kind: Kind) -> Job:
        """Return the job of this kind: bf16 on a GPU, fp32 on a CPU."""
        size = _SIZES[kind][self.is_tiny]
        is_long = kind in ("phi4", "mini", "short")
        return Job(
            size=size,
            precision="bf16" if self.device == "cuda" else "fp32",
            has_shared_prompt=kind == "prompt",
            device=self.device,
            steps=3 if self.is_tiny else 10,
            warmup_steps=1 if self.is_tiny else 3,
            global_batch=4 if is_long else 16 if self.is_tiny else 64,
        )

    def as_words(self) -> list[str]:
        """Return the arguments of `benchmarks.gpu_session` that ask for these settings."""
        return ["--device", self.device, *(["--tiny"] if self.is_tiny else [])]

    as_record = asdict


@cache
def _kept() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def kept_folder() -> Path:
    """Return the folder of what several tasks read; it goes with this process."""
    return Path(_kept().name)
