"""Training goes on while a thread writes: what lands on the disk is the moment of the copy, one save at a time."""

import logging
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune.config.schema import CheckpointSection
from finetune.errors import ConfigError, RunFailedError
from finetune.fallbacks import Fallbacks
from finetune.runs.checkpoints import disk_need, take_snapshot
from finetune.runs.durable import is_leftover
from finetune.runs.folder import RunFolder
from finetune.runs.state import TrainerState
from finetune.runs.tensors import TensorFile
from finetune.runs.verification import verify_checkpoint
from finetune.signals import Terminated
from finetune.training.cadence import Cadence
from finetune.training.saver import Saver, log_disk_need
from tests.tiny_models import build_tiny, tiny_phi3_config


class Gate:
    """Holds a writer back until it is opened."""

    def __init__(self):
        self.is_reached = threading.Event()
        self.is_open = threading.Event()

    def __call__(self):
        self.is_reached.set()
        assert self.is_open.wait(30)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run").open("never")
    yield folder
    folder.close()


@pytest.fixture
def model():
    return build_tiny(tiny_phi3_config())


@pytest.fixture
def optimizer(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    take_step(model, optimizer)
    return optimizer


def take_step(model, optimizer):
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()


def snapshot(folder, model, optimizer, step):
    return take_snapshot(folder, model=model, optimizer=optimizer, state=TrainerState(step=step))


def saver(folder, *, fallbacks=None, before=lambda: None, **keys):
    return Saver(folder, CheckpointSection(**keys), fallbacks or Fallbacks(), before=before)


def weights_of(path):
    return load_file(path / "model.safetensors") | load_file(path / "optimizer.safetensors")


def test_what_is_written_is_what_was_there_when_the_save_began(folder, model, optimizer):
    plain = saver(folder, background=False)
    [as_it_was] = plain.save(snapshot(folder, model, optimizer, 1), best=None)
    gate = Gate()
    saves = saver(folder, before=gate)
    assert saves.save(snapshot(folder, model, optimizer, 2), best=None) == []
    assert gate.is_reached.wait(30)
    assert saves.collect() == []
    take_step(model, optimizer)
    gate.is_open.set()
    [saved] = saves.finish()
    assert saved.path == folder.checkpoint(2)
    assert verify_checkpoint(saved.path) == []
    for name, tensor in weights_of(as_it_was.path).items():
        assert torch.equal(tensor, weights_of(saved.path)[name]), name
    name = "model.embed_tokens.weight"
    assert not torch.equal(model.get_parameter(name), weights_of(saved.path)[name])


def test_training_waits_for_the_copy_and_for_an_earlier_save_alone(folder, model, optimizer):
    gate = Gate()
    saves = saver(folder, before=gate)
    saves.save(snapshot(folder, model, optimizer, 1), best=None)
    assert gate.is_reached.wait(30)
    opener = threading.Timer(1.0, gate.is_open.set)
    opener.start()
    [first] = saves.save(snapshot(folder, model, optimizer, 2), best=None)  # at most one in flight: it waits
    [second] = saves.finish()
    assert (first.step, second.step) == (1, 2)
    assert first.blocked_seconds < 0.9 < second.blocked_seconds
    assert first.write_seconds > 0.9
    assert first.num_bytes == sum(tensor.numel() * 4 for tensor in weights_of(first.path).values())


def test_an_older_checkpoint_that_cannot_be_removed_ends_no_run(folder, model, optimizer, monkeypatch, caplog):
    def refuse(*_):
        raise RunFailedError("Removing old checkpoint step-000001 failed: it is busy")

    monkeypatch.setattr("finetune.training.saver.prune", refuse)
    monkeypatch.setattr(logging.getLogger("finetune"), "propagate", True)
    saves = saver(folder, save_total_limit=1)
    saves.save(snapshot(folder, model, optimizer, 2), best=None)
    assert [one.step for one in saves.finish(is_last=True)] == [2]
    said = "Removing old checkpoint step-000001 failed: it is busy; the checkpoint of step 2 is committed"
    assert said in caplog.messages


@pytest.fixture
def broken(folder):
    """The checkpoints' place is a file: each save fails with ENOTDIR, root's too."""
    if folder.checkpoints.is_dir():
        folder.checkpoints.rmdir()
    folder.checkpoints.write_text("")
    return folder


@pytest.mark.parametrize("call", ["collect", "finish", "save"])
def test_a_disk_that_refuses_is_told_by_the_next_call(broken, model, optimizer, call):
    saves = saver(broken)
    saves.save(snapshot(broken, model, optimizer, 1), best=None)
    calls = {
        "finish": saves.finish,
        "save": lambda: saves.save(snapshot(broken, model, optimizer, 2), best=None),
        "collect": lambda: [saves.collect() for _ in iter(lambda: time.sleep(0.01), 0)],
    }
    with pytest.raises(RunFailedError, match=r"Saving checkpoint .*step-000001 failed: .*bytes are free there"):
        calls[call]()


def test_by_configuration_training_goes_on_without_and_the_next_save_is_tried(broken, model, optimizer):
    fallbacks = Fallbacks()
    saves = saver(broken, fallbacks=fallbacks, on_disk_failure="continue")
    saves.save(snapshot(broken, model, optimizer, 1), best=None)
    assert saves.finish() == []
    [record] = fallbacks.as_records()
    assert record["what"] == "saving step 1"
    assert "bytes are free there" in record["why"]
    broken.checkpoints.unlink()
    saves.save(snapshot(broken, model, optimizer, 2), best=None)
    assert [one.step for one in saves.finish(is_last=True)] == [2]


def test_the_last_save_may_not_fail_whatever_the_configuration_says(broken, model, optimizer):
    saves = saver(broken, on_disk_failure="continue")
    saves.save(snapshot(broken, model, optimizer, 1), best=None)
    with pytest.raises(RunFailedError, match="step-000001 failed"):
        saves.finish(is_last=True)


@pytest.mark.parametrize("call", [None, "collect", "finish"])
def test_the_last_save_may_not_fail_though_an_earlier_call_has_waited_for_it(broken, model, optimizer, call):
    saves = saver(broken, on_disk_failure="continue", background=False)
    saves.save(snapshot(broken, model, optimizer, 1), best=None)
    if call is not None:
        assert getattr(saves, call)() == []
    with pytest.raises(RunFailedError, match="step-000001 failed"):
        saves.finish(is_last=True)
    broken.checkpoints.unlink()
    assert [one.step for one in saves.save(snapshot(broken, model, optimizer, 2), best=None)] == [2]
    assert saves.finish(is_last=True) == []


def test_a_strict_run_does_not_go_on_without_a_checkpoint(broken, model, optimizer):
    saves = saver(broken, fallbacks=Fallbacks(strict=True), on_disk_failure="continue")
    saves.save(snapshot(broken, model, optimizer, 1), best=None)
    with pytest.raises(ConfigError, match="strict"):
        saves.finish()


@pytest.mark.parametrize(("where", "value"), [("weight", float("nan")), ("optimizer", float("-inf"))])
def test_weights_that_are_not_finite_are_never_saved_as_good(folder, model, optimizer, where, value):
    weight = model.model.norm.weight
    target = weight.data if where == "weight" else optimizer.state[weight]["exp_avg"]
    target[3] = value
    saves = saver(folder, on_disk_failure="continue")
    saves.save(snapshot(folder, model, optimizer, 7), best=None)
    with pytest.raises(RunFailedError, match=r"step 7 is not saved: 1 of its tensors .*model\.norm\.weight"):
        saves.finish()
    assert folder.checkpoint_steps() == []


def test_a_run_that_is_told_to_stop_at_once_leaves_no_half_checkpoint(folder, model, optimizer):
    gate = Gate()
    saves = saver(folder, before=gate)
    saves.save(snapshot(folder, model, optimizer, 1), best=None)
    assert gate.is_reached.wait(30)
    threading.Timer(0.2, gate.is_open.set).start()
    saves.close(Terminated())
    assert list(folder.checkpoints.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "finetune-saver"]


def test_a_save_in_flight_outlives_an_error_of_training(folder, model, optimizer):
    saves = saver(folder)
    saves.save(snapshot(folder, model, optimizer, 1), best=None)
    saves.close(RunFailedError("the loss is nan"))
    assert verify_checkpoint(folder.checkpoint(1)) == []
    assert not [path for path in folder.checkpoints.iterdir() if is_leftover(path.name)]


def test_where_memory_does_not_hold_a_copy_training_waits_and_that_is_recorded(folder, model, optimizer):
    huge = torch.zeros(1).expand(1 << 46)  # 256 TiB by its shape, four bytes in memory
    fallbacks = Fallbacks()
    saves = saver(folder, fallbacks=fallbacks)
    small = snapshot(folder, model, optimizer, 1)
    with pytest.raises(RuntimeError):  # nothing can write it either
        saves.save(replace(small, files={"huge.safetensors": TensorFile({"x": huge}, ("format", "pt"))}), best=None)
    [record] = fallbacks.as_records()
    assert record["what"] == "checkpoint.background"
    assert [one.step for one in saves.save(small, best=None)] == [1]  # written before the call returns


@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "Adafactor", "SGD"])
def test_the_disk_that_checkpoints_take_is_known_after_the_first_step(folder, model, name):
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    take_step(model, optimizer)
    need = disk_need(folder, snapshot(folder, model, optimizer, 1), at_once=3)
    take_step(model, optimizer)
    [saved] = saver(folder, background=False).save(snapshot(folder, model, optimizer, 2), best=None)
    assert need.checkpoint == saved.num_bytes
    assert need.total == 3 * saved.num_bytes + need.model
    on_disk = sum(file.stat().st_size for file in saved.path.iterdir())
    assert saved.num_bytes < on_disk < saved.num_bytes + 60_000
    assert "at most 3 of them" in str(need)


def test_a_folder_that_was_removed_ends_the_run_before_its_disk_is_measured(tmp_path, model, optimizer):
    with RunFolder(tmp_path / "run").open() as folder:
        shutil.rmtree(folder.path)
        with pytest.raises(RunFailedError, match="is no longer the folder of this run"):
            log_disk_need(folder, snapshot(folder, model, optimizer, 1), None, keep=2, has_best=False)


def test_a_checkpoint_that_a_save_renames_meanwhile_ends_no_prediction(folder, model, optimizer, monkeypatch, caplog):
    saves = saver(folder, background=False)
    saves.save(snapshot(folder, model, optimizer, 1), best=None)
    really_lstat = Path.lstat

    def rename_and_lstat(path):
        if folder.checkpoint(1).is_dir():
            folder.checkpoint(1).rename(folder.checkpoint(1).with_name(".tmp-step-000001"))
        return really_lstat(path)

    monkeypatch.setattr(Path, "lstat", rename_and_lstat)
    cadence = Cadence(steps_per_epoch=2, num_steps=2, save_every=1)
    with caplog.at_level("INFO"):
        log_disk_need(folder, snapshot(folder, model, optimizer, 1), cadence, keep=2, has_best=False)
    assert not folder.checkpoint(1).exists()
    assert "disk: a checkpoint takes" in caplog.text
