"""Render conversations as text, tokenise it, and mark the tokens that a model must predict. Imports no torch.

A template is rendered once for the whole conversation. To find the start of an answer, the turns before it are rendered
with the generation prompt, and the whole text must begin with the result. The answer ends with the first end-of-turn
token from there on. No marker is searched for, and no token is taken for padding by its id.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Literal, NamedTuple

from finetune.data.chat_template import WITHOUT_TEMPLATE, ChatTemplate, describe_key
from finetune.data.formats import Example
from finetune.data.turns import REASONING_KEYS, Dialogue, Turn, dialogue_of, text_turn
from finetune.data.values import BadRowError, quote
from finetune.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["all", "last"]
"""The answers of a conversation that carry loss."""

_PROBE = dialogue_of([text_turn("user", "a"), text_turn("assistant", "b")])

_THINK = ("<think>", "</think>")
"""What reasoning stands between if it is a part of the answer's text."""
_END_OF_THINKING = re.compile(r"\s*</think>\s*")
_NO_BORDERS = (-1, -1)
_MARKER = re.compile(r"<\|?\w+\|?>")
"""What looks like a special token."""


LOSS_KINDS = ("reasoning", "tool_call", "end_of_turn")
"""What targets are counted as, in the order of the columns of `EncodedRows.loss_kinds`. All others are the answer."""


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """A row as text, ready for the tokenizer."""

    text: str
    answer_starts: tuple[int, ...]
    """The character at which each answer starts. Empty for plain text: all tokens except the first are targets."""
    borders: tuple[tuple[int, int], ...] = ()
    """For each answer, the characters at which its reasoning ends and its tool calls begin. -1: it has none."""


class TokenisedRow(NamedTuple):
    """A row as tokens: ids, and for each a byte that is 1 if the model must predict it."""

    token_ids: Sequence[int]
    is_target: bytearray
    kinds: Sequence[tuple[int, int, int]] = ()
    """Spans of targets that are not the answer itself: first token, end, and index in `LOSS_KINDS`."""


class AnswerTokens:
    """A tokenizer with its special tokens and its end of turn, found once.

    The tokenizer may have no chat template. `template_name` names the template in messages, see `ChatTemplate`.

    Raises:
        DataError: the tokenizer is not fast, or answers end with no special token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_name: str = "") -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer {type(tokenizer).__name__} gives no character offsets, which are needed to find "
                "the answers. Use a fast one: a folder with tokenizer.json."
            )
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, template_name)
        self.special_ids = _special_ids(tokenizer)
        self.end_id = end_of_turn_id(tokenizer)
        texts = {str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in self.special_ids}
        longest_first = sorted(texts, key=lambda text: (-len(text), text))
        self._special_text = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def end_id_of(self, row_type: str) -> int:
        """Return the id of the token that ends a row's answers, or a row of plain text."""
        eos_id = self.tokenizer.eos_token_id
        return int(eos_id) if row_type == "text" and eos_id is not None else self.end_id

    def without_special_text(self, text: str) -> str:
        """Remove the texts of special tokens."""
        return self._special_text.sub("", text)

    def special_text_in(self, example: Example) -> BadRowError | None:
        """Return a problem if a row's text spells a special token: a turn could end or begin inside it."""
        for content in example.contents:
            match = self._special_text.search(content)
            if match:
                near = quote(content[max(0, match.start() - 20) : match.end() + 20])
                return BadRowError(
                    f"{near} contains {match.group()}, a special token of the tokenizer; expected text without it"
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
    (probe,) = render_dialogues(ChatTemplate(tokenizer), [_PROBE])
    if isinstance(probe, BadRowError):
        raise DataError(f"the tokenizer's chat template cannot be used: {probe}")
    encoding = tokenize(tokenizer, [probe.text])[0]
    special_ids = _special_ids(tokenizer)
    ids = encoding.ids
    first = _first_token_of(encoding, ids, probe.answer_starts[0], len(probe.text), special_ids)
    for token_id in ids[first + 1 :]:
        if token_id in special_ids:
            return token_id
    vocabulary = tokenizer.get_vocab()
    unknown = dict.fromkeys(marker for marker in _MARKER.findall(probe.text) if marker not in vocabulary)
    reason = f", because the tokenizer has no token {' and no '.join(unknown)}" if unknown else ""
    raise DataError(
        f"the chat template ends an answer with no special token (it renders {quote(probe.text)}){reason}, so a tuned "
        f"model could not learn to stop. Set another template: {WITHOUT_TEMPLATE}."
    )


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation_config_eos: int | Sequence[int] | None = None) -> list[int]:
    """Return the ids that stop decoding: the end of turn, then eos, then those of the generation config."""
    extra = [generation_config_eos] if isinstance(generation_config_eos, int) else generation_config_eos or []
    ids = [end_of_turn_id(tokenizer), tokenizer.eos_token_id, *extra]
    return list(dict.fromkeys(int(token_id) for token_id in ids if token_id is not None))


def encode_batch(batch: list[Example], tokens: AnswerTokens, train_on: TrainOn) -> list[TokenisedRow | BadRowError]:
    """Encode each row as tokens with its targets, or say why it cannot be. All rows must have one type.

    Raises:
        DataError: the tokenizer lacks what rows of this type need.
    """
    rendered = render_examples(tokens.template, batch, train_on)
    if batch[0].row_type != "text":  # plain text may hold special tokens: a model reads it as it is
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
    template: ChatTemplate, examples: Sequence[Example], train_on: TrainOn = "all"
) -> list[RenderedRow | BadRowError]:
    """Render each row as text, or say why it cannot be. All rows must have one type.

    With `train_on=last`, only the last answer of a conversation is marked, so that a template may drop parts of earlier
    answers, for example reasoning.

    Raises:
        DataError: the tokenizer lacks what rows of this type need.
    """
    row_type = examples[0].row_type
    tokenizer = template.tokenizer
    has_template = tokenizer.chat_template is not None
    if row_type == "messages" and not has_template:
        raise DataError(
            f"{examples[0].source} holds chat messages, but the tokenizer has no chat template. Set "
            f"{WITHOUT_TEMPLATE}. Or use rows with prompt and completion."
        )
    if row_type == "messages":
        first = 0 if train_on == "all" else -1
        dialogues = [Dialogue(example.messages, example.learnt[first:], example.tools) for example in examples]
        return render_dialogues(template, dialogues)
    if row_type == "prompt_completion" and has_template:
        pairs = [[text_turn("user", e.prompt), text_turn("assistant", e.completion)] for e in examples]
        return render_dialogues(template, [dialogue_of(turns) for turns in pairs])
    eos = tokenizer.eos_token
    if not isinstance(eos, str):
        raise DataError(f"the tokenizer has no eos token, which must end each row of {row_type}.")
    if row_type == "prompt_completion":
        return [RenderedRow(e.prompt + e.completion + eos, (len(e.prompt),)) for e in examples]
    return [RenderedRow(e.text if e.text.endswith(eos) else e.text + eos, ()) for e in examples]


def render_dialogues(template: ChatTemplate, dialogues: Sequence[Dialogue]) -> list[RenderedRow | BadRowError]:
    """Render each conversation as text with the starts of the answers to learn, or say why it cannot be."""
    prefixes = [
        dialogue._replace(turns=dialogue.turns[:answer]) for dialogue in dialogues for answer in dialogue.learnt
    ]
    texts = template.render(dialogues)
    starts = iter(template.render(prefixes, with_prompt=True))
    return [
        _place_answers(template, dialogue, text, [next(starts) for _ in dialogue.learnt])
        for dialogue, text in zip(dialogues, texts, strict=True)
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
        ends = [(len(ids) - 1, len(ids), 2)] if ids and ids[-1] == tokens.tokenizer.eos_token_id else []
        return TokenisedRow(ids, bytearray(min(1, len(ids))) + b"\x01" * (len(ids) - 1), ends)
    is_target, kinds = bytearray(len(ids)), list[tuple[int, int, int]]()
    for start, (reasoned, calls) in zip(row.answer_starts, row.borders or repeat(_NO_BORDERS), strict=False):
        try:
            first = _first_token_of(encoding, ids, start, len(row.text), tokens.special_ids)
            last = ids.index(tokens.end_id, first)
            if reasoned >= 0:
                end = _first_token_of(encoding, ids, reasoned, len(row.text), tokens.special_ids)
                kinds.append((first, min(end, last), 0))
            if calls >= 0:
                kinds.append((_first_token_of(encoding, ids, calls, len(row.text), tokens.special_ids), last, 1))
            kinds.append((last, last + 1, 2))
        except ValueError:
            return BadRowError(f"no end of turn (id {tokens.end_id}) follows the answer {quote(row.text[start:])}")
        is_target[first : last + 1] = b"\x01" * (last + 1 - first)
    is_target[0] = 0
    return TokenisedRow(ids, is_target, kinds)


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
    template: ChatTemplate, dialogue: Dialogue, rendered: str | BadRowError, prefixes: Iterable[str | BadRowError]
) -> RenderedRow | BadRowError:
    if isinstance(rendered, BadRowError):
        return rendered
    missing = _find_missing(template, dialogue, rendered)
    if missing is not None:
        return missing
    starts = []
    for prefix in prefixes:
        if isinstance(prefix, BadRowError):
            return prefix
        if not rendered.startswith(prefix):
            return BadRowError(
                "the chat template renders turns differently once an answer follows: the turns before an answer end in "
                f"{quote(prefix[-30:])}, but the whole conversation does not begin with them, so the answer cannot be "
                "found; expected a template that only appends (data.chat_template), or "
                "data.train_on=each_turn (or last) where only earlier answers are rendered differently"
            )
        starts.append(len(prefix))
    answers = zip(starts, dialogue.learnt, strict=True)
    borders = tuple(_find_borders(rendered, start, dialogue.turns[answer]) for start, answer in answers)
    return RenderedRow(rendered, tuple(starts), borders)


def _find_borders(text: str, start: int, turn: Turn) -> tuple[int, int]:
    """Find where the reasoning of a rendered answer ends, and where its tool calls begin; -1 for what it has not."""
    content, thinking = turn["content"].strip(), turn.get(REASONING_KEYS[0], "").strip()
    if content.startswith(_THINK[0]) and not thinking:
        thinking, end, content = content.partition(_THINK[1])
        thinking, content = (thinking + end, content.strip()) if end else ("", thinking)
    if not thinking and not turn.get("tool_calls"):
        return _NO_BORDERS
    found = text.find(thinking, start) if thinking else -1
    after = start if found < 0 else found + len(thinking)
    if closing := _END_OF_THINKING.match(text, after):
        after = closing.end()
    answer = max(after, text.find(content, after))
    return (answer if found >= 0 else -1), (answer + len(content) if turn.get("tool_calls") else -1)


def _find_missing(template: ChatTemplate, dialogue: Dialogue, rendered: str) -> BadRowError | None:
    """Check that the rendered text has each text of the conversation, in order. Context answers may be shortened."""
    position = 0
    for number, turn in enumerate(dialogue.turns):
        if template.has_foreign_header(turn["role"], rendered):
            return BadRowError(
                f"the chat template writes <|{turn['role']}|> for the role of messages[{number}], which is no token of "
                "this tokenizer; expected another role (system for developer), or a template that knows it "
                "(data.chat_template)"
            )
        if turn["role"] == "assistant" and number not in dialogue.learnt:
            continue
        problem = _without_text(template, turn, f"messages[{number}]")
        if problem is not None:
            return problem
        for key, text in _texts_of(template, turn):
            # Some templates write the results of tools as JSON.
            forms = (text, json.dumps(text, ensure_ascii=False)[1:-1]) if turn["role"] == "tool" else (text,)
            start = next((at for form in forms if (at := rendered.find(form, position)) >= 0), None)
            if start is None:
                advice = "data.train_on=each_turn" if key != "content" else "a row without it"
                return BadRowError(
                    f"the chat template leaves out messages[{number}].{key} (role {turn['role']}); expected a "
                    f"template that renders it (data.chat_template), or {advice}"
                )
            position = max(position, start + (len(text) if key == "content" else 0))
    return None


def _texts_of(template: ChatTemplate, turn: Turn) -> Iterator[tuple[str, str]]:
    """Yield the texts that a rendered turn must have."""
    thinking = turn.get(REASONING_KEYS[0], "")
    if thinking and any(template.renders(("assistant", key)) for key in REASONING_KEYS):
        yield REASONING_KEYS[0], thinking.strip()
    yield "content", turn["content"].strip()


def _without_text(template: ChatTemplate, turn: Turn, where: str) -> BadRowError | None:
    """Return a problem if the template renders nothing of an answer."""
    if turn["role"] != "assistant" or turn["content"].strip():
        return None
    if not turn.keys() & {"tool_calls", REASONING_KEYS[0]}:
        return None  # the place of the answer to a prompt alone; a row that has an answer has text, a call or thinking
    ignored = template.ignored(dialogue_of([turn]))
    if any(("assistant", key) not in ignored for key in ("tool_calls", REASONING_KEYS[0]) if key in turn):
        return None
    keys = ", ".join(describe_key(key) for key in sorted(ignored))
    return BadRowError(
        f"the chat template of {template.name} does not render {keys}, and {where} has no other text to learn; "
        "expected a template that renders it (data.chat_template)"
    )


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))
