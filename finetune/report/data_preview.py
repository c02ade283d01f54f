"""Preview the data of runs, with a row of each, for the page."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from finetune.config.run_config import load_run_config
from finetune.errors import FinetuneError
from finetune.runs.recorded_rows import read_row_record
from finetune.runs.recorded_run import RecordedRun
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.diagnose.preview_splits import Span, SplitSummary

MOST_CHARACTERS = 6000
"""The most characters of a row that the page shows."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreviewedData:
    """The data of the runs that share it."""

    labels: list[str]
    """The names of the runs."""
    source: str = ""
    read_as: list[str] = field(default_factory=list)
    """The format of the rows, the columns that are read and not read, and the rows that were left out."""
    splits: dict[str, SplitSummary] = field(default_factory=dict)
    row: list[Span] = field(default_factory=list)
    row_place: str = ""
    findings: list[str] = field(default_factory=list)
    files: list[str]
    """What run.json says of the rows of each file."""
    why_not: str = ""
    """The reason if the data could not be read."""


def preview_data_of(runs: Sequence[RecordedRun]) -> list[PreviewedData]:
    """Read the data of runs again, once for all runs that share it. Never raises."""
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault(_identity(run), []).append(run)
    return [_preview(group) for group in groups.values()]


def _identity(run: RecordedRun) -> str:
    prints = run.part("fingerprints")
    rows = {name: value for name, value in prints.items() if name.startswith("data.") or name == "chat_template"}
    return repr(sorted(rows.items())) if rows else str(run.folder.path)


def _preview(runs: Sequence[RecordedRun]) -> PreviewedData:
    labels = [run.name for run in runs]
    try:
        return _read(runs[0], labels)
    except FinetuneError as error:
        reason = str(error)
    except Exception as error:  # the page is useful even if the run's data cannot be read
        reason = f"{type(error).__name__}: {error}"
    _log.warning("%s: its data could not be read again: %s", labels[0], reason)
    return PreviewedData(labels=labels, files=_recorded_counts(runs[0]), why_not=reason)


def _read(run: RecordedRun, labels: list[str]) -> PreviewedData:
    from finetune.diagnose.preview import preview_data
    from finetune.diagnose.preview_splits import Span, join_alike

    config = load_run_config(run.folder.path, loads_model=False)
    preview = preview_data(config.model_copy(update={"strict": False}), num_rows=1)
    spans: list[Span] = []
    places: list[str] = []
    for row in preview.rows:
        side = "" if row.side is None else f" ({row.side})"
        facts = f"{counted(row.num_tokens, 'token')}{side}, {row.num_targets:,} carry loss"
        places.append(facts if places else f"row {row.location.row}, {row.location.source}: {facts}")
        spans += [Span("\n", False, True)] if spans else []
        spans += join_alike(row.own_pieces())
    findings = [f"{finding.what}: {finding.fix}" for finding in preview.findings]
    recorded = read_row_record(run.folder)
    if recorded is not None and any(changes := recorded.compare(preview.raw_digests)):
        findings.append(f"the rows have changed since the run recorded them, and its results are of those ({changes})")
    return PreviewedData(
        labels=labels,
        source=preview.data,
        read_as=preview.read_as,
        splits={str(name): summary for name, summary in preview.splits.items()},
        row=_shortened(spans),
        row_place="; ".join(places),
        findings=findings,
        files=_recorded_counts(run),
    )


def _recorded_counts(run: RecordedRun) -> list[str]:
    """Describe the files that a run trained and was measured on; nothing if run.json does not say it."""
    from finetune.data.row_checks import describe_counts

    try:
        counts = run.part("row_counts").items()
        return [f"{split}, {describe_counts(of_file)}" for split, files in counts for of_file in files]
    except (KeyError, TypeError, ValueError):  # run.json may come from another version, or from elsewhere
        return []


def _shortened(spans: Sequence[Span]) -> list[Span]:
    left = MOST_CHARACTERS
    shown: list[Span] = []
    for span in spans:
        if left <= 0:
            return [*shown, span._replace(text=" … ", carries_loss=False, is_special=True)]
        shown.append(span._replace(text=span.text[:left]))
        left -= len(span.text)
    return shown
