"""Compute without llama.cpp how it would read a chat, and choose the rules under which it reads the tokens of training.

A GGUF file holds no flags of single tokens. llama.cpp splits a text at its special tokens, strips white space by one
rule for all of them, and may put a space before each piece. This module gives the tokenizer these rules, and encodes
chats with them. The rules under which the ids stay the same go into the GGUF file.
Facts: ggml-org/llama.cpp, src/llama-vocab.cpp (`load`, `tokenizer_st_partition`, `tokenize`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from finetune.data.rendering import render_prompt
from finetune.errors import ModelError
from finetune.export.served_comparison import Turns, first_difference
from finetune.export.vectors import CONVERSATIONS
from finetune.units import name_first

_NEVER_STRIPS = {"<unk>", "<s>", "<|endoftext|>"}
_NEEDED_TO_STRIP = {*_NEVER_STRIPS, "</s>"}
"""llama.cpp looks these up in a file whose name contains phi-3, and does not load one that lacks any."""
_PLAIN = ("one turn", "system", "several turns")
"""Conversations with plain contents. An export is refused if their ids differ. If only others differ, for example in
the white space at the end of a turn, it gives a warning."""


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """The rules for special tokens that a GGUF file can set."""

    puts_space: bool
    """Put a space before the first piece of text and before each piece behind a special token."""
    strips: bool
    """Drop white space behind every special token but `<unk>`, `<s>` and `<|endoftext|>`. llama.cpp does so if the name
    in the file (`general.name`) contains `phi-3` or `phi3`."""


class RenderedChat(NamedTuple):
    """A conversation and its text with the header of the next answer."""

    turns: Turns
    text: str


@dataclass(frozen=True, kw_only=True)
class OtherIds:
    """A text that llama.cpp encodes differently."""

    text: str
    trained: list[str]
    served: list[str]

    def __str__(self) -> str:
        at = first_difference(self.trained, self.served)
        return (
            f"{self.text!r} is {_around(self.trained, at)} in training and {_around(self.served, at)} in llama.cpp, "
            f"from token {at} on"
        )


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How llama.cpp will read chats under the rules that fit best."""

    rules: TokenRules
    plain: list[OtherIds]
    """Chats with plain contents and other ids. llama.cpp would read the first request wrongly."""
    edges: list[OtherIds]
    """Chats with white space at the ends of turns, or unusual characters, and other ids."""
    causes: list[str]
    """The properties of the tokenizer that cause the differences, as phrases."""
    chats: list[RenderedChat]
    """All chats that were compared, the equal ones too."""


def find_rules(tokenizer: Any) -> Reading:
    """Compare a run's tokenizer with llama.cpp's rules, and choose those under which most texts have the same ids.

    Texts are encoded without added special tokens, as in training.
    """
    record = json.loads(tokenizer.backend_tokenizer.to_str())
    plain = list(_chats(tokenizer, _PLAIN))
    edges = list(_chats(tokenizer, CONVERSATIONS.keys() - set(_PLAIN)))
    compared = [
        (rules, _different(tokenizer, record, rules, plain), _different(tokenizer, record, rules, edges))
        for rules in _possible_rules(record)
    ]
    rules, in_plain, in_edges = min(compared, key=lambda it: (len(it[1]), len(it[2])))
    texts = [other.text for other in [*in_plain, *in_edges]]
    causes = list(_causes(record, rules, texts)) if texts else []
    return Reading(rules=rules, plain=in_plain, edges=in_edges, causes=causes, chats=[*plain, *edges])


def refuse_other_ids(reading: Reading) -> None:
    """Refuse a model whose plain chats llama.cpp would read as other tokens.

    Raises:
        ModelError: names the first text, the first token that differs, the cause and what to do.
    """
    if reading.plain:
        raise ModelError(
            f"llama.cpp would read chats as other tokens than those the run trained on: {reading.plain[0]}. "
            f"Cause: {'; '.join(reading.causes) or 'not known'}. Nothing was written. Train with a tokenizer without "
            "this, or add --allow-differences and send token ids to llama.cpp instead of text (its /completion takes "
            "them as `prompt`)."
        )


def is_byte_level(record: dict[str, Any]) -> bool:
    """Tell whether a tokenizer.json is byte-level BPE, as for GPT-2, phi-2, phi-4 and Phi-4-mini."""
    return record.get("model", {}).get("type") == "BPE" and "ByteLevel" in _types(record.get("decoder"))


def _chats(tokenizer: Any, names: Iterable[str]) -> Iterator[RenderedChat]:
    for name in sorted(names):
        with contextlib.suppress(Exception):  # a template may refuse roles, and fail in any way
            yield RenderedChat(CONVERSATIONS[name], render_prompt(tokenizer, CONVERSATIONS[name])[0])


def _possible_rules(record: dict[str, Any]) -> list[TokenRules]:
    """List the rules that llama.cpp can follow for this tokenizer.

    Only tokenizers that spell a space `▁` put one before text. Stripping needs tokens that Llama's tokenizer has.
    """
    known = {*record["model"].get("vocab", {}), *(token["content"] for token in record["added_tokens"])}
    spaces = (False,) if is_byte_level(record) else (True, False)
    strips = (False, True) if known >= _NEEDED_TO_STRIP else (False,)
    return [TokenRules(puts_space=space, strips=strip) for space, strip in product(spaces, strips)]


def _different(
    tokenizer: Any, record: dict[str, Any], rules: TokenRules, texts: Sequence[RenderedChat]
) -> list[OtherIds]:
    from tokenizers import Tokenizer

    served = Tokenizer.from_str(json.dumps(_with_rules(record, rules)))
    found = []
    for _, text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        other = served.encode(text, add_special_tokens=False).ids
        if ids != other:
            trained, read = (list(map(str, tokenizer.convert_ids_to_tokens(each))) for each in (ids, other))
            found.append(OtherIds(text=text, trained=trained, served=read))
    return found


def _with_rules(record: dict[str, Any], rules: TokenRules) -> dict[str, Any]:
    """Return the tokenizer as llama.cpp applies it: its pieces and merges, and llama.cpp's rules for white space."""
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = [
        {**token, **plain, "rstrip": rules.strips and token["content"] not in _NEVER_STRIPS}
        for token in record["added_tokens"]
    ]
    if is_byte_level(record):
        return {**record, "added_tokens": added, "normalizer": None}
    spell = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    before = [{"type": "Prepend", "prepend": "▁"}] if rules.puts_space else []
    normalizer = {"type": "Sequence", "normalizers": [*before, spell]}
    return {**record, "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": None}


def _causes(record: dict[str, Any], rules: TokenRules, texts: Sequence[str]) -> Iterator[str]:
    """Name the properties of the tokenizer that these rules cannot express and that the texts depend on."""
    tokens = [token for token in record["added_tokens"] if any(token["content"] in text for text in texts)]
    rstrip = [token["content"] for token in tokens if token["rstrip"]]
    kept = [it["content"] for it in tokens if not it["rstrip"] and it["content"] not in _NEVER_STRIPS]
    if rstrip and not rules.strips:
        named = name_first(rstrip, 3)
        yield f"{named} swallow white space behind them in training, and in llama.cpp they do not (rstrip)"
    if rules.strips and kept:
        named = name_first(kept, 3)
        yield f"{named} keep white space behind them in training, and in llama.cpp they swallow it (rstrip)"
    for flag, does in (("lstrip", "swallow white space before them"), ("single_word", "count only as whole words")):
        if found := [token["content"] for token in tokens if token[flag]]:
            yield f"{name_first(found, 3)} {does} in training, and in llama.cpp they do not ({flag})"
    if not is_byte_level(record):
        yield from _causes_of_spaces(record, rules)
        if record["model"]["type"] != "BPE":
            yield f"its pieces are of the type {record['model']['type']}, which llama.cpp reads as BPE"
    others = sorted(set(_types(record.get("normalizer"))) - {"Sequence", "Prepend", "Replace"})
    if others:
        yield f"it rewrites texts before it encodes them ({', '.join(others)}), and llama.cpp does not"


def _causes_of_spaces(record: dict[str, Any], rules: TokenRules) -> Iterator[str]:
    """Compare where the tokenizer and llama.cpp put a space before text (prepend_scheme, or a normalizer's Prepend)."""
    scheme = next((part.get("prepend_scheme") for part in _parts(record.get("pre_tokenizer"))), None)
    where = {"always": "each piece of text", "first": "the first piece of text only", "never": "no text"}.get(
        scheme or ("always" if "Prepend" in _types(record.get("normalizer")) else "never")
    )
    there = "each piece of text" if rules.puts_space else "no text"
    if where != there:
        yield f"in training a space is put before {where}, in llama.cpp before {there} (add_space_prefix)"


def _types(part: dict[str, Any] | None) -> list[str]:
    return [each["type"] for each in _parts(part)]


def _parts(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a part of a tokenizer.json, followed by its inner parts if it is a sequence."""
    if part is None:
        return []
    inner: list[dict[str, Any]] = next(
        (part[key] for key in ("normalizers", "pretokenizers", "decoders") if key in part), []
    )
    return [part, *inner]


def _around(tokens: Sequence[str], at: int) -> str:
    return repr(" ".join(tokens[max(at - 1, 0) : at + 2]))
