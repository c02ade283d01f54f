"""Fill model_card.md.j2, the README.md of a model or an adapter, from the run's own files. Nothing in it is guessed.

Format of the header: https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml

from finetune.config.config_files import SHIPPED_PREFIX
from finetune.config.run_config import load_run_config
from finetune.config.schema import Config, as_list
from finetune.data.readers import SUFFIXES, suffix_of
from finetune.export.compressed_folder import SchemeName
from finetune.export.vectors import LogitDifference
from finetune.inference.finished_run import FinishedRun
from finetune.runs.recorded_run import RecordedRun
from finetune.terminal import visible
from finetune.units import counted, format_bytes

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_MARKUP = re.compile(r"[\\`*<>|\[\]]")
_SETTINGS = ("training", "preference", "grpo", "rollout", "reward", "optim", "lora", "data")
_LEFT_OUT = {"device", "debug", "num_workers", "pin_memory", "prefetch_factor", "cache_dir", "log_every", "path"}


@dataclass(frozen=True, kw_only=True)
class Merged:
    """A merged model on disk, and its difference from base and adapter."""

    folder: Path
    num_bytes: int
    """The size of its weights."""
    dtype: str
    """The type that the weights are stored in."""
    is_tied: bool
    """Whether input embeddings and output head are one tensor."""
    stop_ids: list[int]
    """The tokens at which generation ends."""
    difference: LogitDifference
    vectors_sha256: str
    """The digest of the test vectors beside the model."""
    system: str | None = None
    """The system turn of most training rows; None if there is none or they cannot be read."""
    adds_system: bool = False
    """Whether the chat template adds it to conversations without a system turn."""
    effect: tuple[str, ...] = ()
    """What merging a run on a base in 4 bits changed, one sentence for each model without a full stop."""


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """A compressed model on disk, and its differences from the run."""

    scheme: SchemeName
    """The way in which its linear layers are stored."""
    kept: list[str]
    """Linear layers that are stored as before."""
    num_bytes: tuple[int, int]
    """Sizes of the weights, merged and compressed."""
    num_rows: int
    """The number of training rows that calibrated it."""
    num_validated: int = 0
    """The number of validation rows; 0 if the run has none."""
    losses: tuple[float, float] | None = None
    """Validation losses of the run and of the compressed model; None without validation rows."""
    changed: int = 0
    """The number of validation prompts that the two models answer differently."""
    answered: int = 0
    """The number of validation prompts that both models answered."""
    apart: float
    """The relative difference of their logits, over the test vectors."""

    def rows(self) -> list[list[str]]:
        """Return the rows of the table: what was compared, of the run, of the compressed model."""
        rows = [["size of the weights", *map(format_bytes, self.num_bytes)]]
        if self.losses is not None:
            rows.append(
                [f"validation loss ({counted(self.num_validated, 'row')})", *(f"{loss:.4f}" for loss in self.losses)]
            )
        if self.answered:
            share = self.changed / self.answered
            rows.append(["greedy answers that changed", "", f"{self.changed} of {self.answered} ({share:.1%})"])
        rows.append(["logits of the test vectors apart by", "", f"{self.apart:.3g}"])
        return rows


def _recorded_config(run: FinishedRun) -> Config:
    """Return the configuration that the run started with. `run.config` may name another base, to load weights from."""
    return load_run_config(run.folder.path, loads_model=False)


def hub_base(run: FinishedRun) -> str | None:
    """Return the hub id of the base that a run started from; None if the base is not on the hub."""
    config = _recorded_config(run)
    if config.model.init != "pretrained":
        return None
    saved = run.weights / "adapter_config.json"
    if not saved.is_file():
        return hub_id(config.model.path)
    # Here a folder is an absolute path. That in config.yaml may be relative to where the training was started.
    return hub_id(json.loads(saved.read_text(encoding="utf-8")).get("base_model_name_or_path"))


def hub_id(path: str | list[str] | None) -> str | None:
    """Return the path if it is the hub id of a model or data set; None if it is a local folder or a file of rows."""
    if not isinstance(path, str) or not HUB_ID.fullmatch(path) or path.startswith(".") or suffix_of(path) in SUFFIXES:
        return None
    return None if Path(path).expanduser().exists() else path


def fill_card(
    run: FinishedRun,
    base: str | None,
    *,
    system: str | None = None,
    merged: Merged | None = None,
    compressed: Compressed | None = None,
) -> str:
    """Write the card of an adapter, or of a merged or fully tuned model.

    `base` is the hub id that the card names, and `system` the system turn of most training rows.
    """
    recorded, config = run.recorded, _recorded_config(run)
    best_loss, scores = recorded.result.get("best_loss"), recorded.scores()
    scores = {name: scores[name] for name in ("base", "tuned") if name in scores}
    settings = _settings(config)
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_in_a_line,
    )
    template = Path(__file__).with_name("model_card.md.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        header=_Block(_header(config, base, is_adapter=merged is None)),
        name=recorded.folder.path.name,
        base=base or _local_base(config),
        base_in_code=_Block(json.dumps(base or _local_base(config))),
        is_full=run.is_full,
        merged=merged,
        compressed=compressed,
        system=system and _Block(visible(system)),
        fence=max(["~~~", *re.findall("~{3,}", f"{system}\n{settings}")], key=len) + "~",
        data=_data_name(config),
        training=_rows(recorded),
        best_loss=best_loss if isinstance(best_loss, (int, float)) else None,
        best_step=recorded.result.get("best_step"),
        unit=recorded.objective.unit,
        scores=scores,
        metrics=sorted({metric for values in scores.values() for metric in values}),
        tested_split=recorded.tested_split,
        rows_of_loss=recorded.rows_of_test_loss,
        settings=_Block(settings),
        versions=recorded.part("versions"),
    )


class _Block(str):
    """Text of several lines that the card quotes in a block, or that is Markdown itself."""


def _in_a_line(value: Any) -> Any:
    """Return untrusted text as one line of plain text: a run's folder names data, metrics and packages."""
    if isinstance(value, _Block) or not isinstance(value, str):
        return value
    return _MARKUP.sub(r"\\\g<0>", visible(" ".join(value.split())))


def _header(config: Config, base: str | None, *, is_adapter: bool) -> str:
    library, relation = ("peft", "adapter") if is_adapter else ("transformers", "finetune")
    header: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["finetune"]}
    if base:
        header |= {"base_model": base, "base_model_relation": relation}
    if data := hub_id(config.data.path):
        header["datasets"] = [data]
    return str(yaml.safe_dump(header, sort_keys=True))


def _local_base(config: Config) -> str:
    """Describe a base that is not on the hub by the last part of its folder: a card names no path of one machine."""
    if config.model.init == "random":
        family = (config.model.config or {}).get("model_type", "")
        return f"a {family} model of random weights (seed {config.seed})"
    return _last_part(config.model.path)


def _settings(config: Config) -> str:
    values = config.model_dump()
    if config.training.method == "full":
        values.pop("lora")
    reads = config.objective.reads_key
    settings = {}
    for section in (name for name in _SETTINGS if name in values):
        keys = [key for key in values[section] if key not in _LEFT_OUT and reads(f"{section}.{key}")]
        if keys:
            settings[section] = _for_others({key: values[section][key] for key in keys}) or {}
    return str(yaml.safe_dump({"seed": config.seed, **settings}, sort_keys=False))


def _for_others(value: Any) -> Any:
    """Return a value without paths of one machine; None if it is not set, or nothing is left."""
    if isinstance(value, dict):
        return {key: cleaned for key, item in value.items() if (cleaned := _for_others(item)) is not None} or None
    if isinstance(value, list):
        return [cleaned for item in value if (cleaned := _for_others(item)) is not None] or None
    return None if isinstance(value, str) and "/" in value and hub_id(value) is None else value


def _data_name(config: Config) -> str:
    named = [config.data.path, *(source["path"] for source in config.data.mixture), config.data.train]
    paths = [path for files in named for path in as_list(files)]
    return ", ".join(hub_id(path) or _last_part(path) for path in paths) or "see the configuration"


def _rows(recorded: RecordedRun) -> str:
    steps = recorded.result.get("step")
    size = recorded.part("global_batch").get("global_batch_size")
    return f"{counted(steps, 'step')} of {counted(size, 'row')}" if steps and size else "not recorded"


def _last_part(path: str | None) -> str:
    return Path(str(path).removeprefix(SHIPPED_PREFIX)).name
