"""Write the README.md of a model or an adapter from the run's own files. Nothing in it is guessed.

Format of the header: https://huggingface.co/docs/hub/model-cards. It is written here and not by huggingface_hub's
`ModelCard`: its template needs jinja2, which is an extra, and `ModelCardData` does no more than dump a dictionary.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from finetune.config.compose import load_config
from finetune.config.objectives import OBJECTIVES
from finetune.config.schema import Config
from finetune.config.shipped_files import SHIPPED_PREFIX
from finetune.data.compressed import suffix_of
from finetune.data.readers import SUFFIXES
from finetune.export.logits import LogitDifference
from finetune.inference.finished_run import FinishedRun
from finetune.runs.recorded_run import RecordedRun

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SETTINGS = ("training", "preference", "optim", "lora", "data")
_LEFT_OUT = {"device", "debug", "num_workers", "pin_memory", "prefetch_factor", "cache_dir", "log_every", "path"}
_LICENCE = (
    "The licence of the base model applies to these weights as well. It was not looked up: read it at the base's own "
    "page, and name it in the header of this file (`license:`) before you pass the weights on. The same goes for the "
    "data."
)
_USE_MODEL = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER_OR_HUB_ID")
tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_HUB_ID")"""
_USE_ADAPTER = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "FOLDER_OR_HUB_ID")
tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_HUB_ID")"""


class _Trained(NamedTuple):
    """The configuration and the record of a run."""

    config: Config
    """As it was resolved when the run started; `FinishedRun` has the one that loads the weights."""
    recorded: RecordedRun
    base: str | None
    """The hub id of the base; None if it is not on the hub."""


def merged_card(
    run: FinishedRun,
    *,
    dtype: str,
    is_tied: bool,
    stop_ids: list[int],
    difference: LogitDifference,
    vectors_sha256: str,
) -> str:
    """Write the card of a merged or fully tuned model, with its weights' type and how it compares with the run."""
    trained = _read(run)
    base = _base_name(trained)
    source = "the run" if run.is_full else "base and adapter"
    facts = {
        "weights": f"{dtype}, embeddings {'tied' if is_tied else 'not tied'}",
        "generation stops at": ", ".join(map(str, stop_ids)),
        "test vectors": f"test_vectors.json, SHA-256 {vectors_sha256}",
    }
    about = [
        f"{'Full fine-tuning of' if run.is_full else 'A LoRA adapter merged into'} {base}.",
        _facts(trained, base, facts),
        f"Reloaded by transformers alone and compared with {source} on seeded prompts: {difference}.",
    ]
    header = _header(trained.config, library="transformers", relation="finetune", base=trained.base)
    return _card(trained, header, about, _USE_MODEL)


def adapter_card(run: FinishedRun, base: str) -> str:
    """Write the card of an adapter; `base` is the hub id that the card names."""
    trained = _read(run)
    header = _header(trained.config, library="peft", relation="adapter", base=base)
    about = [f"A LoRA adapter for {base}.", _facts(trained, base, {})]
    return _card(trained, header, about, _USE_ADAPTER.format(base=base))


def hub_base(run: FinishedRun) -> str | None:
    """Return the hub id of the base that a run started from; None if the base is not on the hub."""
    return _read(run).base


def _read(run: FinishedRun) -> _Trained:
    config = load_config([], run=str(run.folder.config_file))
    return _Trained(config, RecordedRun(run.folder.path), _hub_base(run, config))


def _hub_base(run: FinishedRun, config: Config) -> str | None:
    if config.model.init != "pretrained":
        return None
    saved = run.weights / "adapter_config.json"
    if not saved.is_file():
        return _hub_id(config.model.path)
    # Here a folder is an absolute path. That in config.yaml may be relative to where the training was started.
    return _hub_id(json.loads(saved.read_text(encoding="utf-8")).get("base_model_name_or_path"))


def _hub_id(path: str | None) -> str | None:
    """Return the path if it is the hub id of a model or data set; None if it is a local folder or a file of rows."""
    if path is None or not HUB_ID.fullmatch(path) or path.startswith(".") or suffix_of(path) in SUFFIXES:
        return None
    return None if Path(path).expanduser().exists() else path


def _card(trained: _Trained, header: str, about: list[str], use: str) -> str:
    versions = trained.recorded.part("versions")
    sections = [
        f"# {trained.recorded.folder.path.name}",
        *about,
        "## Use\n\n```python\n" + use + "\n```",
        "## Measured\n\n" + _measured(trained.recorded),
        "## Configuration\n\n```yaml\n" + _settings(trained.config) + "```",
        "## Versions\n\n" + (", ".join(f"{name} {number}" for name, number in versions.items()) or "not recorded"),
        "## Licence\n\n" + _LICENCE,
    ]
    return header + "\n\n".join(sections) + "\n"


def _header(config: Config, *, library: str, relation: str, base: str | None) -> str:
    header: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["finetune"]}
    if base:
        header |= {"base_model": base, "base_model_relation": relation}
    if data := _hub_id(config.data.path):
        header["datasets"] = [data]
    return f"---\n{yaml.safe_dump(header, sort_keys=True)}---\n\n"


def _base_name(trained: _Trained) -> str:
    """Return the base's hub id, or the last part of a folder's name, because a card names no path of one machine."""
    section = trained.config.model
    if section.init == "random":
        kind = (section.config or {}).get("model_type", "")
        return f"a {kind} model of random weights (seed {trained.config.seed})"
    return trained.base or _last_part(section.path)


def _facts(trained: _Trained, base: str, more: dict[str, str]) -> str:
    facts = {"base": base, "data": _data_name(trained.config), "training": _rows(trained.recorded), **more}
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())])


def _measured(recorded: RecordedRun) -> str:
    lines = []
    best = recorded.result
    if isinstance(best.get("best_loss"), (int, float)):
        unit = recorded.objective.unit
        lines.append(f"Validation loss {best['best_loss']:.4f} ({unit}) at step {best.get('best_step')}.")
    scores = recorded.scores()
    models = [name for name in ("base", "tuned") if name in scores]
    figures = sorted({figure for name in models for figure in scores[name]})
    if figures:
        cells = {figure: " | ".join(_figure(scores[model].get(figure)) for model in models) for figure in figures}
        head = f"| test split | {' | '.join(models)} |\n|---|{'---|' * len(models)}"
        lines.append("\n".join([head, *(f"| {figure} | {row} |" for figure, row in cells.items())]))
        if rows := recorded.rows_of_test_loss:
            lines.append(f"The loss is over {rows} of the test split.")
    return "\n\n".join(lines) or "Nothing was measured on a held-out split."


def _settings(config: Config) -> str:
    values = config.model_dump()
    if config.training.method == "full":
        values.pop("lora")
    used = OBJECTIVES[config.training.objective].keys
    values["preference"] = {key: value for key, value in values["preference"].items() if key in used}
    if not used:
        values.pop("preference")
    kept = {
        section: _for_others({key: value for key, value in values[section].items() if key not in _LEFT_OUT}) or {}
        for section in _SETTINGS
        if section in values
    }
    return str(yaml.safe_dump({"seed": config.seed, **kept}, sort_keys=False))


def _for_others(value: Any) -> Any:
    """Return a value without paths of one machine; None if it is not set, or nothing is left."""
    if isinstance(value, dict):
        return {key: kept for key, it in value.items() if (kept := _for_others(it)) is not None} or None
    if isinstance(value, list):
        return [kept for it in value if (kept := _for_others(it)) is not None] or None
    return None if isinstance(value, str) and "/" in value and _hub_id(value) is None else value


def _data_name(config: Config) -> str:
    named = [config.data.path, *(source["path"] for source in config.data.mixture), config.data.train]
    return ", ".join(_hub_id(path) or _last_part(path) for path in named if path) or "see the configuration"


def _rows(recorded: RecordedRun) -> str:
    steps = recorded.result.get("step")
    size = recorded.part("global_batch").get("global_batch_size")
    return f"{steps} steps of {size} rows" if steps and size else "not recorded"


def _last_part(path: str | None) -> str:
    return Path(str(path).removeprefix(SHIPPED_PREFIX)).name


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
