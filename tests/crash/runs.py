"""A tiny run that is started again and again, and what it must leave behind however it was ended before."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.launches import REPOSITORY
from tests.tiny import tiny_tokenizer
from tests.tiny_runs import random_model_words, write_rows

DATA_WORKERS = ["training.num_workers=1", "validation.num_workers=1"]


class Started(NamedTuple):
    """The processes of a run by rank, and the file that their screen goes to."""

    pids: list[int]
    screen: Path


class Ended(NamedTuple):
    """How the processes of a run ended, by rank: exit code or minus the signal; and what they said on the screen."""

    statuses: list[int | str]
    screen: str
    seconds: float
    """From the first process that failed to the end of the last."""

    @property
    def status(self) -> int | str:
        """That of the first rank that did not end well; else 0."""
        return next((status for status in self.statuses if status != 0), 0)

    @property
    def committed(self) -> int:
        """The last step whose checkpoint it said was committed; 0: none."""
        return _last(r"checkpoint committed step=(\d+)", self.screen)

    @property
    def resumed_from(self) -> int:
        return _last(r"resumed from step=(\d+)", self.screen)


def _last(pattern: str, text: str) -> int:
    return max(map(int, re.findall(pattern, text)), default=0)


class Nursery:
    """A process of `tests.crash.nursery`, and the words of a tiny run with dropout on a base of its own.

    `run` is the one folder that all runs use, since an adapter names its base by its path.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self._screens = 0
        self._wholes: dict[tuple[int, *tuple[str, ...]], Path] = {}
        tiny_tokenizer().save_pretrained(folder / "tokenizer")
        write_rows(folder / "rows", train=8, validation=3, test=0)
        self.words = [
            *("task=finetune_lora", *random_model_words(folder / "tokenizer"), f"output_dir={self.run}"),
            *(f"data.path={folder / 'rows'}", f"data.cache_dir={folder / 'cache'}", "resume=auto"),
            *("lora.r=1", "lora.target_modules=[qkv_proj]", "lora.dropout=0.2", "training.device=cpu"),
            *("training.precision=fp32", "training.global_batch_size=4", "training.batch_size=2"),
            *("training.max_steps=6", "checkpoint.save_every=2", "checkpoint.save_total_limit=1"),
            *("validation.validate_every=2", "testing.num_samples=0", "optim.learning_rate=1e-2"),
        ]
        with (folder / "warm-up.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.nursery", *self.words, f"output_dir={folder / 'warm-up'}"],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        answer = self._answer()
        assert answer == {"threads": 1}, f"{answer}: a fork would copy a part of this process only"

    def start(
        self,
        *words: str,
        ranks: int = 1,
        kill_at: int | None = None,
        operations: Path | None = None,
        command: list[str] | None = None,
    ) -> Started:
        """Begin a run, or another command.

        Args:
            words: besides those of every run.
            ranks: processes that train together.
            kill_at: rank 0 kills itself right before its operation on files of this number, from 1 on.
            operations: a file that rank 0 writes its operations into at its end.
            command: instead of a run's.
        """
        self._screens += 1
        screen = self.folder / f"screen-{self._screens}.txt"
        request = {
            "ranks": ranks,
            "words": command or ["train", *self.words, *words],
            "log": str(screen),
            "folder": str(self.run),
            "kill_at": kill_at,
            "operations": str(operations) if operations else None,
        }
        return Started(self._ask({"start": request})["pids"], screen)

    def end(self, started: Started) -> Ended:
        """Wait for a run that `start` began."""
        answer = self._ask({"wait": started.pids})
        text = started.screen.read_text() if started.screen.exists() else ""
        started.screen.unlink(missing_ok=True)
        return Ended(answer["statuses"], text, answer["seconds"])

    def train(self, *words: str, ranks: int = 1, kill_at: int | None = None, operations: Path | None = None) -> Ended:
        """A run from its start to its end."""
        return self.end(self.start(*words, ranks=ranks, kill_at=kill_at, operations=operations))

    def whole(self, *words: str, ranks: int = 1) -> Path:
        """The folder of the uninterrupted run, made once; the run's own folder is empty then."""
        key = (ranks, *words)
        if key not in self._wholes:
            self.put(None)
            ended = self.train(*words, ranks=ranks)
            assert ended.status == 0, ended.screen
            self._wholes[key] = self.keep(f"whole-{len(self._wholes)}")
            self.put(None)
        return self._wholes[key]

    def put(self, kept: Path | None) -> None:
        """Let the run's folder be a copy of another; None: let it not be there."""
        shutil.rmtree(self.run, ignore_errors=True)
        if kept is not None:
            shutil.copytree(kept, self.run)

    def keep(self, name: str) -> Path:
        """Put a copy of the run's folder aside."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return Path(shutil.copytree(self.run, self.folder / name))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, (self.folder / "warm-up.log").read_text()[-2000:]
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Put in front of a failure which point it was."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def events(run: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says, without what no two runs have alike: speed, what each step took, a slow data loader."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["event"] != "resources" and line.get("kind") != "data"]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


def assert_same_end(ended: Ended, run: Path, whole: Path, *, apart_from: tuple[str, ...] = ()) -> None:
    """The run is complete, with the bytes of the uninterrupted one, each step told once, and nothing left over.

    Args:
        apart_from: names of folders that are not compared.
    """
    assert ended.status == 0, ended.screen
    left = [path for path in run.rglob("*") if path.name.startswith((".tmp-", ".old-", ".lock"))]
    assert not left, left
    for name in sorted({"checkpoints", "adapter", "base"} - set(apart_from)):
        ours, theirs = contents(run / name), contents(whole / name)
        assert ours.keys() == theirs.keys(), f"{name}: {sorted(ours.keys() ^ theirs.keys())}"
        different = [file for file in ours if ours[file] != theirs[file]]
        assert not different, f"{name}: {different}"
    assert [e for e in events(run) if e["event"] != "checkpoint"] == [
        e for e in events(whole) if e["event"] != "checkpoint"
    ]
    assert json.loads((run / "run.json").read_text())["status"] == "completed"
