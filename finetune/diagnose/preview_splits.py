"""Summarize the encoded rows of a split (lengths, tokens with loss, duplicates), and show tokens as readable text."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from finetune import terminal

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from finetune.data.encoded import EncodedExamples
    from finetune.data.preferences import EncodedLabelled, EncodedPairs

    Rows: TypeAlias = EncodedExamples | EncodedPairs | EncodedLabelled
    """The rows of a split. A pair of answers has two sides, every other row has one."""

_MOST_NAMED = 20
_MOST_BINS = 12
_SIGNS = {"\n": "↵\n", "\t": "⇥", "↵": "<U+21B5>", "⇥": "<U+21E5>"}
_LOOKS_LIKE_A_SIGN = re.compile(r"<(?=U\+[0-9A-F]{4,6}>)")
_LOOKS_SPECIAL = re.compile(r"<\|[^\s|<>]{1,32}\|>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>")
_UNREADABLE = "\N{REPLACEMENT CHARACTER}"
MOST_TOKENS_OF_A_CHARACTER = 4
"""A character has at most so many bytes in UTF-8."""


@dataclass(frozen=True)
class RowLocation:
    """One row and where it was read."""

    row: int
    """Its number in its split, counted from 1."""
    source: str
    """For example `orders/train.jsonl:17`. Safe to print on a terminal."""


@dataclass(frozen=True, kw_only=True)
class NamedRows:
    """The number of rows that have something in common, and the first 20 of them."""

    count: int
    first: list[RowLocation]

    @classmethod
    def of(cls, rows: Rows, indices: Sequence[int]) -> NamedRows:
        """Return the group of the rows with these indices, counted from 0."""
        return cls(count=len(indices), first=[location(rows, row) for row in indices[:_MOST_NAMED]])


@dataclass(frozen=True)
class Bin:
    """A bar of the histogram: the rows with `shortest` to `longest` tokens, both included."""

    shortest: int
    longest: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """The counts and lengths of a split as the model will see it."""

    kind: str
    """The format of its rows: messages, prompt_completion, text, several, or preference for pairs of answers."""
    rows: int
    tokens: int
    """A pair counts with both sides."""
    target_tokens: int
    target_share: float
    shortest: int
    """The length of a pair is the length of its longer side."""
    median: int
    percentile_99: int
    longest: int
    histogram: list[Bin]
    truncated: NamedRows
    """Rows that data.max_length cuts."""
    duplicates: NamedRows
    """Rows that repeat an earlier row of the split, token for token. A row that a mixture repeats does not count."""
    files: list[dict[str, Any]]
    """The result of `count_by_file`."""


def summarize_split(rows: Rows, *, are_prompts: bool = False) -> SplitSummary:
    """Summarize a split of at least one row. No token of a prompt carries loss."""
    ordered = rows.lengths.sort().values
    num_tokens = sum(int(side.lengths.sum()) for side in rows.sides)
    num_targets = 0 if are_prompts else sum(int(side.num_targets.sum()) for side in rows.sides)
    # It imports torch, which waits until the configuration is checked.
    from finetune.data.row_checks import count_by_file, keys_of_rows, repeated_rows

    repeated = repeated_rows(rows, keys_of_rows([side.digest_rows() for side in rows.sides]))
    is_truncated = reduce(or_, (side.is_truncated for side in rows.sides))
    return SplitSummary(
        kind=rows.row_type,
        rows=len(rows),
        tokens=num_tokens,
        target_tokens=num_targets,
        target_share=num_targets / num_tokens if num_tokens else 0.0,
        shortest=int(ordered[0]),
        median=_percentile(ordered, 0.5),
        percentile_99=_percentile(ordered, 0.99),
        longest=int(ordered[-1]),
        histogram=histogram(rows.lengths),
        truncated=NamedRows.of(rows, is_truncated.nonzero()[:, 0].tolist()),
        duplicates=NamedRows.of(rows, repeated),
        files=count_by_file(rows, repeated, are_prompts=are_prompts),
    )


def location(rows: Rows, row: int) -> RowLocation:
    """Return the place from which a row was read, given its index from 0."""
    return RowLocation(row + 1, on_one_line(rows.sides[0].source(row)))


def histogram(lengths: torch.Tensor) -> list[Bin]:
    """Count rows by length, in at most a dozen bins of equal, round width, from the shortest row to the longest.

    Args:
        lengths: int64, shape (rows,), at least one.
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = _round_width(longest - shortest + 1)
    first = shortest // width
    counts = (lengths // width - first).bincount().tolist()
    return [Bin((first + index) * width, (first + index + 1) * width - 1, rows) for index, rows in enumerate(counts)]


def _round_width(span: int) -> int:
    """Return the smallest 1, 2 or 5 times a power of ten that divides a span into few enough bins."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if math.ceil(span / (factor * power)) < _MOST_BINS:
                return factor * power
        power *= 10


def _percentile(ordered: torch.Tensor, fraction: float) -> int:
    """Return the smallest length that this fraction of the rows does not exceed."""
    return int(ordered[max(0, math.ceil(fraction * len(ordered)) - 1)])


class Piece(NamedTuple):
    """A token with its text. If tokens split a character, they form one piece."""

    token_ids: list[int]
    text: str
    """As decoded by the tokenizer, with control characters."""
    carries_loss: bool
    is_special: bool
    """It is a special token, not ordinary text."""


class Span(NamedTuple):
    """A part of a row that looks the same: with loss or without, special tokens or text."""

    text: str
    carries_loss: bool
    is_special: bool


def join_alike(pieces: Iterable[Piece]) -> list[Span]:
    """Join neighbouring pieces of one look."""
    groups = groupby(pieces, key=lambda piece: (piece.carries_loss, piece.is_special))
    return [Span("".join(piece.text for piece in alike), *look) for look, alike in groups]


def visible_token(text: str) -> str:
    """Make every character visible, so that none steers a terminal.

    A line break becomes a sign and a line break. Characters that cannot be printed (control characters, invisible and
    direction-changing ones, all spaces but the plain one) are shown as ``<U+001B>``. Text that already looks like
    that is escaped, so that two texts never look alike.
    """
    escaped = _LOOKS_LIKE_A_SIGN.sub("<U+003C>", text)
    return "".join(_SIGNS.get(c) or terminal.visible(c, also_unseen=True) for c in escaped)


def on_one_line(text: str) -> str:
    """Make every character of a name or path visible, without line breaks."""
    return visible_token(text).replace("\n", "")


def read_pieces(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    carries_loss: Sequence[bool],
    special_ids: Collection[int],
) -> list[Piece]:
    """Decode the tokens of a row piece by piece, with a fast tokenizer."""
    pieces: list[Piece] = []
    start = 0
    while start < len(token_ids):
        is_special = token_ids[start] in special_ids
        if is_special:
            num_tokens, text = 1, _name(tokenizer, token_ids[start])
        else:
            stop = start + 1  # the end of the tokens that may belong to one piece
            last = min(len(token_ids), start + MOST_TOKENS_OF_A_CHARACTER)
            while stop < last and token_ids[stop] not in special_ids and carries_loss[stop] == carries_loss[start]:
                stop += 1
            before = pieces[-1].token_ids if pieces else []
            num_tokens, text = _whole_characters(tokenizer, before, token_ids[start:stop])
        ids = list(token_ids[start : start + num_tokens])
        pieces.append(Piece(ids, text, bool(carries_loss[start]), is_special))
        start += num_tokens
    return pieces


def special_looking_text(pieces: Sequence[Piece]) -> list[str]:
    """Find text that looks like a special token but was read as ordinary text, in the order of its first appearance."""
    written = "".join("\0" if piece.is_special else piece.text for piece in pieces)
    return list(dict.fromkeys(_LOOKS_SPECIAL.findall(written)))


def _whole_characters(
    tokenizer: PreTrainedTokenizerBase, before: list[int], token_ids: Sequence[int]
) -> tuple[int, str]:
    """Count the tokens that make whole characters, and decode them."""
    first = _text_behind(tokenizer, before, token_ids[:1])
    if not first.endswith(_UNREADABLE):
        return 1, first or _name(tokenizer, token_ids[0])
    for number in range(2, len(token_ids) + 1):
        text = _text_behind(tokenizer, before, token_ids[:number])
        if _UNREADABLE not in text:
            return number, text
    return 1, first  # a byte that belongs to no character


def _text_behind(tokenizer: PreTrainedTokenizerBase, before: list[int], token_ids: Sequence[int]) -> str:
    """Return the text that the tokens add to those before: some decoders drop a space at the beginning of a text."""
    context = _decode(tokenizer, before)
    both = _decode(tokenizer, [*before, *token_ids])
    return both[len(context) :] if both.startswith(context) else _decode(tokenizer, token_ids)


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=False)
    return text


def _name(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    name = tokenizer.convert_ids_to_tokens(token_id)
    return str(name) if name else f"<id {token_id}>"
