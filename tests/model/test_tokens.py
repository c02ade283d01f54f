"""Model and tokenizer agree: stop ids as a list, a padding token that ends nothing, no token without a row."""

from __future__ import annotations

import logging

import pytest
import torch

from finetune.config.schema import LoraSection, ModelSection
from finetune.errors import DataError, ModelError
from finetune.model.base import build_base_model
from finetune.model.lora import add_lora
from finetune.model.tokens import build_tokenizer, choose_pad_token, set_stop_and_pad_ids
from tests.tiny import tiny_tokenizer
from tests.tiny_models import build_tiny, tiny_phi3_config, tiny_phi_config

END, EOS = 321, 320


def test_the_models_own_stop_ids_stay_behind_the_tokenizers() -> None:
    model = build_tiny(tiny_phi3_config(vocab_size=336))
    model.generation_config.eos_token_id = [7, EOS]
    assert set_stop_and_pad_ids(model, tiny_tokenizer()) == [END, EOS, 7]
    assert model.generation_config.eos_token_id == model.config.eos_token_id == [END, EOS, 7]
    assert set_stop_and_pad_ids(model, tiny_tokenizer()) == [END, EOS, 7], "a second time changes nothing"


def test_an_id_that_the_model_has_no_row_for_stops_nothing() -> None:
    model = build_tiny(tiny_phi3_config(vocab_size=336, eos_token_id=32000))
    assert set_stop_and_pad_ids(model, tiny_tokenizer()) == [END, EOS]


def test_an_adapters_base_is_told_and_a_single_stop_id_is_a_list_too() -> None:
    base = build_tiny(tiny_phi_config(vocab_size=336, eos_token_id=EOS))
    adapted = add_lora(base, LoraSection(r=2))
    assert set_stop_and_pad_ids(adapted, tiny_tokenizer("none")) == [EOS]
    assert base.generation_config.eos_token_id == [EOS]


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    set_stop_and_pad_ids(build_tiny(tiny_phi3_config(vocab_size=len(tokenizer))), tokenizer)
    with pytest.raises(ModelError, match=r"the tokenizer has 327 tokens, but the model's embedding 326 rows"):
        set_stop_and_pad_ids(build_tiny(tiny_phi3_config(vocab_size=326)), tokenizer)


def test_a_tokenizer_that_nothing_can_end_is_refused() -> None:
    tokenizer = tiny_tokenizer("none")
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="nothing could end an answer"):
        set_stop_and_pad_ids(build_tiny(tiny_phi3_config(vocab_size=336)), tokenizer)


def test_a_padding_token_that_ends_nothing_stays() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<|mine|>"})
    choose_pad_token(tokenizer, 999)
    assert tokenizer.pad_token == "<|mine|>"


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (["<|placeholder1|>", "<|placeholder6|>"], "<|placeholder6|>"),
        (["<|dummy_85|>", "<pad>"], "<pad>"),
        ([], "<|pad|>"),
    ],
)
def test_a_token_that_is_kept_free_comes_before_a_new_one(there: list[str], chosen: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": there})
    before = len(tokenizer)
    choose_pad_token(tokenizer, before + 1)
    assert tokenizer.pad_token == chosen
    assert len(tokenizer) == before + (not there)


@pytest.mark.parametrize("rows", [327, None])
def test_without_a_free_token_and_a_free_row_it_stays_and_says_so(
    rows: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tiny_tokenizer()
    with caplog.at_level(logging.INFO, "finetune"):
        choose_pad_token(tokenizer, rows)
    assert (tokenizer.pad_token, len(tokenizer)) == ("<|endoftext|>", 327)
    assert "<|endoftext|> stays the padding token, though it also ends text" in caplog.text


def test_a_tokenizer_is_built_with_a_padding_token_that_fits_the_model_it_is_named_with(tmp_path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    config = {"model_type": "phi3", "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 328}
    keys = {"init": "random", "tokenizer": str(tmp_path)}
    assert build_tokenizer(ModelSection(**keys, config=config)).pad_token_id == 327
    assert build_tokenizer(ModelSection(**keys, config={**config, "vocab_size": 327})).pad_token_id == EOS


def test_the_row_of_a_padding_index_trains(tmp_path) -> None:
    untied = tiny_phi3_config(pad_token_id=5, tie_word_embeddings=False)  # else the row trains as a part of the head
    build_tiny(untied).save_pretrained(tmp_path)
    model = build_base_model(ModelSection(path=str(tmp_path)))
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad[5].abs().max() > 0
