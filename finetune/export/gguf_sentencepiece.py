"""Make tokenizer.model from a tokenizer.json for llama.cpp's converter, and check the vocabulary of a GGUF file.

transformers 5 saves a SentencePiece tokenizer as tokenizer.json alone. Without tokenizer.model, llama.cpp's converter
writes placeholders for the scores of Llama's and Mistral's tokens, takes Gemma 3's tokenizer for another one, and
refuses Gemma 2 and Phi-3. The file's format is `ModelProto` in sentencepiece's src/sentencepiece_model.proto.
Facts: ggml-org/llama.cpp, src/llama-vocab.cpp (`llm_tokenizer_spm_session`).
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from finetune.errors import ModelError
from finetune.export.gguf_tokens import is_byte_level
from finetune.export.vectors import CONVERSATIONS

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""The types of tokens, in tokenizer.model and in a GGUF file."""
_NUM_TEXTS, _TOKENS_IN_TEXT = 200, 4


def sentencepiece_model(record: Mapping[str, Any]) -> bytes:
    """Return a tokenizer.model with the tokens of a tokenizer.json.

    SentencePiece joins the neighbours with the highest score first. A tokenizer.json lists pairs in the order in which
    they are joined, so a token's score is minus the place of its first pair.
    """
    model, added = record["model"], {token["id"]: token for token in record["added_tokens"]}
    tokens = {token_id: token for token, token_id in model["vocab"].items()}
    tokens |= {token_id: token["content"] for token_id, token in added.items()}
    places = {"".join(pair): place for place, pair in reversed(list(enumerate(model["merges"])))}
    pieces = []
    for token_id in range(max(tokens) + 1):
        token, kind = tokens.get(token_id, f"[PAD{token_id}]"), _NORMAL if token_id in tokens else _UNUSED
        if token == model["unk_token"]:
            kind = _UNKNOWN
        elif token_id in added:
            kind = _CONTROL if added[token_id]["special"] else _USER_DEFINED
        elif model["byte_fallback"] and re.fullmatch("<0x[0-9A-F]{2}>", token):
            kind = _BYTE
        score = struct.pack("<Bf", 2 << 3 | 5, -places.get(token, len(places)))
        pieces.append(_field(1, _field(1, token.encode()) + score + bytes([3 << 3, kind])))
    settings = bytes([3 << 3, 2, 0x98, 0x02, model["byte_fallback"]])  # model_type: BPE; byte_fallback
    return b"".join([*pieces, _field(2, settings)])


def _field(number: int, content: bytes) -> bytes:
    """Encode a field of a protobuf message that holds bytes, a text or another message, of less than 32 KB."""
    return bytes([number << 3 | 2, len(content) & 0x7F | 0x80, len(content) >> 7]) + content


def refuse_other_tokens(keys: Mapping[str, Any], tokenizer: Any) -> None:
    """Refuse a file with other tokens than the tokenizer has, for example from the tokenizer.model of another model.

    Raises:
        ModelError: names the first token that differs.
    """
    there = keys.get("tokenizer.ggml.tokens", [])
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    for token_id, token in enumerate(tokens):
        # llama.cpp's converter spells the white space of added tokens as in text.
        if token is not None and there[token_id : token_id + 1] not in ([token], [token.replace("▁", " ")]):
            other = there[token_id] if token_id < len(there) else "missing"
            raise ModelError(
                f"token {token_id} is {token!r} in the model's tokenizer.json, but {other!r} in the GGUF file: "
                "tokenizer.model belongs to another tokenizer. Take the base's file (--base). Nothing was written."
            )


def refuse_other_vocabulary(keys: Mapping[str, Any], tokenizer: Any, record: Mapping[str, Any]) -> None:
    """Refuse a file by which llama.cpp splits text into other tokens than the tokenizer. Needs `refuse_other_tokens`.

    Special tokens are compared one by one. Scores are compared by texts: the contents of chats, and random tokens.

    Args:
        keys: the keys in the header of the file.
        tokenizer: the tokenizer of the run.
        record: the content of its tokenizer.json.

    Raises:
        ModelError: names the first difference.
    """
    if difference := next(_differences(keys, tokenizer, record), None):
        raise ModelError(
            f"llama.cpp would read text as other tokens than those the run trained on: {difference}. Nothing was "
            "written. Update llama.cpp, or add --allow-differences and send token ids to llama.cpp instead of text."
        )


def _differences(keys: Mapping[str, Any], tokenizer: Any, record: Mapping[str, Any]) -> Iterator[str]:
    kind, expected = keys.get("tokenizer.ggml.model"), "gpt2" if is_byte_level(record) else "llama"
    if {kind, expected} == {"gpt2", "llama"}:
        yield f"tokenizer.ggml.model is {kind} in the GGUF file, expected {expected}"
    if kind != "llama":
        return
    tokens, scores, types = (keys[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    score_of, rng = dict(zip(tokens, scores, strict=True)), random.Random(0)
    added = {token["id"]: token["content"] for token in record["added_tokens"]}
    for token_id, token in added.items():
        if types[token_id] not in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            yield f"{token!r} ({token_id}) is an added token in training, and plain text in the GGUF file"
    normal = [token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL]
    texts = [turn["content"].replace(" ", "▁") for turns in CONVERSATIONS.values() for turn in turns]
    texts += ["".join(rng.choices(normal, k=_TOKENS_IN_TEXT)) for _ in range(_NUM_TEXTS)]
    for text in texts:
        trained = [piece.value for piece in tokenizer.backend_tokenizer.model.tokenize(text)]
        served = _join(text, score_of)
        if served != trained and not any(token in text for token in added.values()):
            yield f"{text!r} is {' '.join(trained)!r} in training and {' '.join(served)!r} in llama.cpp"


def _join(text: str, score_of: Mapping[str, float]) -> list[str]:
    """Return the tokens of a text as llama.cpp finds them: it joins the neighbours with the highest score first."""
    symbols = list(text)
    while pairs := [(pair, -place) for place, pair in enumerate(map("".join, pairwise(symbols))) if pair in score_of]:
        pair, place = max(pairs, key=lambda found: (score_of[found[0]], found[1]))
        symbols[-place : 2 - place] = [pair]
    as_bytes = {symbol: [f"<0x{byte:02X}>" for byte in symbol.encode()] for symbol in symbols if symbol not in score_of}
    return [token for symbol in symbols for token in as_bytes.get(symbol, [symbol])]
