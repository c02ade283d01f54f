"""A profile says what took the time, changes no value, and never ends a run."""

import gzip
import json
import os
import re
import signal
from types import SimpleNamespace

import pytest
import torch

from finetune.errors import ConfigError
from finetune.runs.folder import RunFolder
from finetune.training import training_run
from finetune.training.profiling import StepProfiler
from tests.in_process import run_finetune
from tests.launches import run_launched
from tests.tiny_training import events, record

TRACE = "trace-steps-{}-rank0.json.gz"

pytestmark = pytest.mark.warm


@pytest.fixture(scope="module")
def words(inputs):
    """18 rows in global batches of 8 make 3 steps an epoch, each followed by a validation and a checkpoint."""
    return [
        *("train", "task=finetune_lora", f"model.path={inputs / 'base'}", f"data.path={inputs / 'rows'}"),
        *(f"data.cache_dir={inputs / 'cache'}", "lora.r=2", "lora.dropout=0.1", "optim.schedule=constant"),
        *("training.device=cpu", "training.global_batch_size=8", "training.batch_size=3", "training.max_steps=5"),
        "testing.num_samples=0",
    ]


@pytest.fixture(scope="module")
def unprofiled(words, tmp_path_factory):
    run = tmp_path_factory.mktemp("unprofiled") / "run"
    assert run_finetune(*words, f"output_dir={run}").returncode == 0
    return run


def losses(run):
    names = ("loss", "grad_norm", "learning_rate", "num_tokens")
    return [[event[name] for name in names] for event in events(run, "step")]


def weights(run):
    return (run / "adapter" / "adapter_model.safetensors").read_bytes()


def trace_of(run, steps):
    return json.loads(gzip.decompress((run / "profile" / TRACE.format(steps)).read_bytes()))


def during_step(monkeypatch, step, act):
    """Do something right before a step is trained."""
    whole = training_run.train_step

    def acting(*args, **keys):
        if args[4].step == step:
            act()
        return whole(*args, **keys)

    monkeypatch.setattr(training_run, "train_step", acting)


@pytest.mark.slow
def test_a_profile_is_written_and_changes_no_value(words, unprofiled, tmp_path):
    run = tmp_path / "run"
    ended = run_finetune(*words, f"output_dir={run}", "training.profile=2")
    assert ended.returncode == 0, ended.stdout
    assert losses(run) == losses(unprofiled)
    assert weights(run) == weights(unprofiled)

    assert {path.name for path in (run / "profile").iterdir()} == {TRACE.format("3-4")}
    ranges = {event["name"] for event in trace_of(run, "3-4")["traceEvents"] if event.get("cat") == "user_annotation"}
    parts = {f"step {step}: {part}" for step in (3, 4) for part in ("data", "training")}
    assert parts | {"forward", "backward", "step 3: evaluation", "step 3: saving"} <= ranges
    assert not [name for name in ranges if name.startswith(("step 2", "step 5", "collective"))]

    profile = record(run)["profile"]
    assert (profile["first_step"], profile["last_step"]) == (3, 4)
    trained = [event["dur"] for event in trace_of(run, "3-4")["traceEvents"] if event["name"] in parts]
    assert profile["seconds_per_step"] == pytest.approx(sum(trained) / 1e6 / 2, rel=0.01)
    sentence = profile["summary"]
    assert re.fullmatch(r"profile of steps 3 to 4: [\d.,e+]+ ms a step", sentence)
    log = (run / "log.txt").read_text()
    assert f"{sentence}. Open {run / 'profile' / TRACE.format('3-4')} in https://ui.perfetto.dev" in log
    assert "_GatedMlp" in log
    assert "Self CPU time total:" in log
    assert f"P{sentence[1:]}." in ended.answer
    assert "profile/ " in ended.answer


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_leaves_no_profile_and_the_resumed_run_makes_its_own(
    words, unprofiled, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    profiled = [*words, f"output_dir={run}", "training.profile=2"]
    with monkeypatch.context() as patch:
        during_step(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        ended = run_finetune(*profiled)
    assert ended.returncode == 75, ended.stdout
    assert "the profile of steps 3 to 4 is not written: training ended before" in ended.errors
    assert not (run / "profile").exists()
    assert not torch._C._autograd._profiler_enabled()

    ended = run_finetune(*profiled, "resume=auto")
    assert ended.returncode == 0, ended.stdout
    assert record(run)["profile"]["first_step"] == record(run)["profile"]["last_step"] == 5
    assert losses(run) == losses(unprofiled)
    assert weights(run) == weights(unprofiled)


@pytest.mark.slow
def test_a_profile_that_cannot_be_written_ends_no_run(words, unprofiled, tmp_path, monkeypatch):
    run = tmp_path / "run"
    during_step(monkeypatch, 1, lambda: (tmp_path / "run" / "profile").write_text("in the way"))
    ended = run_finetune(*words, f"output_dir={run}", "training.profile=1")
    assert ended.returncode == 0, ended.stdout
    assert weights(run) == weights(unprofiled)
    assert record(run)["profile"] is None
    (fallback,) = record(run)["fallbacks"]
    assert fallback == {
        "what": "training.profile",
        "wanted": "a profile of step 3",
        "used": "none",
        "why": "File exists (EEXIST)",
    }


def test_a_script_that_profiles_by_itself_is_refused(tmp_path):
    refusal = pytest.raises(ConfigError, match=r"training\.profile is 1, .* torch has only one profiler")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), refusal:
        StepProfiler(
            SimpleNamespace(is_main_process=True), RunFolder(tmp_path), num_profiled=1, done=0, num_steps=3, write=None
        )


@pytest.mark.slow
def test_rank_0_writes_the_trace_of_several(words, tmp_path):
    run = tmp_path / "run"
    ended = run_launched("torchrun", ["-m", "finetune", *words, f"output_dir={run}", "training.profile=2"])
    assert ended.returncode == 0, ended.stdout
    assert [path.name for path in (run / "profile").iterdir()] == [TRACE.format("3-4")]
    ranges = {event["name"] for event in trace_of(run, "3-4")["traceEvents"]}
    assert {"collective: sync_gradients", "collective: sum", "step 3: training"} <= ranges
    assert record(run)["fallbacks"] == []


def test_what_a_killed_rank_left_is_removed(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    profile = tmp_path / "profile"
    profile.mkdir()
    whole = profile / TRACE.format("3-4")
    for path in (whole, profile / f".tmp-{whole.name}", profile / ".tmp-x"):
        path.write_bytes(b"torn")
    with RunFolder(tmp_path).open("auto"):
        assert {path.name for path in profile.iterdir()} == {whole.name, ".tmp-x"}
