"""`finetune plan` against what the trainer itself would do, and its advice against its own predictions."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config

from finetune.cli.plan import plan_from_overrides
from finetune.config.compose import compose, load_config
from finetune.config.schema import LoraSection, PreferenceSection
from finetune.data.encode import encode_examples
from finetune.data.examples import load_examples
from finetune.diagnose import planner as planner_module
from finetune.diagnose.plan_devices import find_device, read_device
from finetune.diagnose.plan_time import operations_of_step
from finetune.diagnose.planner import Planner, make_plan
from finetune.distributed.launch import launch
from finetune.engine.attention_cuda import prepare_varlen
from finetune.engine.fused import is_fused
from finetune.engine.layout import pack
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.padded import PaddedMicrobatch
from finetune.errors import ConfigError, DataError
from finetune.findings import EXIT_PROBLEM
from finetune.model.base import build_base_model, checkpoint_gradients
from finetune.model.lora import add_lora
from finetune.model.tokens import build_tokenizer
from finetune.training.memory.engine_choices import choices_on
from finetune.training.memory.tracing import Allocations
from finetune.training.preferences.losses import PreferenceLoss
from finetune.training.preferences.microbatches import PreferenceMicrobatch, summed_preferences
from finetune.training.train import build_trainer
from finetune.training.trainer import Trainer
from tests.tiny_models import PHI3_SIZES, build_tiny, tiny_phi3_config
from tests.tiny_runs import MODEL_VOCABULARY, conversation_words, write_base, write_rows

DPO = PreferenceLoss("dpo", PreferenceSection())


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    return write_base(folder / "base"), write_rows(folder / "rows", test=0)  # of which test_plan_evaluation.py has more


@pytest.fixture
def words(inputs, tmp_path):
    base, rows = inputs
    return [
        *(f"model.path={base}", f"data.path={rows}", f"data.cache_dir={tmp_path / 'cache'}"),
        *(f"output_dir={tmp_path / 'run'}", "lora.r=4", "training.batch_size=4", "training.num_epochs=3"),
    ]


def test_keys_without_effect_are_a_warning(words):
    """There are no test rows, and it may be launched with any number of processes."""
    more = ["training.max_skipped_steps=9", "testing.max_new_tokens=9", "parallel.backend=gloo"]
    plan = make_plan(load_config([*words, *more]), find_device("cpu"))
    found = [each.what for each in plan.findings if each.area == "Keys"]
    first = "training.max_skipped_steps=9 (overrides), because training.on_nonfinite is stop"
    second = "testing.max_new_tokens=9 (overrides), because this run has no test phase (`finetune evaluate` reads them)"
    assert found == [f"set, but without effect in this run: {each}" for each in (first, second)]


def test_a_schedule_and_a_patience_that_need_more_steps_are_warnings(words):
    more = ["optim.warmup_steps=999", "early_stopping.patience=9", "training.max_steps=5"]
    plan = make_plan(load_config([*words, *more]), find_device("cpu"))
    warmup, patience = [each.what for each in plan.findings if each.area == "Steps"]
    assert warmup.startswith("optim.warmup_steps is 999, more than the steps of the run (5)")
    assert patience.startswith("early_stopping.patience=9 cannot end this run early: that takes 11 validations or more")


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [["training.global_batch_size=8"], ["training.kernels=reference"]])
def test_the_plan_is_what_the_trainer_does(words, more, tmp_path):
    config = load_config([*words, *more])
    plan = make_plan(config, find_device("cpu"))
    assert not (tmp_path / "run").exists()
    with launch(config) as runtime:
        tokenizer = build_tokenizer(config.model)
        splits = encode_examples(load_examples(config.data), tokenizer, config.data)
        model = add_lora(build_base_model(config.model), config.lora)
        trainer = Trainer(runtime, config, model, tokenizer, splits)
        loader, _, _ = trainer.prepare_dataloaders()
        steps = list(loader.steps(0))
    batches = plan.batches
    assert (batches.global_batch_size, batches.steps_per_epoch) == (trainer.global_batch_size, len(steps))
    assert batches.steps == 3 * len(steps)
    assert batches.rows_per_sequence == pytest.approx(config.data.max_length * batches.rows / batches.tokens)
    assert batches.microbatches_per_step == max(map(len, steps))
    if "training.kernels=reference" in more:
        padded = sum(m.input_ids.numel() for step in steps for _, m in step)
        assert batches.computed_share == pytest.approx(padded / batches.tokens)
        assert batches.computed_share > 1  # padding counts
    else:
        assert batches.largest_microbatch_tokens == max(m.num_computed for step in steps for _, m in step)
        computed = sum(m.num_computed for step in steps for _, m in step)
        assert batches.computed_share == pytest.approx(computed / batches.tokens, rel=0.05)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert plan.trainable_parameters == sum(weight.numel() for weight in trained)
    assert plan.parameters == sum(weight.numel() for weight in model.parameters())
    assert plan.targets == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
    assert plan.disk.model == plan.peak.parts["adapter"] == sum(weight.nbytes for weight in trained)
    assert plan.fits


def test_the_disk_is_planned_for_the_checkpoints_that_there_will_be(words):
    """The last of three steps always saves."""
    more = ["training.max_steps=3", "checkpoint.save_every=2", "checkpoint.save_total_limit=5"]
    assert make_plan(load_config([*words, *more]), find_device("cpu")).disk.at_once == 2


def test_steps_of_each_turn_count_conversations(words, tmp_path, capsys):
    words = [*words, *conversation_words(tmp_path / "rows"), "training.global_batch_size=9"]
    batching = Planner(load_config(words), find_device("cpu")).batching
    assert 2 * batching.targets_per_step == int(batching.rows.num_targets.sum())
    assert plan_from_overrides(words) == 0
    out = capsys.readouterr().out
    assert "an epoch: 36 rows of 18 conversations, " in out
    assert "global batch: 9 conversations = " in out
    assert "6 steps, 2 an epoch" in out
    per_conversation = int(batching.rows.lengths.sum()) / 18
    sequence = f"into which other tools pack rows, has as many as {2048 / per_conversation:.1f} conversations"
    assert sequence in " ".join(out.split())


def test_processes_on_one_machine_share_its_memory():
    device = find_device("cpu")
    assert device.shared_by(4).memory == device.memory // 4
    assert device.shared_by(1) == device
    assert read_device("H100").shared_by(8) == read_device("H100")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["training.global_batch_size=40"], "18 rows, fewer than one global batch of 40"),
        (["validation.batch_size=40"], "not enough for a batch of 40"),
    ],
)
def test_a_split_that_drop_last_empties_is_refused_as_training_refuses_it(words, more, expected):
    section = more[0].partition(".")[0]
    with pytest.raises(DataError, match=expected):
        make_plan(load_config([*words, *more, f"{section}.drop_last=true"]), find_device("cpu"))


def test_rows_beyond_the_context_are_refused_as_training_refuses_them(words, tmp_path):
    short = write_base(tmp_path / "short", max_position_embeddings=8)
    with pytest.raises(ConfigError, match=r"a row of \d+ tokens, but the model's context ends at 8"):
        make_plan(load_config([*words, f"model.path={short}"]), find_device("cpu"))


@pytest.fixture(scope="module")
def pairs(inputs, tmp_path_factory):
    """Rows of pairs: with prompts that are worth sharing, of different lengths."""
    folder = tmp_path_factory.mktemp("pairs")
    for split, count in (("train", 18), ("validation", 4)):
        rows = [
            {
                "prompt": f"{split} {number}: please send three crates of oranges {'to Porto ' * (number % 4)}",
                "chosen": "yes " * (1 + number % 3),
                "rejected": "no " * (1 + number % 5),
            }
            for number in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def words_of_pairs(words, pairs):
    return [*words, f"data.path={pairs}", "task=finetune_preferences"]


@pytest.mark.slow
def test_the_plan_of_pairs_is_what_the_trainer_does(words_of_pairs):
    config = load_config(words_of_pairs)
    plan = make_plan(config, find_device("cpu"))
    with launch(config) as runtime:
        trainer = build_trainer(runtime, config)
        loader, _, _ = trainer.prepare_dataloaders()
        steps = list(loader.steps(0))
    batches, rows = plan.batches, trainer.splits.train
    assert (plan.objective, batches.rows, batches.global_batch_size) == ("dpo", 18, 4)
    assert (batches.steps_per_epoch, batches.steps) == (len(steps), 3 * len(steps))
    assert batches.microbatches_per_step == max(map(len, steps))
    assert batches.tokens == sum(m.num_tokens for step in steps for _, m in step)
    assert batches.target_tokens == int(rows.chosen.num_targets.sum() + rows.rejected.num_targets.sum())
    computed = [m.num_computed for step in steps for _, m in step]
    assert batches.computed_share == pytest.approx(sum(computed) / batches.tokens, rel=0.1)
    assert batches.largest_microbatch_tokens == pytest.approx(max(computed), rel=0.1)
    assert batches.largest_microbatch_rows <= 4
    assert plan.fits


@pytest.mark.slow
def test_a_plan_of_pairs_says_so(words_of_pairs, capsys):
    assert plan_from_overrides(words_of_pairs, is_probed=True) == 0
    out = capsys.readouterr().out
    assert "an epoch: 18 pairs, " in out
    assert "global batch: 4 pairs = training.batch_size=4 x 1 process\n" in out
    assert ", on preferences (DPO)" in out
    assert "s a step, measured on this machine" in out


@pytest.mark.slow
def test_the_forward_is_the_one_that_training_chooses(words):
    def forward(*more: str) -> str:
        config = load_config([*words, *more])
        return make_plan(config, replace(find_device("cpu"), precision="bf16")).forward

    assert forward("training.method=full") == "the engine's own"
    noise = "embed_tokens has noise (training.neftune_alpha)"
    assert forward("training.neftune_alpha=5") == f"transformers' own on padded rows: {noise}"
    assert forward("training.kernels=reference") == "transformers' own on padded rows: training.kernels=reference"
    called = make_plan(load_config([*words, "lora.dora=true"]), find_device("cpu"))
    assert called.forward == "the engine's own, which calls 8 linear layers as PEFT made them (DoRA)"
    assert [finding.area for finding in called.findings] == ["Engine"]


@pytest.mark.slow
def test_a_model_that_the_engine_does_not_know_is_told_why(tmp_path, capsys):
    GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64).save_pretrained(tmp_path)
    words = [f"model={tmp_path}", "data.max_length=32", "lora.r=2", "strict=true"]
    assert plan_from_overrides(words, device="H100 80GB") == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "forward: transformers' own on padded rows: its model type is gpt2; the engine supports cohere, " in out
    assert "% fits (peak: " in out.replace("%: fits", "% fits")


@pytest.mark.slow
def test_what_does_not_fit_is_told_with_what_does(words):
    words = [word for word in words if not word.startswith("data.path=")]
    words = [*words, "data.max_length=60", "training.max_steps=2", "training.gradient_checkpointing=false"]
    config = compose([*words, "training.batch_size=12"], needs_data=False)
    roomy = replace(find_device("cpu"), reserve=0)
    needed = make_plan(config, roomy).needed
    tight = replace(roomy, memory=round(0.8 * needed))
    plan = make_plan(config, tight)
    assert plan.fits is False
    (told,) = [finding for finding in plan.findings if finding.area == "Memory"]
    assert told.level == "problem"
    for advice in ("a lower training.batch_size", "training.global_batch_size=12", "gradient_checkpointing=true"):
        assert advice in told.fix
    assert "training.precision=bf16, which halves" in told.fix
    assert "quantize" not in told.fix, "a CPU has no base in 4 bits"
    halved = make_plan(compose([*words, "training.batch_size=12", "training.precision=bf16"], needs_data=False), roomy)
    assert halved.peak.parts["weights"] == pytest.approx(plan.peak.parts["weights"] / 2, rel=0.01)
    assert plan.checkpointing.bytes_with < plan.checkpointing.bytes_without == needed
    smaller = [*words, "training.batch_size=6", "training.global_batch_size=12"]
    assert make_plan(compose(smaller, needs_data=False), tight).fits


def test_without_data_every_row_is_taken_to_be_as_long_as_it_may_be(words, capsys):
    more = ["data.path=gone.jsonl", "data.max_length=50", "training.max_steps=7"]
    assert plan_from_overrides([*words, *more]) == 0
    out = capsys.readouterr().out
    assert "the plan assumes rows of 50 tokens" in out.replace("\n", " ")
    assert "the largest has 4 rows and computes 200 tokens" in out
    assert "7 steps" in out


def test_rows_that_train_would_refuse_are_a_problem(words, capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": " "}\n')
    assert plan_from_overrides([*words, f"data.path={tmp_path / 'rows.jsonl'}", "data.max_length=50"]) == EXIT_PROBLEM
    assert "the rows cannot be used, so the plan assumes rows of 50 tokens" in capsys.readouterr().out.replace(
        "\n", " "
    )


def test_what_needs_data_is_not_counted_and_the_plan_says_so(words, monkeypatch, capsys):
    def needs_data(*_, **__):
        raise RuntimeError("routing reads the tokens")

    monkeypatch.setattr(planner_module, "forecast_step", needs_data)
    monkeypatch.setattr(planner_module, "optimizer_need", lambda *_, **__: None)
    assert plan_from_overrides(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "cannot be predicted, see below" in out
    assert "memory cannot be predicted: the model's own forward needs data (RuntimeError: routing reads" in out
    assert "the memory of torch.optim.AdamW is not counted: it cannot take a step without data" in out


def test_json_and_a_probe(words, capsys):
    assert plan_from_overrides(words, is_probed=True, as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["version"] == 2
    assert record["fits"] is True
    assert record["needed"] == sum(record["peak"]["parts"].values()) + record["device"]["reserve"]
    assert 0 < record["seconds_per_step"] < 60
    assert record["seconds"] == pytest.approx(record["seconds_per_step"] * record["batches"]["steps"])


def test_a_probe_measures_in_the_type_and_with_the_fused_functions_of_the_run(words, monkeypatch):
    seen = set()

    def loss(model, _):
        seen.add((torch.is_autocast_enabled("cpu"), is_fused()))
        return sum(weight.sum() for weight in model.parameters() if weight.requires_grad)

    monkeypatch.setattr(planner_module, "why_not_fused", lambda device: None)
    planner = Planner(
        load_config([*words, "training.method=full", "training.precision=bf16", "training.fused=true"]),
        find_device("cpu"),
    )
    monkeypatch.setattr(planner, "_how", replace(planner._how, loss_of=lambda _: loss))
    assert planner.probe()[0] > 0
    assert seen == {(True, True)}
    assert not is_fused()


def test_new_tokens_are_trained_by_the_forward_of_the_model_itself(words):
    config = load_config([*words, 'lora.new_tokens=["<think>","<stop>"]'])
    plan = make_plan(config, find_device("cpu"))
    without = add_lora(build_base_model(config.model), load_config(words).lora)
    assert plan.why_not_engine == "embed_tokens is a TrainableTokensWrapper (lora.new_tokens)"
    others = sum(weight.numel() for weight in without.parameters() if weight.requires_grad)
    assert plan.trainable_parameters - others == 2 * PHI3_SIZES["hidden_size"]
    assert [finding.area for finding in plan.findings] == ["Engine"]


def test_a_probe_does_not_measure_new_tokens(words):
    planner = Planner(load_config([*words, "lora.new_tokens=['<order>']"]), find_device("cpu"))
    assert planner.probe() == (None, None)
    assert planner.findings[-1].what == "--probe does not measure new tokens (lora.new_tokens)"


@pytest.mark.slow
def test_a_probe_does_not_speak_for_another_device(words, capsys):
    assert plan_from_overrides(words, device="h100-80gb", is_probed=True) == 0
    out = capsys.readouterr().out
    assert "H100 80GB" in out
    assert "bf16" in out
    assert "--probe measures this machine" in out
    assert "at the limit of 989 TFLOP/s in bf16" in out


def equal_rows(number: int) -> PaddedMicrobatch:
    """Rows of ten tokens, which carry loss except for the first."""
    ids = torch.full((number, 10), 5)
    is_target = torch.ones_like(ids, dtype=torch.bool)
    is_target[:, 0] = False
    return PaddedMicrobatch(input_ids=ids, is_target=is_target, num_tokens=10 * number, num_targets=9 * number)


def products_of(loss, model, microbatch) -> int:
    """The operations of the matrix products of a step, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        loss(model, microbatch).backward()
    counts = counter.get_flop_counts()["Global"]
    return sum(number for of, number in counts.items() if of in (torch.ops.aten.mm, torch.ops.aten.addmm))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "checkpointing"), [("lora", "true"), ("full", "false")])
def test_the_time_at_the_limit_is_that_of_the_products_that_a_step_makes(words, method, checkpointing):
    more = [f"training.method={method}", f"training.gradient_checkpointing={checkpointing}"]
    config = load_config([*words, *more, "training.kernels=reference"])
    device = replace(read_device("H100"), precision="fp32")
    plan = make_plan(config, device)
    model = build_base_model(config.model)
    model = add_lora(model, config.lora) if method == "lora" else model
    if checkpointing == "true":
        checkpoint_gradients(model)
    products = products_of(summed_cross_entropy, model.train(), equal_rows(2))
    options = {"num_targets": 18, "is_checkpointing": checkpointing == "true"}
    assert operations_of_step(model, num_computed=20, **options) == pytest.approx(products, rel=0.1)
    batches = plan.batches
    num_targets = batches.target_tokens / batches.rows * batches.global_batch_size
    num_computed = batches.computed_share * batches.tokens / batches.steps_per_epoch
    options = {"num_targets": num_targets, "is_checkpointing": checkpointing == "true"}
    whole = operations_of_step(model, num_computed=num_computed, **options)
    assert plan.seconds_at_limit == pytest.approx(whole / (plan.device.teraflops["fp32"] * 1e12))


def test_the_time_of_preferences_counts_their_reference():
    model = add_lora(build_tiny(tiny_phi3_config()), LoraSection(r=2)).train()
    pairs = PreferenceMicrobatch(rows=equal_rows(4), num_tokens=0)
    products = products_of(lambda *given: summed_preferences(*given, loss=DPO)[0], model, pairs)
    options = {"num_targets": 36, "is_checkpointing": False, "has_reference": True}
    assert operations_of_step(model, num_computed=40, **options) == pytest.approx(products, rel=0.1)


def test_devices_have_names():
    for name, expected in (
        ("nvidia_a100-40gb", "A100 40GB"),
        ("a10g", "A10G 24GB"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("My 24GB", "My 24GB"),
    ):
        assert (read_device(name).name, read_device(name).memory > 20 * 2**30) == (expected, True)
    assert read_device("Tesla V100-PCIE-16GB").precision == "fp16"
    for name, part in (("A100", "several devices: A100 80GB, A100 40GB"), ("abacus", "Known are GB200 186GB, ")):
        with pytest.raises(ConfigError, match=part):
            read_device(name)


def test_what_training_refuses_is_refused(words, words_of_pairs):
    with pytest.raises(ConfigError, match=r"needs a CUDA device, and this plan is for this machine's CPU.*--device"):
        make_plan(load_config([*words, "lora.quantize=nf4"]), find_device("cpu"))
    with pytest.raises(ConfigError, match=r"training\.method is full, but the reference of DPO is the base"):
        make_plan(load_config([*words_of_pairs, "training.method=full"]), find_device("cpu"))
    rounded = ["model=phi4", "model.frozen_precision=fp8"]
    with pytest.raises(ConfigError, match=r"fp8 .* needs a GPU from Hopper on, and the plan is for RTX 4090 24GB"):
        make_plan(compose(rounded, needs_data=False), read_device("RTX 4090"))


def plans_with_and_without_quantization(words):
    device = read_device("RTX 4090")
    return [make_plan(load_config([*words, f"lora.quantize={wish}"]), device) for wish in ("none", "nf4")]


@pytest.mark.slow
def test_a_plan_in_four_bits_needs_no_bitsandbytes(words, inputs, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    wide = json.dumps({"model_type": "phi3", **PHI3_SIZES, "vocab_size": MODEL_VOCABULARY, "intermediate_size": 2048})
    asked = [*words[1:], "model.init=random", f"model.config={wide}", f"model.tokenizer={inputs[0]}"]
    plain, quantized = plans_with_and_without_quantization(asked)
    assert quantized.parameters == plain.parameters
    assert quantized.seconds_at_limit == plain.seconds_at_limit
    assert quantized.peak.parts["weights"] < 0.4 * plain.peak.parts["weights"]
    assert [finding.what for finding in quantized.findings if "4 bits" in finding.what] == []


@pytest.mark.slow
def test_a_base_in_four_bits_counts_16_bits_where_the_engine_only_calls_its_layers(words):
    asked = [*words, "lora.dora=true", "training.max_tokens_per_microbatch=64"]
    plain, quantized = plans_with_and_without_quantization(asked)
    assert quantized.peak == plain.peak
    (finding,) = [finding for finding in quantized.findings if "4 bits" in finding.what]
    assert "this plan counts 16 bits" in finding.what


@pytest.mark.slow
@pytest.mark.parametrize(("device", "as_auto"), [("H100", "true"), ("cpu", "false")])
def test_fused_functions_count_by_their_results_where_a_run_has_them(words, inputs, device, as_auto):
    wide = json.dumps({"model_type": "phi3", **PHI3_SIZES, "vocab_size": MODEL_VOCABULARY, "intermediate_size": 512})
    model = ["model.init=random", f"model.config={wide}", f"model.tokenizer={inputs[0]}"]
    there = replace(find_device("cpu") if device == "cpu" else read_device(device), reserve=0)

    def needed(*more: str) -> int:
        words_of_step = [*words[1:], *model, "training.gradient_checkpointing=true", *more]
        return make_plan(load_config(words_of_step), there).needed

    by_word = {word: needed(f"training.fused={word}") for word in ("true", "false")}
    assert by_word["true"] < by_word["false"]
    assert needed() == by_word[as_auto]


def test_attention_on_a_gpu_keeps_gathered_keys_and_no_copy_for_each_head():
    beginning = torch.arange(40)
    packed = pack([(torch.cat([beginning, torch.full((9,), row)]), torch.ones(49).bool()) for row in range(6)])
    packed.prepare_attention(prepare_varlen, [None, None])
    q, k, v = (torch.empty(packed.num_computed, heads, 8, requires_grad=True) for heads in (4, 2, 2))

    def kept(dtype: torch.dtype) -> int:
        with Allocations() as allocations:
            out = choices_on("cuda", dtype).attention(q, k, v, packed.layout, queries=None, window=None)
            assert out.shape == q.shape
            return allocations.in_use

    output = q.nbytes + 4 * q.shape[0] * q.shape[1]  # with a number for each query and head
    assert kept(torch.float32) == kept(torch.bfloat16)
    assert output + k.nbytes + v.nbytes < kept(torch.bfloat16) < output + 9 * k.nbytes
