"""`finetune plan` for runs that learn from their own answers, against what such runs do."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from finetune.cli.plan import plan_from_overrides
from finetune.config.compose import load_config
from finetune.config.schema import LoraSection
from finetune.diagnose.plan import make_plan
from finetune.diagnose.plan_devices import find_device, read_device
from finetune.diagnose.plan_rollouts import AnswerBatch, AssumedAnswers, forecast_generating
from finetune.distributed.launch import launch
from finetune.engine.kv_cache import CachedDecoder
from finetune.engine.loss import summed_cross_entropy
from finetune.inference.decoding import Decoding, Sampling, sample_answers
from finetune.model.lora import add_lora
from finetune.model.quantized import quantize_without_data
from finetune.training.memory.forecast import (
    OptimizerNeed,
    Shards,
    Weights,
    copy_without_data,
    forecast_step,
)
from finetune.training.memory.tracing import Computation
from finetune.training.train import build_trainer
from tests.diagnose.measured import peak_of
from tests.tiny_models import LLAMA_KIN, build_tiny, tiny_gemma2_config, tiny_phi3_config
from tests.tiny_runs import write_base

PARTS = ("held", "merged", "cache", "logits")
SIZES = {"vocab_size": 3000, "hidden_size": 64, "num_hidden_layers": 6, "sliding_window": None}
PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7, 10, 11]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "base")
    (folder / "rows").mkdir()
    for split, count in (("train", 11), ("validation", 3)):
        rows = [{"prompt": f"{split} {n}: send three crates {'to Porto ' * (n % 4)}"} for n in range(count)]
        (folder / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def words(inputs, tmp_path):
    return [
        *("task=finetune_grpo", f"model.path={inputs / 'base'}", f"data.path={inputs / 'rows'}"),
        *(f"data.cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path / 'run'}", "lora.r=4"),
        *("reward.functions=regex", "reward.pattern=[^aet]*", "grpo.beta=0.05", "optim.warmup_steps=0"),
        *("training.device=cpu", "training.precision=fp32", "training.global_batch_size=4", "training.batch_size=6"),
        *("rollout.num_generations=4", "rollout.max_completion_length=4", "training.num_epochs=2"),
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "more",
    [
        ["grpo.num_iterations=2"],
        ["training.drop_last=true", "rollout.max_completion_length=20"],
        ["training.max_tokens_per_microbatch=60"],
        ["training.packing=false"],
        ["training.kernels=reference"],
    ],
)
def test_the_plan_of_answers_is_what_a_run_learns_from(words, more):
    """With a divergence from the base, all answers are in the loss, whatever their rewards."""
    config = load_config([*words, *more])
    plan = make_plan(config, find_device("cpu"))
    with launch(config) as runtime:
        trainer = build_trainer(runtime, config)
        loader, _, _ = trainer.prepare_dataloaders()
        loader._stops = [-1]  # all answers reach their limit
        steps = list(loader.steps(0))
    batches = plan.batches
    assert (batches.rows, batches.answers_per_prompt, batches.global_batch_size) == (11, 4, 4)
    assert (batches.steps_per_epoch, batches.steps) == (len(steps), 2 * len(steps))
    assert batches.microbatches_per_step == max(map(len, steps))
    made = [microbatch for step in steps for _, microbatch in step]
    largest = max(made, key=lambda microbatch: microbatch.num_computed)
    assert batches.largest_microbatch_rows >= largest.num_rows
    assert batches.largest_microbatch_tokens == pytest.approx(largest.num_computed, abs=4)
    assert batches.largest_microbatch_tokens >= largest.num_computed
    repeats = config.grpo.num_iterations
    if not config.training.drop_last:
        assert batches.tokens == sum(microbatch.num_tokens for microbatch in made) / repeats


@pytest.mark.slow
def test_memory_is_chosen_for_the_answers_of_a_step(words):
    """A micro-batch may have more answers than its global batch has prompts."""
    device = replace(find_device("cpu"), memory=2**34, reserve=0)
    few, many = (
        make_plan(load_config([*words, "training.batch_size=16", f"training.global_batch_size={size}"]), device)
        for size in (4, 11)
    )
    assert few.choice == many.choice


def generating_of(config, model, *, top_p=1.0, by_engine=True, prompts=PROMPTS):
    """Predict 12 answers, 4 to each prompt."""
    sampling = Sampling(top_p=None if top_p == 1 else top_p)
    empty, limit = copy_without_data(model), config.rollout.max_completion_length
    how = Computation(
        loss_of=lambda choices: partial(summed_cross_entropy, choices=choices), device_type="cpu", learns=False
    )
    batch = AnswerBatch.of(
        empty,
        AssumedAnswers.of(config, model, prompts, 3).longest_prompts(12),
        limit=limit,
        forecast=lambda microbatch: forecast_step(empty, microbatch, how),
        by_engine=by_engine,
        sampling=sampling,
    )
    return forecast_generating(empty, batch, OptimizerNeed(0, 0), Shards(1), "cpu" if by_engine else "cuda")


@pytest.mark.parametrize("kind", ["phi3", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_take_the_planned_bytes(words, kind, dtype):
    """Each key head serves two heads. Adapters are merged where that is exact."""
    base = build_tiny(LLAMA_KIN["qwen3"] if kind == "qwen3" else tiny_phi3_config())
    model = add_lora(base.to(dtype), LoraSection(r=2)).eval()
    planned = generating_of(load_config(words), model)
    rows = [prompt for prompt in PROMPTS for _ in range(4)]
    with torch.no_grad():
        decoder = CachedDecoder(model, rows, most_tokens=5 + 4)
        decoder.start()
    assert (planned.answers, planned.tokens) == (12, 5 + 4)
    assert planned.cache == sum(tensor.nbytes for layer in decoder._cache.layers for tensor in layer)
    read = [layer for layers in decoder._decoder._read.values() for layer in layers]
    own = {weight.data_ptr() for weight in model.parameters()}
    assert planned.merged == sum(layer.weight.nbytes for layer in read if layer.weight.data_ptr() not in own)
    assert (planned.merged > 0) == (dtype == torch.float32)
    assert planned.held == Weights(model).held(Shards(1)) + Weights(model).adapter


@pytest.mark.few(2)
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("form", ["LoRA", "full", "by transformers"])
def test_answers_take_the_planned_memory(words, form, top_p):
    base = build_tiny(tiny_phi3_config(**SIZES))
    model = add_lora(base, LoraSection(r=2)) if form == "LoRA" else base
    config = load_config([*words, "rollout.max_completion_length=60"])
    by_transformers = form == "by transformers"
    planned = generating_of(config, model, top_p=top_p, by_engine=not by_transformers)
    sampling = Sampling(top_p=None if top_p == 1 else top_p)
    decoding = Decoding(stop_ids=[-1], max_new_tokens=60, sampling=sampling, by_transformers=by_transformers)
    rows = [prompt for prompt in PROMPTS for _ in range(4)]
    measured = peak_of(lambda: sample_answers(model, rows, decoding, batch_size=12))
    assert planned.total - planned.held == pytest.approx(measured, rel=0.02)


LONGER = [[*range(3, 3 + number)] for number in (70, 80, 90)]


@pytest.mark.few(2)
@pytest.mark.parametrize("prompts", [PROMPTS, LONGER], ids=["step", "prompts"])
@pytest.mark.parametrize("form", ["engine", "sdpa", "eager"])
def test_the_forward_pass_of_generating_takes_the_planned_memory(words, form, prompts):
    """With few tokens in the vocabulary, logits take less than a pass over the prompts, or over a later token."""
    grouped = {"num_attention_heads": 8, "num_key_value_heads": 2}
    sizes = {**SIZES, **grouped, "vocab_size": 128, "head_dim": 16}
    base = build_tiny(
        tiny_gemma2_config(**{**sizes, "sliding_window": 4096}) if form == "eager" else tiny_phi3_config(**sizes)
    )
    assert base.config._attn_implementation == ("eager" if form == "eager" else "sdpa")
    limit = 30 if prompts is LONGER else 120
    config = load_config([*words, f"rollout.max_completion_length={limit}"])
    by_engine = form == "engine"
    planned = generating_of(config, base, by_engine=by_engine, prompts=prompts)
    most = planned.prompts if prompts is LONGER or by_engine else planned.step
    assert max(planned.logits, planned.prompts, planned.step) == most
    decoding = Decoding(stop_ids=[-1], max_new_tokens=limit, sampling=Sampling(), by_transformers=not by_engine)
    rows = [prompt for prompt in prompts for _ in range(4)]
    measured = peak_of(lambda: sample_answers(base, rows, decoding, batch_size=12))
    assert planned.total - planned.held == pytest.approx(measured, rel=0.10)


def test_a_weight_in_4_bits_is_counted_while_it_is_dequantized():
    model = copy_without_data(add_lora(build_tiny(tiny_phi3_config(**SIZES)), LoraSection(r=2)))
    largest = model.get_base_model().model.layers[0].self_attn.qkv_proj.base_layer.weight.nbytes
    batch = AnswerBatch(answers=12, tokens=9, room=4, sampling=None, prompts=10**6, is_padded=False)
    plain = forecast_generating(model, batch, OptimizerNeed(0, 0), Shards(1), "cuda")
    quantize_without_data(model)
    in_4_bits = forecast_generating(model, batch, OptimizerNeed(0, 0), Shards(1), "cuda")
    assert in_4_bits.step - plain.step == in_4_bits.prompts - plain.prompts == largest


@pytest.mark.slow
def test_a_device_that_is_too_small_for_the_answers_is_refused_with_what_fits(words):
    """The step computes few answers at once, and all of them are generated at once."""
    more = ["training.batch_size=1", "rollout.num_generations=64", "rollout.max_completion_length=60"]
    more += ["rollout.batch_size=256"]
    config, roomy = load_config([*words, *more]), replace(find_device("cpu"), reserve=0)
    plan = make_plan(config, roomy)
    assert plan.peak.total < plan.generating.total == plan.needed == plan.in_shards[0].needed
    assert (plan.generating.answers, plan.fits, plan.findings) == (256, True, [])
    tight = replace(roomy, memory=plan.needed // 2)
    refused = make_plan(config, tight)
    (told,) = refused.findings
    assert (refused.fits, told.level) == (False, "problem")
    assert told.what.startswith("generating 256 answers at once takes ")
    (fit,) = re.findall(r"a lower rollout\.batch_size: (\d+) answers at once fit", told.fix)
    assert "a lower rollout.max_completion_length (it is 60); or rollout.server" in told.fix
    assert make_plan(load_config([*words, *more, f"rollout.batch_size={fit}"]), tight).fits
    assert not make_plan(load_config([*words, *more, f"rollout.batch_size={int(fit) + 1}"]), tight).fits


def test_a_server_takes_the_memory_and_the_time_of_answers(words):
    plan = make_plan(load_config([*words, "rollout.server=http://localhost:1"]), find_device("cpu"), is_probed=True)
    assert (plan.generating, plan.seconds_generating) == (None, None)
    (told,) = plan.findings
    assert told.what.startswith("the time that rollout.server takes is not in this plan")


@pytest.mark.slow
def test_a_probe_measures_the_answers_of_a_step(words, capsys):
    more = ["rollout.max_completion_length=60", "training.max_steps=4"]
    for iterations in (1, 64):
        given = [*words, *more, f"grpo.num_iterations={iterations}"]
        assert plan_from_overrides(given, is_probed=True, as_json=True) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["findings"] == []
        assert 0 < record["seconds_generating"] < record["seconds_per_step"] < 60
        assert record["seconds"] == pytest.approx(4 * record["seconds_per_step"])
        generating = record["generating"]
        assert record["needed"] - record["device"]["reserve"] >= sum(generating[part] for part in PARTS)
        if iterations == 1:
            once = record["seconds_generating"]
    assert record["seconds_generating"] < once


@pytest.mark.slow
def test_the_time_of_a_gpu_is_without_answers(words):
    (told,) = make_plan(load_config(words), read_device("H100")).findings
    assert told.what.startswith("the time that generating answers takes is not in this plan: --probe measures it where")


def test_prompts_that_cannot_be_read_are_taken_to_be_as_long_as_they_may_be(words, capsys):
    """The context of 128 tokens leaves room for prompts of 108."""
    more = ["data.path=gone.jsonl", "rollout.max_completion_length=20", "training.max_steps=7", "training.batch_size=4"]
    assert plan_from_overrides([*words, *more]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "so the plan assumes prompts of up to 2,048 tokens (data.max_length): " in out
    assert f"the largest has 4 answers and computes {108 + 4 * 20} tokens" in out
    assert (
        "4 answers to each prompt, each assumed to have as many tokens as rollout.max_completion_length allows" in out
    )
    assert "global batch: 4 prompts = training.global_batch_size" in out
    assert "7 steps" in out
    assert re.search(
        r"generating 16 answers at once: .*B, of which keys and values take .*B and the pass over the prompts .*B", out
    )
