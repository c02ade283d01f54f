"""Render conversations as text, tokenise it, and mark the tokens that a model must predict. Imports no torch.

A template is rendered once for the whole conversation. To find the start of an answer, the turns before it are rendered
with the generation prompt, and the whole text must begin with the result. The answer ends with the first end-of-turn
token from there on. No marker is searched for, and no token is taken for padding by its id.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from finetune.data.formats import BadRowError, Example, quote
from finetune.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

Conversation = Sequence[dict[str, str]]
TrainOn = Literal["all", "last"]
"""The answers of a conversation that carry loss."""

_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """A row as text, ready for the tokenizer."""

    text: str
    answer_starts: tuple[int, ...]
    """The character at which each answer starts. Empty for plain text: all tokens except the first are targets."""


class TokenisedRow(NamedTuple):
    """A row as tokens: ids, and for each a byte that is 1 if the model must predict it."""

    token_ids: list[int]
    is_target: bytearray


class AnswerTokens:
    """A tokenizer with its special tokens and its end of turn, found once.

    Args:
        tokenizer: a fast tokenizer, with or without a chat template.

    Raises:
        DataError: the tokenizer is not fast, or answers end with no special token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer {type(tokenizer).__name__} gives no character offsets, which are needed to find "
                "the answers. Use a fast one: a folder with tokenizer.json."
            )
        self.tokenizer = tokenizer
        self.special_ids = _special_ids(tokenizer)
        self.end_id = end_of_turn_id(tokenizer)
        texts = {str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in self.special_ids}
        longest_first = sorted(texts, key=lambda text: (-len(text), text))
        self._special_text = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def end_id_of(self, kind: str) -> int:
        """Return the id of the token that ends a row's answers, or a row of plain text."""
        eos_id = self.tokenizer.eos_token_id
        return int(eos_id) if kind == "text" and eos_id is not None else self.end_id

    def special_text_in(self, example: Example) -> BadRowError | None:
        """Return a problem if a row's text spells a special token: a turn could end or begin inside it."""
        for content in example.contents:
            found = self._special_text.search(content)
            if found:
                near = quote(content[max(0, found.start() - 20) : found.end() + 20])
                return BadRowError(
                    f"{near} contains {found.group()}, a special token of the tokenizer; expected text without it"
                )
        return None


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the token that ends an answer, as the chat template renders it; without a template, eos.

    Raises:
        DataError: the template ends an answer with no special token, or there is neither template nor eos.
    """
    if tokenizer.chat_template is None:
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no chat template and no eos token, so nothing could end an answer.")
        return int(tokenizer.eos_token_id)
    (probe,) = render_conversations(tokenizer, [_PROBE])
    if isinstance(probe, BadRowError):
        raise DataError(f"the tokenizer's chat template cannot be used: {probe}")
    encoding = tokenize(tokenizer, [probe.text])[0]
    special_ids = _special_ids(tokenizer)
    ids = encoding.ids
    first = _first_token_of(encoding, ids, probe.answer_starts[0], len(probe.text), special_ids)
    for token_id in ids[first + 1 :]:
        if token_id in special_ids:
            return token_id
    raise DataError(
        f"the chat template ends an answer with no special token (it renders {quote(probe.text)}), so a tuned "
        "model could not learn to stop. Use another template: model.chat_template."
    )


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation_config_eos: int | Sequence[int] | None = None) -> list[int]:
    """Return the ids that stop decoding: the end of turn, then eos, then those of the generation config."""
    extra = [generation_config_eos] if isinstance(generation_config_eos, int) else generation_config_eos or []
    ids = [end_of_turn_id(tokenizer), tokenizer.eos_token_id, *extra]
    return list(dict.fromkeys(int(token_id) for token_id in ids if token_id is not None))


def encode_batch(batch: list[Example], tokens: AnswerTokens, train_on: TrainOn) -> list[TokenisedRow | BadRowError]:
    """Encode each row as tokens with its targets, or say why it cannot be. All rows must be of one kind.

    Raises:
        DataError: the tokenizer lacks what this kind of row needs.
    """
    rendered = render_examples(tokens.tokenizer, batch, train_on)
    if batch[0].kind != "text":  # plain text may hold special tokens: a model reads it as it is
        rendered = [tokens.special_text_in(example) or row for example, row in zip(batch, rendered, strict=True)]
    good = [row for row in rendered if isinstance(row, RenderedRow)]
    encodings = iter(tokenize(tokens.tokenizer, [row.text for row in good]) if good else [])
    return [mark_targets(row, next(encodings), tokens) if isinstance(row, RenderedRow) else row for row in rendered]


def digest_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Compute a SHA-256 over the vocabulary, the merges, the special tokens and the chat template."""
    backend: str = tokenizer.backend_tokenizer.to_str()
    # Skip truncation and padding, which come first: any call may change them, and ours do not use them.
    backend = backend[max(0, backend.find('"added_tokens"')) :]
    special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    content = json.dumps([backend, special_tokens, tokenizer.chat_template], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def render_examples(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], train_on: TrainOn = "all"
) -> list[RenderedRow | BadRowError]:
    """Render each row as text, or say why it cannot be. All rows must be of one kind.

    Args:
        tokenizer: with the chat template.
        examples: the rows.
        train_on: `last` marks only the last answer of a conversation, so that a template may drop parts of earlier
            answers, for example reasoning.

    Raises:
        DataError: the tokenizer lacks what this kind of row needs.
    """
    kind = examples[0].kind
    has_template = tokenizer.chat_template is not None
    if kind == "messages" and not has_template:
        raise DataError(
            f"{examples[0].source} holds chat messages, but the tokenizer has no chat template. Give one "
            "with model.chat_template, or use rows with prompt and completion."
        )
    if kind == "messages":
        answers = [_answers(example.messages, example.num_given, train_on) for example in examples]
        return render_conversations(tokenizer, [example.messages for example in examples], answers)
    if kind == "prompt_completion" and has_template:
        turns = [
            [{"role": "user", "content": e.prompt}, {"role": "assistant", "content": e.completion}] for e in examples
        ]
        return render_conversations(tokenizer, turns)
    eos = tokenizer.eos_token
    if not isinstance(eos, str):
        raise DataError(f"the tokenizer has no eos token, which must end each row of {kind}.")
    if kind == "prompt_completion":
        return [RenderedRow(e.prompt + e.completion + eos, (len(e.prompt),)) for e in examples]
    return [RenderedRow(e.text if e.text.endswith(eos) else e.text + eos, ()) for e in examples]


def render_conversations(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    answers: Sequence[Sequence[int]] | None = None,
) -> list[RenderedRow | BadRowError]:
    """Render each conversation as text with the starts of its answers, or say why it cannot be.

    Args:
        tokenizer: with the chat template.
        conversations: lists of turns.
        answers: for each conversation the indices of the turns to learn. Default: all of the assistant's.
    """
    answers = answers or [_answers(turns, 0, "all") for turns in conversations]
    prefixes = [[list(turns[:k]) for k in of_one] for turns, of_one in zip(conversations, answers, strict=True)]
    wholes = _render(tokenizer, [list(turns) for turns in conversations], with_prompt=False)
    starts = iter(_render(tokenizer, [p for of_one in prefixes for p in of_one], with_prompt=True))
    return [
        _place_answers(turns, whole, [next(starts) for _ in of_one])
        for turns, whole, of_one in zip(conversations, wholes, prefixes, strict=True)
    ]


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Encoding]:
    """Tokenise texts without adding special tokens: the template has added them."""
    batch = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    encodings: list[Encoding] = batch.encodings or []
    return encodings


def mark_targets(row: RenderedRow, encoding: Encoding, tokens: AnswerTokens) -> TokenisedRow | BadRowError:
    """Mark the tokens of a row that carry loss. The first never does: nothing precedes it."""
    ids = encoding.ids
    if not row.answer_starts:
        return TokenisedRow(ids, bytearray(min(1, len(ids))) + b"\x01" * (len(ids) - 1))
    is_target = bytearray(len(ids))
    for start in row.answer_starts:
        try:
            first = _first_token_of(encoding, ids, start, len(row.text), tokens.special_ids)
            last = ids.index(tokens.end_id, first)
        except ValueError:
            return BadRowError(f"no end of turn (id {tokens.end_id}) follows the answer {quote(row.text[start:])}")
        is_target[first : last + 1] = b"\x01" * (last + 1 - first)
    is_target[0] = 0
    return TokenisedRow(ids, is_target)


def _first_token_of(encoding: Encoding, ids: list[int], start: int, end: int, special_ids: frozenset[int]) -> int:
    """Return the index of the first token that holds a character of `text[start:end]`.

    A special token that begins before `start` is skipped: Phi-3's include the white space behind them.

    Raises:
        ValueError: there is no such token.
    """
    for character in range(start, end):
        token = encoding.char_to_token(character)
        if token is None:
            continue
        if ids[token] not in special_ids or encoding.offsets[token][0] >= start:
            return int(token)
    raise ValueError("no token")


def _place_answers(
    turns: Conversation, whole: str | BadRowError, prefixes: Iterable[str | BadRowError]
) -> RenderedRow | BadRowError:
    if isinstance(whole, BadRowError):
        return whole
    position = 0
    for number, turn in enumerate(turns):
        for key in ("content", "tools"):
            text = turn.get(key, "").strip()
            found = whole.find(text, position)
            if found < 0:
                return BadRowError(
                    f"the chat template leaves out messages[{number}].{key} (role {turn['role']}); expected a "
                    "template that renders it (model.chat_template), or a row without it"
                )
            position = found + len(text)
    starts = []
    for prefix in prefixes:
        if isinstance(prefix, BadRowError):
            return prefix
        if not whole.startswith(prefix):
            return BadRowError(
                "the chat template renders turns differently once an answer follows: the turns before an answer end in "
                f"{quote(prefix[-30:])}, but the whole conversation does not begin with them, so the answer cannot be "
                "found; expected a template that only appends (model.chat_template), or "
                "data.train_on=last where only earlier answers are rendered differently"
            )
        starts.append(len(prefix))
    return RenderedRow(whole, tuple(starts))


def _render(
    tokenizer: PreTrainedTokenizerBase, conversations: list[list[dict[str, str]]], *, with_prompt: bool
) -> list[str | BadRowError]:
    """Render all in one call, and one by one only if the template refuses a row, to find out which."""
    if not conversations:
        return []
    try:
        rendered: list[str | BadRowError] = tokenizer.apply_chat_template(  # type: ignore[assignment]
            conversations, tokenize=False, add_generation_prompt=with_prompt
        )
        return rendered
    except Exception as error:  # a template is a program: it can fail in any way
        if len(conversations) == 1:
            cause = str(error) or type(error).__name__
            return [BadRowError(f"the chat template refuses the row: {cause}")]
    return [text for one in conversations for text in _render(tokenizer, [one], with_prompt=with_prompt)]


def _answers(turns: Conversation, num_given: int, train_on: TrainOn) -> list[int]:
    answers = [k for k, turn in enumerate(turns) if k >= num_given and turn["role"] == "assistant"]
    return answers if train_on == "all" else answers[-1:]


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))
