import pytest
import torch
from transformers import GenerationConfig

from finetune import launch
from finetune.config.schema import Config, LoraSection
from finetune.distributed.device import convert_weights
from finetune.errors import DataError, RunFailedError
from finetune.inference.decoding import (
    Decoding,
    generate_answers,
    group_prompts,
    room_for_answer,
    stream_answer,
)
from finetune.inference.divergence import compare_answers
from finetune.inference.sampling import Draw, Sampling
from finetune.model.lora import add_lora
from finetune.runs.model_files import LoadedRun
from tests.tiny_models import build_tiny, tiny_examples, tiny_phi3_config, tiny_phi_config
from tests.training.preferences.test_preference_loss import tiny_lora

PROMPTS = [example.input_ids.tolist() for example in tiny_examples(7, shortest=2, longest=9)]
NO_STOP = [63]
BOUNDARY = 12
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0, 1.0],
    "long_factor": [1.0, 8.0],
    "original_max_position_embeddings": BOUNDARY,
}


@pytest.fixture(scope="module")
def model():
    return build_tiny(tiny_phi3_config())


@pytest.fixture(scope="module", params=[tiny_phi_config, tiny_phi3_config])
def model_of_each_family(request):
    return build_tiny(request.param())


@pytest.fixture(scope="module")
def longrope_model():
    config = tiny_phi3_config(
        rope_parameters=LONGROPE, original_max_position_embeddings=BOUNDARY, sliding_window=None, initializer_range=0.5
    )
    return build_tiny(config)


def generate(model, prompts=PROMPTS, *, batch_size=3, max_new_tokens=8, stop_ids=NO_STOP, sampling=None):
    decoding = Decoding(stop_ids=stop_ids, max_new_tokens=max_new_tokens, sampling=sampling)
    return generate_answers(model, prompts, decoding, batch_size=batch_size)


def most_likely(model, prompt, count):
    """Token by token, each from all before it, without a cache."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_answers_are_the_most_likely_tokens_in_the_order_of_the_prompts(model_of_each_family):
    model = model_of_each_family
    expected = [most_likely(model, prompt, 6) for prompt in PROMPTS]
    until_stop = [answer[: answer.index(2)] if 2 in answer else answer for answer in expected]
    assert len({tuple(answer) for answer in until_stop}) > 1
    for batch_size in (1, 2, 5):
        assert generate(model, stop_ids=[2], max_new_tokens=6, batch_size=batch_size) == until_stop


def test_an_adapter_takes_part_and_the_model_is_left_as_it_was():
    model = add_lora(build_tiny(tiny_phi3_config()), LoraSection(r=2, dropout=0.5)).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    tuned = generate(model)
    assert generate(model) == tuned, "dropout must be off"
    with model.disable_adapter():
        assert generate(model) != tuned
    assert model.training
    assert model.config.use_cache is False


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_what_is_drawn_does_not_depend_on_the_batch_size(model, batch_size):
    sampling = Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=5)
    drawn = generate(model, sampling=sampling)
    assert generate(model, sampling=sampling, batch_size=batch_size) == drawn
    assert drawn != generate(model)
    assert drawn != generate(model, sampling=Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=6))


def test_tokens_are_drawn_with_their_probabilities(model):
    num_draws = 1500
    prompt = PROMPTS[0]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    expected = (logits / 2.0).softmax(-1)
    drawn = generate(
        model, [prompt] * num_draws, max_new_tokens=1, batch_size=num_draws, sampling=Sampling(temperature=2.0)
    )
    # A stop id ends an answer before it: 63 shows as an empty answer.
    counts = torch.bincount(torch.tensor([(answer or NO_STOP)[0] for answer in drawn]), minlength=len(expected))
    assert float((counts / num_draws - expected).abs().sum() / 2) < 0.1
    assert float((counts / num_draws - logits.softmax(-1)).abs().sum() / 2) > 0.15, "the temperature takes part"


def test_the_filters_leave_out_what_they_should(model):
    greedy = generate(model)
    assert generate(model, sampling=Sampling(top_k=1, seed=3)) == greedy
    assert generate(model, sampling=Sampling(top_p=1e-6, seed=3)) == greedy


def test_a_model_whose_probabilities_are_not_finite_draws_no_token(model):
    diverged = build_tiny(tiny_phi3_config())
    with torch.no_grad():
        diverged.model.norm.weight.fill_(torch.nan)
    for each, temperature in ((diverged, 1.0), (model, 1e-40)):
        with pytest.raises(RunFailedError, match="no token can be drawn, because the model's probabilities are not"):
            generate(each, sampling=Sampling(temperature=temperature))


def test_greedy_is_greedy_whatever_a_base_ships_with(model):
    expected = [most_likely(model, prompt, 8) for prompt in PROMPTS]
    own = model.generation_config
    model.generation_config = GenerationConfig(repetition_penalty=5.0, do_sample=True, temperature=3.0, min_length=50)
    try:
        assert generate(model) == [answer[: (answer + NO_STOP).index(63)] for answer in expected]
        assert model.generation_config.repetition_penalty == 5.0
    finally:
        model.generation_config = own


def test_a_streamed_answer_is_the_same_and_comes_token_by_token(model):
    (whole,) = generate(model, PROMPTS[:1])
    for sampling in (None, Sampling(seed=2)):
        given = []
        decoding = Decoding(stop_ids=NO_STOP, max_new_tokens=8, sampling=sampling)
        stream_answer(model, PROMPTS[0], decoding, given.append)
        assert given == (whole if sampling is None else generate(model, PROMPTS[:1], sampling=sampling)[0])
    given = []
    stops = [whole[3]]
    stream_answer(model, PROMPTS[0], Decoding(stop_ids=stops, max_new_tokens=8), given.append)
    assert given == whole[: whole.index(whole[3])]


def test_what_interrupts_an_answer_leaves_the_model_as_it_was():
    model = add_lora(build_tiny(tiny_phi3_config()), LoraSection(r=2)).train()
    own = model.generation_config

    def stop(token):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), model.disable_adapter():
        stream_answer(model, PROMPTS[0], Decoding(stop_ids=NO_STOP, max_new_tokens=8), stop)
    assert model.training
    assert model.generation_config is own
    assert model.get_model_status().enabled is True


def test_an_answer_ends_with_the_context_and_a_prompt_must_leave_room(model):
    context = model.config.max_position_embeddings
    nearly = [5] * (context - 3)
    assert room_for_answer(model, nearly, 8) == 3
    answers = generate(model, [nearly, PROMPTS[0]], batch_size=2)
    assert [len(answer) for answer in answers] == [3, len(generate(model, PROMPTS[:1])[0])]
    assert answers[1] == generate(model, PROMPTS[:1])[0]
    with pytest.raises(DataError, match=rf"prompt 2 of 2 has {context} tokens.*Shorten"):
        generate(model, [PROMPTS[0], [5] * context])


def test_a_longrope_model_never_shares_a_batch_across_its_boundary(longrope_model):
    lengths = [3, 4, 9, 10, BOUNDARY, 13, 14]
    prompts = [[(7 * place + row) % 60 + 3 for place in range(length)] for row, length in enumerate(lengths)]
    batches = group_prompts(longrope_model, prompts, batch_size=8, max_new_tokens=4)
    assert batches == [[0, 1], [2], [3], [4], [5, 6]]
    together = generate(longrope_model, prompts, batch_size=8, max_new_tokens=4)
    assert together == [generate(longrope_model, [prompt], max_new_tokens=4)[0] for prompt in prompts]
    # What the guard is for: put together by hand, the short rows of a batch take the factors of its longest.
    expected = [most_likely(longrope_model, prompt, 4) for prompt in prompts]
    assert together == [answer[: (answer + NO_STOP).index(63)] for answer in expected]


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.7)])
def test_transformers_computes_the_cache_anew_at_the_boundary_of_longrope(sampling):
    # The class of Phi-3 does so itself; those of other types do not.
    model = build_tiny(tiny_phi_config(rope_parameters=LONGROPE, initializer_range=0.5))
    prompts = [PROMPTS[0][:1] * 4, [*PROMPTS[1], *PROMPTS[0]][:9], [5] * BOUNDARY, [5] * (BOUNDARY + 1)]
    one, other = (
        generate_answers(
            model,
            prompts,
            Decoding(stop_ids=NO_STOP, max_new_tokens=12, sampling=sampling, by_transformers=by_transformers),
            batch_size=2,
        )
        for by_transformers in (False, True)
    )
    assert one == other
    if sampling is None:
        expected = [most_likely(model, prompt, 12) for prompt in prompts]
        assert other == [answer[: (answer + NO_STOP).index(63)] for answer in expected]


@pytest.mark.parametrize(("layer", "dtype"), [("norm", "bf16"), ("lm_head", "fp16"), ("embed_tokens", "bf16")])
def test_a_layer_trained_whole_in_fp32_answers_beside_weights_in_16_bits(layer, dtype):
    model = add_lora(build_tiny(tiny_phi3_config()), LoraSection(r=2, modules_to_save=[layer]))
    convert_weights(model, dtype)
    assert generate(model) == generate(model, batch_size=1)
    with model.disable_adapter():
        assert generate(model) == generate(model, batch_size=1)


def test_the_nats_of_a_drawn_token_are_those_before_temperature_and_filters():
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 1.0, 1.0]])
    draw = Draw(Sampling(temperature=0.5, top_k=2), rows=[0, 1])
    tokens, nats = draw.choose(scores, draw.levels(1))
    expected = -scores.log_softmax(1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(nats, expected)


def test_the_divergence_is_that_of_the_base_from_the_tuned_model_on_the_answer():
    model = tiny_lora().eval()
    prompt, answer = [5, 6, 7], [8, 9]
    config = Config.model_validate({"training": {"device": "cpu", "precision": "fp32"}})
    with launch(config, trains=False) as runtime:
        (found,) = compare_answers(runtime, LoadedRun(model, None), None, [prompt], [answer])
    ids = torch.tensor([prompt + answer])
    with torch.no_grad():
        tuned = model(input_ids=ids).logits[0, 2:4].double().log_softmax(1)
        with model.disable_adapter():
            base = model(input_ids=ids).logits[0, 2:4].double().log_softmax(1)
    log_p = [float(of.gather(1, ids[0, 3:, None]).mean()) for of in (base, tuned)]
    assert found == pytest.approx([float((base.exp() * (base - tuned)).sum(1).mean()), *log_p], rel=1e-4)
