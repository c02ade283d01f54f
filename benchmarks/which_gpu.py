"""Write the table of docs/which-gpu.md with `finetune plan`: the least memory of each preset, and a GPU that has it.

    python -m benchmarks.which_gpu

No GPU is needed, and no network: the sizes of the models are shipped with finetune.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.config.compose import compose
from finetune.config.listing import list_model_families
from finetune.config.schema import Config
from finetune.diagnose.plan_devices import GIB, read_device
from finetune.diagnose.planner import make_plan
from finetune.model.published import published_sizes

PAGE = Path(__file__).parent.parent / "docs/which-gpu.md"
BEGIN, END = "<!-- table: written by benchmarks/which_gpu.py -->\n", "<!-- end of table -->\n"
GIGABYTES = (8, 12, 16, 24, 32, 40, 48, 80, 141)
TASKS = {"LoRA": "finetune_lora", "QLoRA": "finetune_qlora"}
_WITHOUT_MEMORY = ("max_position_embeddings", "original_max_position_embeddings", "rope_type", "sliding_window")
LENGTHS = (2_048, 8_192, 131_072)


def presets() -> list[str]:
    """Return the names of the presets of published models."""
    names = [name for models in list_model_families().values() for name, _ in models]
    return [name for name in names if published_sizes(_config(name).model) is not None]


def _config(name: str, *overrides: str) -> Config:
    return compose([f"model={name}", "output_dir=run", *overrides], complete=False)


def cell(name: str, task: str, length: int, known: dict[Any, str] | None = None) -> str:
    """Return the least memory of a run in GiB, and the smallest GPU that has it.

    Args:
        name: of a preset.
        task: of `TASKS`.
        length: tokens of a row.
        known: the results so far. Presets of equal sizes take equal memory.
    """
    sizes = published_sizes(_config(name).model)
    assert sizes is not None
    if length > sizes.sizes["max_position_embeddings"]:
        return "–"
    alike = {key: value for key, value in sizes.sizes.items() if key not in _WITHOUT_MEMORY}
    key, known = (str(alike), task, length), {} if known is None else known
    if key not in known:
        config = _config(name, f"task={TASKS[task]}", f"data.max_length={length}", "training.memory=least")
        known[key] = _least(config, embedding=2 * sizes.sizes["vocab_size"] * sizes.sizes["hidden_size"])
    return known[key]


def _least(config: Config, *, embedding: int) -> str:
    """Plan a run for the largest GPU, and for the largest on which it fits only if its embedding may be elsewhere.

    `embedding` is the number of its bytes.
    """
    devices = [(size, read_device(f"GPU {size}GB")) for size in GIGABYTES]
    if (needed := make_plan(config, devices[-1][1]).needed) is None:
        return "not known"
    for size, device in devices:
        if needed - embedding <= device.memory < needed:
            needed = min(needed, make_plan(config, device).needed or needed)
        if needed <= device.memory:
            return f"{needed / GIB:.1f}: {size} GB"
    return f"{needed / GIB:.1f}: more than one GPU"


def table() -> Iterator[str]:
    """Write the table, one row for each preset."""
    columns = [(task, length) for task in TASKS for length in LENGTHS]
    yield "| preset | " + " | ".join(f"{task}, {length:,} tokens" for task, length in columns) + " |\n"
    yield "|---|" + "---|" * len(columns) + "\n"
    known: dict[Any, str] = {}
    for name in presets():
        yield f"| `{name}` | " + " | ".join(cell(name, task, length, known) for task, length in columns) + " |\n"


def main() -> None:
    """Replace the table of the page."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + "".join(table()) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
