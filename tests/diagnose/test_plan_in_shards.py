"""The memory of a rank where several share the weights: predicted for any number, measured with two and four."""

import json
from functools import partial

import pytest
import torch
from rich.console import Console

from benchmarks.bench import Bench
from benchmarks.job import SIZES, Job
from benchmarks.sharding import _rows, measure
from finetune.cli.plan import show_plan
from finetune.config.compose import compose, load_config
from finetune.diagnose.plan_devices import read_device
from finetune.diagnose.planner import SHARDS, make_plan
from finetune.distributed.device import convert_weights
from finetune.engine.layout import pack
from finetune.engine.loss import summed_cross_entropy
from finetune.model.base import build_base_model
from finetune.model.lora import attach_adapter
from finetune.model.targets import resolve_targets
from finetune.training.forward import Computation
from finetune.training.memory.forecast import Shards, Weights, forecast_step, optimizer_need
from finetune.training.optim import build_optimizer

WIDE = {
    "model_type": "phi3",
    **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16},
    **{"num_key_value_heads": 16, "vocab_size": 32_000, "max_position_embeddings": 4096, "pad_token_id": 0},
}
"""1.7 billion parameters."""
WORDS = [
    *("task=finetune_lora", "model.init=random", f"model.config={json.dumps(WIDE)}", "model.tokenizer=nowhere"),
    *("training.gradient_checkpointing=true", "training.max_tokens_per_microbatch=2048", "data.max_length=1024"),
]
SIZE, FEW_STEPS = "sharded-shallow", 2
_OF_CODE = 20e6
"""Bytes that first calls import."""


def words_of(base, folder, method):
    lora = ["lora.r=8", f"lora.target_modules={json.dumps(SIZES[SIZE].lora_targets)}"] if method == "lora" else []
    return [
        *(f"task=finetune_{method}", f"model.path={base}", f"data.path={base}", f"output_dir={folder / 'run'}", *lora),
        *("training.device=cpu", "training.precision=fp32", "training.global_batch_size=8", "training.batch_size=2"),
        "parallel.sharding=fsdp2",
    ]


def prepared(config):
    """The model on the meta device, as a run prepares it."""
    with torch.device("meta"):
        model = build_base_model(config.model.model_copy(update={"init": "random"}))
        if config.training.method == "lora":
            model = attach_adapter(model, config.lora, resolve_targets(model, config.lora.target_modules))
    convert_weights(model, "fp32")
    return model.train()


def forecast(config):
    model = prepared(config)
    rows = sorted(_rows(SIZES[SIZE].vocabulary), key=lambda row: -len(row[0]))[:2]
    microbatch = pack([(torch.tensor(ids), torch.tensor(is_target)) for ids, is_target in rows])
    need = optimizer_need(build_optimizer(model, config.optim), device_type="cpu")
    assert need is not None
    how = Computation(loss_of=lambda choices: partial(summed_cross_entropy, choices=choices), device_type="cpu")
    return forecast_step(model, microbatch, how), need


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("base")).base(Job(size=SIZE))


@pytest.mark.slow
def test_the_forecast_is_what_a_rank_holds(base, tmp_path):
    method, ranks = "full", 2
    steps = f"training.max_steps={FEW_STEPS}"
    held, seconds = measure(base, tmp_path, SIZE, method=method, sharding="fsdp2", num_ranks=ranks, more=[steps])
    loading, loaded, peak = held
    assert seconds > 0
    found, need = forecast(load_config(words_of(base, tmp_path, method)))
    predicted = found.peak(need, world_size=ranks, shards=Shards(ranks))
    assert predicted.total == pytest.approx(peak, rel=0.1)
    weights = predicted.parts["weights"] + predicted.parts["adapter"]
    assert predicted.total - weights == pytest.approx(peak - loaded, rel=0.1), "of steps, which take no other memory"
    assert found.peak(need, world_size=ranks).total > 1.2 * peak, "the same without shards"
    most = weights + max(found.weights.largest_layer, found.weights.outside)
    assert loading < most + _OF_CODE, "a part and one layer at a time"


METHODS = ("lora", "full")


def composed(*words):
    return compose([*WORDS, *words], needs_data=False)


def plan(*words, device="Small 4GB"):
    return make_plan(composed(*words), read_device(device))


@pytest.fixture(scope="module")
def models():
    return {method: prepared(composed(f"task=finetune_{method}")) for method in METHODS}


def test_sharded_weights_are_divided_and_the_rest_is_full(models):
    lora, full = (Weights(models[method]) for method in METHODS)
    for weights in (lora, full):
        assert weights.held(Shards(8)) == pytest.approx(weights.held(Shards(1)) / 8, rel=0.01)
    assert lora.gradients(Shards(8)) == lora.adapter == lora.gradients(Shards(1))
    assert full.gradients(Shards(8)) == pytest.approx(full.gradients(Shards(1)) / 8, rel=0.01)
    assert lora.gathered(Shards(1)) == 0 < lora.gathered(Shards(2)) == lora.gathered(Shards(8))
    frozen = sum(weight.nbytes for weight in models["lora"].parameters() if not weight.requires_grad)
    assert Weights(models["lora"]).gathered(Shards(2, reshards=False)) == frozen


@pytest.mark.slow
def test_the_smallest_number_that_fits_is_found_and_advised(capsys):
    found = plan()
    needs = [need.needed for need in found.in_shards]
    assert [need.shards for need in found.in_shards] == list(SHARDS) == [1, 2, 4, 8]
    assert needs == sorted(needs, reverse=True)
    assert needs[0] == found.needed
    assert (found.fits, found.fewest_shards) == (False, 2)
    (told,) = [finding for finding in found.findings if finding.area == "Memory"]
    assert "parallel.sharding=fsdp2 with 2 processes or more" in told.fix
    show_plan(found, Console())
    assert "in 8; it fits in 2" in " ".join(capsys.readouterr().out.split())
    assert found.as_record()["in_shards"][1] == {"shards": 2, "needed": needs[1], "fits": True}


@pytest.mark.slow
def test_the_plan_of_a_sharded_run_is_that_of_its_shards():
    whole, shared = plan(), plan("parallel.sharding=fsdp2", "parallel.world_size=4")
    assert shared.needed == whole.in_shards[2].needed < whole.needed / 1.5
    assert shared.fits
    assert shared.peak.parts["gathered"] > 0
    assert "gathered" not in whole.peak.parts
    by_pairs = plan("parallel.sharding=fsdp2", "parallel.world_size=4", "parallel.shard_size=2")
    assert by_pairs.needed == whole.in_shards[1].needed


@pytest.mark.slow
def test_a_model_that_is_small_beside_its_activations_is_not_planned_in_shards(capsys):
    words = ["model=phi_tiny", "training.batch_size=16"]
    found = make_plan(compose(words, needs_data=False), read_device("Small 4GB"))
    assert found.in_shards == [(1, found.needed, True)]
    show_plan(found, Console())
    assert "they save next to nothing, as weights take little" in " ".join(capsys.readouterr().out.split())
    sharded = [*words, "parallel.sharding=fsdp2", "parallel.world_size=4"]
    asked = make_plan(compose(sharded, needs_data=False), read_device("Small 4GB"))
    assert [need.shards for need in asked.in_shards] == list(SHARDS), "a run that asks for shards hears of all"


@pytest.mark.slow
@pytest.mark.parametrize("word", ["parallel.gradient_sync=ddp", "optim.optimizer=torch.optim.Adafactor"])
def test_what_cannot_be_sharded_has_no_figures(word):
    assert plan("task=finetune_full", word).in_shards == []
