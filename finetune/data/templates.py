"""Render conversations as text, tokenise it, and mark the tokens that a model must predict. Imports no torch.

A template is rendered once for the whole conversation. To find the start of an answer, the turns before it are rendered
with the generation prompt, and the whole text must begin with the result. The answer ends with the first end-of-turn
token from there on, which must come before the next turn. No marker is searched for, and no token is taken for padding
by its id.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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

_QUESTION, _ANSWER = text_turn("user", "probe-1"), text_turn("assistant", "probe-2")
_PROBES = (dialogue_of([_QUESTION, _ANSWER]), dialogue_of([_QUESTION, _ANSWER, text_turn("user", "probe-3")]))
"""A conversation that ends with its answer, and one in which a turn follows the answer."""
_THINK = ("<think>", "</think>")
"""What reasoning stands between if it is a part of the answer's text."""
_END_OF_THINKING = re.compile(r"\s*</think>\s*")
_MARKER = re.compile(r"<\|?\w+\|?>")
"""What looks like a special token."""

LOSS_KINDS = ("reasoning", "tool_call", "end_of_turn")
"""What targets are counted as, in the order of the columns of `EncodedRows.loss_kinds`. All others are the answer."""
ODDITIES = ("empty_question", "reordered_results")
"""What may be a mistake in the turns of a row, in the order of the columns of `EncodedRows.oddities`."""


class AnswerPlace(NamedTuple):
    """The characters of a rendered row at which an answer and its parts begin. -1: there is no such part."""

    start: int
    after_reasoning: int = -1
    calls: int = -1
    next_turn: int = -1
    """The text of the next turn begins here at the latest, so the answer ends before. -1: it is the last turn."""


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """A row as text, ready for the tokenizer."""

    text: str
    answers: tuple[AnswerPlace, ...]
    """The answers that carry loss. Empty for plain text: all tokens except the first are targets."""


class TokenisedRow(NamedTuple):
    """A row as tokens: ids, and for each a byte that is 1 if the model must predict it."""

    token_ids: Sequence[int]
    is_target: bytearray
    kinds: Sequence[tuple[int, int, int]] = ()
    """Spans of targets that are not the answer itself: first token, end, and index in `LOSS_KINDS`."""
    oddities: Sequence[bool] = (False,) * len(ODDITIES)


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
        self.end_id, self.earlier_end_id = end_of_turn_ids(tokenizer)
        self._adds_bos = adds_bos(tokenizer)
        texts = {str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in self.special_ids}
        longest_first = sorted(texts - {""}, key=lambda text: (-len(text), text))
        self._longest_special_text = len(longest_first[0]) if longest_first else 0
        self._special_text = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def end_id_of(self, row_type: str) -> int:
        """Return the id of the token that ends a row's answers, or a row of plain text."""
        eos_id = self.tokenizer.eos_token_id
        return int(eos_id) if row_type == "text" and eos_id is not None else self.end_id

    def tokenize(self, texts: list[str], *, is_rendered: bool) -> list[Encoding]:
        """Tokenise texts. Those that no chat template rendered get the beginning that the tokenizer gives any text."""
        if is_rendered or not self._adds_bos:
            return tokenize(self.tokenizer, texts)
        own = [text.removeprefix(str(self.tokenizer.bos_token)) for text in texts]
        return tokenize(self.tokenizer, own, add_special_tokens=True)

    def without_special_text(self, text: str) -> str:
        """Remove the texts of special tokens, also those that only appear when another one is removed."""
        start = 0
        while match := self._special_text.search(text, start):
            text = text[: match.start()] + text[match.end() :]
            # The text before and after the removed one may spell a special token together.
            start = max(0, match.start() - self._longest_special_text)
        return text

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


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the ids of the tokens that end the last turn and an earlier answer. Without a template, both are eos.

    They are equal for most chat templates. The template of OLMo 3 ends the last turn with eos and all others with
    `<|im_end|>`.

    Raises:
        DataError: the template ends an answer with no special token, or there is neither template nor eos.
    """
    if tokenizer.chat_template is None:
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no chat template and no eos token, so nothing could end an answer.")
        return int(tokenizer.eos_token_id), int(tokenizer.eos_token_id)
    template = ChatTemplate(tokenizer)
    probe, longer = render_dialogues(template, _PROBES)
    if isinstance(probe, BadRowError):
        raise DataError(f"the tokenizer's chat template cannot be used: {probe}")
    end_id = _special_after(tokenizer, probe.text, "probe-2")
    if end_id is not None:
        return end_id, _earlier_end_id(template, longer, end_id)
    vocabulary = tokenizer.get_vocab()
    unknown = dict.fromkeys(marker for marker in _MARKER.findall(probe.text) if marker not in vocabulary)
    reason = f", because the tokenizer has no token {' and no '.join(unknown)}" if unknown else ""
    raise DataError(
        f"the chat template ends an answer with no special token (it renders {quote(probe.text)}){reason}, so a tuned "
        f"model could not learn to stop. Set another template: {WITHOUT_TEMPLATE}."
    )


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer puts a beginning-of-sequence token, and no other token, around a text by default."""
    return tokenizer.bos_token_id is not None and tokenizer("")["input_ids"] == [tokenizer.bos_token_id]


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation_config_eos: int | Sequence[int] | None = None) -> list[int]:
    """Return the ids that stop decoding: the end of turn, then eos, then those of the generation config."""
    extra = [generation_config_eos] if isinstance(generation_config_eos, int) else generation_config_eos or []
    ids = [*end_of_turn_ids(tokenizer), tokenizer.eos_token_id, *extra]
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
    is_rendered = batch[0].row_type != "text" and tokens.tokenizer.chat_template is not None
    encodings = iter(tokens.tokenize([row.text for row in good], is_rendered=is_rendered) if good else [])
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
        return [RenderedRow(e.prompt + e.completion + eos, (AnswerPlace(len(e.prompt)),)) for e in examples]
    return [RenderedRow(e.text if e.text.endswith(eos) else e.text + eos, ()) for e in examples]


def render_dialogues(template: ChatTemplate, dialogues: Sequence[Dialogue]) -> list[RenderedRow | BadRowError]:
    """Render each conversation as text with the places of the answers to learn, or say why it cannot be."""
    prefixes = [
        dialogue._replace(turns=dialogue.turns[:answer]) for dialogue in dialogues for answer in dialogue.learnt
    ]
    texts = template.render(dialogues)
    starts = iter(template.render(prefixes, with_prompt=True))
    return [
        _place_answers(template, dialogue, text, [next(starts) for _ in dialogue.learnt])
        for dialogue, text in zip(dialogues, texts, strict=True)
    ]


def tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, add_special_tokens: bool = False
) -> list[Encoding]:
    """Tokenise texts. Special tokens are not added, because the chat template has added them."""
    batch = tokenizer(texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False)
    encodings: list[Encoding] = batch.encodings or []
    return encodings


def mark_targets(row: RenderedRow, encoding: Encoding, tokens: AnswerTokens) -> TokenisedRow | BadRowError:
    """Mark the tokens of a row that carry loss. The first never does: nothing precedes it."""
    ids = encoding.ids
    if not row.answers:
        ends = [(len(ids) - 1, len(ids), 2)] if ids and ids[-1] == tokens.tokenizer.eos_token_id else []
        return TokenisedRow(ids, bytearray(min(1, len(ids))) + b"\x01" * (len(ids) - 1), ends)
    is_target, kinds = bytearray(len(ids)), list[tuple[int, int, int]]()
    for answer in row.answers:
        end_id = tokens.end_id if answer.next_turn < 0 else tokens.earlier_end_id
        try:
            first, reasoned, calls = (
                _first_token_of(encoding, ids, place, len(row.text), tokens.special_ids) if place >= 0 else -1
                for place in answer[:3]
            )
            last = ids.index(end_id, first)
        except ValueError:
            return BadRowError(f"no end of turn (id {end_id}) follows the answer {quote(row.text[answer.start :])}")
        begin, _ = encoding.token_to_chars(last) or (0, 0)
        if 0 <= answer.next_turn <= begin:
            return BadRowError(
                f"the chat template does not end the answer {quote(row.text[answer.start :])} with the token that ends "
                f"other answers (id {end_id}), but a turn follows it, which would be learnt too; expected "
                "data.train_on=each_turn (or last), or a template that ends all answers alike (data.chat_template)"
            )
        if reasoned >= 0:
            kinds.append((first, min(reasoned, last), 0))
        if calls >= 0:
            kinds.append((calls, last, 1))
        kinds.append((last, last + 1, 2))
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
    begins = _find_turns(template, dialogue, rendered)
    if isinstance(begins, BadRowError):
        return begins
    answers = []
    for answer, prefix in zip(dialogue.learnt, prefixes, strict=True):
        if isinstance(prefix, BadRowError):
            return prefix
        if not rendered.startswith(prefix):
            return BadRowError(
                "the chat template renders turns differently once an answer follows: the turns before an answer end in "
                f"{quote(prefix[-30:])}, but the whole conversation does not begin with them, so the answer cannot be "
                "found; expected a template that only appends (data.chat_template), or "
                "data.train_on=each_turn (or last) where only earlier answers are rendered differently"
            )
        borders = _find_borders(rendered, len(prefix), dialogue.turns[answer])
        answers.append(AnswerPlace(len(prefix), *borders, begins[answer + 1]))
    return RenderedRow(rendered, tuple(answers))


def _find_borders(text: str, start: int, turn: Turn) -> tuple[int, int]:
    """Find where the reasoning of a rendered answer ends, and where its tool calls begin; -1 for what it has not."""
    content, thinking = turn["content"].strip(), turn.get(REASONING_KEYS[0], "").strip()
    if content.startswith(_THINK[0]) and not thinking:
        thinking, end, content = content.partition(_THINK[1])
        thinking, content = (thinking + end, content.strip()) if end else ("", thinking)
    if not thinking and not turn.get("tool_calls"):
        return -1, -1
    found = text.find(thinking, start) if thinking else -1
    after = start if found < 0 else found + len(thinking)
    if closing := _END_OF_THINKING.match(text, after):
        after = closing.end()
    answer = max(after, text.find(content, after))
    return (answer if found >= 0 else -1), (answer + len(content) if turn.get("tool_calls") else -1)


def _find_turns(template: ChatTemplate, dialogue: Dialogue, rendered: str) -> list[int] | BadRowError:
    """Find the last character at which the text of each turn may begin, followed by -1.

    The rendered text must have each text of the conversation, in order. Answers without loss may be shortened, so for
    them the character of the next turn is returned.
    """
    begin, begins = len(rendered), [-1]
    for number, turn in reversed([*enumerate(dialogue.turns)]):
        if template.has_foreign_header(turn["role"], rendered):
            return BadRowError(
                f"the chat template writes <|{turn['role']}|> for the role of messages[{number}], which is no token of "
                "this tokenizer; expected another role (system for developer), or a template that knows it "
                "(data.chat_template)"
            )
        if turn["role"] != "assistant" or number in dialogue.learnt:
            problem = _without_text(template, turn, f"messages[{number}]")
            if problem is not None:
                return problem
            for key, text in _texts_of(template, turn):
                # Some templates write the results of tools as JSON.
                forms = (text, json.dumps(text, ensure_ascii=False)[1:-1]) if turn["role"] == "tool" else (text,)
                end = begin if key == "content" else begin + len(text)  # thinking may be a part of the content
                begin = max(rendered.rfind(form, 0, end) for form in forms)
                if begin < 0:
                    advice = "data.train_on=each_turn" if key != "content" else "a row without it"
                    return BadRowError(
                        f"the chat template leaves out messages[{number}].{key} (role {turn['role']}); expected a "
                        f"template that renders it (data.chat_template), or {advice}"
                    )
        begins.insert(0, begin)
    return begins


def _texts_of(template: ChatTemplate, turn: Turn) -> Iterator[tuple[str, str]]:
    """Yield the texts that a rendered turn must have, the last one first."""
    yield "content", turn["content"].strip()
    thinking = turn.get(REASONING_KEYS[0], "")
    if thinking and any(template.renders(("assistant", key)) for key in REASONING_KEYS):
        yield REASONING_KEYS[0], thinking.strip()


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


def _earlier_end_id(template: ChatTemplate, longer: RenderedRow | BadRowError, end_id: int) -> int:
    """Return the id of the token that ends every turn but the last; `end_id` if there is no such token."""
    if isinstance(longer, BadRowError):  # and so will be all rows with an earlier answer
        return end_id
    tokenizer = template.tokenizer
    after_question, earlier = (_special_after(tokenizer, longer.text, text) for text in ("probe-1", "probe-2"))
    if earlier is None or earlier == end_id or earlier != after_question:
        return end_id
    # gpt-oss ends thinking with the same token, and the answer goes on after it.
    (text,) = template.render([dialogue_of([_QUESTION, _ANSWER | {REASONING_KEYS[0]: "probe-4"}])])
    is_inside = isinstance(text, str) and "probe-4" in text and _special_after(tokenizer, text, "probe-4") == earlier
    return end_id if is_inside else earlier


def _special_after(tokenizer: PreTrainedTokenizerBase, text: str, part: str) -> int | None:
    """Return the id of the first special token behind a part of a text; None if none follows."""
    encoding, special_ids = tokenize(tokenizer, [text])[0], _special_ids(tokenizer)
    end = text.rindex(part) + len(part)
    behind = (token_id for token_id, (start, _) in zip(encoding.ids, encoding.offsets, strict=True) if start >= end)
    return next((token_id for token_id in behind if token_id in special_ids), None)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))
