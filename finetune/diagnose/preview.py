"""`finetune preview`: show the rows of a run as its model will see them, encoded as training encodes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from finetune.config.schema import Config, name_files
from finetune.data import row_checks
from finetune.data.chat_template import ChatTemplate
from finetune.data.encoded import EncodedExamples
from finetune.data.preferences import EncodedLabelled, EncodedPairs
from finetune.data.templates import AnswerTokens
from finetune.data.turns import dialogue_of, text_turn
from finetune.diagnose.preview_splits import (
    NamedRows,
    Piece,
    RowLocation,
    SplitSummary,
    join_alike,
    location,
    on_one_line,
    read_pieces,
    special_looking_text,
    summarize_split,
)
from finetune.errors import ConfigError, DataError
from finetune.fallbacks import Fallback, Fallbacks
from finetune.findings import Finding, exit_code, ok, problem, warning, what_and_fix
from finetune.model.base import max_context, read_model_config
from finetune.model.new_tokens import ids_of_new_tokens
from finetune.model.tokens import build_run_tokenizer
from finetune.runs.durable import disk_failures_end_the_run, replacing
from finetune.training.checks import check_inputs
from finetune.training.objective import encode_for_objective
from finetune.units import counted

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from finetune.diagnose.preview_splits import Rows
    from finetune.training.objective import AnySplits

SCHEMA_VERSION = 2
"""The version of the JSON form, which docs/preview.md describes."""
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
SplitName = Literal["train", "validation", "test"]
Side = Literal["chosen", "rejected"]

_MADE_UP = (
    "what follows the prompt is made up to show which tokens of a conversation carry loss: no model answered, and no "
    "tool or environment was called"
)
_MOST_NAMED = 3
ROWS_OF_A_BLOCK = 512
"""Rows that are read, rendered and written before the next ones are."""


@dataclass(frozen=True, kw_only=True)
class PreviewedRow:
    """One row, token by token. For a pair of answers: one side, with its prompt."""

    split: SplitName
    location: RowLocation
    side: Side | None
    """None if the row is not a pair."""
    answer: tuple[int, int] | None
    """With `data.train_on=each_turn`: the number of an answer in its conversation, from 1, and how many there are."""
    num_shared: int
    """Tokens that both sides of a pair begin with; 0 if the row is not a pair."""
    pieces: list[Piece]
    num_tokens: int
    num_targets: int
    is_truncated: bool
    notes: list[str]
    """Remarks, as sentences without a full stop."""
    made_up: list[Piece] = field(default_factory=list)
    """With tools or an environment: a made-up conversation that follows the prompt."""

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values."""
        return {
            "split": self.split,
            **asdict(self.location),
            "side": self.side,
            "answer": None if self.answer is None else self.answer[0],
            "answers": None if self.answer is None else self.answer[1],
            "shared_tokens": None if self.side is None else self.num_shared,
            "tokens": self.num_tokens,
            "target_tokens": self.num_targets,
            "is_truncated": self.is_truncated,
            "notes": self.notes,
            **_tokens_as_record(self.pieces),
            "made_up": _tokens_as_record(self.made_up) if self.made_up else None,
        }

    def own_pieces(self) -> list[Piece]:
        """Return the pieces to show. A rejected side is shown without the prompt, as the chosen side shows it."""
        if self.side != "rejected":
            return self.pieces
        position = 0
        for first, piece in enumerate(self.pieces):
            position += len(piece.token_ids)
            if piece.carries_loss or position > self.num_shared:
                return self.pieces[first:]
        return []


def _tokens_as_record(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Convert to plain values. The three lists of tokens are parallel."""
    every = [(token_id, piece) for piece in pieces for token_id in piece.token_ids]
    return {
        "spans": [
            {"text": span.text, "loss": span.carries_loss, "special": span.is_special} for span in join_alike(pieces)
        ],
        "token_ids": [token_id for token_id, _ in every],
        "loss": [piece.carries_loss for _, piece in every],
        "special": [piece.is_special for _, piece in every],
    }


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The result of `finetune preview`. Names and locations in it are safe to print; the text of rows is not."""

    data: str
    read_as: list[str]
    """The format of the rows of each source, and the columns that are read and not read."""
    objective: str
    max_length: int
    tokenizer: str
    end_of_turn: tuple[int, str]
    has_chat_template: bool
    context: int | None
    """The most positions that the model supports, if its configuration says so."""
    splits: dict[SplitName, SplitSummary]
    """The splits that exist."""
    shown_split: SplitName
    rows: list[PreviewedRow]
    """A pair of answers is two entries: first the chosen side, then the rejected one."""
    findings: list[Finding] = field(default_factory=list)
    raw_digests: list[str] = field(default_factory=list)
    """The `digest_row` of each row of all splits."""

    def as_record(self, *, strict: bool) -> dict[str, Any]:
        """Convert to plain values for JSON, see docs/preview.md."""
        end_id, end_text = self.end_of_turn
        return {
            "version": SCHEMA_VERSION,
            "exit_code": exit_code(self.findings, strict=strict),
            "data": self.data,
            "read_as": self.read_as,
            "objective": self.objective,
            "max_length": self.max_length,
            "tokenizer": self.tokenizer,
            "end_of_turn": {"id": end_id, "text": end_text},
            "has_chat_template": self.has_chat_template,
            "context": self.context,
            "splits": {name: asdict(self.splits[name]) if name in self.splits else None for name in SPLITS},
            "rows": [row.as_record() for row in self.rows],
            "findings": [asdict(finding) for finding in self.findings],
        }


def preview_data(
    config: Config,
    *,
    split: SplitName = "train",
    num_rows: int = 3,
    rows: Sequence[int] = (),
    table: Path | None = None,
) -> Preview:
    """Encode the rows of a run as training does, and examine them.

    No weights are read, and nothing is written but the data cache. The configuration must be complete. The preview
    shows the first rows of a split, or the given ones, which are counted from 1. All rows of the split are written to
    the file `table`, see `write_table`.

    Raises:
        ConfigError: there is no such split or row.
        DataError: the rows cannot be used; training gives the same message.
        ModelError: the tokenizer or the model does not exist.
    """
    if table is not None:
        refuse_table(table)
    check_inputs(config, needs_weights=False)
    tokenizer = build_run_tokenizer(config)
    encoded, refusals = _encode(config, tokenizer)
    splits: dict[SplitName, Rows] = {
        name: of_split for name in SPLITS if (of_split := getattr(encoded, name)) is not None
    }
    if split not in splits:
        raise ConfigError(f"--split {split}: there is no such split. There are: {', '.join(splits)}.")
    shown = splits[split]
    if missing := [str(row) for row in rows if not 1 <= row <= len(shown)]:
        raise ConfigError(
            f"--row {', '.join(missing)}: the {split} split has the rows 1 to {len(shown)}. They are counted "
            "without empty lines; the file and line of a row are shown with it."
        )
    are_prompts = config.objective.generates_answers
    if table is not None:
        write_table(table, shown, tokenizer, are_prompts=are_prompts)
    summaries = {name: summarize_split(of_split, are_prompts=are_prompts) for name, of_split in splits.items()}
    indices = [row - 1 for row in rows] or range(min(num_rows, len(shown)))
    tokens = AnswerTokens(tokenizer)
    made_up, template_findings = _make_up(config, tokens)
    model = read_model_config(config.model)
    context = max_context(model)
    sources = [name_files(source["path"]) for source in config.data.mixture]
    read_as = dict.fromkeys(text for of_split in splits.values() for text in of_split.sides[0].read_as)
    return Preview(
        data=on_one_line(f"a mixture of {', '.join(sources)}" if sources else config.data.label),
        read_as=[on_one_line(text) for text in read_as],
        objective=config.training.objective,
        max_length=config.data.max_length,
        tokenizer=on_one_line(config.model.tokenizer or config.model.path or ""),
        end_of_turn=(tokens.end_id, str(tokenizer.convert_ids_to_tokens(tokens.end_id))),
        has_chat_template=tokenizer.chat_template is not None,
        context=context,
        splits=summaries,
        shown_split=split,
        rows=[
            replace(side, made_up=made_up, notes=[*side.notes, *([_MADE_UP] if made_up else [])])
            for index in indices
            for side in _read_row(split, shown, index, tokens, are_prompts)
        ],
        findings=[
            *refusals,
            *template_findings,
            *_judge_template(splits, tokenizer),
            *_judge_fit(splits, context, _rows_of_embedding(config, model, tokenizer), tokenizer),
            *_judge_duplicates(summaries),
            *(_judge_prompts(config, splits, refusals) if are_prompts else _judge_targets(summaries)),
            *_mention_rows_on_top(config, encoded, tokenizer),
        ],
        raw_digests=[digest for of_split in splits.values() for digest in of_split.sides[0].raw_digests()],
    )


def refuse_table(table: Path) -> None:
    """Raise ConfigError for a file that exists already, or whose ending is neither .parquet nor .csv."""
    if table.suffix not in (".parquet", ".csv"):
        raise ConfigError(f"--table is {table}, which ends in neither .parquet nor .csv. Choose one of them.")
    if table.exists() or table.is_symlink():
        raise ConfigError(f"--table is {table}, which exists already. Choose another name: nothing is overwritten.")


def write_table(table: Path, rows: Rows, tokenizer: PreTrainedTokenizerBase, *, are_prompts: bool) -> None:
    """Write the rows of a split as Parquet or CSV, by the ending. A pair of answers is two lines, one for each side.

    Raises:
        ConfigError: see `refuse_table`.
        RunFailedError: the disk refused.
    """
    import pyarrow
    from pyarrow.csv import CSVWriter
    from pyarrow.parquet import ParquetWriter

    is_csv = table.suffix == ".csv"
    as_cell = json.dumps if is_csv else list
    names, file_of, line = rows.sides[0].files()

    def read(index: int) -> Iterator[dict[str, Any]]:
        for side, examples in zip(_names_of_sides(rows), rows.sides, strict=True):
            ids, is_target = examples[index]
            loss = (is_target & (not are_prompts)).int().tolist()
            row = {"source": names[int(file_of[index])], "line": int(line[index])}
            row |= {} if side is None else {"side": side}
            row |= {} if (is_good := _label(rows, index)) is None else {"is_good": is_good}
            text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            yield {**row, "input_ids": as_cell(ids.tolist()), "loss_mask": as_cell(loss), "text": text}

    refuse_table(table)  # another program may have written it meanwhile
    with disk_failures_end_the_run("Writing", table, then="run the command again"), replacing(table) as file:
        schema = pyarrow.Table.from_pylist([*read(0)]).schema
        with (CSVWriter if is_csv else ParquetWriter)(file, schema) as writer:
            for first in range(0, len(rows), ROWS_OF_A_BLOCK):
                block = [row for index in range(first, min(len(rows), first + ROWS_OF_A_BLOCK)) for row in read(index)]
                writer.write(pyarrow.Table.from_pylist(block, schema))


def _names_of_sides(rows: Rows) -> tuple[Side | None, ...]:
    return ("chosen", "rejected") if isinstance(rows, EncodedPairs) else (None,)


def _label(rows: Rows, index: int) -> bool | None:
    """Return whether a labelled row is good; None for a row without a label."""
    return bool(rows.is_good[index]) if isinstance(rows, EncodedLabelled) else None


def _encode(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[AnySplits, list[Finding]]:
    """Encode the rows of a run. If the checks refuse them, encode all rows, and report the reasons as findings."""

    fallbacks = Fallbacks(strict=config.strict)

    def encode(is_checked: bool) -> AnySplits:
        return encode_for_objective(config, tokenizer, fallbacks=fallbacks, is_checked=is_checked)

    refused: list[str] = []
    with _collected_messages(logging.getLogger(row_checks.__name__)) as warnings:
        try:
            passed = encode(is_checked=True)
        except DataError as error:
            passed = encode(is_checked=False)  # raises for rows that cannot be encoded at all, as in training
            first, *others = str(error).split("\n  ")
            refused = others or [first]
    findings = [problem("Data", *what_and_fix(on_one_line(text), page="docs/data.md")) for text in refused]
    unique = dict.fromkeys(warnings)
    findings += [warning("Data", *what_and_fix(on_one_line(text), page="docs/data.md")) for text in unique]
    findings += map(_taken, dict.fromkeys(fallbacks))
    return passed, findings


def _taken(fallback: Fallback) -> Finding:
    what = f"{fallback.what}: wanted {fallback.wanted}, using {fallback.used}"
    return warning("Data", on_one_line(what), on_one_line(fallback.why))


def _make_up(config: Config, tokens: AnswerTokens) -> tuple[list[Piece], list[Finding]]:
    """Make up a conversation with the tools and the environment of a run. Report a template that does not allow it."""
    if not (config.objective.generates_answers and (config.rollout.tools or config.rollout.environment)):
        return [], []
    from finetune.training.rewards.conversations import ToolUse, is_generated
    from finetune.training.rewards.tools import offered_tools

    try:
        use = ToolUse(config, tokens.tokenizer, offered_tools(config))
    except ConfigError as error:
        return [], [problem("Data", *what_and_fix(on_one_line(str(error)), page="docs/tasks/tools.md"))]
    example = use.example()
    pieces = read_pieces(tokens.tokenizer, example.ids, is_generated(example.lengths), tokens.special_ids)
    return pieces, [] if use.fallback is None else [_taken(use.fallback)]


@contextmanager
def _collected_messages(logger: logging.Logger) -> Iterator[list[str]]:
    """Collect the messages that a logger gets inside the block. No handler sees them."""
    messages: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return False

    logger.addFilter(collect)
    try:
        yield messages
    finally:
        logger.removeFilter(collect)


def _read_row(
    split: SplitName, rows: Rows, index: int, tokens: AnswerTokens, are_prompts: bool
) -> Iterator[PreviewedRow]:
    """Yield the sides of the row with this index, counted from 0: two if the row is a pair, else one.

    Of a prompt, only the tokens from which generation starts are shown.
    """
    answer = None
    if isinstance(rows, EncodedExamples) and rows.has_branches:
        of_example = rows.rows_of_examples[int(rows.example_of[index])]
        answer = (index - of_example.start + 1, len(of_example))
    for name, examples in zip(_names_of_sides(rows), rows.sides, strict=True):
        ids, is_target = examples[index]
        notes = []
        if are_prompts and bool(is_target.any()):
            asked = examples.prompt_and_answer(index)
            ids, is_target = torch.tensor(asked.prompt), torch.zeros(len(asked.prompt), dtype=torch.bool)
            expected = str(tokens.tokenizer.decode(asked.answer))
            notes += [f"expected answer: {expected}"] if expected.strip() else []
        pieces = read_pieces(tokens.tokenizer, ids.tolist(), is_target.tolist(), tokens.special_ids)
        if bool(examples.is_truncated[index]):
            notes.append(f"cut at data.max_length from {int(examples.full_lengths[index]):,} tokens")
        if not bool(is_target.any()) and not are_prompts:
            notes.append("no token carries loss: nothing is learned from it")
        if (is_good := _label(rows, index)) is not None:
            notes.append(f"labelled as a {'good' if is_good else 'bad'} answer")
        for text in special_looking_text(pieces):
            notes.append(f"{text} is ordinary text here, not a special token of this tokenizer")
        yield PreviewedRow(
            split=split,
            location=location(rows, index),
            side=name,
            answer=answer,
            num_shared=rows.num_shared(index) if isinstance(rows, EncodedPairs) else 0,
            pieces=pieces,
            num_tokens=len(ids),
            num_targets=int(is_target.sum()),
            is_truncated=bool(examples.is_truncated[index]),
            notes=notes,
        )


def _describe_group(group: NamedRows) -> str:
    """Name the rows of a group: ``row 7 (orders/train.jsonl:7), row 9 (orders/train.jsonl:9) and 3 more``."""
    named = ", ".join(f"row {place.row} ({place.source})" for place in group.first[:_MOST_NAMED])
    more = group.count - min(len(group.first), _MOST_NAMED)
    return f"{named} and {more:,} more" if more else named


def _mention_rows_on_top(config: Config, splits: Any, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Say how many rows `data.keep` adds. The base has not generated them yet."""
    if config.data.keep is not None:
        from finetune.training.keeping import assumed_rows, describe_rows_on_top

        yield ok("Data", describe_rows_on_top(config, assumed_rows(config, tokenizer, len(splits.train))))


def _rows_of_embedding(config: Config, model: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the rows of the model's embedding in training, where `lora.new_tokens` may add some; None if unknown."""
    num_rows: int | None = getattr(model, "vocab_size", None)
    ids = ids_of_new_tokens(tokenizer, config.lora) if config.training.method == "lora" else []
    return max(num_rows, ids[-1] + 1) if num_rows is not None and ids else num_rows


def _judge_fit(
    splits: dict[SplitName, Rows], context: int | None, num_rows: int | None, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Finding]:
    """Find rows on which the model would fail, perhaps only after hours of training.

    `context` is the number of the model's positions, and `num_rows` that of the rows of its embedding, if known.
    """
    for name, rows in splits.items():
        longest = int(rows.lengths.max())
        largest = max(int(ids.max()) for side in rows.sides for ids, _ in side.pieces())
        if context is not None and longest > context:
            message = f"{name}: the longest row has {longest:,} tokens, but the model's context ends at {context:,}"
            yield problem("Data", message, f"data.max_length={context}")
        if num_rows is not None and largest >= num_rows:
            token = on_one_line(str(tokenizer.convert_ids_to_tokens(largest)))
            message = f"{name}: the token {token} has the id {largest}, but the model has {num_rows:,} embeddings"
            yield problem("Data", message, "use the model's own tokenizer (model.tokenizer)")


def _judge_template(splits: dict[SplitName, Rows], tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Find a chat template without a generation prompt: the model would have to write the header of its answers."""
    is_chat = tokenizer.chat_template is not None and any(rows.row_type != "text" for rows in splits.values())
    header = unopened_header(ChatTemplate(tokenizer)) if is_chat else ""
    if header:
        shown = on_one_line(header)
        message = f"the chat template has no generation prompt: {shown} carries loss, and no prompt will end with it"
        fix = "give a template that renders it if add_generation_prompt is true (data.chat_template)"
        yield problem("Data", message, fix)


def unopened_header(template: ChatTemplate) -> str:
    """Return the header of an answer if no generation prompt opens it, so that the model must write it; else ''."""
    question = (text_turn("user", "probe-1"),)
    answered = (*question, text_turn("assistant", "probe-2"))
    prompt, closed, conversation = (
        template.render([dialogue_of(turns)], with_prompt=with_prompt)[0]
        for turns, with_prompt in ((question, True), (question, False), (answered, False))
    )
    if not (isinstance(prompt, str) and isinstance(closed, str) and isinstance(conversation, str)):
        return ""
    if not (closed.startswith(prompt) and conversation.startswith(prompt)):
        return ""
    header, separator, _ = conversation.removeprefix(prompt).partition("probe-2")
    return header.strip() if separator else ""


def _judge_targets(splits: dict[SplitName, SplitSummary]) -> Iterator[Finding]:
    """Find files of which the chat template trains nothing, or everything."""
    for name, split in splits.items():
        for counts in split.files:
            if text := row_checks.learns_nothing_or_everything(counts):
                yield warning("Data", f"{name}: {on_one_line(text)}", "set another template (data.chat_template)")


def _judge_prompts(config: Config, splits: dict[SplitName, Rows], found: Sequence[Finding]) -> Iterator[Finding]:
    """Find rows that a run refuses because their prompt is not whole. `found`: the checks of rows may name them."""
    from finetune.training.rewards.prompt_rows import cut_prompts, validation_sample

    if any(each.level == "problem" for each in found):
        return
    for name, rows in splits.items():
        if name == "test" or not isinstance(rows, EncodedExamples):
            continue
        if text := cut_prompts(rows if name == "train" else validation_sample(config, rows)):
            what, fix = what_and_fix(text, page="docs/tasks/rewards.md")
            yield problem("Data", f"{name}: {on_one_line(what)}", fix)


def _judge_duplicates(splits: dict[SplitName, SplitSummary]) -> Iterator[Finding]:
    """Find equal rows. No check refuses them: they may be intended, and a mixture may repeat a row."""
    for name, split in splits.items():
        if split.duplicates.count:
            share = split.duplicates.count / split.rows
            verb = "repeats" if split.duplicates.count == 1 else "repeat"
            message = (
                f"{name}: {counted(split.duplicates.count, 'row')} ({share:.1%}) {verb} an earlier row of the split"
            )
            where = f"token for token: {_describe_group(split.duplicates)}"
            yield warning("Data", f"{message}, {where}", "remove them, unless they are meant")
