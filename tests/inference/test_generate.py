import pytest
import torch

from finetune.config.schema import LoraSection
from finetune.inference.decoding import Decoding, generate_answers
from finetune.model.lora import add_lora
from tests.tiny_models import build_tiny, tiny_examples, tiny_phi3_config, tiny_phi_config

PROMPTS = [example.input_ids.tolist() for example in tiny_examples(5, shortest=2, longest=9)]
CONFIGS = {"phi": tiny_phi_config(), "phi3": tiny_phi3_config()}


@pytest.fixture(params=CONFIGS)
def model(request):
    return build_tiny(CONFIGS[request.param])


def generate(model, prompts=PROMPTS, *, stop_ids=(2,), max_new_tokens=6, batch_size=2):
    decoding = Decoding(stop_ids=stop_ids, max_new_tokens=max_new_tokens)
    return generate_answers(model, prompts, decoding, batch_size=batch_size)


def most_likely(model, prompt, count):
    """Token by token, each from all before it, without a cache."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_answers_are_the_most_likely_tokens_in_the_order_of_the_prompts(model):
    expected = [most_likely(model, prompt, 6) for prompt in PROMPTS]
    until_stop = [answer[: answer.index(2)] if 2 in answer else answer for answer in expected]
    assert len({tuple(answer) for answer in until_stop}) > 1
    assert generate(model) == until_stop


@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_prompts_decoded_together_do_not_touch_each_other(model, batch_size):
    assert generate(model, batch_size=batch_size) == generate(model, batch_size=2)


def test_an_answer_ends_before_the_first_of_any_stop_id(model):
    free = [most_likely(model, prompt, 6) for prompt in PROMPTS]
    stops = [free[0][2], free[1][3]]
    expected = [answer[: min([answer.index(s) for s in stops if s in answer], default=6)] for answer in free]
    assert generate(model, stop_ids=stops) == expected
    assert any(len(answer) < 6 for answer in expected)


def test_an_answer_may_be_empty_and_there_may_be_no_prompts(model):
    first = most_likely(model, PROMPTS[0], 1)
    assert generate(model, [PROMPTS[0]], stop_ids=first) == [[]]
    assert generate(model, []) == []


def test_an_adapter_takes_part_and_the_model_is_left_as_it_was():
    model = add_lora(build_tiny(CONFIGS["phi3"]), LoraSection(r=2, dropout=0.5)).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    tuned = generate(model, stop_ids=[63])
    assert generate(model, stop_ids=[63]) == tuned, "dropout must be off"
    with model.disable_adapter():
        assert generate(model, stop_ids=[63]) != tuned
    assert model.training
    assert model.config.use_cache is False
