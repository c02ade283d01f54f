"""Build the page: one file that makes no requests, in which no text of a run can become markup or script.

Jinja2 escapes every value. A content security policy forbids all requests, and all scripts except the page's own, which
it names by their digests. So even a mistake in escaping could not run a script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from finetune.config.keys import fields, values
from finetune.config.schema import Config
from finetune.errors import CheckpointError, ConfigError, extra_command
from finetune.report import sentences
from finetune.report.curves import COLOURS, build_charts, compile_charts
from finetune.report.data_preview import PreviewedData
from finetune.report.parallel import parallel_charts
from finetune.runs.comparison import compare_runs, format_value
from finetune.runs.metrics import number_in, step_of
from finetune.runs.recorded_run import RecordedRun, mapping
from finetune.runs.rollouts import read_rollout
from finetune.terminal import visible
from finetune.units import format_bytes

MARK = "<!-- written by finetune report -->"
"""Marks the first line of each page, so that only a page of ours is overwritten."""
_FOLDER = Path(__file__).parent
_log = logging.getLogger(__name__)
_NOT_DRAWN = (
    "The curves are not drawn: the process that draws them (vl-convert-python) has ended. It reserves far more address "
    "space than it uses, so run `finetune report` where `ulimit -v` is unlimited."
)
_SHOWN_GROUPS = 4
"""Shown prompts of a rollout."""
_DIGITS = 16
"""Shown digits of a digest, enough to tell two apart."""


class SettingRow(NamedTuple):
    """A key of a run's configuration that differs from its default."""

    key: str
    value: str
    default: str
    meaning: str


def require_libraries() -> None:
    """Raise a ConfigError if the extra `report` is not installed."""
    if find_spec("vl_convert") is None:
        needed = "`finetune report` needs vl-convert-python, which this installation lacks"
        raise ConfigError(f"{needed}. Install the extra: {extra_command('report')}")


def build_page(runs: Sequence[RecordedRun], data: Sequence[PreviewedData]) -> str:
    """Build the page about one run, or about several to compare, as HTML. The previews of their data may be empty."""
    charts, best = [*parallel_charts(runs), *build_charts(runs)], sentences.best_run(runs)
    records = [chart.as_record() for chart in charts]
    vega = compile_charts(records)
    if vega is None:
        charts, records = [], []
        _log.error(_NOT_DRAWN)
    scripts = [vega or "", (_FOLDER / "page.js").read_text(encoding="utf-8")]
    return str(
        page_template("page.html.j2").render(
            mark=_markup(MARK),
            policy=_policy(scripts),
            scripts=[_markup(script) for script in scripts],
            payload=_markup(script_data(records)),
            title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
            headline=sentences.headline(runs),
            said=sentences.score_of_headline(runs),
            second_line=sentences.second_line(runs),
            runs=[_run_values(run, index, is_best=run is best) for index, run in enumerate(runs)],
            charts=charts,
            not_drawn="" if vega else _NOT_DRAWN,
            differences=compare_runs(runs) if len(runs) > 1 else [],
            data=data,
        )
    )


def page_template(name: str) -> Any:
    """Return a template of this folder, which has the style sheet as `style`. It escapes and makes visible all text."""
    jinja2 = import_module("jinja2")
    folder = jinja2.FileSystemLoader(_FOLDER)
    options = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(loader=folder, finalize=_visible_unless_markup, **options)
    environment.filters |= {"number": sentences.format_number, "percent": sentences.percent, "size": _size}
    environment.globals["style"] = _markup((_FOLDER / "page.css").read_text(encoding="utf-8"))
    return environment.get_template(name)


def script_data(value: object) -> str:
    """Encode JSON that cannot end the script element around it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _visible_unless_markup(value: object) -> object:
    return visible(str(value), also_unseen=True) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _markup(text: str) -> Any:
    """Mark our own text as markup, which is not escaped."""
    return import_module("markupsafe").Markup(text)


def _policy(scripts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    own = " ".join(f"'sha256-{digest}'" for digest in digests)
    forbidden = "base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {own}; style-src 'unsafe-inline'; img-src data:; {forbidden}"


def setting_rows(run: RecordedRun) -> list[SettingRow]:
    """List the keys of a run's configuration that differ from their defaults, with their meanings."""
    if run.config is None:
        return []
    defaults = values(Config())
    return [
        SettingRow(
            key=key,
            value=format_value(value),
            default=format_value(defaults[key]),
            meaning=(fields()[key].description or "").replace("`", ""),
        )
        for key, value in values(run.config).items()
        if value != defaults[key]
    ]


def _run_values(run: RecordedRun, index: int, *, is_best: bool) -> dict[str, Any]:
    summary = sentences.summarize_run(run)
    return {
        "label": run.name,
        "is_best": is_best,
        "hue": index % COLOURS,
        "path": str(run.folder.path),
        "status": run.state,
        "summary": summary,
        "problems": run.problems,
        "warnings": [{"step": step_of(event), "text": str(event.get("text", ""))} for event in run.of("warning")],
        "has_config": run.config is not None,
        "changed": setting_rows(run),
        "fallbacks": run.entries("fallbacks"),
        "resume_changes": run.entries("resume_changes"),
        "has_scores": bool(summary["base"] or summary["tuned"]),
        "answers": _answers(run),
        "verdict": _verdict(run),
        "rollouts": _rollouts(run),
        "checkpoints": _checkpoints(run),
        "versions": run.part("versions"),
        "facts": _facts(run),
    }


def _facts(run: RecordedRun) -> dict[str, str]:
    names = ("launcher", "processes_started", "backend", "git_commit", "finished")
    facts = {name.replace("_", " "): str(run.record[name]) for name in names if run.record.get(name) is not None}
    batch = {name.replace("_", " "): str(value) for name, value in run.part("global_batch").items()}
    profile = {"profile": str(run.part("profile")["summary"])} if run.part("profile").get("summary") else {}
    prints = run.part("fingerprints")
    digests = {f"digest of {name}": value[:_DIGITS] for name, value in prints.items()}
    starts = run.entries("starts")
    return {**({"started": ", ".join(starts)} if starts else {}), **facts, **batch, **profile, **digests}


def _verdict(run: RecordedRun) -> list[str]:
    """Return the sentences in run.json: metrics, an early end, answers without an end, forgetting, and merging."""
    others = [mapping(run.result.get(name)) for name in ("ended_early", "unended", "forgetting", "merging")]
    records = [*map(mapping, mapping(run.result.get("verdict")).values()), *others]
    return [str(record["sentence"]) for record in records if record.get("sentence")]


def _answers(run: RecordedRun) -> list[dict[str, str | None]]:
    """Return the prompts in run.json with their context, the expected answer and the answers of both models."""
    answers = run.result.get("answers")
    records = [mapping(answer) for answer in answers] if isinstance(answers, list) else []
    names = ("context", "prompt", "expected", "base", "tuned")
    return [{name: None if (text := record.get(name)) is None else str(text) for name in names} for record in records]


def _rollouts(run: RecordedRun) -> list[dict[str, Any]]:
    """Return some groups of the first, the middle and the last rollout, each with its best and its worst answer."""
    steps = run.folder.rollout_steps()
    rollouts = []
    for step in dict.fromkeys([steps[0], steps[len(steps) // 2], steps[-1]] if steps else []):
        try:
            groups = read_rollout(run.folder, step)["groups"][:_SHOWN_GROUPS]
        except CheckpointError:
            continue
        rollouts.append({"step": step, "groups": [_best_and_worst(mapping(group)) for group in groups]})
    return rollouts


def _best_and_worst(group: Mapping[str, Any]) -> dict[str, Any]:
    listed = group.get("answers")
    answers = [mapping(answer) for answer in listed] if isinstance(listed, list) else []
    ordered = sorted(answers, key=lambda answer: number_in(answer, "advantage") or 0.0)
    ends = {"best": ordered[-1], "worst": ordered[0]} if ordered else {}
    shown = []
    for name, answer in ends.items():
        rewards = mapping(answer.get("rewards")).items()
        text = ", ".join(f"{reward} {'none' if value is None else value}" for reward, value in rewards)
        texts = answer.get("texts")  # of an answer with tools: what the model generated and what it read take turns
        parts = list(map(str, texts)) if isinstance(texts, list) else [str(answer.get("text", ""))]
        shown.append({"name": name, "parts": parts, "rewards": text})
    return {"prompt": str(group.get("text", "")), "answers": shown}


def _checkpoints(run: RecordedRun) -> list[dict[str, Any]]:
    present = set(run.folder.checkpoint_steps())
    return [
        {
            "step": step,
            "num_bytes": number_in(event, "num_bytes"),
            "blocked_seconds": number_in(event, "blocked_seconds") or 0.0,
            "is_kept": step in present,
        }
        for event in run.of("checkpoint")
        if (step := step_of(event)) is not None
    ]


def _size(num_bytes: float | None) -> str:
    return format_bytes(int(num_bytes)) if num_bytes is not None and math.isfinite(num_bytes) else "–"
