"""Say what to set so that rows are read whose columns a run does not understand. Only a refused run imports it."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from finetune.config.other_tools import settings_among
from finetune.config.render import inline_yaml
from finetune.config.schema import ROW_COLUMNS
from finetune.data.columns import (
    MEANINGS,
    find_columns,
    holds_something,
    meaning_of,
    show_names,
)
from finetune.data.formats import OF_PROMPT, Format, Reads, detect_format, find_unread, parse_row
from finetune.data.preference_formats import FORMATS_OF, may_be_prompt
from finetune.data.readers import SUFFIXES, JoinedRows, RawRow, RowSource
from finetune.data.values import BadRowError
from finetune.fallbacks import Fallback
from finetune.limits import open_regular
from finetune.units import name_first

_OBJECTIVE_OF: Mapping[Reads, str] = {"answers": "sft", "chosen": "dpo", "labelled": "kto", "prompts": "grpo"}
"""The objective that a message proposes for rows of each type."""

_MAX_SETTINGS = 3
_MAX_FILES = 10
_LONGEST_FIRST_LINE = 100_000


class ReadRows(Protocol):
    """How the rows of a source are read: `Examples`."""

    @property
    def source(self) -> RowSource:
        """The rows as they are stored."""

    @property
    def format(self) -> str:
        """`data.format`."""

    @property
    def reads(self) -> Reads:
        """What the objective reads of a row."""

    @property
    def name(self) -> str:
        """The name of a source of a mixture, otherwise empty."""

    @property
    def columns(self) -> Mapping[str, str]:
        """The settings of `data.columns`."""


def describe_suffix(path: Path, name: str) -> str:
    """Describe a file that no reader is for by its suffix, and say what its first bytes look like."""
    suffix = path.suffix.lower()
    advice = ' Texts are rows of a .jsonl file: {"text": "…"}.' if suffix in ("", ".txt", ".md") else ""
    with suppress(OSError), open_regular(path, follows_links=True) as file:
        line = file.readline(_LONGEST_FIRST_LINE).removeprefix(b"\xef\xbb\xbf").strip()
        looks = {b"{": ".jsonl", b"[": ".json"}.get(line[:1], ".tsv" if b"\t" in line else "")
        if looks and b"\0" not in line:
            advice = f" It begins as a {looks} file does. If it is one, rename it to {path.with_suffix(looks).name}."
    if suffix in (".xlsx", ".xls", ".ods"):
        advice = " Save the sheet as CSV, in UTF-8."
    return f"{name} ends in {path.suffix or 'nothing'}; expected one of {', '.join(SUFFIXES)}.{advice}"


def describe_pair(row: RawRow, examples: ReadRows, columns: Mapping[str, str]) -> str:
    """Describe a row of two answers, given the names of its columns by ours."""
    names = " and ".join(columns[side] for side in ("chosen", "rejected") if side in columns)
    proposal = propose_settings(row, examples, "chosen") or "training.objective=dpo"
    chosen = {"completion": columns.get("chosen", ""), "rejected": "none"}
    learns_chosen = f"; or set {column_settings(chosen, examples)} to learn the chosen answers"
    return (
        f"{examples.source.place(row.number)} has {names}: a pair of answers to compare, which supervised training "
        f"does not read. Set {proposal} (or orpo, simpo) to learn from both"
        f"{learns_chosen if _is_accounted_for(row, examples, chosen) else ''}."
    )


def describe_unknown_columns(row: RawRow, examples: ReadRows) -> str:
    """Describe a row that has the columns of no format, and what can be set to read it."""
    place, reads = examples.source.place(row.number), examples.reads
    columns = find_columns(row.value, examples.columns)
    if reads == "chosen" and {"chosen", "rejected"} <= columns.keys():
        texts = [name for name, value in row.value.items() if isinstance(value, str) and may_be_prompt(name)]
        others = [] if any(map(meaning_of, texts)) else ["none"]
        settings = [{"prompt": name} for name in (*texts, *others)]
        proposals = [column_settings(each, examples) for each in settings if _is_accounted_for(row, examples, each)]
        return (
            f"{place} has a chosen and a rejected answer, and {show_names(texts)} may be their prompt. Set "
            f"{' or '.join(proposals) or 'data.columns.prompt'}{' if the answers begin with it' if others else ''}."
        )
    if {"role", "content"} <= row.value.keys() or {"role", "text"} <= row.value.keys():
        return (
            f"{place} has the columns {show_names(row.value)}: it is one turn. Put the turns of a conversation into "
            "one row, as a list in a column messages."
        )
    is_whole = examples.source.label.lower().endswith(".json") and len([*islice(examples.source.rows(), 2)]) == 1
    if is_whole and all(map(_holds_rows, row.value.values())):
        return (
            f"{place} has the columns {show_names(row.value)}, and each holds a list of rows. Write the rows of each "
            "into a file of its own: one list in a .json file, or one row a line in a .jsonl file."
        )
    if others := settings_among(row.value):
        file = shlex.quote(examples.source.label)
        return (
            f"{place} holds settings of another tool ({name_first(others, _MAX_SETTINGS)}), and no row. Translate "
            f"the file with: finetune init --from {file} --file FILE.yaml"
        )
    expected = "; ".join(
        f"{name}: {' and '.join(known.needs)}" for name, known in FORMATS_OF[reads].items() if known.needs
    )
    readings: list[Reads] = [reads, "answers", "chosen", "labelled"]
    readings += [] if _has_other_texts(row, columns) else ["prompts"]
    proposals = [proposal for other in readings if (proposal := propose_settings(row, examples, other))][:1]
    names_columns = bool(proposals) and proposals[0].startswith(("data.columns", "columns:"))
    example = f", for example {proposals[0]}" if names_columns else ""
    instead = f", or set {proposals[0]}" if proposals and not example else ""
    if reads == "answers" and "text" in columns:
        text = f"format: text in the source {examples.name} of data.mixture" if examples.name else "data.format=text"
        instead += f", or set {text} to learn the texts as they are"
    if not proposals and reads == "answers":
        has_turns = any(isinstance(value, list) for value in row.value.values())
        names = ("messages",) if has_turns else ("prompt", "completion")
        example = f": {column_settings(dict.fromkeys(names, 'COLUMN'), examples)}"
    absent = {ours: name for ours, name in examples.columns.items() if name != "none" and name not in row.value}
    wrong = f" Here is no column for {column_overrides(absent)}." if absent else ""
    where = "" if examples.name else " in data.columns"
    if mixture := propose_mixture(examples):
        where, example, instead = " in data.columns", f" of each file: {mixture}", ""
    return (
        f"{place} has the columns {show_names(row.value)}.{wrong} Expected those of one format "
        f"({expected or 'prompt or messages'}). Rename the columns, or name them{where}{example}{instead}."
    )


def _holds_rows(value: object) -> bool:
    """Return whether a cell is a list of objects which are no turns."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(each, Mapping) and {"role", "from", "content", "value"}.isdisjoint(each) for each in value)


def advise_on_second_format(row: RawRow, known: Format, examples: ReadRows) -> str:
    """Say how to read a row whose columns belong to a format that is not in `known`. Empty if they belong to none."""
    if examples.format == "auto" and (mixture := propose_mixture(examples)):
        return f"All rows of a source have one format, and the same columns. Set {mixture} to read each file as it is."
    if _format_of(row, examples) in (None, known):
        return ""
    if examples.format != "auto":
        auto = f"format: auto in the source {examples.name} of data.mixture" if examples.name else "data.format=auto"
        return f"data.format is {examples.format}. Set {auto} to read rows by their columns."
    return "All rows of a source have one format. Write the rows of each into a file, and name both in data.mixture."


def propose_mixture(examples: ReadRows) -> str:
    """Return how to read files with different columns as the sources of a mixture; "" if there is no way.

    This is an override. For a source of a mixture, it names the sources to write in its place.
    """
    ways: dict[tuple[Format, str], list[str]] = {}
    columns: dict[str, dict[str, str]] = {}
    for label, row in (first_rows := _first_rows(examples)).items():
        settings = _settings_that_read(row, examples)
        if settings is None:
            return ""
        overrides, renamed = column_overrides(settings), {**examples.columns, **settings}
        known = detect_format(row.value, renamed, FORMATS_OF[examples.reads])
        assert known is not None  # the settings read the row
        ways.setdefault((known, overrides), []).append(label)
        columns[overrides] = renamed
    if len(ways) < 2 or len(first_rows) > _MAX_FILES:
        return ""
    sources = [
        {"path": paths if len(paths) > 1 else paths[0], **({"columns": of} if (of := columns[overrides]) else {})}
        for (_, overrides), paths in ways.items()
    ]
    if examples.name:
        return f"the sources {inline_yaml(sources)[1:-1]} in place of this one in data.mixture (keep its other keys)"
    return shlex.quote(f"data.mixture={inline_yaml(sources)}")


def _first_rows(examples: ReadRows) -> dict[str, RawRow]:
    """Return the first row of each file of a source that has a few, by the name of the file."""
    parts = examples.source.parts if isinstance(examples.source, JoinedRows) else []
    firsts = ((part.label, next(part.rows(), None)) for part in parts[: _MAX_FILES + 1])
    return {label: row for label, row in firsts if row is not None}


def _settings_that_read(row: RawRow, examples: ReadRows) -> dict[str, str] | None:
    """Return settings of `data.columns` that read a row and account for its columns; None if there are none."""
    if not isinstance(row.value, Mapping):
        return None
    if _is_accounted_for(row, examples, {}):
        return {}
    return _propose_columns_of(row, examples, examples.reads)


def _format_of(row: RawRow, examples: ReadRows) -> Format | None:
    """Return the format in which a row can be read as it is."""
    if not isinstance(row.value, Mapping):
        return None
    known = detect_format(row.value, examples.columns, FORMATS_OF[examples.reads])
    try:
        if known is not None:
            parse_row(row.value, known, examples.columns, is_table=row.is_table)
    except BadRowError:
        return None
    return known


def _has_other_texts(row: RawRow, columns: Mapping[str, str]) -> bool:
    """Return whether a row has more than a prompt: columns that are not known and hold texts, not numbers."""
    values = [value for name, value in row.value.items() if name not in columns.values() and may_be_prompt(name)]
    texts = [value for value in values if holds_something(value) and not isinstance(value, (int, float))]
    return len(texts) > ("prompt" not in columns)


def propose_settings(row: RawRow, examples: ReadRows, reads: Reads) -> str:
    """Return overrides with which a row is read and every column is accounted for; "" if none are known."""
    objective = "" if reads == examples.reads else f"training.objective={_OBJECTIVE_OF[reads]}"
    if not isinstance(row.value, Mapping):
        return ""
    if objective and _is_accounted_for(row, examples, {}, reads):
        return objective
    settings = _propose_columns_of(row, examples, reads)
    both = filter(None, [objective, column_settings(settings, examples) if settings else ""])
    return (" and " if examples.name else " ").join(both) if settings else ""


def _propose_columns_of(row: RawRow, examples: ReadRows, reads: Reads) -> dict[str, str] | None:
    """Return settings of `data.columns` for the first format that reads a row with them."""
    for known in FORMATS_OF[reads].values():
        may_have = [column for column in known.may_have if column in OF_PROMPT]
        settings = propose_columns(row.value, known.needs or ("prompt",), may_have, examples.columns)
        if settings and _is_accounted_for(row, examples, settings, reads):
            return settings
    return None


def _is_accounted_for(row: RawRow, examples: ReadRows, settings: Mapping[str, str], reads: Reads | None = None) -> bool:
    """Return whether a row can be read with more settings of `data.columns`, and all its columns are accounted for."""
    renamed, reads = {**examples.columns, **settings}, reads or examples.reads
    known = detect_format(row.value, renamed, FORMATS_OF[reads])
    if known is None or any(name != "none" and column not in known.columns for column, name in settings.items()):
        return False
    try:
        example = parse_row(row.value, known, renamed, is_table=row.is_table)
    except BadRowError:
        return False
    return not any(find_unread(row.value, example, known, renamed, reads))


def describe_unread_column(
    row: RawRow, examples: ReadRows, name: str, *, label: str, format: str, names: Mapping[str, str]
) -> str:
    """Describe a column with a part of the rows that their format does not read, and how to read it.

    `label` names the rows, and `names` has the names of the columns that are read, by ours.
    """
    part = MEANINGS[meaning_of(name) or name].part
    first = next(examples.source.rows(), row)  # it decides the format, and may lack the column
    others = [each for each in _first_rows(examples).values() if not _is_accounted_for(each, examples, {})]
    rows = [row, first, *others] if _is_accounted_for(first, examples, {}) else [row, *others]
    reads = []
    for column in (column for column in ROW_COLUMNS if MEANINGS[column].part == part):
        more = propose_columns(row.value, (), OF_PROMPT, {**examples.columns, column: name}) or {}
        settings = [{column: name}, {column: name, **more}]
        reads += [
            column_settings(each, examples)
            for each in settings
            if all(_is_accounted_for(row, examples, each) for row in rows)
        ]
    if not reads and (mixture := propose_mixture(examples)):
        reads = [mixture]
    advice = f"Set {reads[0]} to read it, or " if reads else "Correct the rows, or set "
    return (
        f"{label}: by its name, the column {show_names([name])} is {part}, but rows of this format ({format}) do not "
        f"read it; the first is {examples.source.place(row.number)}. {advice}{leave_out([name], examples, names)} if "
        "it is not meant to be read."
    )


def advise_on_labels(row: RawRow, examples: ReadRows, column: str, bad: str) -> str:
    """Say what to do with rows whose answers are marked as good or bad."""
    kto = propose_settings(row, examples, "labelled")
    return (
        f"Supervised training and preference pairs do not use labels: answers marked {bad} would be learned like the "
        f"others. {f'Set {kto} to learn from both, remove' if kto else 'Remove'} these rows and the column {column}, "
        f"or set {column_settings({'label': 'none'}, examples)} to use every row whatever its label."
    )


def propose_columns(
    row: Mapping[str, Any], needs: Collection[str], may_have: Collection[str], renamed: Mapping[str, str]
) -> dict[str, str] | None:
    """Return settings of `data.columns` for the columns that a format needs, and for those that it may have.

    None if a column that the format needs has no name, or several that are equally likely.
    """
    lower = {name: name.strip().lower() for name in map(str, row) if holds_something(row[name])}
    if not {"target", "targets"} & {*lower.values()}:
        lower = {name: word for name, word in lower.items() if word != "source"}  # elsewhere it is an origin
    settings: dict[str, str] = {}
    for column in (*needs, *may_have):
        found = find_columns(row, {**renamed, **settings})
        if column in found:
            continue
        meaning = MEANINGS[column]
        taken = {*settings.values(), *(found[need] for need in needs if need in found)}
        free = {name: word for name, word in lower.items() if name not in taken}
        alike = [our for our, of in MEANINGS.items() if of.part == meaning.part]  # prompt and instruction
        usual = (*alike, *meaning.also, *meaning.means)
        names = [name for name, word in free.items() if word in usual]
        names = names or [name for may in meaning.may_mean for name, word in free.items() if word == may][:1]
        if len(names) == 1:
            settings[column] = names[0]
        elif column in needs:
            return None
    return settings


def leave_out(names: Iterable[str], examples: ReadRows, columns: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return settings of `data.columns` which say that columns of these names are not meant to be read.

    `columns` has the names of the columns that are read instead.
    """
    settings = {}
    for name in names:
        part = MEANINGS[meaning_of(name) or name].part
        alike = [our for our, of in MEANINGS.items() if of.part == part]
        our = next((our for our in alike if our in columns), alike[0])
        settings[our] = columns.get(our, "none")
    return column_settings(settings, examples)


def fallbacks_of_unread(names: Sequence[str], examples: ReadRows) -> list[Fallback]:
    """Return the fallbacks of columns that are not read and not refused."""
    label = examples.source.label
    splits = [name for name in names if meaning_of(name) == "split"]
    others = [name for name in names if name not in splits]
    fallbacks = []
    if others:
        wanted, used = f"the columns {', '.join(others)} of {label}", "the other columns"
        why = f"rows of this format have no place for them ({leave_out(others, examples)} says that this is meant)"
        fallbacks.append(Fallback(what="data.columns", wanted=wanted, used=used, why=why))
    if splits:
        wanted, used = f"the splits in the column {show_names(splits)} of {label}", "all its rows as one split"
        why = (
            "a split is a file. Write the rows of each split into a file of its own, and set data.train, "
            f"data.validation and data.test to these files ({column_settings({'split': 'none'}, examples)} says that "
            "one split is meant)"
        )
        fallbacks.append(Fallback(what="data.columns", wanted=wanted, used=used, why=why))
    return fallbacks


def column_settings(settings: Mapping[str, str], examples: ReadRows) -> str:
    """Write settings of `data.columns` for these rows: as overrides, or in a mixture as the key of their source."""
    if not examples.name:
        return column_overrides(settings)
    of_source = inline_yaml({**examples.columns, **settings})  # the columns of a source replace data.columns
    return f"columns: {of_source} in the source {examples.name} of data.mixture"


def column_overrides(settings: Mapping[str, str]) -> str:
    """Write settings of `data.columns` as a command takes them."""
    return " ".join(shlex.quote(f"data.columns.{column}={name}") for column, name in settings.items())
