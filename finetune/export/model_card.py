"""A README.md for a model or an adapter: what is known, from the run's own files, and nothing that is guessed.

Format of the header: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from finetune.shipped_files import SHIPPED_PREFIX

if TYPE_CHECKING:
    from finetune.export.comparison import Merged
    from finetune.export.run_to_ship import RunToShip

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SETTINGS = ("training", "optim", "lora", "data")
_LEFT_OUT = {"device", "debug", "num_workers", "pin_memory", "prefetch_factor", "cache_dir", "log_every", "path"}
_LICENCE = (
    "The licence of the base model applies to these weights as well. It was not looked up: read it at the base's own "
    "page, and name it in the header of this file (`license:`) before you pass the weights on. The same goes for the "
    "data."
)


def hub_id(path: str | None) -> str | None:
    """The path, where it is that of a model or data set on the hub and of no folder here."""
    is_id = path is not None and _HUB_ID.fullmatch(path) is not None and not path.startswith(".")
    return path if is_id and not Path(str(path)).expanduser().exists() else None


def merged_card(run: RunToShip, merged: Merged) -> str:
    """The card of a merged or fully tuned model."""
    relation = "finetune"
    how = "Full fine-tuning of" if run.is_full else "A LoRA adapter merged into"
    source = "the run" if run.is_full else "base and adapter"
    check = f"Reloaded by transformers alone and compared with {source} on seeded prompts: {merged.difference}."
    use = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("FOLDER_OR_HUB_ID")\n'
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_HUB_ID")'
    )
    facts = {
        "weights": f"{merged.dtype}, embeddings {'tied' if merged.is_tied else 'not tied'}",
        "generation stops at": ", ".join(map(str, merged.stop_ids)),
    }
    return _card(run, relation=relation, library="transformers", how=how, facts=facts, check=check, use=use)


def adapter_card(run: RunToShip, base: str) -> str:
    """The card of an adapter; `base` is the hub id that it names."""
    use = (
        "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{base}")\n'
        'model = PeftModel.from_pretrained(base, "FOLDER_OR_HUB_ID")\n'
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_HUB_ID")'
    )
    return _card(
        run, relation="adapter", library="peft", how="A LoRA adapter for", facts={}, check=None, use=use, base=base
    )


def base_name(run: RunToShip) -> str:
    """How a card calls the base: its hub id, or the last part of a folder's name; no path of one machine."""
    section = run.config.model
    if section.init == "random":
        return f"a {(section.config or {}).get('model_type', '')} model of random weights (seed {run.config.seed})"
    return hub_id(section.path) or _last_part(section.path)


def _card(
    run: RunToShip,
    *,
    relation: str,
    library: str,
    how: str,
    facts: dict[str, str],
    check: str | None,
    use: str,
    base: str | None = None,
) -> str:
    name = base or base_name(run)
    versions = ", ".join(f"{package} {number}" for package, number in run.recorded.part("versions").items())
    sections = [
        f"# {run.folder.path.name}",
        f"{how} {name}.",
        _table({"base": name, "data": _data_name(run), "training": _rows(run), **facts}),
        check or "",
        "## Use\n\n```python\n" + use + "\n```",
        "## Measured\n\n" + _measured(run),
        "## Configuration\n\n```yaml\n" + _settings(run) + "```",
        "## Versions\n\n" + (versions or "not recorded"),
        "## Licence\n\n" + _LICENCE,
    ]
    return _header(run, relation, library, base) + "\n\n".join(part for part in sections if part) + "\n"


def _header(run: RunToShip, relation: str, library: str, base: str | None) -> str:
    known = base or hub_id(run.config.model.path if run.config.model.init == "pretrained" else None)
    data = hub_id(run.config.data.path)
    header: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["finetune"]}
    if known:
        header |= {"base_model": known, "base_model_relation": relation}
    if data:
        header["datasets"] = [data]
    return f"---\n{yaml.safe_dump(header, sort_keys=True)}---\n\n"


def _measured(run: RunToShip) -> str:
    lines = []
    best = run.recorded.result
    if isinstance(best.get("best_loss"), (int, float)):
        lines.append(f"Validation loss {best['best_loss']:.4f} nats per target token at step {best.get('best_step')}.")
    scores = run.recorded.scores()
    models = [name for name in ("base", "tuned") if name in scores]
    figures = sorted({figure for name in models for figure in scores[name]})
    if figures:
        cells = {figure: " | ".join(_figure(scores[model].get(figure)) for model in models) for figure in figures}
        head = f"| test split | {' | '.join(models)} |\n|---|{'---|' * len(models)}"
        lines.append("\n".join([head, *(f"| {figure} | {row} |" for figure, row in cells.items())]))
    return "\n\n".join(lines) or "Nothing was measured on a held-out split."


def _settings(run: RunToShip) -> str:
    config = run.config.model_dump()
    if run.is_full:
        config.pop("lora")
    kept = {
        section: {key: value for key, value in config[section].items() if key not in _LEFT_OUT and _is_plain(value)}
        for section in _SETTINGS
        if section in config
    }
    return str(yaml.safe_dump({"seed": config["seed"], **kept}, sort_keys=False))


def _is_plain(value: object) -> bool:
    """Not a path of one machine, and nothing that was left at `unset`."""
    if isinstance(value, str):
        return "/" not in value or hub_id(value) is not None
    return value is not None and value not in ([], {})


def _data_name(run: RunToShip) -> str:
    section = run.config.data
    named = [section.path, section.train]
    return ", ".join(hub_id(path) or _last_part(path) for path in named if path) or "see the configuration"


def _rows(run: RunToShip) -> str:
    steps = run.recorded.result.get("step")
    size = run.recorded.part("global_batch").get("global_batch_size")
    return f"{steps} steps of {size} rows" if steps and size else "not recorded"


def _last_part(path: str | None) -> str:
    return Path(str(path).removeprefix(SHIPPED_PREFIX)).name


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _table(facts: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())])
