"""Turn token ids into readable text without control sequences for the terminal."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from finetune import terminal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SIGNS = {"\n": "↵\n", "\t": "⇥", "↵": "<U+21B5>", "⇥": "<U+21E5>"}
_LOOKS_LIKE_A_SIGN = re.compile(r"<(?=U\+[0-9A-F]{4,6}>)")
_LOOKS_SPECIAL = re.compile(r"<\|[^\s|<>]{1,32}\|>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>")
_UNREADABLE = "\N{REPLACEMENT CHARACTER}"
MOST_TOKENS_OF_A_CHARACTER = 4
"""A character has at most so many bytes in UTF-8."""


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
