"""`finetune preview`: the rows of a run as its model will see them, by the very path that training encodes them on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from finetune.data import gates
from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedExamples, EncodedSplits
from finetune.data.examples import load_examples
from finetune.data.templates import AnswerTokens
from finetune.diagnose.preview_splits import (
    RowGroup,
    RowPlace,
    SplitSummary,
    place,
    row_digests,
    summarize,
)
from finetune.diagnose.preview_tokens import Piece, on_one_line, read_pieces, special_looking_text
from finetune.errors import ConfigError, DataError
from finetune.fallbacks import Fallbacks
from finetune.findings import Finding, exit_code, problem, warning
from finetune.model.base import read_model_config
from finetune.model.new_tokens import build_run_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from finetune.config.schema import Config, DataSection

SCHEMA_VERSION = 1
"""Of the JSON form; docs/preview.md describes it."""
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
SplitName = Literal["train", "validation", "test"]

_NAMED_IN_WORDS = 3


@dataclass(frozen=True, kw_only=True)
class PreviewedRow:
    """One row, token by token."""

    split: SplitName
    place: RowPlace
    pieces: list[Piece]
    num_tokens: int
    num_targets: int
    is_truncated: bool
    same_as: RowGroup
    """The other rows of the split that are equal to it."""
    notes: list[str]
    """What is worth knowing of it, as sentences without a full stop."""

    def as_record(self) -> dict[str, Any]:
        """As plain values. The three lists of tokens are parallel."""
        every = [(token_id, piece) for piece in self.pieces for token_id in piece.token_ids]
        return {
            "split": self.split,
            **asdict(self.place),
            "tokens": self.num_tokens,
            "target_tokens": self.num_targets,
            "is_truncated": self.is_truncated,
            "same_as": asdict(self.same_as),
            "notes": self.notes,
            "spans": [
                {"text": "".join(piece.text for piece in pieces), "loss": loss, "special": special}
                for (loss, special), pieces in _alike(self.pieces)
            ],
            "token_ids": [token_id for token_id, _ in every],
            "loss": [piece.carries_loss for _, piece in every],
            "special": [piece.is_special for _, piece in every],
        }


@dataclass(frozen=True, kw_only=True)
class Preview:
    """All that `finetune preview` says. Names and places in it steer no terminal; the text of rows may."""

    data: str
    max_length: int
    tokenizer: str
    end_of_turn: tuple[int, str]
    has_chat_template: bool
    context: int | None
    """The most positions the model was made for, where its configuration says so."""
    splits: dict[SplitName, SplitSummary]
    """Those that there are."""
    shown_split: SplitName
    rows: list[PreviewedRow]
    findings: list[Finding] = field(default_factory=list)

    def as_record(self, *, strict: bool) -> dict[str, Any]:
        """As plain values for JSON, see docs/preview.md."""
        end_id, end_text = self.end_of_turn
        return {
            "version": SCHEMA_VERSION,
            "exit_code": exit_code(self.findings, strict=strict),
            "data": self.data,
            "max_length": self.max_length,
            "tokenizer": self.tokenizer,
            "end_of_turn": {"id": end_id, "text": end_text},
            "has_chat_template": self.has_chat_template,
            "context": self.context,
            "splits": {name: asdict(self.splits[name]) if name in self.splits else None for name in SPLITS},
            "rows": [row.as_record() for row in self.rows],
            "findings": [asdict(finding) for finding in self.findings],
        }


def preview_data(config: Config, *, split: SplitName = "train", num_rows: int = 3, rows: Sequence[int] = ()) -> Preview:
    """Encode a run's rows as training does, and look at them. No weights are read; only the data cache is written.

    Args:
        config: a complete run.
        split: whose rows are shown.
        num_rows: show so many from the first on.
        rows: show these instead, counted from 1.

    Raises:
        ConfigError: there is no such split or row.
        DataError: rows cannot be used: what training would say.
        ModelError: there is no tokenizer, or no model of that name.
    """
    tokenizer = build_run_tokenizer(config)
    encoded, verdict = _encode(config, tokenizer)
    found = _splits(encoded)
    if split not in found:
        raise ConfigError(f"--split {split}: there is no such split. There are: {', '.join(found)}.")
    _refuse_missing_rows(rows, split, found[split])
    digests = {name: row_digests(examples) for name, examples in found.items()}
    summaries = {
        name: summarize(examples, digests[name], () if name == "train" else digests["train"])
        for name, examples in found.items()
    }
    wanted = [row - 1 for row in rows] or range(min(num_rows, len(found[split])))
    tokens = AnswerTokens(tokenizer)
    model = read_model_config(config.model)
    reader = _RowReader(split, found[split], digests[split], set(() if split == "train" else digests["train"]), tokens)
    shown = [reader.read(row) for row in wanted]
    return Preview(
        data=on_one_line(_data_in_words(config.data)),
        max_length=config.data.max_length,
        tokenizer=on_one_line(config.model.tokenizer or config.model.path or ""),
        end_of_turn=(tokens.end_id, str(tokenizer.convert_ids_to_tokens(tokens.end_id))),
        has_chat_template=tokenizer.chat_template is not None,
        context=getattr(model, "max_position_embeddings", None),
        splits=summaries,
        shown_split=split,
        rows=shown,
        findings=[*verdict, *_judge_fit(found, model, tokenizer), *_judge_duplicates(summaries)],
    )


def _encode(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[EncodedSplits, list[Finding]]:
    """The rows that a run trains and measures on, and what the gates say; where these refuse them, all rows."""
    fallbacks = Fallbacks(strict=config.strict)

    def encode(is_gated: bool) -> EncodedSplits:
        examples = load_examples(config.data)
        return encode_examples(examples, tokenizer, config.data, fallbacks=fallbacks, is_gated=is_gated)

    refused: list[str] = []
    with _heard(logging.getLogger(gates.__name__)) as warnings:
        try:
            passed = encode(is_gated=True)
        except DataError as error:
            passed = encode(is_gated=False)  # what cannot be encoded at all ends it here, as it would end training
            first, *others = str(error).split("\n  ")
            refused = others or [first]
    return passed, [
        *(problem("Data", *_what_and_fix(message)) for message in refused),
        *(warning("Data", *_what_and_fix(message)) for message in warnings),
    ]


@contextmanager
def _heard(logger: logging.Logger) -> Iterator[list[str]]:
    """The messages that a logger gets inside; they go nowhere else."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    listener, propagates = Listener(), logger.propagate
    logger.addHandler(listener)
    logger.propagate = False
    try:
        yield heard
    finally:
        logger.propagate = propagates
        logger.removeHandler(listener)


def _what_and_fix(message: str) -> tuple[str, str]:
    """A gate's message says what to do in its last sentence."""
    what, _, fix = on_one_line(message).rstrip(".").rpartition(". ")
    return (what, fix) if what else (fix, "see docs/data.md")


def _data_in_words(section: DataSection) -> str:
    sources = [str(source.get("path")) for source in section.mixture]
    return f"a mixture of {', '.join(sources)}" if sources else section.path or section.train or ""


def _splits(encoded: EncodedSplits) -> dict[SplitName, EncodedExamples]:
    return {name: examples for name in SPLITS if (examples := getattr(encoded, name)) is not None}


def _refuse_missing_rows(rows: Sequence[int], split: str, examples: EncodedExamples) -> None:
    missing = [str(row) for row in rows if not 1 <= row <= len(examples)]
    if missing:
        raise ConfigError(
            f"--row {', '.join(missing)}: the {split} split has the rows 1 to {len(examples)}. They are counted "
            "without empty lines; the place where a row was read is shown with it."
        )


class _RowReader:
    """Makes rows of one split readable."""

    def __init__(
        self,
        split: SplitName,
        examples: EncodedExamples,
        digests: Sequence[bytes],
        training: set[bytes],
        tokens: AnswerTokens,
    ) -> None:
        self._split = split
        self._examples = examples
        self._digests = digests
        self._training = training
        self._tokens = tokens
        self._is_answer_cut = gates.is_answer_truncated(examples)

    def read(self, row: int) -> PreviewedRow:
        """One row, given its index from 0."""
        ids, is_target = self._examples[row]
        pieces = read_pieces(self._tokens.tokenizer, ids.tolist(), is_target.tolist(), self._tokens.special_ids)
        digest = self._digests[row]
        same = [other for other, its in enumerate(self._digests) if its == digest and other != row]
        same_as = RowGroup(count=len(same), first=[place(self._examples, other) for other in same[:_NAMED_IN_WORDS]])
        return PreviewedRow(
            split=self._split,
            place=place(self._examples, row),
            pieces=pieces,
            num_tokens=len(ids),
            num_targets=int(is_target.sum()),
            is_truncated=bool(self._examples.is_truncated[row]),
            same_as=same_as,
            notes=list(self._notes(row, pieces, same_as)),
        )

    def _notes(self, row: int, pieces: Sequence[Piece], same_as: RowGroup) -> Iterator[str]:
        if bool(self._examples.is_truncated[row]):
            full = int(self._examples.rows.full_lengths[row])
            inside = ", inside of an answer: its end of turn is lost" if self._is_answer_cut[row] else ""
            yield f"cut at data.max_length from {full:,} tokens{inside}"
        if not any(piece.carries_loss for piece in pieces):
            yield "no token carries loss: nothing is learned from it"
        if same_as.count:
            yield f"the same, token for token, as {in_words(same_as)}"
        if self._digests[row] in self._training:
            yield "the training split has this row too"
        for text in special_looking_text(pieces):
            yield f"{text} is ordinary text here, no special token of this tokenizer"


def in_words(group: RowGroup) -> str:
    """``row 7 (orders/train.jsonl:7), row 9 (orders/train.jsonl:9) and 3 more``."""
    named = ", ".join(f"row {at.row} ({at.source})" for at in group.first[:_NAMED_IN_WORDS])
    more = group.count - min(len(group.first), _NAMED_IN_WORDS)
    return f"{named} and {more:,} more" if more else named


def _judge_fit(
    splits: dict[SplitName, EncodedExamples], model: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Finding]:
    """What the model itself would stumble over, hours later."""
    context = getattr(model, "max_position_embeddings", None)
    num_rows = getattr(model, "vocab_size", None)
    for name, examples in splits.items():
        longest, largest = int(examples.lengths.max()), int(examples.rows.token_ids.max())
        if context is not None and longest > context:
            what = f"{name}: the longest row has {longest:,} tokens, but the model's context ends at {context:,}"
            yield problem("Data", what, f"data.max_length={context}")
        if num_rows is not None and largest >= num_rows:
            token = on_one_line(str(tokenizer.convert_ids_to_tokens(largest)))
            what = f"{name}: the token {token} has the id {largest}, but the model has {num_rows:,} embeddings"
            yield problem("Data", what, "use the model's own tokenizer (model.tokenizer)")


def _judge_duplicates(splits: dict[SplitName, SplitSummary]) -> Iterator[Finding]:
    """Equal rows are no gate's business: some are meant, and an epoch may have a row of a mixture twice."""
    for name, split in splits.items():
        if split.duplicates.count:
            share = split.duplicates.count / split.rows
            what = (
                f"{name}: {split.duplicates.count:,} rows ({share:.1%}) repeat an earlier row of the split, token for "
            )
            yield warning("Data", f"{what}token: {in_words(split.duplicates)}", "remove them, unless they are meant")


def _alike(pieces: Sequence[Piece]) -> Iterator[tuple[tuple[bool, bool], Iterator[Piece]]]:
    """Runs of pieces that look alike."""
    return groupby(pieces, key=lambda piece: (piece.carries_loss, piece.is_special))
