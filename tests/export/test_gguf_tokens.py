"""What llama.cpp would read of a chat, without llama.cpp. tests/export/test_llama_cpp.py shows that it does so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from finetune.config.config_files import resolve_shipped
from finetune.errors import ModelError
from finetune.export.gguf import keys_for_llama_cpp
from finetune.export.gguf_file import read_header, with_keys
from finetune.export.gguf_sentencepiece import refuse_other_tokens
from finetune.export.gguf_tokens import TokenRules, find_rules, may_be_read_by_llama_cpp, refuse_other_ids
from tests.export.gguf_files import write_gguf
from tests.model.variants import VARIANTS

SPACE_AND_STRIP = TokenRules(puts_space=True, strips=True)


def changed(name: str, **changes: object) -> PreTrainedTokenizerFast:
    """A variant's tokenizer with parts of its tokenizer.json replaced."""
    tokenizer = VARIANTS[name].tokenizer()
    record = {**json.loads(tokenizer.backend_tokenizer.to_str()), **changes}
    backend = Tokenizer.from_str(json.dumps(record))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **VARIANTS[name].tokens.keywords)
    made.chat_template = tokenizer.chat_template
    return made


def test_the_rules_of_phi_3_are_found():
    reading = find_rules(VARIANTS["Phi-3-mini-4k"].tokenizer())
    assert reading.rules == SPACE_AND_STRIP
    assert not reading.plain
    assert not reading.edges
    assert len(reading.chats) == 7


def test_a_tokenizer_that_puts_a_space_before_the_first_piece_only_gets_a_file_without_spaces():
    """As transformers saves it from a LlamaTokenizer with legacy=False: the difference that nobody saw."""
    scheme = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    reading = find_rules(changed("Phi-3-mini-4k", normalizer=None, pre_tokenizer=scheme))
    assert reading.rules == TokenRules(puts_space=False, strips=True)
    assert not reading.plain


def test_a_merge_advises_gguf_only_for_tokenizers_that_llama_cpp_may_know(tmp_path):
    assert not may_be_read_by_llama_cpp(Path(resolve_shipped("shipped:phi_tiny"))), "its converter refuses this one"
    for name in ("Phi-3-mini-4k", "phi-4"):
        VARIANTS[name].tokenizer().save_pretrained(tmp_path / name)
        assert may_be_read_by_llama_cpp(tmp_path / name)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    words.save_pretrained(tmp_path / "words")
    assert not may_be_read_by_llama_cpp(tmp_path / "words")


def test_white_space_that_no_rule_covers_concerns_no_plain_chat():
    reading = find_rules(VARIANTS["phi-4"].tokenizer())
    assert reading.rules == TokenRules(puts_space=False, strips=False)
    assert not reading.plain
    assert len(reading.edges) == 2
    assert "from token" in str(reading.edges[0])
    refuse_other_ids(reading)


def lowercasing_tokenizer() -> PreTrainedTokenizerFast:
    spell = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    parts = [{"type": "Lowercase"}, {"type": "Prepend", "prepend": "▁"}, spell]
    return changed("Phi-3-mini-4k", normalizer={"type": "Sequence", "normalizers": parts})


def test_a_tokenizer_that_llama_cpp_cannot_follow_is_refused_with_the_first_token():
    with pytest.raises(ModelError, match=r"is '.*' in training and '.*' in llama\.cpp, from token 2 on"):
        refuse_other_ids(find_rules(lowercasing_tokenizer()))


def test_a_tokenizer_that_is_not_bpe_is_refused():
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0)], unk_id=0))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    with pytest.raises(ModelError, match=r"of the kind Unigram, .* Serve the merged folder"):
        find_rules(tokenizer)


def test_a_file_with_other_tokens_is_refused(tmp_path):
    tokenizer = VARIANTS["Phi-3-mini-4k"].tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    header = read_header(write_gguf(tmp_path / "a.gguf", {"tokenizer.ggml.tokens": [*tokens, "[PAD]"]}))
    refuse_other_tokens(header.keys, tokenizer)
    tokens[300] = "other"
    header = read_header(write_gguf(tmp_path / "b.gguf", {"tokenizer.ggml.tokens": tokens}))
    with pytest.raises(ModelError, match=r"token 300 is .* but 'other' in the GGUF file"):
        refuse_other_tokens(header.keys, tokenizer)


def test_added_tokens_of_a_run_are_compared_too():
    tokenizer = VARIANTS["Phi-3-mini-4k"].tokenizer()
    tokenizer.add_tokens([AddedToken("<order>", special=False, normalized=False)])
    assert find_rules(tokenizer).rules == SPACE_AND_STRIP


def test_keys_are_set_and_the_rest_of_the_file_stays(tmp_path):
    before = {"general.name": "a", "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eos_token_id": 3}
    path = write_gguf(tmp_path / "a.gguf", {**before, "tokenizer.ggml.tokens": ["a", "é", "▁b"]}, data=b"\1" * 96)
    header = read_header(path)
    keys = {**keys_for_llama_cpp(SPACE_AND_STRIP, header, [5, 3, 7]), "a number": 0.375}
    made = tmp_path / "b.gguf"
    made.write_bytes(b"".join(with_keys(path, header, keys)))
    after = read_header(made)
    assert after.keys == {
        **header.keys,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 7,
        "a number": 0.375,
    }
    assert after.num_tensors == 1
    at = after.tensors[1] + -after.tensors[1] % 32
    assert made.read_bytes()[at:] == b"\1" * 96
