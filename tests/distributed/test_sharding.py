"""A run with a sharded base writes the bytes of a run in the same world that is not sharded."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from finetune.config.compose import load_config
from finetune.distributed.launch import launch
from finetune.distributed.sharding import _mesh, refuse_uneven_shards, refuse_what_is_not_sharded
from finetune.engine.padded import EMPTY_MICROBATCH
from finetune.errors import ConfigError, LaunchError, RunFailedError
from finetune.runs.folder import RunFolder
from finetune.training.memory.forecast import Shards, Weights
from finetune.training.train import build_trainer
from tests.curves import Case, assert_one_world, reporting_words, reports_of_run, run_and_report, run_words
from tests.launches import LAUNCHERS, run_command
from tests.tiny_training import events, record

SHARDED = "parallel.sharding=fsdp2"
CHECKPOINTED = "training.gradient_checkpointing=true"
REFERENCE = "training.kernels=reference"
PLAIN = Case(2)
"""In the last step of an epoch, one of two ranks has no micro-batch."""
FOUR_STEPS = "training.max_steps=4"
"""The third is the last of an epoch, the fourth begins from all that came before."""
CASES = {
    "dropout, checkpointing, bf16": Case(2, 0.1, words=("training.precision=bf16", CHECKPOINTED, FOUR_STEPS)),
    "the model's own forward, checkpointing": Case(2, 0.1, words=(REFERENCE, CHECKPOINTED, FOUR_STEPS)),
    "DoRA, new tokens and noise": Case(
        2, words=("lora.dora=true", "lora.new_tokens=[<one>, <two>]", "training.neftune_alpha=5", FOUR_STEPS)
    ),
    "PiSSA, whole layers, and layers that are kept": Case(
        3,
        words=(
            *("lora.init=pissa", "lora.modules_to_save=[embed_tokens, norm]"),
            *("parallel.reshard_after_forward=false", FOUR_STEPS),
        ),
    ),
}
RECIPE = [f"{__name__}:train_and_look"]
ANSWERS = ("testing.metrics=[exact_match]", "testing.num_samples=3", "testing.max_new_tokens=6", "testing.batch_size=4")
"""All four test rows are one batch, so that one of two ranks has none."""

pytestmark = pytest.mark.warm


def train_and_look(words: list[str]) -> None:
    """Train as ever; a sharded run then looks at its weights and calls the model by itself."""
    config = load_config(words, task="finetune_lora")
    with launch(config) as runtime:
        trainer = build_trainer(runtime, config)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
        comparison = trainer.run_test(test_loader)
        assert (comparison is None) == (test_loader is None or not runtime.is_main_process)
        if runtime.placement.shard_size is None:
            return
        shards = Shards(runtime.placement.shard_size, trainer.config.parallel.reshard_after_forward)
        assert Weights(trainer._setup.memory_twin).gathered(shards) == runtime.placement.gathered_bytes, (
            "as `finetune plan` counts it"
        )
        kept = {name: weight for name, weight in trainer.model.named_parameters() if isinstance(weight, DTensor)}
        frozen = {name for name, weight in trainer.model.named_parameters() if not weight.requires_grad}
        assert set(kept) == frozen
        for name, weight in kept.items():
            assert weight.to_local().shape[0] == -(-len(weight) // runtime.placement.shard_size), name
        with pytest.raises(RunFailedError, match=r"cannot be called outside of the run"):
            trainer.model(input_ids=EMPTY_MICROBATCH.input_ids)


def let_rank_0_compute_alone(words: list[str]) -> None:
    """Let rank 0 test or measure alone, as it may without shards; the others leave, or wait for it."""
    what, others, *words = words
    config = load_config(words, task="finetune_lora")
    with launch(config) as runtime:
        trainer = build_trainer(runtime, config)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
        if runtime.is_main_process:
            trainer.run_test(test_loader) if what == "test" else trainer.measure(val_loader)
        if others == "wait":
            runtime.collectives.barrier()


def sharded(case, *words):
    return case._replace(words=(*case.words, SHARDED, *words))


def train_both_ways(folder, cases, *words, launcher="torchrun", rows=(), recipe=RECIPE):
    """Train each case with and without shards in one launch; return the folders in pairs."""
    pairs = [(case, sharded(case, *words)) for case in cases]
    every = [case for pair in pairs for case in pair]
    run_and_report(LAUNCHERS[launcher], folder, every, "checkpoint.save_every=2", *ANSWERS, *rows, recipe=recipe)
    for _, other in pairs:
        assert_one_world(reports_of_run(folder, other.name), 4 if launcher == "torchrun_4" else 2)
    return [(folder / case.name, folder / other.name) for case, other in pairs]


def assert_same_bytes(one, other):
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors") if "base" not in path.parts)
    assert sum("checkpoints" in path.parts for path in files) >= 2 * 2, "adapters and optimizers"
    assert [path for path in files if (one / path).read_bytes() != (other / path).read_bytes()] == []
    for name in ("loss", "grad_norm"):
        assert figures(one, name) == figures(other, name) != []
    assert in_test_phase(one) == in_test_phase(other)


def in_test_phase(folder):
    return [{name: value for name, value in event.items() if name != "time"} for event in events(folder, "test")]


def figures(folder, name):
    return [event[name] for event in events(folder) if name in event and event["event"] in ("step", "validation")]


def assert_sharded_is_unsharded(whole, shards):
    """The sixth promise, and what such a run says of itself; tests/test_one_curve.py trains both."""
    assert_same_bytes(whole, shards)
    assert (record(whole)["sharding"], record(whole)["shard_size"]) == ("none", None)
    assert (record(shards)["sharding"], record(shards)["shard_size"]) == ("fsdp2", 2)
    assert record(shards)["status"] == "completed"
    assert record(shards)["fallbacks"] == []
    assert {event["model"] for event in in_test_phase(shards)} == {"base", "tuned"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "others", "message"),
    [("test", "leave", "rank 1 has left"), ("measure", "wait", "another is in")],
)
def test_a_rank_that_computes_alone_is_told_at_once(tmp_path, what, others, message):
    recipe = [f"{__name__}:let_rank_0_compute_alone", what, others]
    words = reporting_words(tmp_path, [sharded(PLAIN)], "training.max_steps=1", recipe=recipe)
    done = run_command([*LAUNCHERS["torchrun"], *words], limit_seconds=60)
    assert done.returncode == 1
    assert message in done.stdout
    assert "call run_test and whatever runs the model on every rank" in done.stdout
    assert record(tmp_path / sharded(PLAIN).name)["status"] == "failed"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A plain run, and those of the cases."""
    trained = train_both_ways(tmp_path_factory.mktemp("sharded"), [PLAIN, *CASES.values()])
    return dict(zip(["plain", *CASES], trained, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_so_has_every_kind_of_adapter_and_forward(pairs, name):
    assert_same_bytes(*pairs[name])


@pytest.mark.slow
def test_two_nodes_of_two_keep_a_copy_each(tmp_path):
    ((whole, shards),) = train_both_ways(tmp_path, [PLAIN], "parallel.shard_size=2", launcher="torchrun_4")
    assert_same_bytes(whole, shards)
    assert record(shards)["shard_size"] == 2


@pytest.mark.slow
def test_pairs_of_answers_are_compared_with_the_sharded_base(tmp_path):
    (tmp_path / "pairs").mkdir()
    for split, count in (("train", 18), ("validation", 5)):
        rows = [{"prompt": f"{split} {n}?", "chosen": "yes " * (n % 3 + 1), "rejected": "no"} for n in range(count)]
        (tmp_path / "pairs" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["training.objective=dpo", f"data.path={tmp_path / 'pairs'}"]
    cases = [PLAIN, Case(2, words=(REFERENCE, CHECKPOINTED))]
    for whole, shards in train_both_ways(tmp_path, cases, rows=[*words, FOUR_STEPS]):
        assert_same_bytes(whole, shards)
        assert figures(whole, "reward_margin") == figures(shards, "reward_margin") != []


@pytest.mark.slow
def test_accelerate_launch_with_fsdp_is_the_same_run(pairs, tmp_path):
    """Neither checkpointing nor weights that are kept change a byte."""
    _, ours = pairs["plain"]
    words = ("checkpoint.save_every=2", *ANSWERS)
    kept = ["--fsdp_activation_checkpointing", "true", "--fsdp_reshard_after_forward", "false"]
    for options, own in (([], []), (kept, [CHECKPOINTED, "parallel.reshard_after_forward=false"])):
        theirs = tmp_path / f"theirs-{len(options)}" / PLAIN.name
        run_and_report([*LAUNCHERS["accelerate_sharded"], *options], theirs.parent, [PLAIN], *words, recipe=RECIPE)
        assert_one_world(reports_of_run(theirs.parent, PLAIN.name), 2)
        assert_same_bytes(ours, theirs)
        assert (record(theirs)["launcher"], record(theirs)["sharding"]) == ("accelerate", "fsdp2")
        wanted = load_config(own, run=str(ours / "config.yaml"))
        settled = load_config(run=str(theirs / "config.yaml"))
        assert settled.parallel == wanted.parallel
        assert settled.training.gradient_checkpointing == wanted.training.gradient_checkpointing


def begun_again(begun, folder, step):
    """Copy a run as it was after a step."""
    shutil.copytree(begun, folder)
    run = RunFolder(folder)
    for later in run.checkpoint_steps():
        if later > step:
            shutil.rmtree(run.checkpoint(later))
    shutil.rmtree(run.adapter)


@pytest.mark.slow
def test_a_run_goes_on_with_shards_and_without(pairs, tmp_path):
    whole, shards = pairs["plain"]
    gone_on = tmp_path / "on"
    goings = {Case(2, words=("resume=auto",)): shards, sharded(Case(2, words=("resume=auto",))): whole}
    for case, begun in goings.items():
        begun_again(begun, gone_on / case.name, 4)
    run_and_report(LAUNCHERS["torchrun"], gone_on, list(goings), "checkpoint.save_every=2", *ANSWERS, recipe=RECIPE)
    for case in goings:
        assert_same_bytes(whole, gone_on / case.name)
        assert len(record(gone_on / case.name)["starts"]) == 2


def test_shards_go_through_the_group_of_the_run_where_torch_sees_gpus_too(monkeypatch):
    """`init_device_mesh` would make a group through nccl beside a group of gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert _mesh("cpu", 1, 1).get_group("shards") is dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_the_reducer_of_whole_weights_is_refused_before_anything_is_loaded(tmp_path):
    config = load_config([*run_words(tmp_path / "run"), SHARDED, "parallel.gradient_sync=ddp"])
    message = r"parallel\.gradient_sync is ddp \(.*\), which needs all weights on each process"
    with pytest.raises(ConfigError, match=message), launch(config):
        pass
    assert not (tmp_path / "run").exists()


def test_only_optimizers_that_look_at_single_values_update_sharded_weights(tmp_path):
    def refuse(method, optimizer, *, trains=True):
        words = [SHARDED, f"training.method={method}", f"optim.optimizer={optimizer}"]
        refuse_what_is_not_sharded(load_config([*run_words(tmp_path / "run"), *words]), trains=trains)

    refuse("full", "torch.optim.SGD")
    refuse("lora", "torch.optim.Adafactor")
    refuse("full", "torch.optim.Adafactor", trains=False)
    with pytest.raises(
        ConfigError, match=r"torch\.optim\.Adafactor .* cannot update weights that are sharded .* AdamW"
    ):
        refuse("full", "torch.optim.Adafactor")


def test_a_shard_size_must_divide_the_world_and_needs_shards(tmp_path):
    config = load_config([*run_words(tmp_path / "run"), SHARDED, "parallel.shard_size=3"])
    refuse_uneven_shards(config, 6)
    with pytest.raises(LaunchError, match=r"parallel\.shard_size is 3 .* does not divide the world of 4 processes"):
        refuse_uneven_shards(config, 4)
    with pytest.raises(ConfigError, match=r"parallel\.shard_size: 3 needs parallel\.sharding=fsdp2, which is none"):
        load_config([*run_words(tmp_path / "run"), "parallel.shard_size=3"])


def test_one_process_keeps_all_weights_and_says_so(tmp_path):
    words = [*run_words(tmp_path / "run"), SHARDED, "parallel.shard_size=2"]
    with launch(load_config(words)) as runtime:
        (fallback,) = runtime.fallbacks.as_records()
        assert (fallback["what"], fallback["wanted"], fallback["used"]) == ("parallel.sharding", "fsdp2", "none")
        assert not runtime.placement.needs_equal_microbatches
    with (
        pytest.raises(ConfigError, match=r"parallel\.sharding: wanted fsdp2"),
        launch(load_config([*words, "strict=true"])),
    ):
        pass
