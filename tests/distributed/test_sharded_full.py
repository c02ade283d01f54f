"""Full fine-tuning with sharded weights has the curve of one plain process, and files that anyone can go on with."""

import json
import re
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from finetune.config.compose import load_config
from finetune.distributed.launch import launch
from finetune.errors import ConfigError
from finetune.runs.checkpoint_loading import load_checkpoint
from finetune.runs.checkpoints import take_snapshot
from finetune.runs.folder import RunFolder
from finetune.training.optim import build_optimizer
from finetune.training.reporting.journal import Journal
from finetune.training.train import build_trainer
from tests.curves import (
    FULL,
    REFERENCE_BATCH_SIZE,
    Case,
    assert_one_curve,
    assert_one_world,
    read_run,
    reporting_words,
    reports_of_run,
    run_and_report,
    run_words,
)
from tests.distributed.test_sharding import SHARDED, begun_again
from tests.launches import LAUNCHERS, run_command

PLAIN = Case(REFERENCE_BATCH_SIZE, recipe=FULL)
SAVING = "checkpoint.save_every=2"
TRAIN, GO_ON = "train_and_look", "load_and_go_on"

pytestmark = pytest.mark.warm


def sharded(batch_size, *words):
    return Case(batch_size, recipe=FULL, words=(SHARDED, *words))


AGAIN = sharded(2, "training.log_every=3")
"""Computes the same as `sharded(2)`, in a folder of another name."""
TWO = [
    sharded(8, "training.gradient_checkpointing=true"),
    sharded(3, "training.kernels=reference", "training.gradient_checkpointing=true"),
    sharded(2, "parallel.reshard_after_forward=false"),
]
FOUR = [sharded(1), sharded(2, "parallel.shard_size=2")]


def train_and_look(words: list[str]) -> None:
    """Train as ever; then see that every weight, and all that is kept for it, lies in parts."""
    config = load_config(words, task="finetune_full")
    with launch(config) as runtime:
        trainer = build_trainer(runtime, config)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
        trainer.run_test(test_loader)
        if runtime.placement.shard_size is None:
            return
        for name, weight in trainer.model.named_parameters():
            assert isinstance(weight, DTensor), name
            assert weight.to_local().shape[0] == -(-len(weight) // runtime.placement.shard_size), name


def load_and_go_on(words: list[str]) -> None:
    """Load the newest checkpoint of a run and write it in memory: its files must have the same bytes. Then train on."""
    config = load_config(words, task="finetune_full")
    with launch(config) as runtime:
        trainer = build_trainer(runtime, config)
        optimizer = runtime.placement.prepare_optimizer(build_optimizer(trainer.model, config.optim))
        folder = RunFolder(config.output_dir)
        newest = folder.checkpoint(folder.checkpoint_steps()[-1])
        state = load_checkpoint(newest, model=trainer.model, optimizer=optimizer)
        snapshot = take_snapshot(folder, model=trainer.model, optimizer=optimizer, state=state)
        with runtime.placement.full_tensors(snapshot.tensors) as whole:
            for name, content in snapshot.read_by(whole).files.items() if runtime.is_main_process else ():
                if name.endswith(".safetensors"):
                    assert b"".join(content) == (newest / name).read_bytes(), name
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
        trainer.run_test(test_loader)


def train_on_a_failing_disk(words: list[str]) -> None:
    """Rank 0 cannot write the first checkpoint to its end: the disk takes no files larger than the weights' half."""
    save = Journal.save

    def save_on_it(self, snapshot, *, best):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (snapshot.num_bytes // 6, limits[1]))
        try:
            save(self, snapshot, best=best)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            Journal.save = save  # type: ignore[method-assign]

    Journal.save = save_on_it  # type: ignore[method-assign]
    train_and_look(words)


def run(launcher, folder, cases, *words, recipe=TRAIN):
    run_and_report(LAUNCHERS[launcher], folder, cases, SAVING, *words, recipe=[f"{__name__}:{recipe}"])
    for case in cases:
        size = {"python": 1, "torchrun": 2, "torchrun_4": 4}[launcher]
        assert_one_world(reports_of_run(folder, case.name), size)
    return [folder / case.name for case in cases]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run of one process, whose weights are whole."""
    (folder,) = run("python", tmp_path_factory.mktemp("plain"), [PLAIN])
    return folder


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Two runs of two ranks with shards, one after the other."""
    return run("torchrun", tmp_path_factory.mktemp("shards"), [sharded(2), AGAIN])


def tensor_files(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors"))


def assert_same_bytes(one, other):
    assert len(tensor_files(one)) >= 5, "weights and optimizers, and what is published"
    assert tensor_files(one) == tensor_files(other)
    assert [file for file in tensor_files(one) if (one / file).read_bytes() != (other / file).read_bytes()] == []


@pytest.mark.slow
def test_sharded_full_fine_tuning_has_the_curve_of_one_process(plain, both):
    shards, again = both
    assert_one_curve(read_run(shards), read_run(plain))
    assert_same_bytes(shards, again)
    assert tensor_files(shards) == tensor_files(plain)
    record = json.loads((shards / "run.json").read_text())
    assert (record["sharding"], record["shard_size"], record["status"]) == ("fsdp2", 2, "completed")
    assert record["result"]["saving"]["blocked_seconds"] > 0
    assert "training waited" in (shards / "log.txt").read_text()
    before, after = (header_of(folder / "checkpoints" / "step-000006") for folder in (plain, shards))
    assert before == after, "names, types, shapes and places of all tensors"


def header_of(checkpoint: Path) -> dict[str, bytes]:
    headers = {}
    for file in checkpoint.glob("*.safetensors"):
        data = file.read_bytes()
        headers[file.name] = data[: 8 + int.from_bytes(data[:8], "little")]
    assert sorted(headers) == ["model.safetensors", "optimizer.safetensors"]
    return headers


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "cases"), [("torchrun", TWO), ("torchrun_4", FOUR)])
def test_so_it_has_in_every_way(plain, tmp_path, launcher, cases):
    for case, folder in zip(cases, run(launcher, tmp_path, cases), strict=True):
        assert_one_curve(read_run(folder), read_run(plain)), case


@pytest.mark.slow
def test_with_one_microbatch_a_rank_the_bytes_are_those_without_shards(tmp_path):
    """Two numbers have only one sum. So with more, nothing but the order in which gradients are added can differ."""
    optimizers = [f"optim.optimizer=torch.optim.{name}" for name in ("SGD", "NAdam")]
    ways = ["training.precision=bf16", *optimizers]
    cases = [case for way in ways for case in (Case(4, recipe=FULL, words=(way,)), sharded(4, way))]
    folders = run("torchrun", tmp_path, cases, "training.max_steps=4")  # the third has rows for one rank alone
    for whole, shards in zip(folders[::2], folders[1::2], strict=True):
        assert_same_bytes(whole, shards)


@pytest.mark.slow
def test_transformers_loads_what_is_published(both):
    from transformers import AutoModelForCausalLM

    folder, _ = both
    model, found = AutoModelForCausalLM.from_pretrained(folder / "adapter", output_loading_info=True)
    assert not any(found.values()), found
    saved = load_file(folder / "adapter" / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in saved.items())


@pytest.mark.slow
def test_if_the_disk_fails_the_other_ranks_do_not_wait_for_ever(both, tmp_path):
    whole, _ = both
    shards, disturbed = sharded(2), sharded(2, "checkpoint.on_disk_failure=continue")
    (folder,) = run("torchrun", tmp_path, [disturbed], recipe="train_on_a_failing_disk")
    saving = [entry for entry in json.loads((folder / "run.json").read_text())["fallbacks"] if "step" in entry["what"]]
    assert [entry["what"] for entry in saving] == ["saving step 2"]
    assert "File too large" in saving[0]["why"]
    assert_same_bytes(whole, folder)

    words = reporting_words(tmp_path / "stopped", [shards], SAVING, recipe=[f"{__name__}:train_on_a_failing_disk"])
    (tmp_path / "stopped").mkdir()
    done = run_command([*LAUNCHERS["torchrun"], *words], limit_seconds=60)
    assert done.returncode != 0
    assert done.stdout.count("RunFailedError") == 1, done.stdout
    assert "File too large" in done.stdout


@pytest.mark.slow
def test_a_checkpoint_is_gone_on_with_in_parts_and_whole_and_by_any_number_of_ranks(plain, both, tmp_path):
    shards, _ = both
    whole, parts = Case(2, recipe=FULL, words=("resume=auto",)), sharded(2, "resume=auto")
    copies = sharded(2, "resume=auto", "parallel.shard_size=2")
    ways = {"python": {whole: shards}, "torchrun": {parts: shards, whole: shards}, "torchrun_4": {copies: plain}}
    for launcher, cases in ways.items():
        for case, begun in cases.items():
            begun_again(begun, tmp_path / launcher / case.name, 4)
        for folder in run(launcher, tmp_path / launcher, cases, recipe=GO_ON):
            assert_one_curve(read_run(folder), read_run(plain))
            assert len(json.loads((folder / "run.json").read_text())["starts"]) == 2
    assert_same_bytes(shards, tmp_path / "torchrun" / parts.name)


@pytest.mark.parametrize("name", ["torch.optim.Adafactor", "torch.optim.Rprop", "bitsandbytes.optim.AdamW8bit"])
def test_an_optimizer_that_looks_beyond_a_value_is_refused_before_anything_is_loaded(tmp_path, name):
    words = [*run_words(tmp_path / "run"), SHARDED, f"optim.optimizer={name}"]
    with (
        pytest.raises(ConfigError, match=f"{re.escape(name)} .*cannot update weights that are sharded .*AdamW"),
        launch(load_config([*words, "training.method=full"])),
    ):
        pass
    assert not (tmp_path / "run").exists()
