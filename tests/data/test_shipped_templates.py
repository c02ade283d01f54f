"""The shipped prompt formats, against conversations written out by hand from the model cards of each family."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from finetune.data.chat_template import ChatTemplate, use_chat_template
from finetune.data.formats import FORMATS, parse_row
from finetune.data.templates import AnswerTokens, encode_batch, end_of_turn_ids
from finetune.data.turns import dialogue_of
from finetune.data.values import BadRowError
from finetune.errors import DataError
from tests.tiny import tiny_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "no"},
]
# What carries loss is between ⟦ and ⟧.
LLAMA3 = (
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦yes<|eot_id|>⟧"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦no<|eot_id|>⟧"
)
CHATML = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
    "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n"
)
ALPACA = "### Instruction:\nHi\n\n### Response:\n⟦yes</s>⟧\n\n### Instruction:\nAnd?\n\n### Response:\n⟦no</s>⟧"
GEMMA = (
    "{}Hi<end_of_turn>\n<start_of_turn>model\n⟦yes<end_of_turn>⟧\n"
    "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n⟦no<end_of_turn>⟧\n"
)
ALPACA_OPENING = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
FORMATS_BY_HAND = {
    "alpaca": ("<s>Be brief.\n\n" + ALPACA, "<s>" + ALPACA_OPENING + ALPACA),
    "chatml": ("<|im_start|>system\nBe brief.<|im_end|>\n" + CHATML, CHATML),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>" + LLAMA3,
        "<|begin_of_text|>" + LLAMA3,
    ),
    "gemma": (
        "<bos>" + GEMMA.format("<start_of_turn>user\nBe brief.\n\n"),
        "<bos>" + GEMMA.format("<start_of_turn>user\n"),
    ),
    "mistral": (
        "<s>[INST] Be brief.\n\nHi[/INST]⟦ yes</s>⟧[INST] And?[/INST]⟦ no</s>⟧",
        "<s>[INST] Hi[/INST]⟦ yes</s>⟧[INST] And?[/INST]⟦ no</s>⟧",
    ),
}
SPECIAL = {
    "alpaca": ("<s>", "</s>", []),
    "chatml": ("<|endoftext|>", "<|endoftext|>", ["<|im_start|>", "<|im_end|>"]),
    "llama3": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    ),
    "gemma": ("<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"]),
    "mistral": ("<s>", "</s>", ["[INST]", "[/INST]"]),
}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    bos, eos, others = SPECIAL[name]
    tokenizer = tiny_tokenizer("none")
    tokenizer.add_special_tokens({"bos_token": bos, "eos_token": eos, "additional_special_tokens": others})
    use_chat_template(tokenizer, name)
    return tokenizer


@pytest.mark.parametrize("with_system", [True, False])
@pytest.mark.parametrize("name", FORMATS_BY_HAND)
def test_a_shipped_format_is_the_published_one(name, with_system):
    tokenizer = tokenizer_of(name)
    by_hand = FORMATS_BY_HAND[name][not with_system]
    turns = [SYSTEM, *TURNS] if with_system else TURNS
    (text,) = ChatTemplate(tokenizer).render([dialogue_of(turns)])
    assert text == by_hand.replace("⟦", "").replace("⟧", "")
    (prompt,) = ChatTemplate(tokenizer).render([dialogue_of(turns[:-1])], with_prompt=True)
    assert prompt == by_hand.rpartition("⟦")[0].replace("⟦", "").replace("⟧", "")

    row = parse_row({"messages": turns}, FORMATS["messages"], {})
    (encoded,) = encode_batch([row], AnswerTokens(tokenizer), "all")
    ids, is_target = [], []
    for number, part in enumerate(by_hand.replace("⟧", "⟦").split("⟦")):
        part_ids = tokenizer(part, add_special_tokens=False)["input_ids"]
        ids += part_ids
        is_target += [number % 2] * len(part_ids)
    assert (list(encoded.token_ids), list(encoded.is_target)) == (ids, is_target)
    for token in {token for token in SPECIAL[name][2] if token in by_hand}:
        assert tokenizer.convert_tokens_to_ids(token) in ids
    assert encoded.token_ids[-1 if is_target[-1] else -2] == end_of_turn_ids(tokenizer)[0]


def test_alpaca_has_two_answers_in_a_row():
    tokenizer, turns = tokenizer_of("alpaca"), [*TURNS[:2], TURNS[3]]
    (row,) = encode_batch([parse_row({"messages": turns}, FORMATS["messages"], {})], AnswerTokens(tokenizer), "all")
    assert not isinstance(row, BadRowError), row
    text = tokenizer.decode(row.token_ids)
    assert text.endswith("Hi\n\n### Response:\nyes</s>\n\n### Response:\nno</s>")
    learnt = [token for token, is_target in zip(row.token_ids, row.is_target, strict=True) if is_target]
    assert tokenizer.decode(learnt) == "yes</s>no</s>"


def test_a_tokenizer_without_bos_gets_none():
    tokenizer = tiny_tokenizer("none")  # as GPT-2 and Phi have it, also with the end of text as bos
    for bos in (None, "<|endoftext|>"):
        tokenizer.bos_token = bos
        use_chat_template(tokenizer, "alpaca")
        (text,) = ChatTemplate(tokenizer).render([dialogue_of([SYSTEM, *TURNS])])
        assert text.startswith("Be brief.\n\n### Instruction:\nHi\n\n### Response:\nyes<|endoftext|>\n\n###")


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma"])
def test_a_tokenizer_without_the_tokens_of_a_format_is_refused(name):
    tokenizer = tiny_tokenizer("phi4_mini")
    use_chat_template(tokenizer, name)
    with pytest.raises(DataError, match="could not learn to stop") as refused:
        AnswerTokens(tokenizer)
    assert f"the tokenizer has no token {' and no '.join(SPECIAL[name][2])}, so" in str(refused.value)
    for helping in ("plain", "alpaca"):  # the templates that the message names
        assert helping in str(refused.value)
        use_chat_template(tokenizer, helping)
        AnswerTokens(tokenizer)
