"""Prove the families of docs/models.md with `finetune doctor --model`, and write the page's table from the record.

python -m tools.families                 # all families: a minute or two each
python -m tools.families olmo3 granite   # these; the record keeps the others
python -m tools.families --page          # only the table, from the record
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.diagnose.family import PROMISES

REPOSITORY = Path(__file__).parent.parent
PAGE, RECORD = REPOSITORY / "docs/models.md", REPOSITORY / "docs/assets/families.json"
BEGIN, END = "<!-- table: written by tools/families.py -->\n", "<!-- end of table -->\n"
PRESETS = {
    "Phi-1, 1.5, 2": "phi2",
    "Phi-3, 3.5, 4": "phi4_mini",
    "Phi-3.5-MoE": "phi3_5_moe",
    "SmolLM2, Llama 3": "llama3_2_1b",
    "SmolLM3": "smollm3_3b",
    "Qwen2.5": "qwen2_5_0_5b",
    "Qwen3": "qwen3_0_6b",
    "Mistral": "mistral_7b",
    "Gemma 2": "gemma2_2b",
    "Gemma 3": "gemma3_1b",
    "OLMo 3": "olmo3_7b",
    "Granite 4 without Mamba": "granite4_1b",
}
"""A preset for each family of presets."""
MODEL_TYPES = {
    "Ministral 3, text": "ministral3",
    "OLMo 2": "olmo2",
    "Granite 3": "granite",
    "EXAONE 4": "exaone4",
    "Command R7B": "cohere2",
    "GLM-4": "glm4",
    "StarCoder2": "starcoder2",
    "Mixtral": "mixtral",
    "Qwen3-MoE": "qwen3_moe",
    "gpt-oss": "gpt_oss",
}
"""Further families, by the model type of transformers."""
FAMILIES = {**PRESETS, **MODEL_TYPES}
_MARKS = {"ok": "yes", "failed": "no", "not run": "–"}


def prove(name: str) -> dict[str, Any]:
    """Return what `finetune doctor --model NAME --json` prints, without seconds and exit code."""
    arguments = [sys.executable, "-m", "finetune", "doctor", "--model", name, "--json"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):
        raise SystemExit(f"{name}: {done.stderr}")
    record: dict[str, Any] = json.loads(done.stdout)
    del record["exit_code"]
    for promise in record["promises"]:
        del promise["seconds"]
    return record


def read_record() -> dict[str, Any]:
    """Return the record of each family, by the name of its preset or its model type."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}


def table(records: dict[str, Any]) -> Iterator[str]:
    """Write the table, one row for each family, and a line for each promise that does not hold."""
    yield "| family | `--model` | model type | computed by | " + " | ".join(PROMISES) + " |\n"
    yield "|---|---|---|---|" + "---|" * len(PROMISES) + "\n"
    broken = []
    for family, name in FAMILIES.items():
        record = records[name]
        promises = {promise["name"]: promise for promise in record["promises"]}
        marks = " | ".join(_MARKS[promises[promise]["outcome"]] for promise in PROMISES)
        yield f"| {family} | `{name}` | `{record['model_type']}` | {record['computed_by']} | {marks} |\n"
        broken += [
            f"- {family}, {promise['name']}: {promise['what']}\n"
            for promise in promises.values()
            if promise["outcome"] == "failed"
        ]
    versions = sorted(
        {", ".join(f"{name} {number}" for name, number in each["versions"].items()) for each in records.values()}
    )
    yield f"\nProven with {'; '.join(versions)}.\n"
    if broken:
        yield "What does not hold:\n\n"
        yield from broken


def write_page() -> None:
    """Replace the table of the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + "".join(table(read_record())) + END + after, encoding="utf-8")


def main(names: list[str]) -> None:
    """Prove families, keep the record, and write the page."""
    for name in [] if names == ["--page"] else names or list(FAMILIES.values()):
        record = prove(name)
        records = {**read_record(), name: record}
        in_order = {each: records[each] for each in FAMILIES.values() if each in records}
        RECORD.write_text(json.dumps(in_order, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        sys.stdout.write(f"{name}: {[promise['outcome'] for promise in record['promises']]}\n")
        sys.stdout.flush()
    write_page()


if __name__ == "__main__":
    main(sys.argv[1:])
