"""`finetune checkpoints` lists the checkpoints that exist, and names the one from which resume=auto continues."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from finetune.cli.overrides import train_from_overrides
from finetune.cli.runs import checkpoints
from finetune.errors import CheckpointError
from finetune.runs import verification
from finetune.runs.durable import committed_folder, find_damage
from finetune.runs.folder import RunFolder
from finetune.runs.state import TrainerState
from finetune.runs.verification import newest_valid
from tests.in_process import run_finetune
from tests.tiny_runs import write_base, write_rows
from tests.tiny_training import events

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def commit(path: Path, *names: str, **state: object) -> None:
    with committed_folder(path) as writer:
        for name in names:
            writer.write(name, [random.Random(name).randbytes(300)])
        if state:
            writer.write("state.json", [json.dumps(TrainerState(**state).as_record()).encode()])


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Make three checkpoints, the second one the best, and an adapter."""
    run = RunFolder(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    losses = {10: 0.9, 20: 0.4, 30: 0.7}
    for step in losses:
        best = min((known for known in losses if known <= step), key=losses.__getitem__)
        state = {"step": step, "best_step": best, "best_loss": losses[best]}
        commit(run.checkpoint(step), *ADAPTER, "optimizer.safetensors", **state)
    commit(run.adapter, *ADAPTER)
    events = [{"event": "validation", "step": step, "loss": loss} for step, loss in losses.items()]
    run.metrics_file.write_text("".join(json.dumps(event) + "\n" for event in events))
    run.record_file.write_text("{}")
    return run


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def listed(path: Path, capsys: pytest.CaptureFixture[str], *, code: int = 0) -> str:
    with pytest.raises(typer.Exit) as caught:
        checkpoints(path)
    assert caught.value.exit_code == code
    return capsys.readouterr().out


def examined(path: Path, capsys: pytest.CaptureFixture[str]) -> SimpleNamespace:
    capsys.readouterr()
    with pytest.raises(typer.Exit):
        checkpoints(path, as_json=True)
    return json.loads(capsys.readouterr().out, object_hook=lambda values: SimpleNamespace(**values))


def line_of(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if f" {name} " in line)


def test_it_lists_metric_size_the_best_and_where_to_go_on(folder, capsys):
    text = listed(folder.path, capsys)
    num_bytes = sum(file.stat().st_size for file in folder.checkpoint(20).iterdir())
    assert "0.4000" in line_of(text, "step-000020")
    assert f"{num_bytes / 1000:.3g} kB" in line_of(text, "step-000020")
    assert "whole; the best" in line_of(text, "step-000020")
    assert "whole; resume=auto goes on from here" in line_of(text, "step-000030")
    assert line_of(text, "step-000010").count("whole") == 1
    assert "whole" in line_of(text, "adapter")
    assert text.endswith("resume=auto goes on from step 30.\n")


@pytest.mark.slow
def test_any_damage_is_named_and_what_it_promises_is_what_resume_takes(folder, capsys):
    """Every file of every checkpoint and of adapter/, flipped and cut at several places, one at a time."""
    tried = 0
    for path in sorted(path for path in folder.path.rglob("*") if path.parent.name.startswith(("step-", "adapter"))):
        whole = path.read_bytes()
        for place in {0, 1, len(whole) // 2, len(whole) - 1}:
            flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
            for damaged in (flipped, whole[:place]):
                path.write_bytes(damaged)
                run = examined(folder.path, capsys)
                (saved,) = (saved for saved in (*run.checkpoints, *run.published) if saved.problems)
                assert saved.name == path.parent.name
                # A manifest with another name in it is told by that name.
                assert path.name in " ".join(saved.problems) or path.name == "manifest.json"
                taken = newest_valid(folder)
                assert taken is not None
                assert taken.name == f"step-{run.resumes_from:06d}" != saved.name
                assert run.exit_code == 0
                tried += 1
        path.write_bytes(whole)
    assert tried > 120
    assert not any(saved.problems for saved in examined(folder.path, capsys).checkpoints)


def test_no_whole_checkpoint_is_exit_code_2(folder, capsys):
    for step in folder.checkpoint_steps():
        (folder.checkpoint(step) / "optimizer.safetensors").unlink()
    text = listed(folder.path, capsys, code=2)
    assert text.count("optimizer.safetensors: missing") == 3
    assert "3 damaged: step-000010, step-000020, step-000030." in text
    assert "No checkpoint is whole: resume=auto would start from the beginning." in text


def test_a_torn_adapter_is_named_and_does_not_count_against_the_run(folder, capsys):
    (folder.adapter / "adapter_model.safetensors").write_bytes(b"")
    text = listed(folder.path, capsys)
    assert "1 damaged: adapter." in text
    assert "resume=auto goes on from step 30" in text


def test_a_newest_checkpoint_that_is_not_gone_on_from_is_explained(folder, capsys):
    (folder.checkpoint(20) / "optimizer.safetensors").write_bytes(b"torn")
    text = listed(folder.path, capsys)
    assert "whole; resume=auto goes on from here" in line_of(text, "step-000010")
    assert "Step 30 is whole, but its best step, 20, must be trained again." in text
    assert capsys.readouterr().err == ""


def test_a_best_step_that_was_not_kept_is_said(folder, capsys):
    for file in folder.checkpoint(20).iterdir():
        file.unlink()
    folder.checkpoint(20).rmdir()
    assert "The best validation, of step 20 (loss 0.4000), has no checkpoint any more." in listed(folder.path, capsys)


@pytest.mark.parametrize("content", [None, b"", b'{"event": "validation", "step"', b"[]\n3\nnull\n\xff\n"])
def test_torn_metrics_leave_the_losses_out(folder, content, capsys):
    if content is None:
        folder.metrics_file.unlink()
    else:
        folder.metrics_file.write_bytes(content)
    run = examined(folder.path, capsys)
    assert [saved.validation_loss for saved in run.checkpoints] == [None] * 3
    assert (run.resumes_from, run.best_step, run.best_loss) == (30, 20, 0.4)


def test_it_changes_nothing_and_follows_no_link(folder, tmp_path, capsys):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "large.dat").write_bytes(b"x" * 10_000)
    (folder.checkpoint(30) / "large.dat").symlink_to(outside / "large.dat")
    folder.checkpoint(40).symlink_to(outside)
    before = {str(path): path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    run = examined(folder.path, capsys)
    assert run.checkpoints[-1].problems == ["manifest.json: reached through a symbolic link"]
    assert run.checkpoints[-2].num_bytes < 10_000
    assert run.resumes_from == 30
    assert {str(path): path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    (folder.path / "base").symlink_to(outside)
    with pytest.raises(CheckpointError, match="base is a symbolic link"):
        examined(folder.path, capsys)


def test_a_folder_that_is_no_run_is_exit_code_2(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("empty", "gone", "other", "file"):
        done = run_finetune("checkpoints", tmp_path / name, code=2)
        assert "is not the folder of a run" in done.errors
        assert "output_dir=" not in done.errors
        assert done.errors.count("CheckpointError") == 1
        assert "Traceback" not in done.errors


def test_a_run_that_has_saved_nothing_yet_says_so(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    done = run_finetune("checkpoints", tmp_path)
    assert (done.returncode, done.errors) == (0, "")
    assert done.answer == "No checkpoint was saved yet: resume=auto starts from the beginning.\n"


def test_json(folder):
    record = json.loads(run_finetune("checkpoints", folder.path, "--json").answer)
    assert (record["exit_code"], record["resumes_from"], record["best_step"]) == (0, 30, 20)
    assert [(saved["step"], saved["validation_loss"], saved["problems"]) for saved in record["checkpoints"]] == [
        *((10, 0.9, []), (20, 0.4, []), (30, 0.7, []))
    ]
    assert [saved["name"] for saved in record["published"]] == ["adapter"]


def test_each_checkpoint_is_read_once(folder, monkeypatch, capsys):
    read = []
    monkeypatch.setattr(verification, "find_damage", lambda path: read.append(path.name) or find_damage(path))
    assert examined(folder.path, capsys).resumes_from == 30
    assert sorted(read) == ["adapter", "step-000010", "step-000020", "step-000030"]


def test_a_real_run(tmp_path, capsys):
    words = [
        *(f"model.path={write_base(tmp_path / 'base')}", f"data.path={write_rows(tmp_path / 'rows', test=0)}"),
        *(f"data.cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path / 'run'}", "lora.r=2", "training.device=cpu"),
        *("training.batch_size=6", "training.max_steps=5", "checkpoint.save_every=2", "validation.validate_every=2"),
        "checkpoint.save_total_limit=9",
    ]
    train_from_overrides(words)
    losses = {event["step"]: event["loss"] for event in events(tmp_path / "run", "validation")}
    found = examined(tmp_path / "run", capsys)
    assert [saved.step for saved in found.checkpoints] == [2, 3, 4, 5]
    assert [saved.validation_loss for saved in found.checkpoints] == [losses.get(step) for step in (2, 3, 4, 5)]
    assert found.best_step == min(losses, key=losses.__getitem__)
    assert found.best_loss == losses[found.best_step]
    assert found.resumes_from == 5
    assert [saved.problems for saved in (*found.checkpoints, *found.published)] == [[]] * 5
    (tmp_path / "run" / "checkpoints" / "step-000005" / "state.json").write_text("{}")
    assert examined(tmp_path / "run", capsys).resumes_from == 4
    train_from_overrides([*words, "resume=auto"])
    assert "resumed from step=4" in (tmp_path / "run" / "log.txt").read_text()
