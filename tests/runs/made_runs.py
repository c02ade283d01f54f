"""Write folders of runs as training does, without weights: configuration, record and metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.config.compose import load_config
from finetune.config.render import resolved_yaml
from finetune.runs.folder import RunFolder
from finetune.runs.metrics import MetricsWriter
from finetune.runs.record import RunRecord, RunStart


def write_run(
    path: Path, *words: str, losses: tuple[float, ...] = (3.0, 2.5, 2.0), status: str = "completed", **result: Any
) -> RunFolder:
    """A run that validated after its last step."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True)
    config = load_config(["model.path=owner/phi", "data.path=owner/rows", f"output_dir={path}", *words])
    folder.config_file.write_text(resolved_yaml(config))
    record = RunRecord(folder.record_file)
    start = RunStart(
        world_size=1,
        processes_started=1,
        launcher="none",
        backend=None,
        threads={"count": 1},
        global_batch={"global_batch_size": 8},
        fallbacks=[],
        fingerprints={"data.train": "a" * 64, "config": path.name},
    )
    record.start(start)
    record.update(num_steps=len(losses))
    with MetricsWriter(folder.metrics_file) as metrics:
        for step, loss in enumerate(losses, 1):
            metrics.write("step", **step_figures(step, loss))
        if losses:
            metrics.write("validation", step=len(losses), epoch=0, loss=losses[-1], standard_error=0.1, num_targets=9)
    if status != "running":
        record.finish(status, {"step": len(losses), "best_loss": losses[-1] if losses else None, **result})
    return folder


def step_figures(step: int, loss: float, **changes: Any) -> dict[str, Any]:
    """The figures of a step event; 100 tokens in 0.1 s."""
    return {
        **{"step": step, "epoch": 0, "loss": loss, "learning_rate": 1e-4, "grad_norm": 0.5, "num_targets": 40},
        **{"num_tokens": 100, "num_computed": 100, "tokens_per_second": 1000.0},
        **changes,
    }


def step_event(step: int, loss: float, **changes: Any) -> dict[str, Any]:
    """Return the same run as it is read back."""
    return {"event": "step", **step_figures(step, loss, **changes)}


def change_record(folder: RunFolder, **values: Any) -> None:
    """Write other values into run.json."""
    record = json.loads(folder.record_file.read_text())
    folder.record_file.write_text(json.dumps({**record, **values}))
