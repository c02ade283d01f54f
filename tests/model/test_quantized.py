"""QLoRA: refused in words where it cannot be; its path on a CPU where bitsandbytes is there."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from finetune import add_lora, encode_examples, load_config, load_examples
from finetune.config.schema import LoraSection, ModelSection
from finetune.data.encoded import filler_rows
from finetune.diagnose.plan_devices import read_device
from finetune.diagnose.plan_model import PlannedModel
from finetune.diagnose.planner import Planner
from finetune.distributed.device import convert_weights
from finetune.engine.adapted import holds_nf4
from finetune.engine.decoder import bare_model
from finetune.engine.host_embedding import HostEmbedding
from finetune.engine.layout import pack
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.products import unchanged_weights, widened
from finetune.engine.quantized import _state_tensors
from finetune.engine.supported import called_layers
from finetune.errors import ConfigError, ModelError
from finetune.export.merge_effect import IN_4_BITS, IN_16_BITS, MERGED
from finetune.model.base import build_base_model, count_parameters, states_in_4_bits
from finetune.model.quantized import (
    build_quantized_base,
    load_in_4_bits,
    refuse_where_quantizing_is_impossible,
    weights_from_disk,
)
from finetune.model.saved_adapter import load_adapter
from finetune.report.page import _verdict as sentences_of
from finetune.runs.recorded_run import RecordedRun
from finetune.training import low_precision, merging
from finetune.training.forward import Computation
from finetune.training.memory import least
from finetune.training.memory.choice import MOST_TOKENS
from finetune.training.memory.forecast import (
    WHOLE,
    OptimizerNeed,
    Weights,
    copy_without_data,
    forecast_step,
)
from finetune.training.memory.tracing import Allocations
from tests.curves import Case
from tests.diagnose.measured import peak_of
from tests.distributed.test_sharding import CHECKPOINTED, REFERENCE, assert_same_bytes, train_both_ways
from tests.engine.prefix_rows import random_rows
from tests.in_process import run_finetune, run_script
from tests.launches import REPOSITORY
from tests.rounding import relative_difference
from tests.tiny import tiny_tokenizer
from tests.tiny_models import build_tiny, tiny_phi3_config
from tests.tiny_runs import MODEL_VOCABULARY, write_base, write_rows
from tests.tiny_training import (
    curve,
    logits_of,
    plain_logits,
    record,
    refuse_to_differ_after_a_break,
    words_for,
)
from tests.tiny_training import train as train_plain
from tests.training.test_fp8_base import wide_weights
from tests.training.test_memory import choice_of, config_of, loss_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
QUANTIZED = LoraSection(quantize="nf4", r=4, alpha=6.0)
ELSEWHERE = ModelSection(path="nobody/has-this-model")
_skips_without = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def needs_bitsandbytes(test):
    """`.ci/run` installs the extra for these, after all other tests: PEFT imports it into every run."""
    return pytest.mark.slow(_skips_without(test))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    sizes = {"vocab_size": MODEL_VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.05}
    build_tiny(tiny_phi3_config(**sizes, eos_token_id=320)).save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    write_rows(folder / "rows")
    return folder


# --- where it cannot be -------------------------------------------------------------------------------------------


def test_without_cuda_it_is_refused_before_anything_is_read():
    with pytest.raises(ConfigError, match=r"lora\.quantize=nf4 needs a CUDA device, and this run is on cpu\. Set lora"):
        build_quantized_base(ELSEWHERE, QUANTIZED, CPU)


def test_what_cannot_be_quantized_is_refused(monkeypatch):
    monkeypatch.setattr("finetune.model.quantized.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs bitsandbytes, which is not installed: pip install bitsandbytes"):
        refuse_where_quantizing_is_impossible(QUANTIZED, ELSEWHERE, GPU)
    monkeypatch.setattr("finetune.model.quantized.find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=r"model\.init=random has none on disk"):
        refuse_where_quantizing_is_impossible(QUANTIZED, ModelSection(init="random"), GPU)
    with pytest.raises(ConfigError, match=r"Set lora\.quantize=nf4"):
        build_quantized_base(ELSEWHERE, LoraSection(), GPU)
    assert refuse_where_quantizing_is_impossible(QUANTIZED, ELSEWHERE, GPU) is None


def test_a_recipe_that_does_not_quantize_says_which_one_does():
    with pytest.raises(ConfigError, match=r"recipes/finetune_qlora\.py"):
        add_lora(build_tiny(tiny_phi3_config()), QUANTIZED)


def test_the_recipe_ends_with_2_and_one_line_where_there_is_no_gpu(inputs, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    words = [*words_for(inputs, tmp_path / "run"), "model.path=nobody/has-this-model"]
    done = run_script(REPOSITORY / "recipes/finetune_qlora.py", words)
    assert done.returncode == 2, done.stdout
    assert "lora.quantize=nf4 needs a CUDA device, and this run is on cpu" in done.stdout
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "run").exists()


# --- the path -----------------------------------------------------------------------------------------------------


def load_on_cpu(section):
    base = load_in_4_bits(section, CPU)
    for module in base.modules():
        # On CPUs with AVX512-BF16, an evaluation repacks the weights for a product that has no gradient, for good.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return base


def train(words):
    """The recipe's lines, past the line that asks for a GPU."""
    return train_plain(["task=finetune_qlora", *words], load_on_cpu)


@needs_bitsandbytes
@pytest.mark.process
def test_an_adapter_trains_on_four_bits_and_loads_on_the_full_base(inputs, tmp_path):
    words = [*words_for(inputs, tmp_path / "run"), "lora.r=4", "optim.learning_rate=1e-2"]
    trainer = train(words)
    ours = logits_of(trainer)
    losses = [step["loss"] for step in curve(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.1
    assert record(tmp_path / "run")["fallbacks"] == []
    assert record(tmp_path / "run")["low_precision"]["precision"] == "nf4"
    kinds = {type(module).__name__ for module in trainer.model.modules()}
    assert "Linear4bit" in kinds
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    again = load_adapter(load_on_cpu(ModelSection(path=str(inputs / "base"))), tmp_path / "run/adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=torch.tensor([list(range(5, 25))])).logits, ours, atol=2e-2, rtol=0)
    plain = plain_logits(tmp_path, {"full": (inputs / "base", tmp_path / "run/adapter", 0)})["full"]
    assert (plain - ours).abs().mean() < 0.5 * ours.abs().mean(), "the base in 4 bits is about the base"


@needs_bitsandbytes
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-6)], ids=["fp32", "bf16"])
def test_the_engine_reads_four_bits_as_the_weights_that_they_stand_for(inputs, dtype, tolerance):
    """In the type of the run, on the adapter's side too, and the same whether a whole layer is widened or a part."""
    section = ModelSection(path=str(inputs / "base"))
    models = [add_lora(base, LoraSection(r=4)).train() for base in (load_on_cpu(section), build_base_model(section))]
    in_four_bits, plain = models
    assert called_layers(in_four_bits) == {}
    for name, module in in_four_bits.named_modules():
        if holds_nf4(module):
            plain.get_submodule(name).weight.data = widened(module.weight, dtype)
    weights = {name: weight.detach() for name, weight in in_four_bits.named_parameters() if weight.requires_grad}
    for name, weight in plain.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weights[name], std=0.1)
        if name in weights:
            weight.data.copy_(weights[name])
    packed, found = pack(random_rows(3, targets=0.5)), []
    for model in models:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = summed_cross_entropy(model, packed)
        loss.backward()
        found.append((loss.item(), {name: w.grad for name, w in model.named_parameters() if w.grad is not None}))
    (loss, gradients), (expected, exact) = found
    assert loss == pytest.approx(expected, rel=tolerance)
    for name, gradient in gradients.items():
        assert (gradient - exact[name]).norm() <= tolerance * exact[name].norm(), name


@needs_bitsandbytes
def test_the_error_of_four_bits_is_that_of_the_weights_on_disk(inputs, tmp_path):
    """The run reads them layer by layer. Here, a plain model holds all of them."""
    words = [*words_for(inputs, tmp_path / "run"), "lora.r=4", "training.max_steps=1", "optim.learning_rate=0"]
    in_four_bits = train(words).model.train()
    plain = add_lora(build_base_model(ModelSection(path=str(inputs / "base"))), LoraSection(r=4)).train()
    started = dict(in_four_bits.named_parameters())
    for name, weight in plain.named_parameters():
        if weight.requires_grad:
            weight.data.copy_(started[name].data)
    config = load_config(words)
    rows = encode_examples(load_examples(config.data), tiny_tokenizer(), config.data).train
    packed, losses, gradients = pack([rows[index] for index in range(len(rows))]), [], []
    for model in (in_four_bits, plain):
        loss = summed_cross_entropy(model, packed) / packed.num_targets
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        gradients.append(torch.autograd.grad(loss, weights, materialize_grads=True))
        losses.append(loss.item())
    measured = record(tmp_path / "run")["low_precision"]
    assert (measured["num_layers"], measured["num_targets"]) == (8, packed.num_targets)
    assert [measured["loss"], measured["base_loss"]] == pytest.approx(losses, rel=1e-6)
    assert measured["gradient_error"] == pytest.approx(relative_difference(*gradients), rel=1e-3)
    assert 0.05 < measured["gradient_error"] < measured["gradient_limit"], "it is 4 bits, and no coarser"


@needs_bitsandbytes
def test_the_error_of_four_bits_is_measured_in_the_memory_of_a_step(inputs, tmp_path, monkeypatch):
    """A 12 GB card holds phi-4 only with checkpointed layers and the embedding in main memory. A CPU is told so."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "tie_word_embeddings": False}
    write_base(tmp_path / "base", **sizes)
    measure, states = low_precision._measure, []

    def noting(runtime, model, microbatch):
        decoder = bare_model(model).get_decoder()
        states.append((type(decoder.embed_tokens), decoder.layers[0].gradient_checkpointing, microbatch.num_tokens))
        return measure(runtime, model, microbatch)

    monkeypatch.setattr(low_precision, "_measure", noting)
    monkeypatch.setattr(least, "may_keep_embedding_on_host", lambda *_: True)
    words = [*words_for(inputs, tmp_path / "run"), f"model.path={tmp_path / 'base'}", "lora.r=4"]
    own = ["training.memory=least", "training.memory_fraction=1e-9", "training.max_steps=1"]
    longest = int(train([*words, *own]).splits.train.lengths.max())
    assert [state[:2] for state in states] == [(HostEmbedding, True)] * 2
    assert states[0][2] <= longest < 1024
    assert record(tmp_path / "run")["memory"]["embedding_on_host"]
    assert record(tmp_path / "run")["low_precision"]["num_layers"] == 8


@needs_bitsandbytes
def test_four_bits_that_change_too_much_are_a_fallback(inputs, tmp_path):
    """Beside a large column, the other weights of its block are rounded to zero."""
    base = wide_weights(inputs / "base", tmp_path / "base", 2.0**8)
    words = [*words_for(inputs, tmp_path / "run"), f"model.path={base}", "lora.r=4", "training.max_steps=1"]
    train(words)
    [taken] = record(tmp_path / "run")["fallbacks"]
    assert taken["what"] == "lora.quantize"
    assert "the gradient differs by" in taken["why"]
    assert "Set lora.quantize=none" in taken["why"]
    with pytest.raises(ConfigError, match=r"lora\.quantize: wanted 4 bits that .* The run is strict"):
        train([*words, "strict=true", f"output_dir={tmp_path / 'strict'}"])


@needs_bitsandbytes
def test_an_error_that_cannot_be_measured_is_said(inputs, tmp_path):
    words = [*words_for(inputs, tmp_path / "run"), "lora.r=4", "training.max_steps=1"]
    train([*words, "training.kernels=reference"])
    assert record(tmp_path / "run")["low_precision"] is None
    assert "is not measured, because the engine does not compute all layers" in (tmp_path / "run/log.txt").read_text()
    build_tiny(tiny_phi3_config()).save_pretrained(tmp_path / "other")
    states = states_in_4_bits(load_on_cpu(ModelSection(path=str(inputs / "base"))))
    with pytest.raises(ModelError, match="under another name or in another shape"):
        weights_from_disk(ModelSection(path=str(tmp_path / "other")), states).__enter__()
    assert not any(hasattr(state, "widened") for state in states.values())


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_predicted_memory_of_a_step_is_the_measured_one(tmp_path, dtype):
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 500}
    build_tiny(tiny_phi3_config(**sizes)).save_pretrained(tmp_path)
    model = add_lora(load_on_cpu(ModelSection(path=str(tmp_path))), LoraSection(r=4)).train()
    rows = filler_rows(20, 40)
    packed = pack([rows[index] for index in range(20)])

    def step():
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32), unchanged_weights():
            summed_cross_entropy(model, packed).backward()
        model.zero_grad()

    step()
    measured = peak_of(step)
    how = Computation(loss_of=loss_of, device_type="cpu", dtype=dtype, accumulates=False)
    peak = forecast_step(copy_without_data(model), packed, how).peak(OptimizerNeed(0, 0))
    predicted = peak.total - peak.parts["weights"] - peak.parts["adapter"]
    assert predicted == pytest.approx(measured, rel=0.05)
    if dtype != torch.float32:
        return  # the choice below computes in its own type
    tight = choice_of(config_of("training.global_batch_size=512"), device_type="cuda", room=measured, model=model)
    assert tight.why.startswith("a step needs at most")
    assert 60 < tight.max_tokens < MOST_TOKENS


@needs_bitsandbytes
def test_a_plan_has_the_sizes_of_a_real_base_in_4_bits(inputs, tmp_path):
    sizes = {"hidden_size": 96, "intermediate_size": 520, "num_hidden_layers": 5, "vocab_size": MODEL_VOCABULARY}
    base = build_tiny(tiny_phi3_config(**sizes, eos_token_id=320))
    base.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    words = [*words_for(inputs, tmp_path / "run"), f"model.path={tmp_path / 'base'}", "lora.quantize=nf4", "lora.r=4"]
    config = load_config([*words, "training.gradient_checkpointing=false"])
    planner = Planner(config, read_device("RTX 4090"))
    model = add_lora(load_on_cpu(config.model), config.lora).train()
    convert_weights(model, planner.precision)
    kept = [tensor for tensor in model.parameters() if not tensor.requires_grad]
    kept += [tensor for weight in kept for tensor in _state_tensors(weight)]
    real = copy_without_data(model)
    assert Weights(planner.model).held(WHOLE) == pytest.approx(sum(tensor.nbytes for tensor in kept), rel=0.02)
    assert count_parameters(planner.model) == count_parameters(real)
    largest, how = planner.batching.largest.microbatch, replace(planner._how, device_type="cuda")
    planned, forecast = (forecast_step(of, largest, how).peak(OptimizerNeed(0, 0)) for of in (planner.model, real))
    assert planned.total == pytest.approx(forecast.total, rel=0.02)


class _OnTheDevice(Allocations):
    """Counts real tensors. transformers also makes the whole model on the meta device."""

    def __init__(self):
        super().__init__()
        self.enter("")

    def _see(self, tensor):
        if not tensor.is_meta:
            super()._see(tensor)

    @property
    def highest(self):
        return self.phases[""][0]


@needs_bitsandbytes
def test_a_base_is_quantized_weight_by_weight_as_planned_and_to_the_same_bytes(inputs, tmp_path):
    """Loading holds the model as it is kept, and what quantizing the largest weight alone holds."""
    quantize = partial(import_module("bitsandbytes").functional.quantize_4bit, compress_statistics=True)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 500, "num_hidden_layers": 6}
    build_tiny(tiny_phi3_config(**sizes, tie_word_embeddings=False)).bfloat16().save_pretrained(tmp_path)
    words = [*words_for(inputs, tmp_path / "run"), f"model.path={tmp_path}", "lora.quantize=nf4", "lora.r=4"]
    config = load_config(words)
    stored = load_file(tmp_path / "model.safetensors")
    largest = max(stored.values(), key=torch.numel)
    with _OnTheDevice() as alone:
        quantize(largest.clone(), quant_type="nf4")
    with _OnTheDevice() as loading:
        base = load_in_4_bits(config.model, CPU)
    held = Weights(base).held(WHOLE)
    assert held < loading.highest <= held + alone.highest
    assert PlannedModel(config, "bf16", "cuda").loading == pytest.approx(held + 2 * largest.numel(), rel=0.01)
    for name, state in states_in_4_bits(base).items():
        packed, expected = quantize(stored[name], quant_type="nf4")
        assert torch.equal(base.get_parameter(name), packed), name
        tensors = [_state_tensors(SimpleNamespace(quant_state=of)) for of in (state, expected)]
        for tensor, other in zip(*tensors, strict=True):
            assert torch.equal(tensor, other), name


@needs_bitsandbytes
def test_a_run_that_broke_ends_with_the_bytes_of_the_whole_one(inputs, tmp_path):
    words = [*words_for(inputs, tmp_path / "whole"), "lora.r=4"]
    train([*words, "training.max_steps=4", "optim.schedule=constant"])
    broken = [*words, f"output_dir={tmp_path / 'broken'}", "optim.schedule=constant"]
    train([*broken, "training.max_steps=2"])
    train([*broken, "training.max_steps=4"])
    name = "adapter/adapter_model.safetensors"
    assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert record(tmp_path / "broken")["low_precision"] == record(tmp_path / "whole")["low_precision"] is not None


@needs_bitsandbytes
def test_adamw_in_8_bits_goes_on_with_the_same_bytes(inputs, tmp_path):
    own = ["optim.optimizer=bitsandbytes.optim.AdamW8bit", "optim.args={min_8bit_size: 16}", "optim.learning_rate=1e-2"]
    words = [*words_for(inputs, tmp_path), *own]
    train_plain([*words, f"output_dir={tmp_path}/whole"])
    saved = load_file(tmp_path / "whole/checkpoints/step-000004/optimizer.safetensors")
    assert {tensor.dtype for name, tensor in saved.items() if ".state1/" in name} == {torch.uint8}
    refuse_to_differ_after_a_break(words, tmp_path / "whole", tmp_path / "broken")


def train_on_cpu(words):
    """For a launcher."""
    trainer = train(words)
    if trainer.runtime.placement.shard_size is not None:
        in_parts = [weight for weight in trainer.model.parameters() if isinstance(weight, DTensor)]
        assert any(weight.dtype == torch.uint8 for weight in in_parts), "in 4 bits"


@needs_bitsandbytes
@pytest.mark.warm
def test_a_base_in_four_bits_is_shared_out(inputs, tmp_path):
    """In the engine, which reads the bits, and in the model's own forward, which calls bitsandbytes' layers."""
    cases = [Case(2, words=words) for words in ((), (REFERENCE, "training.precision=fp16"), (CHECKPOINTED,))]
    more = [f"model.path={inputs / 'base'}", "model.init=pretrained", "model.config=null", "checkpoint.save_every=2"]
    errors = []
    for whole, shards in train_both_ways(tmp_path, cases, rows=more, recipe=[f"{__name__}:train_on_cpu"]):
        assert_same_bytes(whole, shards)
        assert record(whole)["low_precision"] == record(shards)["low_precision"]
        errors.append(record(shards)["low_precision"])
    assert errors[0] == errors[2] != errors[1] is None, "only the engine measures it"


@needs_bitsandbytes
def test_missing_weights_are_refused(inputs, tmp_path):
    for file in (inputs / "base").iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(inputs / "base/model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="down_proj"):
        load_in_4_bits(ModelSection(path=str(tmp_path)), CPU)


@needs_bitsandbytes
@pytest.mark.warm
def test_what_merging_changes_is_measured_and_the_trained_base_can_be_merged_into(inputs, tmp_path):
    """Merged into the dequantized base, the adapter has the loss that it was trained to; merged into the base, not."""
    run = tmp_path / "run"
    words = [*words_for(inputs, run), "lora.r=4", "optim.learning_rate=1e-2", "testing.max_new_tokens=4"]
    train(words)
    verified = run_finetune("verify", run, code=0)
    effect = json.loads((run / "adapter/certificate.json").read_text())["merge_effect"]
    assert [model["model"] for model in effect] == [IN_4_BITS, IN_16_BITS, MERGED]
    trained, full, merged = (model["loss"] for model in effect)
    assert trained == pytest.approx(record(run)["result"]["best_loss"], rel=1e-5)
    assert merged == pytest.approx(full, rel=1e-5)
    assert abs(full - trained) > 1e-4 * trained
    assert [model["verdict"] and model["verdict"]["metric"] for model in effect] == [None, "loss", "loss"]
    assert f"Note: {MERGED}: loss {merged:.4f} on 5 validation rows, " in verified.answer
    done = run_finetune("merge", run, tmp_path / "merged", "--into", "nf4-dequantized", code=0)
    assert f"Merged and rounded: loss {trained:.4f} on 5 validation rows, 5 of 5 answers as {IN_4_BITS}" in done.answer
    note = json.loads((tmp_path / "merged/test_vectors.json").read_text())["note"]
    assert note == "merged into the dequantized 4-bit weights of the base"
    quantized = load_on_cpu(ModelSection(path=str(inputs / "base")))
    put_on = load_adapter(quantized, run / "adapter").eval()
    ids = torch.tensor([list(range(5, 25))])
    with torch.no_grad():
        plain = build_base_model(ModelSection(path=str(tmp_path / "merged"))).eval()(input_ids=ids).logits
        torch.testing.assert_close(plain, put_on(input_ids=ids).logits, atol=2e-2, rtol=0)


@needs_bitsandbytes
def test_a_run_ends_by_saying_what_merging_changes(inputs, tmp_path, capsys):
    """The weights are read from disk one by one. Here, `evaluate` loads the whole base without quantizing it."""
    run = tmp_path / "run"
    # The first batch is measured however long it takes: here it has all rows.
    words = [*words_for(inputs, run), "lora.r=4", "optim.learning_rate=1e-2", "testing.batch_size=4"]
    trainer = train(words)
    said = capsys.readouterr().out
    found = record(run)["result"]["merging"]
    assert found["num_rows"] == len(trainer.splits.test) == found["num_better"] + found["num_worse"]
    assert found["loss_in_4_bits"] == pytest.approx(record(run)["result"]["test_tuned"]["loss"], rel=1e-9)
    measured = json.loads(run_finetune("evaluate", run, "--json", "testing.general_prompts=none", code=0).answer)
    assert found["loss"] == pytest.approx(measured["tuned"]["loss"], rel=1e-5)
    assert found["loss"] != pytest.approx(found["loss_in_4_bits"], rel=1e-4)
    assert found["difference"] == pytest.approx(found["loss"] - found["loss_in_4_bits"])
    assert " ".join(said.split()).count(found["sentence"]) == 1
    assert found["sentence"] in sentences_of(RecordedRun(run))
    assert not any(hasattr(state, "widened") for state in states_in_4_bits(trainer.model).values())


@needs_bitsandbytes
def test_what_merging_changes_takes_a_share_of_the_time_or_its_command_is_named(inputs, tmp_path, monkeypatch):
    build_tiny(tiny_phi3_config()).save_pretrained(tmp_path / "other")
    say, found = merging.say_what_merging_changes, {}

    def say_in_other_places(setup, *rest, **_):
        other, gone = (
            {"config": setup.config.model_copy(update={"model": ModelSection(path=str(tmp_path / name))})}
            for name in ("other", "gone")
        )
        places = {"late": {}, "not packed": {"is_packed": False}, "other": other, "gone": gone}
        for name, changes in places.items():
            journal = SimpleNamespace(result={}, is_closed=False)
            say(SimpleNamespace(**vars(setup) | {"journal": journal} | changes), *rest, max_seconds=0)
            found[name] = journal.result["merging"]

    monkeypatch.setattr(merging, "say_what_merging_changes", say_in_other_places)
    run = tmp_path / "run"
    train([*words_for(inputs, run), "lora.r=4", "training.max_steps=1", "testing.batch_size=2"])
    assert found["late"]["num_rows"] == 2, "one batch of two"
    not_packed = (
        "What merging changes was not measured: the engine does not compute all layers. "
        f"`finetune verify {run}` measures it."
    )
    assert found["not packed"] == {"sentence": not_packed}
    assert "under another name or in another shape. `finetune verify" in found["other"]["sentence"]
    assert "was not measured: " in found["gone"]["sentence"]
    assert str(tmp_path / "gone") in found["gone"]["sentence"]
    assert record(run)["status"] == "completed"
