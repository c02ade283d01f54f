"""Tokens that the base does not know: their rows train, nothing else of the embedding does, and ties hold."""

from __future__ import annotations

import json
import random

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoTokenizer

from finetune.config.schema import LoraSection
from finetune.engine.supported import unsupported_reason
from finetune.errors import ConfigError, ModelError
from finetune.model.lora import add_lora
from finetune.model.new_tokens import add_tokens, grow_embeddings, ids_of_new_tokens, start_base_from_mean_row
from finetune.model.saved_adapter import load_adapter
from tests.tiny import tiny_tokenizer
from tests.tiny_models import build_tiny, tiny_phi3_config, tiny_phi_config
from tests.tiny_training import (
    adapter_tensors,
    logits_of,
    plain_logits,
    refuse_to_differ_after_a_break,
    train,
    words_for,
)

TOKENS = ["<order>", "</order>"]
WORDS = ["task=finetune_new_tokens", "lora.new_tokens=['<order>', '</order>']", "lora.r=4", "optim.learning_rate=1e-2"]


def write_rows_with_tokens(folder):
    folder.mkdir()
    rng = random.Random(0)
    for split, count in (("train", 18), ("validation", 4), ("test", 4)):
        rows = [
            [
                {"role": "user", "content": f"{split} {number}: {rng.choice(['oranges', 'crates'])} by Friday"},
                {"role": "assistant", "content": f"<order>{rng.choice(['yes', 'no'])}</order>"},
            ]
            for number in range(count)
        ]
        text = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text)


@pytest.fixture(scope="module", params=["tied", "untied", "full to the last row"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, kind):
    folder = tmp_path_factory.mktemp("inputs")
    write_rows_with_tokens(folder / "rows")
    known = len(tiny_tokenizer()) + 1  # with a padding token of its own, in a spare row
    rows = known if kind == "full to the last row" else known + 9
    config = tiny_phi3_config(vocab_size=rows, tie_word_embeddings=kind != "untied", eos_token_id=320)
    build_tiny(config).save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    return folder, known


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    folder, known = inputs
    run = tmp_path_factory.mktemp("trained") / "run"
    trainer = train([*words_for(folder, run), *WORDS])
    ids = [5, 6, known, 7, known + 1, 8]
    return trainer, run, ids, logits_of(trainer, ids)


@pytest.mark.slow
def test_the_new_rows_train_and_load_in_plain_peft_on_the_original_base(trained, inputs, kind, tmp_path):
    (trainer, run, ids, ours), (folder, known) = trained, inputs
    rows = {name: tensor for name, tensor in adapter_tensors(run).items() if "token_adapter" in name}
    assert [tuple(tensor.shape) for tensor in rows.values()] == [(2, 16)] * (2 if kind == "untied" else 1)
    mean = trainer.model.get_input_embeddings().original_module.weight[:known].mean(dim=0)
    assert all((tensor - mean).abs().max() > 1e-3 for tensor in rows.values()), "they stayed where they began"
    to = known + 2 if kind == "full to the last row" else 0
    plain = plain_logits(tmp_path, {"tuned": (folder / "base", run / "adapter", to)}, ids)
    torch.testing.assert_close(plain["tuned"], ours, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain["tuned merged"], ours, rtol=1e-4, atol=1e-4)


def test_the_tokenizer_beside_the_adapter_knows_them(trained, inputs):
    (_, run, _, _), (_, known) = trained, inputs
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    assert tokenizer("<order>yes</order>", add_special_tokens=False)["input_ids"][:: len("yes") - 1][0] == known
    assert tokenizer.convert_tokens_to_ids(TOKENS) == [known, known + 1]
    shown = tokenizer.decode(tokenizer("<order>yes</order>")["input_ids"], skip_special_tokens=True)
    assert shown == "<order>yes</order>", "an answer must show them"


@pytest.mark.few(1)
def test_a_run_that_broke_ends_with_the_bytes_of_the_whole_one(trained, inputs, tmp_path):
    words = [*words_for(inputs[0], tmp_path), *WORDS]
    refuse_to_differ_after_a_break(words, trained[1], tmp_path / "broken")


def test_a_saved_adapter_is_put_on_its_base_again(trained, inputs):
    from transformers import AutoModelForCausalLM

    (_, run, ids, ours), (folder, _) = trained, inputs
    loaded = load_adapter(AutoModelForCausalLM.from_pretrained(folder / "base"), run / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=torch.tensor([ids])).logits, ours, rtol=1e-5, atol=1e-5)


def test_an_embedding_grows_by_the_mean_row_and_never_shrinks():
    model = build_tiny(tiny_phi3_config())
    before = model.get_input_embeddings().weight.detach().clone()
    grow_embeddings(model, 10)
    assert torch.equal(model.get_input_embeddings().weight, before)
    grow_embeddings(model, 66)
    after = model.get_input_embeddings().weight.detach()
    assert torch.equal(after[:64], before)
    torch.testing.assert_close(after[64:], before.mean(dim=0).expand(2, -1))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight, "the tie is kept"


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_base_in_16_bits_computes_what_the_new_rows_start_with(is_tied):
    tokenizer, section = tiny_tokenizer(), LoraSection(new_tokens=TOKENS)
    add_tokens(tokenizer, section)
    ids = ids_of_new_tokens(tokenizer, section)
    config = tiny_phi3_config(vocab_size=ids[-1] + 7, tie_word_embeddings=is_tied, eos_token_id=320)
    model = add_lora(build_tiny(config, dtype=torch.bfloat16), section, tokenizer)
    assert unsupported_reason(model) == "embed_tokens is a TrainableTokensWrapper (lora.new_tokens)"
    before = model.get_input_embeddings().original_module.weight.detach().clone()
    start_base_from_mean_row(model, ids)
    after = model.get_input_embeddings().original_module.weight.detach()
    others = [row for row in range(len(after)) if row not in ids]
    assert torch.equal(after[others], before[others])
    model = model.float().eval()
    with torch.no_grad():
        start = model(input_ids=torch.tensor([[5, *ids]])).logits
        with model.disable_adapter():
            assert torch.equal(model(input_ids=torch.tensor([[5, *ids]])).logits, start)
    rows = [delta for name, delta in model.named_parameters() if "trainable_tokens_delta" in name]
    for delta in rows:
        delta.data += 1
    start_base_from_mean_row(model, ids)
    assert all(delta.min() > 0.5 for delta in rows), "rows that have trained stay"


def test_a_token_that_is_there_already_is_refused():
    tokenizer = tiny_tokenizer()
    with pytest.raises(ConfigError, match=r"new_tokens: <\|end\|> is already a token of this tokenizer"):
        add_tokens(tokenizer, LoraSection(new_tokens=["<x>", "<|end|>"]))
    for tokens in (["<a>", "<a>"], [""]):
        with pytest.raises(ValidationError, match="expected different tokens that are not empty"):
            LoraSection(new_tokens=tokens)
    with pytest.raises(ValidationError, match=r"cannot be combined with lora\.new_tokens"):
        LoraSection(new_tokens=["<a>"], modules_to_save=["embed_tokens"])


def test_a_token_that_the_base_s_tokenizer_was_given_is_refused_and_one_of_a_run_is_not(tmp_path):
    section = LoraSection(new_tokens=["<think>"])
    tokenizer = tiny_tokenizer()
    add_tokens(tokenizer, section)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"new_tokens: <think> is already a token of this tokenizer \(id \d+\)"):
        add_tokens(AutoTokenizer.from_pretrained(tmp_path), section)
    (tmp_path / "adapter_config.json").write_text("{}")
    again = AutoTokenizer.from_pretrained(tmp_path)
    add_tokens(again, section)
    assert again.get_vocab() == tokenizer.get_vocab()


def test_a_head_with_a_bias_is_refused():
    tokenizer, section = tiny_tokenizer(), LoraSection(new_tokens=["<x>"])
    add_tokens(tokenizer, section)
    model = build_tiny(tiny_phi_config(vocab_size=400))
    with pytest.raises(ModelError, match="the head of this phi model has a bias"):
        add_lora(model, section, tokenizer)


def test_a_recipe_that_adds_no_tokens_says_which_one_does():
    with pytest.raises(ConfigError, match=r"recipes/finetune_new_tokens\.py"):
        add_lora(build_tiny(tiny_phi3_config()), LoraSection(new_tokens=["<x>"]))


def test_tokens_that_a_runs_tokenizer_has_already_are_added_once_and_their_ids_ascend(tmp_path):
    tokenizer = tiny_tokenizer()
    (tmp_path / "adapter_config.json").touch()
    tokenizer.name_or_path = str(tmp_path)
    section, other_order = (LoraSection(new_tokens=tokens) for tokens in (["<a>", "<b>"], ["<b>", "<a>"]))
    add_tokens(tokenizer, section)
    size = len(tokenizer)
    add_tokens(tokenizer, other_order)
    assert len(tokenizer) == size
    assert ids_of_new_tokens(tokenizer, other_order) == ids_of_new_tokens(tokenizer, section) == [size - 2, size - 1]
