"""Write folders of runs with the writers that training uses and invented figures."""

from __future__ import annotations

from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from finetune.config.compose import load_config
from finetune.config.render import resolved_yaml
from finetune.runs.metrics import MetricsWriter
from finetune.runs.record import RunRecord, RunStart

HOSTILE = '"\'></script></style><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>{{ 7777*7777 }}'
"""Leaves any element and attribute that it is put into unescaped."""


def loss_at(step: int) -> float:
    return 4.0 / step + 0.25


def write_run(
    folder: Path,
    words: Sequence[str] = (),
    *,
    num_steps: int = 60,
    status: str | None = "completed",
    result: dict[str, Any] | None = None,
    digest: str = "rows",
    fallbacks: Sequence[dict[str, str]] = (),
    factor: float = 1.0,
) -> Path:
    """A run that validated after each 20 steps. Status None: it has not ended."""
    folder.mkdir(parents=True)
    config = load_config(["model.path=none", "data.path=none", *words, f"output_dir={folder}"])
    (folder / "config.yaml").write_text(resolved_yaml(config))
    record = RunRecord(folder / "run.json")
    start = RunStart(
        world_size=2, processes_started=2, launcher="torchrun", backend="gloo", threads={"count": 1},
        fallbacks=list(fallbacks),
        global_batch={"global_batch_size": 8}, fingerprints={"data.train": digest, "data.validation": digest},
    )  # fmt: skip
    record.start(start)
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        for step in range(1, num_steps + 1):
            metrics.write(
                "step", step=step, epoch=0, loss=factor * loss_at(step), learning_rate=1e-3 * (1 - step / 100),
                grad_norm=1.0, num_targets=10, num_tokens=50, num_computed=50, tokens_per_second=1000.0 + step,
            )  # fmt: skip
            if step % 20 == 0:
                loss = factor * (loss_at(step) + 0.1)
                metrics.write("validation", step=step, epoch=0, loss=loss, standard_error=0.02, num_targets=99)
                path = f"checkpoints/step-{step:06d}"
                metrics.write(
                    "checkpoint", step=step, path=path, num_bytes=2048, blocked_seconds=0.5, write_seconds=1.0
                )
        if status == "completed":
            metrics.write("test", model="base", exact_match=0.125, json_valid=0.5, loss=3.5)
            metrics.write("test", model="tuned", exact_match=0.875, json_valid=1.0, loss=0.5)
    if status is not None:
        record.finish(status, result)  # type: ignore[arg-type]
    return folder


class Parsed(HTMLParser):
    """The elements and the visible text that a browser would read from a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._silent = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._silent = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent = False

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.text += data
