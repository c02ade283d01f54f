"""`finetune plan` for runs that learn from their own answers, against what such runs do."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from finetune.cli.plan import plan_from_overrides
from finetune.config.compose import load_config
from finetune.config.schema import LoraSection
from finetune.diagnose.plan_batches import AssumedAnswers
from finetune.diagnose.plan_devices import find_device, read_device
from finetune.diagnose.planner import make_plan
from finetune.distributed.launch import launch
from finetune.engine import kv_cache
from finetune.engine.fused import replayed_or_not
from finetune.engine.kv_cache import CachedDecoder, bytes_of_copies, can_pack
from finetune.inference.decoding import Decoding, sample_answers
from finetune.inference.sampling import Sampling
from finetune.model.lora import add_lora
from finetune.model.quantized import quantize_without_data
from finetune.training.memory.forecast import OptimizerNeed, Shards, Weights, copy_without_data
from finetune.training.memory.generation import AnswerBatch, forecast_generation
from finetune.training.train import build_trainer
from tests.diagnose.measured import peak_of
from tests.diagnose.test_plan_memory import CONFIGS
from tests.tiny_models import build_tiny, tiny_gemma2_config, tiny_phi3_config
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["grpo.num_iterations=2", "training.max_tokens_per_microbatch=60"],
        ["training.drop_last=true", "rollout.max_completion_length=20", "training.kernels=reference"],
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


def generating_of(config, model, *, sampling=None, by_engine=True, replays=False, prompts=PROMPTS):
    """Predict 12 answers, 4 to each prompt."""
    rows = AssumedAnswers.of(config, model, prompts, 3).longest_prompts(12)
    batch = AnswerBatch(rows, config.rollout.max_completion_length, sampling)
    how = {"by_engine": by_engine, "replays": replays}
    forecast = forecast_generation(copy_without_data(model), batch, torch.float32, **how)
    return forecast.with_held(OptimizerNeed(0, 0), Shards(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_values_and_merged_weights_take_the_planned_bytes(words, dtype, monkeypatch):
    """Each key head serves two heads. Adapters are merged where that is exact, and weights packed where CPUs can."""
    model = add_lora(build_tiny(tiny_phi3_config(hidden_size=192)).to(dtype), LoraSection(r=2)).eval()
    planned = generating_of(load_config(words), model)
    rows = [prompt for prompt in PROMPTS for _ in range(4)]
    with torch.no_grad():
        decoder = CachedDecoder(model, rows, most_tokens=5 + 4)
        decoder.start()
    assert (planned.answers, planned.tokens) == (12, 5 + 4)
    cache = sum(tensor.nbytes for layer in decoder._cache.layers for tensor in layer)
    copies = 0 if dtype == torch.float32 else Weights(model).adapter // 2  # of the adapter in bf16, which stay too
    assert planned.cache == pytest.approx(cache + copies, rel=0.02)
    read = [layer for layers in decoder._decoder._read.values() for layer in layers]
    own = {weight.data_ptr() for weight in model.parameters()}
    weights = [layer.weight for layer in (*read, decoder._head)]
    assert planned.merged == sum(
        weight.nbytes for weight in weights if weight.is_mkldnn or weight.data_ptr() not in own
    )
    assert (planned.merged > 0) == (dtype == torch.float32 or can_pack(dtype, len(rows)))
    assert planned.held == Weights(model).held(Shards(1)) + Weights(model).adapter
    for most_bytes, expected in ((0, 0), (1, planned.merged)):
        monkeypatch.setattr(kv_cache, "_MOST_COPIED_BYTES", sum(w.nbytes for w in model.parameters()) - 1 + most_bytes)
        assert bytes_of_copies(model, len(rows), on_cpu=True) == expected, "the weights of a large model are not copied"


LONGER = [[*range(3, 3 + number)] for number in (70, 80, 90)]
GROUPED = {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 128, "head_dim": 16}
"""With few tokens in the vocabulary, logits take less than a pass over the prompts, or over a later token."""
MODELS = {
    "LoRA": lambda: add_lora(build_tiny(tiny_phi3_config(**SIZES)), LoraSection(r=2)),
    "sdpa": lambda: build_tiny(tiny_phi3_config(**GROUPED)),
    "sliding": lambda: build_tiny(tiny_phi3_config(**{**GROUPED, "sliding_window": 20})),
    "eager": lambda: build_tiny(tiny_gemma2_config(**{**GROUPED, "sliding_window": 4096})),
    "phimoe": lambda: build_tiny(CONFIGS["phimoe"]()),
    "gpt2": lambda: build_tiny(CONFIGS["gpt2"]()),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "by_engine", "prompts", "most", "sampling"),
    [
        ("LoRA", True, PROMPTS, "logits", Sampling(top_p=0.9)),
        ("sdpa", True, LONGER, "prompts", None),
        ("LoRA", False, PROMPTS, "logits", Sampling(top_p=0.9)),
        ("sdpa", False, PROMPTS, "step", None),
        ("sliding", False, LONGER, "prompts", Sampling()),
        ("eager", False, LONGER, "prompts", Sampling()),
        ("phimoe", False, [[5] * 3, [6] * 4], "prompts", None),
        ("gpt2", False, LONGER, "prompts", Sampling(top_k=50)),
    ],
)
def test_answers_take_the_planned_memory(words, family, by_engine, prompts, most, sampling):
    model = MODELS[family]()
    limit = {"logits": 60, "step": 120, "prompts": 30 if family != "phimoe" else 8}[most]
    config = load_config([*words, f"rollout.max_completion_length={limit}"])
    planned = generating_of(config, model, sampling=sampling, by_engine=by_engine, prompts=prompts)
    assert max(planned.logits, planned.prompts, planned.step) == getattr(planned, most)
    decoding = Decoding(stop_ids=[-1], max_new_tokens=limit, sampling=sampling, by_transformers=not by_engine)
    rows = [prompt for prompt in prompts for _ in range(4)]
    measured = peak_of(lambda: sample_answers(model, rows, decoding, batch_size=12))
    # The last layer and the head are copied after the peak of the prompts.
    late = planned.merged / model.config.num_hidden_layers if most == "prompts" else 0
    assert 0.98 * measured < planned.total - planned.held < 1.02 * measured + late


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [None, Sampling(top_p=0.9)], ids=["greedy", "drawn"])
def test_replayed_answers_take_the_memory_of_a_second_step(words, sampling):
    """A graph keeps that of its step. Without a GPU there is no graph, and the rest is measured."""
    model = MODELS["LoRA"]()
    config = load_config([*words, "rollout.max_completion_length=60"])
    replayed = generating_of(config, model, sampling=sampling, replays=True)
    rows = [prompt for prompt in PROMPTS for _ in range(4)]
    decoding = Decoding(stop_ids=[-1], max_new_tokens=60, sampling=sampling)
    with replayed_or_not(True):
        measured = peak_of(lambda: sample_answers(model, rows, decoding, batch_size=12))
    packed = bytes_of_copies(model, 12, on_cpu=True) - replayed.merged  # CUDA has no packed weights
    without_graph = replace(replayed, step=replayed.step // 2)
    assert without_graph.total + packed - replayed.held == pytest.approx(measured, rel=0.02)
    assert replayed.total - without_graph.total == min(replayed.step // 2, replayed.step - replayed.prompts)


@pytest.mark.slow
def test_a_plan_for_cuda_counts_replayed_answers_only_if_they_are_possible(words):
    def answers(*more):
        return make_plan(load_config([*words, "training.graphs=true", *more]), read_device("H200")).generating

    replayed, by_transformers = answers(), answers("training.deterministic=true")
    assert replayed.cache != by_transformers.cache
    assert replayed.step >= 2 * replayed.logits > 0
    assert answers("training.graphs=auto") == by_transformers


@pytest.mark.slow
def test_a_weight_in_4_bits_is_counted_while_it_is_dequantized():
    model = copy_without_data(MODELS["LoRA"]())
    quantized = copy_without_data(MODELS["LoRA"]())
    quantize_without_data(quantized)
    batch = AnswerBatch(PROMPTS, room=4)
    largest = model.get_base_model().model.layers[0].self_attn.qkv_proj.base_layer.weight.nbytes
    plain, in_4_bits = (
        forecast_generation(model, batch, torch.float32, by_engine=False, quantized=of).with_held(
            OptimizerNeed(0, 0), Shards(1)
        )
        for of in (None, quantized)
    )
    assert in_4_bits.step - plain.step == largest
    assert in_4_bits.held < plain.held


@pytest.mark.slow
def test_a_device_that_is_too_small_for_the_answers_is_refused_with_what_fits(words):
    """The step computes few answers at once, and all of them are generated at once."""
    more = ["training.batch_size=1", "rollout.num_generations=16", "rollout.max_completion_length=60"]
    more += ["rollout.batch_size=64"]
    config, roomy = load_config([*words, *more]), replace(find_device("cpu"), reserve=0)
    plan = make_plan(config, roomy)
    assert plan.peak.total < plan.generating.total == plan.needed == plan.in_shards[0].needed
    assert (plan.generating.answers, plan.fits, plan.findings) == (64, True, [])
    tight = replace(roomy, memory=plan.needed // 2)
    refused = make_plan(config, tight)
    (told,) = refused.findings
    assert (refused.fits, told.level) == (False, "problem")
    assert told.what.startswith("generating 64 answers at once takes ")
    (fit,) = re.findall(r"a lower rollout\.batch_size: (\d+) answers at once fit", told.fix)
    assert "a lower rollout.max_completion_length (it is 60); or rollout.server" in told.fix
    assert make_plan(load_config([*words, *more, f"rollout.batch_size={fit}"]), tight).fits


@pytest.mark.slow
def test_a_server_takes_the_memory_and_the_time_of_answers(words):
    plan = make_plan(load_config([*words, "rollout.server=http://localhost:1"]), find_device("cpu"), is_probed=True)
    assert (plan.generating, plan.seconds_generating) == (None, None)
    (told,) = plan.findings
    assert told.what.startswith("the time that rollout.server takes is not in this plan")


@pytest.mark.slow
def test_a_probe_measures_the_answers_of_a_step(words, capsys):
    more = ["rollout.max_completion_length=60", "training.max_steps=4"]
    assert plan_from_overrides([*words, *more], is_probed=True, as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["findings"] == []
    assert 0 < record["seconds_generating"] < record["seconds_per_step"] < 60
    assert record["seconds"] == pytest.approx(4 * record["seconds_per_step"])
    assert record["needed"] - record["device"]["reserve"] >= sum(record["generating"][part] for part in PARTS)


@pytest.mark.slow
def test_prompts_that_cannot_be_read_are_taken_to_be_as_long_as_they_may_be(words, capsys):
    """The context of 128 tokens leaves room for prompts of 108."""
    more = ["data.path=gone.jsonl", "rollout.max_completion_length=20", "training.max_steps=7", "training.batch_size=4"]
    assert plan_from_overrides([*words, *more]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"the largest has 4 answers and computes {108 + 4 * 20} tokens" in out
    assert "4 answers to each prompt, each assumed to have as many tokens as" in out
    assert "global batch: 4 prompts = training.global_batch_size" in out
    assert re.search(r"generating 16 answers at once: .*B, of which keys and values take .*B", out)
