"""What a run writes about itself: each kind of event with its keys in their order, as docs/watching.md has them."""

from __future__ import annotations

import json
import shutil
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune.config.compose import load_config
from finetune.errors import PreemptedError, RunFailedError
from finetune.fallbacks import Fallback, Fallbacks
from finetune.inference.losses import LossSums
from finetune.inference.scores import Evaluation, Scores
from finetune.runs.checkpoints import Snapshot
from finetune.runs.file_lock import is_held
from finetune.runs.folder import RunFolder
from finetune.runs.state import TrainerState
from finetune.training.reporting import journal as journal_module
from finetune.training.reporting.journal import Journal
from finetune.training.reporting.trackers import Trackers
from finetune.training.saver import Saved, publish_best
from finetune.training.step import StepResult
from tests.tiny_training import events

STEP = ["event", "step", "epoch", "loss", "learning_rate", "grad_norm"]
STEP += ["num_targets", "num_tokens", "num_computed", "tokens_per_second"]
WORLD = {"world_size": 1, "processes_started": 1, "launcher": "none", "backend": None, "threads": {"count": 1}}
RESOURCES = ["event", "step", "seconds", "tokens_per_second", "host_memory"]


def result(**changes: object) -> StepResult:
    figures = {"step": 1, "loss": 1.25, "grad_norm": 0.5, "learning_rate": 1e-4, "num_targets": 40, "num_tokens": 100}
    return StepResult(**{**figures, "num_computed": 90, **changes})  # type: ignore[arg-type]


def journal_in(folder: Path, *words: str) -> Journal:
    words = ("model.path=x", "data.path=y", f"output_dir={folder}", "training.log_every=1", *words)
    joules = count(2.5)
    return Journal(
        load_config([*words, "checkpoint.background=false"]), Fallbacks(strict=False), world=WORLD,
        global_batch={"global_batch_size": 8}, fingerprints={}, energy=lambda: {"cpu_joules": next(joules)},
    )  # fmt: skip


def write_all(folder: Path) -> list[dict[str, object]]:
    """The events of a run that does everything once."""
    journal = journal_in(folder)
    journal.start_training(TrainerState(), 2)
    journal.step(TrainerState(step=1, steps_in_epoch=1), result(rank_seconds=(1.0, 3.0)), data_wait_seconds=9.0)
    skipped = result(loss=float("nan"), not_finite="the loss is nan", metrics={"reward_margin": 0.25})
    journal.step(TrainerState(step=2, epoch=1), skipped, data_wait_seconds=9.0)
    sums = LossSums(nats=22.0, num_targets=20.0, num_examples=2.0, example_means=2.2, squared_example_means=2.5)
    journal.validation(TrainerState(step=2, epoch=1), sums, metrics={"reward_margin": 0.5})
    journal.save(Snapshot(2, {"state.json": [b"{}"]}), best=None)
    scores = {"base": Scores(loss=2.0), "tuned": Scores(loss=0.2, metrics={"exact_match": 0.93})}
    journal.test(Evaluation(num_rows=3, num_left_out=1, scores=scores))
    journal.close(None)
    return events(folder)


def test_events_have_the_keys_of_the_docs_in_their_order(tmp_path: Path) -> None:
    events = write_all(tmp_path / "run")
    keys = [(event["event"], list(event)) for event in events]
    assert keys == [
        ("step", STEP),
        ("resources", [*RESOURCES, "data_wait_share", "slowest_rank_share", "cpu_joules"]),
        ("step", [*STEP, "skipped", "reward_margin"]),
        ("resources", [*RESOURCES, "data_wait_share", "cpu_joules"]),
        ("warning", ["event", "step", "kind", "text"]),
        ("validation", ["event", "step", "epoch", "loss", "standard_error", "num_targets", "reward_margin"]),
        ("checkpoint", ["event", "step", "path", "num_bytes", "blocked_seconds", "write_seconds"]),
        ("test", ["event", "model", "exact_match", "json_valid", "loss"]),
        ("test", ["event", "model", "exact_match", "json_valid", "loss"]),
    ]
    first, second, warning, validation, checkpoint, base, tuned = (events[place] for place in (0, 2, 4, 5, 6, 7, 8))
    del first["tokens_per_second"]
    assert list(first.values()) == ["step", 1, 0, 1.25, 1e-4, 0.5, 40, 100, 90]
    assert (second["step"], second["epoch"], second["loss"], second["skipped"]) == (2, 0, "NaN", True)
    assert (warning["step"], warning["kind"]) == (2, "data")
    assert (validation["loss"], validation["num_targets"], validation["reward_margin"]) == (1.1, 20, 0.5)
    assert (checkpoint["step"], checkpoint["path"], checkpoint["num_bytes"]) == (2, "checkpoints/step-000002", 0)
    assert base == {"event": "test", "model": "base", "exact_match": None, "json_valid": None, "loss": 2.0}
    assert tuned == {"event": "test", "model": "tuned", "exact_match": 0.93, "json_valid": None, "loss": 0.2}
    result = json.loads((tmp_path / "run/run.json").read_text())["result"]
    assert (result["test_rows"], result["test_rows_left_out"]) == (3, 1)


def test_a_run_that_its_script_did_not_train_is_not_called_completed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script may build a trainer and do nothing with it."""
    journal_in(tmp_path / "run").close(None)
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["status"], record["result"]) == ("stopped", {"error": "its script did not train"})
    assert "Written to" not in capsys.readouterr().out


def test_a_run_whose_folder_was_removed_ends_and_writes_nothing_into_the_next_run_there(tmp_path: Path) -> None:
    journal = journal_in(tmp_path / "run")
    journal.start_training(TrainerState(), 9)
    journal.step(TrainerState(step=1, steps_in_epoch=1), result())
    shutil.rmtree(tmp_path / "run")
    with RunFolder(tmp_path / "run").open() as other:
        for write in (
            lambda: journal.step(TrainerState(step=2, steps_in_epoch=2), result(step=2)),
            lambda: journal.save(Snapshot(2, {"state.json": [b"{}"]}), best=None),
            lambda: journal.record(opening=None),
            lambda: publish_best(journal.folder, TrainerState(), None, keep=1, has_trained=True),  # type: ignore[arg-type]
            lambda: journal.close(None),
        ):
            with pytest.raises(RunFailedError, match="is no longer the folder of this run"):
                write()
        assert [path.name for path in other.path.iterdir()] == [".lock"]
        assert is_held(other.lock_file)


def test_run_json_says_how_the_run_ended_before_the_trackers_finish(tmp_path):
    class Uploading:
        def log(self, values, step):
            """Take everything."""

        def finish(self):
            seen.append(json.loads((tmp_path / "run.json").read_text())["status"])

    seen = []
    config = load_config(["model.path=a", "data.path=b", f"output_dir={tmp_path}"])
    fallbacks = Fallbacks(strict=False)
    journal = Journal(config, fallbacks, world=WORLD, global_batch={"global_batch_size": 8}, fingerprints={})
    journal._events._trackers = Trackers(config, journal.folder, fallbacks)
    journal._events._trackers._open["wandb"] = Uploading()
    journal.close(PreemptedError("stopped after step 3"))
    assert seen == ["preempted"]


def test_the_result_counts_what_the_steps_of_all_starts_did(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = journal_in(tmp_path, "training.log_every=2")
    journal.start_training(TrainerState(num_overflows=2), 3)
    journal.step(TrainerState(step=1, steps_in_epoch=1, num_overflows=2), result())
    skipped = TrainerState(step=2, steps_in_epoch=2, num_overflows=5, num_skipped_steps=1)
    journal.step(skipped, result(step=2, not_finite="the loss is nan"))
    taken = Fallback(what="a", wanted="b", used="c", why="d")
    for _ in range(2):
        journal._fallbacks.take(taken)
    journal.step(TrainerState(step=3, steps_in_epoch=3, num_overflows=5, num_skipped_steps=1), result(step=3))
    step_2 = tmp_path / "checkpoints/step-000002"
    journal._note_saved([Saved(step=2, path=step_2, num_bytes=3, blocked_seconds=0.5, write_seconds=4.0)] * 2)
    journal.close(KeyboardInterrupt("now"))
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["status"], record["fallbacks"]) == ("stopped", [vars(taken)])
    said = [line.levelname for line in caplog.records if line.getMessage() == str(taken)]
    assert said == ["WARNING"]
    saving = {"checkpoints": 2, "blocked_seconds": 1.0, "write_seconds": 8.0}
    expected = {"num_skipped_steps": 1, "num_overflows": 5, "saving": saving, "error": "KeyboardInterrupt: now"}
    assert record["result"] == {**expected, "shared_tokens": pytest.approx(0.1)}
    assert [event.get("overflows") for event in events(tmp_path, "step")] == [None, 3, None]
    told = events(tmp_path, "resources")
    assert [(event["step"], event["cpu_joules"]) for event in told] == [(2, 3.5), (3, 4.5)], "from step 1 on"


def test_a_step_takes_no_longer_because_of_what_came_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(journal_module, "time", clock)
    journal = journal_in(tmp_path)
    journal.start_training(TrainerState(), 9)
    sums = LossSums(nats=22.0, num_targets=20.0, num_examples=2.0, example_means=2.2, squared_example_means=2.5)

    def step(number: int) -> TrainerState:
        clock.now += 2.0
        state = TrainerState(step=number, steps_in_epoch=number)
        journal.step(state, result(step=number))
        clock.now += 100.0
        return state

    journal.validation(step(1), sums, metrics={})
    journal.save(Snapshot(step(2).step, {"state.json": [b"{}"]}), best=None)
    step(3)
    journal.close(PreemptedError("stopped after step 3"))
    assert [event["tokens_per_second"] for event in events(tmp_path, "step")] == [50.0] * 3
    assert json.loads((tmp_path / "run.json").read_text())["result"]["why"] == "stopped after step 3"


def test_an_allowed_change_holds_for_one_start(tmp_path: Path) -> None:
    journal_in(tmp_path, "resume.allow=optim").close(None)
    assert load_config([f"run={tmp_path}/config.yaml"]).resume_allow == []
    assert json.loads((tmp_path / "run.json").read_text())["started_with"]["config"]["resume_allow"] == []


def test_what_an_earlier_start_has_warned_of_is_not_said_again(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    earlier = {"event": "warning", "step": 1, "kind": "data", "text": "slow"}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(earlier) + "\n")
    journal.start_training(TrainerState(step=1, steps_in_epoch=1), 9)
    for step in (2, 3, 4):
        journal.step(TrainerState(step=step, steps_in_epoch=step), result(step=step), data_wait_seconds=99.0)
    journal.close(PreemptedError("stopped after step 4"))
    assert events(tmp_path, "warning") == [earlier]
