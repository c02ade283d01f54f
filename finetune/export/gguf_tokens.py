"""Compute without llama.cpp how it would read a chat, and choose the rules under which it reads the tokens of training.

A GGUF file holds no flags of single tokens. llama.cpp splits a text at its special tokens, strips white space by one
rule for all of them, and may put a space before each piece. This module gives the tokenizer these rules, and encodes
chats with them. The rules under which the ids stay the same go into the GGUF file.
Facts: ggml-org/llama.cpp, src/llama-vocab.cpp (`load`, `tokenizer_st_partition`, `tokenize`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from finetune.errors import ModelError
from finetune.export.converters import SPLIT_OF_PHI_TINY
from finetune.export.served_comparison import first_difference
from finetune.export.vectors import Vector, conversation_vectors

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


@dataclass(frozen=True, kw_only=True)
class OtherIds:
    """A text that llama.cpp encodes differently."""

    text: str
    trained: list[str]
    served: list[str]

    @classmethod
    def of(cls, vector: Vector, served_ids: Sequence[int], tokenizer: Any) -> OtherIds:
        """Spell the ids of training and of llama.cpp as tokens."""
        trained, served = (
            list(map(str, tokenizer.convert_ids_to_tokens(list(ids)))) for ids in (vector.token_ids, served_ids)
        )
        return cls(text=str(vector.text), trained=trained, served=served)

    def __str__(self) -> str:
        index = first_difference(self.trained, self.served)
        trained, served = (repr(" ".join(ids[max(index - 1, 0) : index + 2])) for ids in (self.trained, self.served))
        return f"{self.text!r} is {trained} in training and {served} in llama.cpp, from token {index} on"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How llama.cpp will read chats under the rules that fit best."""

    rules: TokenRules
    plain: list[OtherIds]
    """Chats with plain contents and other ids. llama.cpp would read the first request wrongly."""
    edges: list[OtherIds]
    """Chats with white space at the ends of turns, or unusual characters, and other ids."""
    chats: list[Vector]
    """All chats that were compared, the equal ones too."""
    record: dict[str, Any]
    """The content of tokenizer.json."""

    @property
    def others(self) -> list[OtherIds]:
        """Return all chats with other ids."""
        return [*self.plain, *self.edges]


def find_rules(tokenizer: Any) -> Reading:
    """Compare a run's tokenizer with llama.cpp's rules, and choose those under which most texts have the same ids.

    Texts are encoded without added special tokens, as rendered chats are in training.

    Raises:
        ModelError: see `refuse_other_tokenizer`.
    """
    refuse_other_tokenizer(tokenizer)
    record = json.loads(tokenizer.backend_tokenizer.to_str())
    chats = conversation_vectors(tokenizer)
    plain = [vector for vector in chats if vector.name in _PLAIN]
    edges = [vector for vector in chats if vector.name not in _PLAIN]
    readings = []
    for rules in _possible_rules(record):
        by_rules = Tokenizer.from_str(json.dumps(_with_rules(record, rules)))
        in_plain, in_edges = (_other_ids(tokenizer, by_rules, chats) for chats in (plain, edges))
        readings.append(Reading(rules=rules, plain=in_plain, edges=in_edges, chats=chats, record=record))
    return min(readings, key=lambda reading: (len(reading.plain), len(reading.edges)))


def refuse_other_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer that is not BPE. The ids of llama.cpp are computed here for BPE only.

    Raises:
        ModelError: names the kind of the tokenizer, and what to do.
    """
    kind = type(tokenizer.backend_tokenizer.model).__name__
    if kind != "BPE":
        raise ModelError(
            f"the tokenizer is of the kind {kind}, and finetune can tell how llama.cpp reads chats only for BPE. "
            "Nothing was written. Serve the merged folder with vLLM or transformers."
        )


def may_be_read_by_llama_cpp(model: Path) -> bool:
    """Return False if no GGUF file can hold a folder's tokenizer: it is not BPE, or splits text as that of phi_tiny.

    llama.cpp knows a list of tokenizers, which is in its converter. Of the others, only phi_tiny's is known here.
    """
    file = model / "tokenizer.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"model": {}}
    splits = json.dumps(record.get("pre_tokenizer"))
    return record["model"].get("type") == "BPE" and json.dumps(SPLIT_OF_PHI_TINY) not in splits


def refuse_other_ids(reading: Reading) -> None:
    """Refuse a model whose plain chats llama.cpp would read as other tokens.

    Raises:
        ModelError: names the first text, the first token that differs and what to do.
    """
    if reading.plain:
        raise ModelError(
            f"llama.cpp would read chats as other tokens than those the run trained on: {reading.plain[0]}. No setting "
            "of the file changes this. Nothing was written. Train with another tokenizer, or add --allow-differences "
            "and send token ids to llama.cpp instead of text (its /completion takes them as `prompt`)."
        )


def is_byte_level(record: Mapping[str, Any]) -> bool:
    """Tell whether a tokenizer.json is byte-level BPE, as for GPT-2, phi-2, phi-4 and Phi-4-mini."""
    decoder = record.get("decoder") or {}
    types = {part["type"] for part in [decoder, *decoder.get("decoders", ())] if part}
    return record.get("model", {}).get("type") == "BPE" and "ByteLevel" in types


def _possible_rules(record: dict[str, Any]) -> list[TokenRules]:
    """List the rules that llama.cpp can follow for this tokenizer.

    Only tokenizers that spell a space `▁` put one before text. Stripping needs tokens that Llama's tokenizer has.
    """
    known = {*record["model"].get("vocab", {}), *(token["content"] for token in record["added_tokens"])}
    spaces = (False,) if is_byte_level(record) else (True, False)
    strips = (False, True) if known >= _NEEDED_TO_STRIP else (False,)
    return [TokenRules(puts_space=space, strips=strip) for space, strip in product(spaces, strips)]


def _other_ids(tokenizer: Any, by_rules: Tokenizer, chats: Sequence[Vector]) -> list[OtherIds]:
    """Return the chats that llama.cpp's rules encode differently from the run's tokenizer."""
    others = []
    for vector in chats:
        served_ids = by_rules.encode(str(vector.text), add_special_tokens=False).ids
        if served_ids != vector.token_ids:
            others.append(OtherIds.of(vector, served_ids, tokenizer))
    return others


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
