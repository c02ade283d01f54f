"""A SentencePiece tokenizer on its way to llama.cpp. test_llama_cpp.py shows how llama.cpp itself reads the files."""

from __future__ import annotations

import json
import random
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from finetune.errors import ModelError
from finetune.export.gguf import copy_for_llama_cpp
from finetune.export.gguf_sentencepiece import refuse_other_tokens, refuse_other_vocabulary, sentencepiece_model
from tests.export.sentencepiece_models import build_tokenizer, train
from tests.model.variants import VARIANTS

WORDS = ("crates", "oranges", "Marta", "Porto", "Friday", "naïve", "价格", "🙂", "two\ttabs", "please", "<0x41>")


def with_pieces(tokenizer: Any) -> SimpleNamespace:
    """A tokenizer, its tokenizer.json, and the keys of a GGUF file as llama.cpp's converter writes them for it."""
    record = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = {token["id"]: 3 if token["special"] else 4 for token in record["added_tokens"]}
    places = {"".join(pair): place for place, pair in enumerate(record["model"]["merges"])}
    kinds = [special.get(i, 6 if token.startswith("<0x") else 1) for i, token in enumerate(tokens)]
    scores = [float(-places.get(token, 9999)) for token in tokens]
    keys = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}
    keys = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return SimpleNamespace(tokenizer=tokenizer, record=record, keys=keys)


@pytest.fixture(scope="module")
def phi_3() -> SimpleNamespace:
    return with_pieces(VARIANTS["Phi-3-mini-4k"].tokenizer())


def check(given: SimpleNamespace, **changes: object) -> None:
    keys = given.keys | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    refuse_other_tokens(keys, given.tokenizer)
    refuse_other_vocabulary(keys, given.tokenizer, given.record)


def test_a_file_with_the_vocabulary_of_the_tokenizer_is_accepted(phi_3):
    check(phi_3)


def test_placeholders_for_scores_are_refused_with_a_text(phi_3):
    """As llama.cpp's converter writes them for Llama's tokenizer without tokenizer.model."""
    with pytest.raises(ModelError, match=r"is '.*' in training and '.*' in llama\.cpp\. Nothing was written"):
        check(phi_3, scores=[-1000.0] * len(phi_3.tokenizer))


def test_a_special_token_that_the_file_takes_for_text_is_refused(phi_3):
    kinds = [1 if token == "<|end|>" else kind for token, kind in zip(*tokens_and_kinds(phi_3), strict=True)]
    with pytest.raises(ModelError, match=r"'<\|end\|>' \(\d+\) is an added token in training, and plain text"):
        check(phi_3, token_type=kinds)


def tokens_and_kinds(given: SimpleNamespace) -> tuple[list[str], list[int]]:
    return given.keys["tokenizer.ggml.tokens"], given.keys["tokenizer.ggml.token_type"]


@pytest.mark.parametrize(("name", "other"), [("Phi-3-mini-4k", "gpt2"), ("phi-4", "llama")])
def test_a_tokenizer_of_the_other_kind_is_refused(name, other):
    """As llama.cpp's converter writes Gemma 3 without tokenizer.model."""
    with pytest.raises(ModelError, match=f"model is {other} in the GGUF file, expected"):
        check(with_pieces(VARIANTS[name].tokenizer()), model=other)


def test_white_space_of_added_tokens_may_be_spelled_as_in_text(phi_3):
    tokenizer = VARIANTS["Phi-3-mini-4k"].tokenizer()
    tokenizer.add_tokens([AddedToken("▁▁▁", normalized=False)])
    given = with_pieces(tokenizer)
    tokens, _ = tokens_and_kinds(given)
    check(given, tokens=[*tokens[:-1], "   "])
    with pytest.raises(ModelError, match=r"token \d+ is '▁▁▁' in the model's tokenizer\.json, but '  '"):
        check(given, tokens=[*tokens[:-1], "  "])


@pytest.mark.needs("sentencepiece")
def test_the_tokenizer_model_that_is_made_splits_text_as_tokenizer_json_does(tmp_path):
    from sentencepiece import SentencePieceProcessor

    train(tmp_path / "trained.model")
    tokenizer = build_tokenizer(tmp_path / "trained.model", "first piece")
    tokenizer.add_tokens(["<order>"])
    (tmp_path / "made.model").write_bytes(sentencepiece_model(json.loads(tokenizer.backend_tokenizer.to_str())))
    trained, made = (SentencePieceProcessor(model_file=str(tmp_path / f"{name}.model")) for name in ("trained", "made"))
    for test in ("IsControl", "IsUnknown", "IsByte", "IsUnused"):
        kinds = [[getattr(model, test)(i) for i in range(len(trained))] for model in (trained, made)]
        assert kinds[0] == kinds[1]
    assert [made.IdToPiece(i) for i in range(len(made))] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    rng = random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=6)) for _ in range(300)]
    for text in texts:
        assert made.EncodeAsIds(text) == trained.EncodeAsIds(text)
        pieces = tokenizer.backend_tokenizer.model.tokenize(f"▁{text.replace(' ', '▁')}")
        assert made.EncodeAsIds(text) == [piece.id for piece in pieces]


def test_the_converter_gets_a_tokenizer_model_and_the_added_tokens(tmp_path):
    """transformers saves neither. A tokenizer.model that is there, or in the base's folder, is taken as it is."""
    VARIANTS["Phi-3-mini-4k"].write(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    record = json.loads(tokenizer.backend_tokenizer.to_str())
    (tmp_path / "base").mkdir()
    (tmp_path / "base/tokenizer.model").write_bytes(b"of the base")
    for name, base in (("made", None), ("taken", tmp_path / "base")):
        (tmp_path / name).mkdir()
        copy_for_llama_cpp(tmp_path / "model", tmp_path / name, base, record)
        added = json.loads((tmp_path / name / "tokenizer_config.json").read_text())["added_tokens_decoder"]
        assert {int(i): token["content"] for i, token in added.items()} == {
            i: str(token) for i, token in tokenizer.added_tokens_decoder.items()
        }
    assert (tmp_path / "made/tokenizer.model").read_bytes() == sentencepiece_model(record)
    assert (tmp_path / "taken/tokenizer.model").read_bytes() == b"of the base"
    shutil.copy(tmp_path / "base/tokenizer.model", tmp_path / "model")
    (tmp_path / "own").mkdir()
    copy_for_llama_cpp(tmp_path / "model", tmp_path / "own", None, record)
    assert (tmp_path / "own/tokenizer.model").read_bytes() == b"of the base"
