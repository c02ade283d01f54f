"""What a run does about memory: decided by figures alone, the same on all ranks, and kept by a run that goes on."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from finetune.config.compose import load_config
from finetune.config.schema import Config, LoraSection
from finetune.data.batches import loader_keys_on, pad
from finetune.data.encoded import filler_rows
from finetune.engine.host_embedding import HostEmbedding, embedding_that_may_leave, keep_embedding_on_host
from finetune.engine.layout import pack
from finetune.engine.loss import Choices, LossFunction, summed_cross_entropy
from finetune.main_memory import read_main_memory
from finetune.model.base import checkpoint_gradients
from finetune.model.lora import add_lora
from finetune.runs.folder import RunFolder
from finetune.training.data_workers import prepare_for_workers
from finetune.training.forward import Computation
from finetune.training.memory import choice as memory_choice
from finetune.training.memory import forecast as memory_forecast
from finetune.training.memory import least as least_memory
from finetune.training.memory.choice import MOST_TOKENS, MemoryChoice, choose, free_memory
from finetune.training.memory.decision import ENOUGH_TOKENS, Decision, Need, decide
from finetune.training.memory.forecast import (
    WHOLE,
    OptimizerNeed,
    Shards,
    Size,
    Weights,
    copy_without_data,
    forecast_step,
    optimizer_need,
)
from finetune.training.optim import build_optimizer
from finetune.training.supervised import Supervised
from tests.in_process import Ended, run_script
from tests.launches import REPOSITORY, run_launched
from tests.model.variants import VARIANTS
from tests.tiny_models import build_tiny, tiny_gemma2_config, tiny_phi3_config
from tests.tiny_runs import conversation_words, write_base, write_rows
from tests.tiny_training import adapter_tensors, curve, record, train, words_for

WITHOUT = Need(Size(1000, 1_000), Size(16_000, 16_000))
WITH_IT = Need(Size(1000, 200), Size(16_000, 3_200))

pytestmark = pytest.mark.warm


@pytest.mark.parametrize(
    ("room", "wish", "decided"),
    [
        (16_000, None, Decision(False, 16_000, 16_000)),
        (ENOUGH_TOKENS, None, Decision(False, ENOUGH_TOKENS, ENOUGH_TOKENS)),
        (ENOUGH_TOKENS - 1, None, Decision(True, 16_000, 3_200)),
        (1_000, None, Decision(True, 5_000, 1_000)),
        (199, None, Decision(True, 1_000, 200)),
        (999, False, Decision(False, 1_000, 1_000)),
        (16_000, True, Decision(True, 16_000, 3_200)),
    ],
)
def test_checkpointing_is_for_steps_that_do_not_fit_without_it(room: int, wish: bool | None, decided: Decision) -> None:
    asked = []

    def need(is_checkpointing: bool) -> Need:
        asked.append(is_checkpointing)
        return WITH_IT if is_checkpointing else WITHOUT

    assert decide(need, room, wish=wish) == decided
    both = [False, True][: 1 + decided.is_checkpointing]
    assert asked == (both if wish is None else [wish]), "each takes seconds"


CONFIGS = {
    "phi3": tiny_phi3_config,
    "gemma2": tiny_gemma2_config,
    "phimoe": partial(VARIANTS["Phi-3.5-MoE"].config, vocab_size=64),
}
PADDED = ("gemma2", "phimoe")
"""Families that the engine does not know."""


def tiny(family: str = "phi3") -> Any:
    return add_lora(build_tiny(CONFIGS[family](max_position_embeddings=1024)), LoraSection(r=2)).train()


def config_of(*words: str) -> Config:
    return load_config(["model=phi_tiny", "data=orders", "output_dir=run", *words], task="finetune_lora")


def loss_of(choices: Choices) -> LossFunction:
    return partial(summed_cross_entropy, choices=choices)


def computation_on(device_type: str) -> Computation:
    is_cuda = device_type == "cuda"
    return Computation(
        loss_of=loss_of, device_type=device_type, dtype=torch.bfloat16 if is_cuda else torch.float32, is_fused=is_cuda
    )


def choice_of(config: Config, *, device_type: str, room: int, model: Any = None, **more: Any) -> MemoryChoice:
    how = computation_on(device_type)
    given = {"collate": pack, "world_size": 1, **more}
    return choose(config, model or tiny(), how, longest=60, room=room, **given)


def bytes_of_step(
    model: Any, num_rows: int, length: int, *, collate: Any = None, device_type: str = "cpu", optimizer: Any = None
) -> int:
    rows = filler_rows(num_rows, length)
    microbatch = (collate or pack)([rows[index] for index in range(num_rows)])
    copy = copy_without_data(model)
    peak = forecast_step(copy, microbatch, computation_on(device_type)).peak(optimizer or OptimizerNeed(0, 0))
    return peak.total - peak.parts["weights"] - peak.parts["adapter"]


def test_least_memory_is_checkpointing_one_row_and_inputs_of_layers_in_main_memory() -> None:
    asked = config_of("training.memory=least")
    on_gpu, on_cpu = (choice_of(asked, device_type=device_type, room=10**12) for device_type in ("cuda", "cpu"))
    assert (on_gpu.gradient_checkpointing, on_gpu.max_tokens, on_gpu.offloads) == (True, 60, True)
    assert (on_cpu.gradient_checkpointing, on_cpu.max_tokens, on_cpu.offloads) == (True, 60, False)
    own = config_of("training.memory=least", "training.gradient_checkpointing=false", "training.batch_size=2")
    chosen = choice_of(own, device_type="cuda", room=10**12)
    assert (chosen.gradient_checkpointing, chosen.max_rows, chosen.offloads) == (False, 2, False)
    assert MemoryChoice.from_record(on_gpu.as_record(), asked) == on_gpu
    assert MemoryChoice.from_record(on_gpu.as_record(), config_of()) is None


@pytest.mark.slow
def test_least_memory_keeps_the_embedding_in_main_memory_if_a_step_does_not_fit_otherwise() -> None:
    sizes = {"tie_word_embeddings": False, "vocab_size": 2000, "max_position_embeddings": 1024}
    model = add_lora(build_tiny(tiny_phi3_config(**sizes)), LoraSection(r=2)).train()
    embedding = embedding_that_may_leave(model)
    assert embedding is not None
    asked = config_of("training.memory=least")
    least = partial(choice_of, asked, device_type="cuda", model=model)
    roomy, tight = least(room=10**9), least(room=10_000)
    assert (roomy.embedding_on_host, tight.embedding_on_host) == (False, True)
    assert replace(tight, embedding_on_host=False, why=roomy.why) == roomy
    assert "main memory keeps the inputs of layers and the embedding: training.memory=least, and with" in str(tight)
    assert "a step needs" in tight.why
    assert "of 10 kB that are free" in tight.why
    assert MemoryChoice.from_record(json.loads(json.dumps(tight.as_record())), asked) == tight
    for word in ("training.graphs=true", "parallel.sharding=fsdp2", "parallel.gradient_sync=ddp"):
        own = config_of("training.memory=least", word)
        other = choice_of(own, device_type="cuda", room=0, model=model, world_size=2)
        assert not other.embedding_on_host, word
    assert least(room=0, world_size=2).embedding_on_host
    assert not choice_of(asked, device_type="cpu", room=0, model=model).embedding_on_host
    assert not choice_of(asked, device_type="cuda", room=0).embedding_on_host, "the head of this model is its embedding"
    weights = Weights(model)
    keep_embedding_on_host(model)
    with_less = Weights(copy_without_data(model))
    assert weights.held(WHOLE) - with_less.held(WHOLE) == embedding.nbytes
    assert weights.held(Shards(2)) == with_less.held(Shards(2))


@pytest.mark.slow
def test_a_run_with_its_embedding_in_main_memory_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has nothing to gain, so the choice is forced. tests/engine/test_fake_device.py has two devices."""
    num_lookups, look_up = 0, HostEmbedding.forward

    def count_lookup(self: Any, input: torch.Tensor) -> torch.Tensor:
        nonlocal num_lookups
        num_lookups += 1
        return look_up(self, input)

    def train_with(on_host: bool, name: str, *more: str) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            patch.setattr(HostEmbedding, "forward", count_lookup)
            patch.setattr(least_memory, "may_keep_embedding_on_host", lambda *_: on_host)
            own = ("training.memory=least", "training.memory_fraction=1e-9", "optim.schedule=constant", "lora.r=2")
            train([*words_for(tmp_path, tmp_path / name), *own, "testing.num_samples=2", *more])
        assert record(tmp_path / name)["memory"]["embedding_on_host"] is on_host
        return adapter_tensors(tmp_path / name)

    write_base(tmp_path / "base", tie_word_embeddings=False)
    write_rows(tmp_path / "rows")
    expected = train_with(False, "device")
    assert num_lookups == 0
    train_with(True, "host", "training.max_steps=2")
    before = num_lookups
    assert before > 2 * 3, "micro-batches of two steps, validations and answers"
    tensors = train_with(True, "host")
    assert num_lookups > before
    assert curve(tmp_path / "host") == curve(tmp_path / "device")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


@pytest.mark.slow
def test_inputs_of_layers_in_main_memory_take_none_of_the_device() -> None:
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    found = {}
    for offloads in (False, True):
        model = add_lora(build_tiny(tiny_phi3_config(**sizes)), LoraSection(r=2)).train()
        checkpoint_gradients(model, offloads=offloads)
        found[offloads] = bytes_of_step(model, 4, 60, device_type="cuda")
    inputs = 4 * 4 * 60 * 64 * 2  # layers, rows, tokens, width, bytes
    assert 0.7 * inputs < found[False] - found[True] <= inputs


def test_a_fraction_bounds_the_free_memory() -> None:
    total = read_main_memory().total
    taken = psutil.Process().memory_info().rss
    free = free_memory(torch.device("cpu"), num_sharing=1, fraction=0.1)
    assert free == pytest.approx(0.1 * total - taken, abs=0.01 * total)
    assert free < free_memory(torch.device("cpu"), num_sharing=1)


@pytest.mark.slow
def test_the_tokens_that_memory_allows_fit_and_not_many_more_would() -> None:
    model = tiny()
    room = bytes_of_step(model, 3, 60, device_type="cuda")
    words = ("training.global_batch_size=512", "training.gradient_checkpointing=false")
    tokens = choice_of(config_of(*words), device_type="cuda", room=room, model=model).max_tokens
    assert tokens is not None
    assert 0.6 * room < bytes_of_step(model, tokens // 60, 60, device_type="cuda") <= 0.92 * room


@pytest.mark.slow
@pytest.mark.parametrize(("family", "length"), [("phi3", 40), ("gemma2", 700), ("phimoe", 700)])
def test_what_surely_fits_is_known_without_a_trace(family: str, length: int) -> None:
    model = tiny(family)
    collate = pad if family in PADDED else None
    assert bytes_of_step(model, 2, length, collate=collate) < memory_choice._bound(model, rows=2, length=length)


@pytest.mark.parametrize(("method", "vocabulary"), [("DoRA", 64), ("full", 2000)])
def test_what_surely_fits_does_so_for_a_few_tokens_too(method: str, vocabulary: int) -> None:
    """Weights take the most then: copies that DoRA makes of them; gradients, the two of a tied head among them."""
    sizes = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": vocabulary}
    base = build_tiny(tiny_phi3_config(**sizes))
    model: Any = add_lora(base, LoraSection(r=2, dora=True)) if method == "DoRA" else base
    need = optimizer_need(build_optimizer(copy_without_data(model), config_of().optim), device_type="cpu")
    assert bytes_of_step(model, 1, 4, optimizer=need) < memory_choice._bound(model, rows=1, length=4)


def test_a_small_model_on_a_cpu_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_forecast, "forecast_step", None)
    choice = choice_of(config_of(), device_type="cpu", room=10**10)
    assert (choice.gradient_checkpointing, choice.max_rows, choice.max_tokens) == (False, 8, None)
    assert "10 GB that are free" in str(choice)
    for word in ("true", "false"):
        as_it_says = choice_of(config_of(f"training.gradient_checkpointing={word}"), device_type="cpu", room=0)
        assert (as_it_says.gradient_checkpointing, as_it_says.is_chosen) == (word == "true", False)


@pytest.mark.slow
def test_a_step_that_does_not_fit_a_cpu_is_checkpointed_and_nothing_else() -> None:
    model = tiny()
    needed = bytes_of_step(model, 8, 60)
    roomy, tight = (choice_of(config_of(), device_type="cpu", room=room, model=model) for room in (2 * needed, needed))
    assert (roomy.gradient_checkpointing, tight.gradient_checkpointing) == (False, True)
    assert (tight.max_rows, tight.max_tokens) == (8, None)
    assert not model.is_gradient_checkpointing, "the model itself is as it was"
    assert "memory may run out" in choice_of(config_of(), device_type="cpu", room=1000, model=model).why


@pytest.mark.slow
def test_on_cuda_memory_limits_the_tokens_of_a_micro_batch() -> None:
    rows = "training.global_batch_size=512"
    roomy = choice_of(config_of(rows), device_type="cuda", room=10**12)
    assert (roomy.gradient_checkpointing, roomy.max_rows, roomy.max_tokens) == (False, 512, MOST_TOKENS)
    assert choice_of(config_of(rows), device_type="cuda", room=10**12, world_size=3).max_rows == 171  # of each rank
    assert choice_of(config_of(rows, "training.batch_size=4"), device_type="cuda", room=10**12).max_rows == 4
    asked = choice_of(config_of(rows, "training.max_tokens_per_microbatch=900"), device_type="cuda", room=10**12)
    assert (asked.max_rows, asked.max_tokens) == (8, 900)
    kept = choice_of(config_of(rows), device_type="cuda", room=10**12, keeps_microbatches=True)
    assert (kept.max_rows, kept.max_tokens) == (8, None)
    needed = bytes_of_step(tiny(), 4, 60)
    tight = choice_of(config_of(rows, "training.gradient_checkpointing=false"), device_type="cuda", room=needed)
    assert 60 <= tight.max_tokens < 500
    one_row = choice_of(config_of(rows), device_type="cuda", room=0)
    assert (one_row.gradient_checkpointing, one_row.max_tokens) == (True, 60)


def test_what_cannot_be_predicted_stays_as_it_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_data(*_: object, **__: object) -> None:
        raise RuntimeError("the experts of a token depend on it")

    monkeypatch.setattr(memory_forecast, "forecast_step", needs_data)
    choice = choice_of(config_of("training.global_batch_size=64"), device_type="cuda", room=10**12)
    assert (choice.gradient_checkpointing, choice.max_rows, choice.max_tokens) == (False, 8, None)
    assert "cannot be predicted without data (RuntimeError: the experts of a token depend on it)" in choice.why


def test_a_record_holds_as_long_as_the_same_is_asked() -> None:
    choice = choice_of(config_of(), device_type="cpu", room=10**10)
    recorded = json.loads(json.dumps(choice.as_record()))
    assert MemoryChoice.from_record(recorded, config_of()) == choice
    assert MemoryChoice.from_record(recorded, config_of("training.batch_size=4")) is None
    assert MemoryChoice.from_record({}, config_of()) is None
    del recorded["offloads"], recorded["embedding_on_host"]
    assert MemoryChoice.from_record(recorded, config_of()) == choice, "older runs lack it"


def test_loaders_have_workers_and_pinned_memory_on_cuda_unless_the_configuration_says_otherwise() -> None:
    training = config_of().training
    on_cuda, on_cpu = loader_keys_on("cuda", training), loader_keys_on("cpu", training)
    assert (on_cuda.num_workers, on_cuda.pin_memory) == (2, True)
    assert (on_cpu.num_workers, on_cpu.pin_memory) == (0, False)
    asked = config_of("training.num_workers=0", "training.pin_memory=false").training
    assert loader_keys_on("cuda", asked) == asked


@pytest.mark.skipif(sys.platform != "linux", reason="other systems start workers in another way")
def test_workers_are_forked_so_that_none_imports_the_script_again() -> None:
    rows: Any = [1]
    forked: Any = DataLoader(rows, num_workers=1)
    alone: Any = DataLoader(rows)
    prepare_for_workers([forked, alone, None])
    assert forked.multiprocessing_context.get_start_method() == "fork"
    assert alone.multiprocessing_context is None


SCRIPT = REPOSITORY / "tests" / "training" / "short_of_memory.py"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "base")
    write_rows(folder / "rows", validation=0, test=0)
    return [
        *(f"model.path={folder / 'base'}", f"data.path={folder / 'rows'}", f"data.cache_dir={folder / 'cache'}"),
        *("lora.r=2", "optim.learning_rate=1e-2", "training.device=cpu", "training.precision=fp32"),
        *("training.global_batch_size=16", "training.batch_size=4", "training.max_steps=3", "checkpoint.save_every=1"),
        "testing.num_samples=0",
    ]


@pytest.mark.slow
def test_two_ranks_choose_by_the_one_with_less_memory_and_a_resumed_run_keeps_the_choice(
    words: list[str], tmp_path: Path
) -> None:
    words = [*words, f"output_dir={tmp_path / 'run'}"]
    done = run_launched("torchrun", [SCRIPT, *words, "training.max_steps=2"], ROOM_OF_RANK_1="20000")
    assert done.returncode == 0, done.stdout
    chosen = record(tmp_path / "run")["memory"]
    assert chosen["gradient_checkpointing"] is True
    assert "20 kB that are free" in chosen["why"]
    assert done.stdout.count("checkpointed: True") == 2
    done = run_launched("python", [SCRIPT, *words, "resume=auto", "resume.allow=training.max_steps"])
    assert done.returncode == 0, done.stdout
    assert "when the run began; run.json has kept it" in done.stdout
    assert "checkpointed: True" in done.stdout
    assert record(tmp_path / "run")["memory"] == chosen


def test_checkpointing_changes_no_byte_with_dropout(words: list[str], tmp_path: Path) -> None:
    from finetune.cli.overrides import train_from_overrides

    adapters = []
    for word in ("true", "false"):
        run = tmp_path / word
        more = [f"output_dir={run}", "lora.dropout=0.2", f"training.gradient_checkpointing={word}"]
        train_from_overrides([*words, "task=finetune_lora", *more])
        adapters.append((run / "adapter" / "adapter_model.safetensors").read_bytes())
    assert adapters[0] == adapters[1]


def train_short(words: list[str], run: Path, short: str, *more: str) -> Ended:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHORT", short)
        patch.setattr(Supervised, "loss", Supervised.loss)  # the script's own is undone with it
        return run_script(SCRIPT, [*words, f"output_dir={run}", *more])


@pytest.fixture(scope="module")
def whole(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with memory for its micro-batches, which have about 70 tokens."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert train_short(words, run, "").returncode == 0
    return run


def assert_one_curve(run: Path, whole: Path) -> None:
    assert len(curve(whole)) == 3
    for ours, theirs in zip(curve(run), curve(whole), strict=True):
        assert abs(ours["loss"] - theirs["loss"]) <= 1e-6 * max(1, abs(theirs["loss"]))
    one, other = map(adapter_tensors, (run, whole))
    difference = sum(float((one[name] - other[name]).square().sum()) for name in other) ** 0.5
    assert difference <= 1e-5 * sum(float(tensor.square().sum()) for tensor in other.values()) ** 0.5


def test_memory_that_runs_out_in_the_first_step_makes_micro_batches_smaller(
    words: list[str], whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = train_short(words, run, "0:40")
    assert done.returncode == 0, done.stdout
    assert_one_curve(run, whole)
    limit = record(run)["memory"]["max_tokens"]
    assert record(run)["fallbacks"] == []
    assert f"micro-batches compute up to {limit} tokens: memory ran out in step 1 with larger ones" in done.stdout
    more = ["training.max_steps=4", "resume=auto", "resume.allow=training.max_steps"]
    again = train_short(words, run, "0:40", *more)
    assert again.returncode == 0, again.stdout
    assert "out of memory" not in again.stdout, "the limit that worked is there from the start"
    assert record(run)["memory"]["max_tokens"] == limit


def test_memory_that_runs_out_says_what_it_costs_to_cut_conversations(words: list[str], tmp_path: Path) -> None:
    rows = conversation_words(tmp_path / "rows", train=16)
    done = train_short(words, tmp_path / "run", "0:150", *rows, "training.max_steps=1")
    assert done.returncode == 0, done.stdout
    before, _, after = done.stdout.partition("out of memory in step 1, which is tried again")
    limit = record(tmp_path / "run")["memory"]["max_tokens"]
    assert "their answers are cut into several micro-batches" not in before
    assert f"of 16 conversations exceed training.max_tokens_per_microbatch={limit}: their answers are cut" in after


@pytest.mark.slow
def test_with_dropout_smaller_micro_batches_are_a_fallback_that_strict_refuses(
    words: list[str], tmp_path: Path
) -> None:
    done = train_short(words, tmp_path / "run", "0:40", "lora.dropout=0.1")
    assert done.returncode == 0, done.stdout
    assert {one["what"] for one in record(tmp_path / "run")["fallbacks"]} == {"training.max_tokens_per_microbatch"}
    refused = train_short(words, tmp_path / "strict", "0:40", "lora.dropout=0.1", "strict=true")
    assert refused.returncode == 2
    assert "The run is strict" in refused.stdout


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_takes_the_others_back_with_it(
    words: list[str], whole: Path, tmp_path: Path
) -> None:
    # Two micro-batches for each rank: the first leaves gradients.
    done = run_launched("torchrun", [SCRIPT, *words, f"output_dir={tmp_path / 'run'}"], SHORT="1:40")
    assert done.returncode == 0, done.stdout
    assert_one_curve(tmp_path / "run", whole)
    assert "memory ran out in step 1 with larger ones" in done.stdout
    assert record(tmp_path / "run")["memory"]["max_tokens"] <= 40
    done = run_launched("torchrun", [SCRIPT, *words, f"output_dir={tmp_path / 'none'}"], SHORT="1:5")
    assert done.returncode != 0
    assert "Lower training.batch_size" in done.stdout
    assert done.stdout.count("which is tried again") > 1
    assert not RunFolder(tmp_path / "none").checkpoint_steps()
    assert record(tmp_path / "none")["status"] == "failed"
    assert "out of memory" in record(tmp_path / "none")["result"]["error"]


@pytest.mark.slow
def test_with_torchs_reducer_memory_that_runs_out_ends_the_run(words: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = [f"output_dir={run}", "parallel.gradient_sync=ddp"]
    done = run_launched("torchrun", [SCRIPT, *words, *more], SHORT="1:40")
    assert done.returncode != 0
    assert "out of memory: DefaultCPUAllocator" in done.stdout
    assert "which is tried again" not in done.stdout
    assert record(run)["status"] == "failed"
