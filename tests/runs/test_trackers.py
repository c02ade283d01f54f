import importlib
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from finetune.config.compose import load_config
from finetune.config.trackers import is_tracker_installed
from finetune.errors import ConfigError
from finetune.fallbacks import Fallbacks
from finetune.runs.folder import RunFolder
from finetune.training.reporting.trackers import Trackers
from tests.in_process import run_finetune
from tests.launches import REPOSITORY, run_command
from tests.runs.screens import FINETUNE
from tests.tiny_runs import write_base, write_rows
from tests.tiny_training import events, record

_READ = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1]); events.Reload()
print(json.dumps({tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
"""

pytestmark = pytest.mark.warm


def is_there(name):
    return importlib.util.find_spec(name) is not None


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return write_base(folder / "base"), write_rows(folder / "rows"), folder / "cache"


def train(folder, inputs, *words, **variables):
    base, rows, cache = inputs
    places = [f"model.path={base}", f"data.path={rows}", f"data.cache_dir={cache}", "output_dir=run"]
    own = ["training.batch_size=6", "data.on_overlap=warn", "training.log_every=2", "checkpoint.save_every=2"]
    own += ["testing.max_new_tokens=4"]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return run_command(
        [*FINETUNE, "train", *places, *own, *words], cwd=folder, variables={"PYTHONPATH": path, **variables}
    )


def test_missing_trackers_are_refused_with_their_command_before_any_model_is_looked_for(tmp_path, monkeypatch):
    rows = write_rows(tmp_path / "rows")
    words = ["train", "model.path=microsoft/phi-4", f"data.path={rows}", "training.report_to=[mlflow,tensorboard]"]
    for name in ("tensorboard", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    done = run_finetune(*words, code=2)
    assert "names mlflow, tensorboard, " in done.stdout
    assert "Run pip install mlflow-skinny sqlalchemy alembic tensorboard, or drop" in done.stdout
    assert "phi-4" not in done.stdout
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "runs").exists(), "nothing was begun"


def test_a_mere_folder_is_no_package(tmp_path, monkeypatch):
    """wandb leaves a folder of its name where it ran, which Python would import."""
    (tmp_path / "left_by_a_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert is_there("left_by_a_tracker")
    assert not is_tracker_installed("left_by_a_tracker")
    assert is_tracker_installed("json")


class Broken:
    """A tracker that fails after one event, like one whose service goes away."""

    def __init__(self):
        self.taken = []

    def log(self, values, step):
        if self.taken:
            raise ConnectionError("the service\nis gone")
        self.taken.append((step, values))

    def finish(self):
        raise ConnectionError("still gone")


def test_one_that_fails_is_dropped_and_recorded(tmp_path):
    fallbacks = Fallbacks()
    trackers = Trackers(load_config(["model.path=a", "data.path=b"]), RunFolder(tmp_path), fallbacks)
    broken = trackers._open["wandb"] = Broken()
    for step in (1, 2, 3):
        trackers.write({"event": "step", "step": step, "loss": 2.0, "grad_norm": "NaN", "skipped": True})
    assert broken.taken == [(1, {"step/loss": 2.0, "step/skipped": True})]
    (taken,) = fallbacks.as_records()
    assert (taken["what"], taken["wanted"], taken["used"]) == ("training.report_to", "wandb", "none")
    assert taken["why"].startswith("ConnectionError: the service is gone")


def test_steps_never_go_back_for_a_checkpoint_that_is_told_later(tmp_path):
    class Listening:
        def log(self, values, step):
            told.append((step, values))

    told = []
    trackers = Trackers(load_config(["model.path=a", "data.path=b"]), RunFolder(tmp_path), Fallbacks())
    trackers._open["wandb"] = Listening()
    for kind, step in (("step", 2), ("checkpoint", 1), ("step", 3)):
        trackers.write({"event": kind, "step": step, "loss": 2.0})
    trackers.write({"event": "test", "model": "base", "loss": 2.0})
    assert [step for step, _ in told] == [2, 2, 3, None]


def test_one_that_cannot_finish_does_not_end_a_run_that_is_over(tmp_path, caplog):
    trackers = Trackers(load_config(["model.path=a", "data.path=b"]), RunFolder(tmp_path), Fallbacks(strict=True))
    trackers._open["wandb"] = Broken()
    with caplog.at_level("WARNING", logger="finetune"):
        trackers.close()
        trackers.close()
    assert caplog.messages == ["training.report_to: wandb could not finish: ConnectionError: still gone"]


def test_a_strict_run_refuses_to_go_on_without_its_tracker(tmp_path):
    trackers = Trackers(load_config(["model.path=a", "data.path=b"]), RunFolder(tmp_path), Fallbacks(strict=True))
    trackers._open["wandb"] = Broken()
    trackers.write({"event": "step", "step": 1, "loss": 2.0})
    with pytest.raises(ConfigError, match="ConnectionError"):
        trackers.write({"event": "step", "step": 2, "loss": 2.0})


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.needs("tensorboard")
def test_tensorboard_has_the_figures_of_metrics_jsonl_after_a_restart_too(tmp_path, inputs):
    words = ["training.report_to=[tensorboard]", "optim.schedule=constant"]
    secret = {"HF_TOKEN": "hf_very_secret"}
    for steps, resume in (("4", "never"), ("6", "auto")):
        done = train(tmp_path, inputs, *words, f"training.max_steps={steps}", f"resume={resume}", **secret)
        assert done.returncode == 0, done.stdout
    folder = tmp_path / "run" / "trackers" / "tensorboard"
    read = subprocess.run([sys.executable, "-c", _READ, folder], check=True, capture_output=True, text=True)
    scalars = json.loads(read.stdout)
    run = tmp_path / "run"
    for name in ("loss", "learning_rate", "grad_norm", "num_tokens"):
        told = [(event["step"], event[name]) for event in events(run, "step")]
        assert [step for step, _ in scalars[f"step/{name}"]] == [step for step, _ in told] == [1, 2, 3, 4, 5, 6]
        assert [value for _, value in scalars[f"step/{name}"]] == pytest.approx([v for _, v in told], rel=1e-6)
    assert [step for step, _ in scalars["validation/loss"]] == [e["step"] for e in events(run, "validation")]
    assert {"resources/host_memory", "resources/tokens_per_second", "checkpoint/num_bytes"} < scalars.keys()
    for file in [path for path in run.rglob("*") if path.is_file()]:
        assert b"hf_very_secret" not in file.read_bytes(), file
    assert record(run)["fallbacks"] == []


@pytest.mark.slow
@pytest.mark.needs("wandb")
def test_wandb_works_offline(tmp_path, inputs):
    words = ["training.report_to=[wandb]", "training.max_steps=4"]
    done = train(tmp_path, inputs, *words, WANDB_MODE="offline", WANDB_SILENT="true", WANDB_API_KEY="k" * 40)
    assert done.returncode == 0, done.stdout
    (file,) = (tmp_path / "run" / "trackers").rglob("*.wandb")
    content = file.read_bytes()
    assert b"step/loss" in content
    assert b"k" * 40 not in content
    assert record(tmp_path / "run")["fallbacks"] == []


@pytest.mark.slow
@pytest.mark.needs("trackio")
def test_trackio_has_the_figures_in_its_own_folder(tmp_path, inputs):
    words = ["training.report_to=[trackio]", "training.max_steps=4"]
    done = train(tmp_path, inputs, *words, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert done.returncode == 0, done.stdout
    with closing(sqlite3.connect(tmp_path / "trackio" / "finetune.db")) as database:
        rows = [(step, json.loads(text)) for step, text in database.execute("SELECT step, metrics FROM metrics")]
    losses = sorted((step, row["step/loss"]) for step, row in rows if "step/loss" in row)
    assert losses == [(event["step"], event["loss"]) for event in events(tmp_path / "run", "step")]
    assert record(tmp_path / "run")["fallbacks"] == []


@pytest.mark.slow
@pytest.mark.needs("mlflow", "sqlalchemy", "alembic")
def test_mlflow_has_the_figures_in_its_database(tmp_path, inputs):
    words = ["training.report_to=[mlflow]", "training.max_steps=4"]
    address = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    done = train(tmp_path, inputs, *words, **address)
    assert done.returncode == 0, done.stdout
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        query = "SELECT step, value FROM metrics WHERE key = 'step/loss' ORDER BY step"
        assert list(database.execute(query)) == [
            (event["step"], event["loss"]) for event in events(tmp_path / "run", "step")
        ]
        query = "SELECT value FROM params WHERE key = 'training.max_steps'"
        assert list(database.execute(query)) == [("4",)]
    assert record(tmp_path / "run")["fallbacks"] == []
