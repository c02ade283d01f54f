"""Encode the rows of a run: render, tokenise and mark each row once, then check the rows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from finetune.config.config_files import local_path
from finetune.data.chat_template import ChatTemplate, asks_for_date, describe_key, use_chat_template
from finetune.data.encoded import EncodedExamples, EncodedSplits, Part
from finetune.data.examples import ExampleSplits
from finetune.data.formats import Example, RowType, as_messages
from finetune.data.row_checks import check_rows, name_some
from finetune.data.row_file import RowFacts, RowWriter, encoding_key, load_or_encode, path_of_rows
from finetune.data.rows import ROW_TYPE_NAMES, Examples, RowProblems
from finetune.data.templates import AnswerTokens, TrainOn, digest_tokenizer, encode_batch
from finetune.data.turns import Dialogue
from finetune.data.values import BadRowError
from finetune.errors import DataError
from finetune.fallbacks import Fallback, Fallbacks
from finetune.logs import report_progress, waiting
from finetune.threads import num_cores
from finetune.units import ceil_div, counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import DataSection
    from finetune.data.parallel import Encoded

_log = logging.getLogger(__name__)

ROWS_AT_ONCE, CHARACTERS_AT_ONCE = 512, 1 << 23
"""The largest batch: one call of the template and of the tokenizer. Each answer renders the turns before it again."""
PAYS_FROM_CHARACTERS = 24_000_000
"""With less text, one process with the tokenizer's own threads is as fast: measured in docs/data.md."""
MOST_PROCESSES = 16


def encode_examples(
    splits: ExampleSplits,
    tokenizer: PreTrainedTokenizerBase,
    section: DataSection,
    *,
    fallbacks: Fallbacks | None = None,
    is_checked: bool = True,
    knows_trained: bool = False,
) -> EncodedSplits:
    """Encode every split, or read it from the cache, and log a summary of each.

    The first process of a node encodes. The others wait for it with a file lock, so this is not a collective. The
    tokenizer must be fast, and gets `data.chat_template`. Without `is_checked`, no check refuses or drops rows.
    With `knows_trained`, no check looks for training rows in other splits: a finished run has recorded its training
    rows, and the caller leaves them out of what it measures.

    Raises:
        DataError: a row cannot be used, a split has no row or no target token, a check refuses the rows, or the
            tokenizer cannot encode them.
        ConfigError: there is no template of the name in `data.chat_template`.
    """
    return encode_sides(
        [splits], tokenizer, section, fallbacks=fallbacks, is_checked=is_checked, knows_trained=knows_trained
    )[0]


@waiting("reading and encoding the rows")
def encode_sides(
    sides: Sequence[ExampleSplits],
    tokenizer: PreTrainedTokenizerBase,
    section: DataSection,
    *,
    fallbacks: Fallbacks | None = None,
    is_checked: bool = True,
    knows_trained: bool = False,
) -> list[EncodedSplits]:
    """Encode the same rows as often as they are read, once for each side of a pair. A row is kept if all sides have it.

    Return the splits of each side. For the arguments and errors see `encode_examples`.
    """
    use_chat_template(tokenizer, section.chat_template, section.template_date)
    fallbacks = fallbacks or Fallbacks()
    tokens = AnswerTokens(tokenizer, section.chat_template or "")
    digest = digest_tokenizer(tokenizer)
    encode = partial(_encode_source, tokens=tokens, tokenizer_digest=digest, section=section, fallbacks=fallbacks)
    encoded = _in_all_sides([{source: encode(source) for source in side.wholes()} for side in sides])
    has_turns = any(rows.row_type != "text" for side in encoded for rows in side.values())
    if is_checked and has_turns and asks_for_date(tokenizer):
        from finetune.data.template_date import warn_of_date

        keys = [encoding_key(source, digest, section) for side in sides for source in side.wholes()]
        warn_of_date(tokens.template.name, [path_of_rows(local_path(section.cache_dir), key) for key in keys])
    return _split(sides, encoded, tokens, section, is_checked=is_checked, knows_trained=knows_trained)


def _in_all_sides(sides: Sequence[Mapping[Examples, EncodedExamples]]) -> list[dict[Examples, EncodedExamples]]:
    """Leave out the rows that one side has and another side lacks, because it could not encode them."""
    if len(sides) == 1:
        return [dict(sides[0])]
    common_rows: list[dict[Examples, EncodedExamples]] = [{} for _ in sides]
    for sources in zip(*sides, strict=True):
        encoded = [side[source] for side, source in zip(sides, sources, strict=True)]
        common = set.intersection(*(set(rows.numbers.tolist()) for rows in encoded))
        for side, source, rows in zip(common_rows, sources, encoded, strict=True):
            side[source] = rows.select([row for row, n in enumerate(rows.numbers.tolist()) if n in common])
    return common_rows


def _split(
    sides: Sequence[ExampleSplits],
    encoded: Sequence[Mapping[Examples, EncodedExamples]],
    tokens: AnswerTokens,
    section: DataSection,
    *,
    is_checked: bool,
    knows_trained: bool,
) -> list[EncodedSplits]:
    """Choose the rows of each split, check them, and log a summary of each. Return the splits of each side."""
    parts = {
        split: [
            _part_of(of_sides, encoded)
            for of_sides in zip(*(getattr(side, split).parts for side in sides), strict=True)
        ]
        for split, examples in vars(sides[0]).items()
        if examples is not None
    }
    if sides[0].validation is not None:
        parts["validation"] = [*filter(len, parts["validation"])]  # auto holds nothing out of a small source
    if parts.get("validation") == []:
        from finetune.data.held_out import AUTO_NEEDS_ROWS

        del parts["validation"]
        _log.info("validation is off: data.validation=auto holds nothing out of fewer than %d rows", AUTO_NEEDS_ROWS)
    if is_checked:
        bos_id, template = tokens.tokenizer.bos_token_id, tokens.template.name
        parts = check_rows(parts, section, bos_id, template, knows_trained=knows_trained)
    mixed = {split: _mix(split, of_split, section.split_seed) for split, of_split in parts.items()}
    results = [EncodedSplits(**{split: rows[k] for split, rows in mixed.items()}) for k in range(len(sides))]
    for line in (line for result in results for line in describe(result)):
        _log.info("%s", line)
    return results


def describe(splits: EncodedSplits) -> list[str]:
    """Summarise each split on one line, and name the rows without a target token."""
    lines = []
    for name, examples in vars(splits).items():
        if examples is None:
            lines.append(f"{name}: off")
            continue
        facts = [
            f"{name}: {_count(examples)} of {ROW_TYPE_NAMES[examples.row_type]}",
            counted(int(examples.lengths.sum()), "token"),
            counted(int(examples.num_targets.sum()), "target token"),
            f"longest row {counted(int(examples.lengths.max()), 'token')}",
            f"{counted(int(examples.is_truncated.sum()), 'row')} truncated",
        ]
        lines.append(", ".join(facts))
        if empty := (examples.num_targets == 0).nonzero()[:, 0].tolist():
            named = name_some(examples.source(index) for index in empty)
            lines.append(f"{name}: {counted(len(empty), 'row')} without a target token after truncation: {named}")
    return lines


def encode_rows(
    examples: Examples, tokens: AnswerTokens, section: DataSection, fallbacks: Fallbacks, writer: RowWriter
) -> RowFacts:
    """Encode all rows of a source, in this process or in several. The bytes are the same.

    The rows are read twice and are not kept in memory. All rows are checked before the first one is encoded, so that a
    row that cannot be used is reported early.

    Raises:
        DataError: a row cannot be used, or none has a target token.
        OSError: the disk refused a row.
    """
    scan = _look_through(examples, tokens.template, section.train_on)
    facts = scan.facts
    train_on: TrainOn = "last" if section.train_on == "last" else "all"
    num_processes = choose_processes(scan.num_to_encode, scan.characters, section.num_processes)

    def batches() -> Iterator[list[Example]]:
        alike = (as_messages(example) if facts.row_type == "messages" else example for example in examples)
        batch, num_characters = list[Example](), 0
        for row in (row for example in alike for row in _to_encode(example, section.train_on)):
            batch.append(row)
            num_characters += sum(map(len, row.contents)) * (1 + len(row.learnt))
            if len(batch) == ROWS_AT_ONCE or num_characters > CHARACTERS_AT_ONCE:
                yield batch
                batch, num_characters = [], 0
        if batch:
            yield batch

    def write(encoded: Iterable[Encoded]) -> RowProblems:
        problems = RowProblems(drops=examples.drops)
        _write_rows(encoded, writer, tokens.template, section.max_length, problems)
        problems.raise_if_any(examples.label, scan.num_rows)
        return problems

    if num_processes > 1:
        from finetune.data.parallel import WorkerLostError, encode_in_processes  # only large data needs them

        try:
            with encode_in_processes(tokens, train_on, num_processes) as encode:
                problems = write(encode(batches()))
        except WorkerLostError as error:
            wanted, used = f"{num_processes} processes that encode {examples.label}", "this process alone"
            fallbacks.take(Fallback(what="data.num_processes", wanted=wanted, used=used, why=str(error)))
            num_processes = 1
            writer.restart()
    if num_processes == 1:
        problems = write((batch, encode_batch(batch, tokens, train_on)) for batch in batches())
    if not any(writer.num_targets):
        raise DataError(
            f"{examples.label}: none of its {scan.num_rows:,} rows has a target token within "
            f"data.max_length={section.max_length}; the longest row has {max(writer.full_lengths)} tokens. Raise "
            "data.max_length, or shorten the rows."
        )
    return facts._replace(read_as=facts.read_as + problems.describe(), num_dropped=facts.num_dropped + problems.count)


def choose_processes(num_rows: int, characters: int, requested: int | None) -> int:
    """Return the number of encoding processes: as many as wanted; otherwise one, or one per core if it pays."""
    num_batches = max(ceil_div(num_rows, ROWS_AT_ONCE), characters // CHARACTERS_AT_ONCE)
    if requested is not None:
        return min(requested, num_batches)
    if num_batches < 2 or num_cores() < 2 or characters < PAYS_FROM_CHARACTERS:
        return 1
    return min(int(num_cores()), num_batches, MOST_PROCESSES)


class _Seen(NamedTuple):
    """What the first pass over the rows of a source found out."""

    num_rows: int
    num_to_encode: int
    characters: int
    facts: RowFacts


def _look_through(examples: Examples, template: ChatTemplate, train_on: str) -> _Seen:
    """Read and check all rows of a source."""
    types: set[RowType] = set()
    num_rows = num_to_encode = characters = 0
    ignored: dict[str, tuple[int, int]] = {}
    for example in examples:
        types.add(example.row_type)
        num_rows += 1
        for row in _to_encode(example, train_on):
            num_to_encode += 1
            characters += sum(map(len, row.contents))
        if example.row_type == "messages":
            for key in template.ignored(Dialogue(example.messages, example.learnt, example.tools)):
                count, first = ignored.get(describe_key(key), (0, example.number))
                ignored[describe_key(key)] = count + 1, first
    keys = [(key, *where) for key, where in sorted(ignored.items())]
    row_type = "messages" if "messages" in types else types.pop()
    facts = RowFacts(row_type, examples.read_as, keys, examples.unread, examples.num_dropped)
    return _Seen(num_rows, num_to_encode, characters, facts)


def _to_encode(row: Example, train_on: str) -> Iterable[Example]:
    """Return the rows to encode. For `each_turn`, one row for each answer: the conversation up to that answer."""
    if train_on != "each_turn" or row.row_type != "messages":
        return (row,)
    return (row._replace(messages=row.messages[: answer + 1], learnt=(answer,)) for answer in row.learnt)


def _encode_source(
    source: Examples, tokens: AnswerTokens, tokenizer_digest: str, section: DataSection, fallbacks: Fallbacks
) -> EncodedExamples:
    """Encode all rows of a source, or read them from the cache."""
    key = encoding_key(source, tokenizer_digest, section)

    def encode(writer: RowWriter) -> RowFacts:
        facts = encode_rows(source, tokens, section, fallbacks, writer)
        if encoding_key(source, tokenizer_digest, section) != key:  # the key of other rows would get these
            raise DataError(f"{source.label} has changed while it was read. Start again once nothing writes to it.")
        return facts

    rows = load_or_encode(local_path(section.cache_dir), key, encode, fallbacks, source.label)
    if unread := rows.facts.unread:
        from finetune.data.column_advice import fallbacks_of_unread

        for fallback in fallbacks_of_unread(unread, source):
            fallbacks.take(fallback)
    return EncodedExamples.of(rows, tokens.end_id_of(rows.facts.row_type), source.source.place)


def _part_of(parts: Sequence[Examples], encoded: Sequence[Mapping[Examples, EncodedExamples]]) -> Part:
    """Return the rows that a split has from a source, given the source and its encoded rows for each side."""
    sides = []
    for part, rows in zip(parts, encoded, strict=True):
        whole = rows[part.whole]
        sides.append(whole if part.choose is None else whole.select_examples(part.choose(whole.digests_of_examples())))
    return Part(tuple(sides), parts[0].label, parts[0].weight, parts[0].name, parts[0].reads == "prompts")


def _write_rows(
    batches: Iterable[Encoded], writer: RowWriter, template: ChatTemplate, max_length: int, problems: RowProblems
) -> None:
    """Write the rows that could be encoded, and note the problems of the others."""
    last_problem = -1  # the answers of a conversation count as one row
    for batch, encoded in batches:
        for example, row in zip(batch, encoded, strict=True):
            if not isinstance(row, BadRowError):
                row = row._replace(oddities=_find_oddities(example, template))
                writer.add(example.number, row, max_length=max_length, is_good=example.is_good, digest=example.digest)
                continue
            if example.number != last_problem:
                problems.add(example.source, str(row))
            last_problem = example.number
        report_progress(f"{len(writer.num_targets):,} encoded")


def _find_oddities(example: Example, template: ChatTemplate) -> tuple[bool, bool]:
    """Return whether a row has each of `ODDITIES`."""
    turns, are_reordered = as_messages(example).messages, False
    questions = [turn["content"] for turn in turns if turn["role"] == "user"]
    if any("tool_call_id" in turn for turn in turns):
        from finetune.data.result_order import are_results_reordered

        are_reordered = are_results_reordered(turns, template)
    return any(not question.strip() for question in questions), are_reordered


def _mix(split: str, parts: Sequence[Part], seed: int) -> list[EncodedExamples]:
    """Join the sources of a split, with each row repeated according to the weight of its source; for each side."""
    chosen = []
    for part in parts:
        rows = part.epoch(seed)
        chosen.append([side.select_examples(rows) for side in part.sides])
        if split == "train" and (len(parts) > 1 or part.weight != 1):
            _log.info(
                "%s: %s an epoch from the %s of %s (weight %g)",
                *(split, counted(len(rows), "row"), f"{part.examples.num_examples:,}", part.label, part.weight),
            )
    return [EncodedExamples.joined(sides, [part.name for part in parts]) for sides in zip(*chosen, strict=True)]


def _count(examples: EncodedExamples) -> str:
    if not examples.has_branches:
        return counted(len(examples), "row")
    rows, answers = counted(examples.num_examples, "row"), counted(len(examples), "answer")
    return f"{rows} with {answers}, each with the turns before it,"
