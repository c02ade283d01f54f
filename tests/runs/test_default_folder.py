"""A run whose configuration names no folder gets a free one, or with `resume=auto` the newest run that is the same."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from finetune.config.compose import compose
from finetune.config.render import resolved_yaml
from finetune.errors import CheckpointError
from finetune.runs import recorded_run
from finetune.runs.default_folder import reserved_folder, with_chosen_folder
from finetune.runs.file_lock import is_held
from finetune.runs.folder import RunFolder
from tests.in_process import run_finetune
from tests.launches import run_launched

WORDS = ["model=phi_tiny", "data=orders"]


def chosen(*words):
    return with_chosen_folder(compose([*WORDS, *words])).output_dir


def pretend_run(folder, *words, started):
    """Write the files of a run that tell its configuration and its start."""
    config = compose([*WORDS, *words, f"output_dir={folder}"])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(resolved_yaml(config))
    (folder / "run.json").write_text(json.dumps({"status": "failed", "starts": [started]}))
    (folder / "metrics.jsonl").touch()


@pytest.fixture(autouse=True)
def _empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_folder_that_exists_is_numbered_unless_it_was_named():
    assert chosen() == "runs/orders-phi_tiny"
    Path("runs/orders-phi_tiny").mkdir(parents=True)
    assert chosen() == "runs/orders-phi_tiny"  # empty
    Path("runs/orders-phi_tiny/mine.txt").touch()
    assert chosen() == "runs/orders-phi_tiny-2"
    Path("runs/orders-phi_tiny-2").write_text("a file")
    assert chosen() == "runs/orders-phi_tiny-3"
    assert chosen("output_dir=runs/orders-phi_tiny") == "runs/orders-phi_tiny"


def test_a_run_that_cannot_be_resumed_is_not_passed_over_in_silence(caplog):
    assert chosen("resume=auto") == "runs/orders-phi_tiny"
    assert not caplog.messages
    pretend_run(Path("runs/orders-phi_tiny"), "seed=1", started="2026-01-01T00:00:00")
    assert chosen("resume=auto") == "runs/orders-phi_tiny-2"
    assert "runs/orders-phi_tiny is another run. A new run begins in runs/orders-phi_tiny-2." in caplog.text


def test_starts_at_the_same_time_get_a_folder_each():
    first, second = (reserved_folder(compose([*WORDS, f"seed={seed}", "resume=auto"])) for seed in (1, 2))
    assert [first, second] == [("runs/orders-phi_tiny", True), ("runs/orders-phi_tiny-2", True)]
    with RunFolder(first[0]).open("auto") as folder:
        assert is_held(folder.lock_file)
        RunFolder(first[0]).end_reservation()
        assert is_held(folder.lock_file)
        folder.metrics_file.touch()
    RunFolder(second[0]).end_reservation()
    assert sorted(Path("runs").iterdir()) == [Path("runs/orders-phi_tiny")]
    pretend_run(Path("runs/b"), started="2026-01-01T00:00:00")
    assert reserved_folder(compose([*WORDS, "resume=auto"])) == ("runs/b", False)


def test_a_killed_start_leaves_its_folder_free_and_one_that_ends_leaves_nothing():
    folder = RunFolder(reserved_folder(compose(WORDS))[0])
    folder.end_reservation()
    assert list(Path.cwd().iterdir()) == []
    folder.path.mkdir(parents=True)
    folder.lock_file.write_text("{}")
    assert chosen() == "runs/orders-phi_tiny"


def test_resume_takes_the_newest_run_whose_curve_would_be_the_same(monkeypatch):
    assert chosen("resume=auto") == "runs/orders-phi_tiny"
    pretend_run(Path("runs/a"), started="2026-01-01T00:00:00")
    pretend_run(Path("runs/b"), "training.log_every=3", started="2026-03-01T00:00:00")
    pretend_run(Path("runs/c"), "optim.learning_rate=1e-5", started="2026-04-01T00:00:00")
    pretend_run(Path("runs/d"), started="2026-02-01T00:00:00")
    Path("runs/e").mkdir()
    assert chosen("resume=auto", "training.log_every=7") == "runs/b"
    assert chosen("resume=auto", "optim.learning_rate=1e-5") == "runs/c"
    assert chosen("resume=auto", "seed=1") == "runs/orders-phi_tiny"
    assert chosen() == "runs/orders-phi_tiny"
    read = []
    monkeypatch.setattr(recorded_run, "compose", lambda *a, **k: read.append(k["run"]) or compose(*a, **k))
    assert chosen("resume=auto") == "runs/b"
    assert [Path(file).parent.name for file in read] == ["c", "b"], "no run that is older than the answer"


def test_resume_takes_the_run_that_messages_advise_to_change():
    pretend_run(Path("runs/a"), started="2026-01-01T00:00:00")
    smaller = ["training.batch_size=2", "training.global_batch_size=8"]
    assert chosen("resume=auto", *smaller) == "runs/a"  # after running out of memory
    assert chosen("resume=auto", *smaller, "lora.dropout=0.1") == "runs/orders-phi_tiny"
    slower = ["resume=auto", "optim.learning_rate=1e-5", "resume.allow=optim"]  # after a loss that is not finite
    assert chosen(*slower) == "runs/a"
    assert chosen(*slower, "seed=1") == "runs/orders-phi_tiny"
    pretend_run(Path("runs/b"), "optim.schedule=constant", "training.max_steps=9", started="2026-01-01T00:00:00")
    assert chosen("resume=auto", "optim.schedule=constant", "training.max_steps=10") == "runs/b"
    assert chosen("resume=auto", "training.max_steps=10") == "runs/orders-phi_tiny"


def test_a_folder_that_another_user_closed_is_no_run_and_not_free(monkeypatch):
    """Permissions are pretended, because tests may run as root."""
    closed = {Path("runs/orders-phi_tiny").absolute(), Path("runs/other").absolute()}
    for folder in closed:
        folder.mkdir(parents=True)
    pretend_run(Path("runs/mine"), started="2026-01-01T00:00:00")

    def refuse(call, refused):
        def refusing(path, *arguments, **named):
            if not isinstance(path, int) and refused(Path(path)):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *arguments, **named)

        return refusing

    monkeypatch.setattr(os, "stat", refuse(os.stat, lambda path: path.absolute().parent in closed))
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refuse(getattr(os, name), lambda path: path.absolute() in closed))
    assert chosen("resume=auto") == "runs/mine"
    assert chosen("resume=auto", "seed=1") == "runs/orders-phi_tiny-2"
    assert chosen() == "runs/orders-phi_tiny-2"
    closed.add(Path("runs").absolute())
    with pytest.raises(CheckpointError, match=r"runs cannot be read: Permission denied .*output_dir"):
        chosen("resume=auto")


def test_resume_finds_a_run_by_what_was_asked_for_and_not_by_what_it_filled_in():
    Path("tools.py").write_text("def lookup(): ...\ndef search(): ...\n")
    tools = ["task=finetune_grpo", "rollout.tools=./tools.py:lookup"]
    pretend_run(Path("runs/a"), *tools, "rollout.tool_schemas='[]'", started="2026-01-01T00:00:00")
    assert chosen(*tools, "resume=auto") == "runs/a"
    other = "rollout.tools=./tools.py:search"
    assert chosen(*tools[:1], other, "resume=auto") == "runs/orders-phi_tiny"


def test_resume_tells_optimizers_of_scripts_apart_as_far_as_they_are_known():
    sgd, adam = (["optim.optimizer=script:" + name] for name in ("torch.optim.SGD", "torch.optim.Adam"))
    for name, words in {"a": sgd, "b": adam}.items():
        pretend_run(Path("runs", name), *words, started=f"2026-01-01T00:00:00{name}")
    assert chosen(*sgd, "resume=auto") == "runs/a"
    assert chosen("optim.optimizer=script:torch.optim.Adagrad", "resume=auto") == "runs/orders-phi_tiny"
    assert chosen("resume=auto") == "runs/b"  # the script gives the optimizer later, and is refused if it is another
    assert chosen("resume=auto", "optim.learning_rate=1e-5") == "runs/orders-phi_tiny"
    pretend_run(Path("runs/c"), started="2026-01-01T00:00:00")
    assert chosen("resume=auto") == "runs/c"


@pytest.mark.slow
@pytest.mark.warm
def test_rank_0_chooses_for_all_ranks_and_a_complete_run_is_said_to_be_complete(tmp_path):
    words = [
        "-m",
        "finetune",
        "train",
        *WORDS,
        "data.max_rows=16",
        "training.max_steps=2",
        "training.global_batch_size=4",
    ]
    words += [
        "training.global_batch_size=4",
        "testing.num_samples=0",
        "testing.metrics=[]",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]
    for folder in ("runs/orders-phi_tiny", "runs/orders-phi_tiny-2"):
        done = run_launched("torchrun", words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
        assert Path(folder, "adapter/adapter_model.safetensors").is_file()
    again = run_finetune(*words[2:], "resume=auto", code=0)
    assert "resume=auto: runs/orders-phi_tiny-2 is the newest run of this configuration (complete)" in again.stdout
    assert "the run is complete, with step 2 of 2: nothing is trained" in again.stdout
    assert sorted(path.name for path in Path("runs").iterdir()) == ["orders-phi_tiny", "orders-phi_tiny-2"]
