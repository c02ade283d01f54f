"""A run that was interrupted in mid-epoch goes on with another number of processes: the same rows, the same curve.

Each world is started twice at most and trains several times in it. A run is interrupted here by what a kill leaves: the
checkpoints up to a step, no `adapter/`, and lines of metrics.jsonl behind the last checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from finetune import (
    Trainer,
    add_lora,
    build_base_model,
    build_tokenizer,
    encode_examples,
    launch,
    load_config,
    load_examples,
)
from finetune.data.encoded import EncodedExample, EncodedExamples, EncodedSplits
from finetune.runs.folder import RunFolder
from tests.curves import (
    GLOBAL_BATCH_SIZE,
    NUM_STEPS,
    assert_one_curve,
    assert_one_world,
    read_run,
    reports_of_run,
    run_words,
)
from tests.launches import LAUNCHERS, REPOSITORY, run_command

NUM_ROWS = 18
STEPS_PER_EPOCH = 3
"""Of 8, 8 and 2 rows: three micro-batches, three and one, so some rank of 4 never has one and one of 2 goes without."""
WORDS = ["checkpoint.save_every=1", "checkpoint.save_total_limit=100", "lora.dropout=0.1"]
"""Dropout: the masks, too, are those of the run that was not interrupted."""
_LIMIT_SECONDS = 240

pytestmark = [pytest.mark.slow, pytest.mark.warm]


class Going(NamedTuple):
    """A run of the world of `before` that goes on behind `step` in the world of `now`."""

    before: int
    now: int
    step: int

    @property
    def name(self) -> str:
        return f"{self.before}-to-{self.now}-behind-{self.step}"


GOINGS = [Going(4, 1, 2), Going(1, 2, 2), Going(4, 2, 4)]
"""Into more processes and into fewer; before the short step of the first epoch, and in mid-epoch of the second."""


class NotedRows(EncodedExamples):
    """Rows that remember which of them were read."""

    read: list[int]

    def __getitem__(self, index: int) -> EncodedExample:
        self.read.append(index)
        return super().__getitem__(index)


def train(words: list[str]) -> None:
    """The recipe, in the worlds that are started here: each rank notes which rows each of its steps was given."""
    config = load_config(words, task="finetune_lora")
    with launch(config) as runtime:
        tokenizer = build_tokenizer(config.model)
        splits = encode_examples(load_examples(config.data), tokenizer, config.data, fallbacks=runtime.fallbacks)
        rows = NotedRows.of(splits.train.sources[0], splits.train.end_id)
        rows.read = []
        model = add_lora(build_base_model(config.model), config.lora)
        splits = EncodedSplits(rows, splits.validation, splits.test)
        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        deal = train_loader.steps
        notes = Path(f"{config.output_dir}.rows-of-rank-{runtime.rank}.jsonl")

        def steps(epoch: int, first_step: int = 0) -> Iterator[list]:
            first = epoch * train_loader.rule.steps_per_epoch + first_step + 1
            for step, share in enumerate(deal(epoch, first_step), start=first):
                with notes.open("a") as file:
                    file.write(json.dumps({"step": step, "microbatches": len(share), "rows": rows.read}) + "\n")
                rows.read = []
                yield share

        train_loader.steps = steps
        trainer.run_training(train_loader, val_loader)
        trainer.run_test(test_loader)


class Worlds:
    """Runs of several worlds in one folder; each is trained when it is first asked for."""

    def __init__(self, folder: Path, goings: Sequence[Going]) -> None:
        self.folder = folder
        self._goings = goings
        self._started: set[int] = set()

    def whole(self, world_size: int) -> Path:
        """The folder of a run that was never interrupted."""
        path = self.folder / f"whole-{world_size}"
        if not path.exists():
            self._launch(world_size, [[*run_words(path), *WORDS]])
            assert_one_world(reports_of_run(self.folder, path.name), world_size)
        return path

    def gone_on(self, going: Going) -> Path:
        """The folder of a run that was interrupted and went on; all that this world goes on with trains at once."""
        if going.now not in self._started:
            self._started.add(going.now)
            goings = [each for each in self._goings if each.now == going.now]
            for each in goings:
                interrupt(self.whole(each.before), self.folder / each.name, each.step)
            runs = [[*run_words(self.folder / each.name), *WORDS, "resume=auto"] for each in goings]
            self._launch(going.now, runs)
        return self.folder / going.name

    def _launch(self, world_size: int, runs: list[list[str]]) -> None:
        script = [REPOSITORY / "tests" / "distributed" / "reporting_recipe.py", self.folder]
        for words in runs:
            spawn = [f"parallel.num_processes={world_size}"] if world_size > 1 else []
            script += [*(["--"] if len(script) > 2 else []), f"{__name__}:train", *words, *spawn]
        done = run_command([*LAUNCHERS["python"], *script], limit_seconds=_LIMIT_SECONDS)
        assert done.returncode == 0, done.stdout


def interrupt(whole: Path, path: Path, step: int) -> None:
    """Make a folder as a run that was killed behind a step leaves it."""
    shutil.copytree(whole, path)
    folder = RunFolder(path)
    for later in folder.checkpoint_steps():
        if later > step:
            shutil.rmtree(folder.checkpoint(later))
    shutil.rmtree(folder.adapter)


def rows_by_step(path: Path, world_size: int) -> dict[int, list[dict]]:
    """What each rank was given, in order of rank, for each step that it trained."""
    files = [Path(f"{path}.rows-of-rank-{rank}.jsonl") for rank in range(world_size)]
    steps: dict[int, list[dict]] = {}
    for file in files:
        for line in file.read_text().splitlines():
            note = json.loads(line)
            steps.setdefault(note["step"], []).append(note)
    return steps


@pytest.fixture(scope="module")
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """Runs go on as the tests of this session ask for it: CI has a sample of them."""
    tested = [item.callspec.params.get("going") for item in request.session.items if hasattr(item, "callspec")]
    return Worlds(tmp_path_factory.mktemp("worlds"), [going for going in GOINGS if going in tested])


@pytest.mark.parametrize("going", GOINGS, ids=lambda going: going.name)
def test_the_curve_and_the_rows_are_those_of_one_uninterrupted_process(worlds: Worlds, going: Going) -> None:
    path = worlds.gone_on(going)
    assert_one_world(reports_of_run(worlds.folder, path.name), going.now)
    run, alone = read_run(path), read_run(worlds.whole(1))
    assert run.record["world_size"] == going.now
    assert run.record["global_batch"]["global_batch_size"] == GLOBAL_BATCH_SIZE
    assert len(run.losses) == NUM_STEPS
    assert run.losses[NUM_STEPS // 2] < run.losses[0] - 0.05, "a run that learns nothing proves nothing"
    assert_one_curve(run, alone)
    checkpoints = RunFolder(path).checkpoint_steps()
    assert checkpoints == list(range(1, NUM_STEPS + 1))
    for step in checkpoints:  # those before the break are the other world's
        state = json.loads((RunFolder(path).checkpoint(step) / "state.json").read_text())
        assert state["world_size"] == (going.before if step <= going.step else going.now), step
        assert state["global_batch_size"] == GLOBAL_BATCH_SIZE

    # The rows that the interrupted run was given up to its last checkpoint, and those of the run that went on.
    before, now = rows_by_step(worlds.whole(going.before), going.before), rows_by_step(path, going.now)
    assert sorted(now) == list(range(going.step + 1, NUM_STEPS + 1)), "no step is trained twice or left out"
    steps = {step: before[step] if step <= going.step else now[step] for step in range(1, NUM_STEPS + 1)}
    used = {step: [row for note in notes for row in note["rows"]] for step, notes in steps.items()}
    for first in range(1, NUM_STEPS, STEPS_PER_EPOCH):
        epoch = Counter(row for step in range(first, first + STEPS_PER_EPOCH) for row in used[step])
        assert epoch == Counter(range(NUM_ROWS)), f"the epoch of step {first}"
    assert [len(used[step]) for step in sorted(used)] == [8, 8, 2] * 2, "the global batch is what it was"
    alone = rows_by_step(worlds.whole(1), 1)
    assert {step: sorted(rows) for step, rows in used.items()} == {
        step: sorted(alone[step][0]["rows"]) for step in alone
    }


def test_some_ranks_go_without_a_micro_batch(worlds: Worlds) -> None:
    shares = {
        size: [[note["microbatches"] for note in notes] for _, notes in sorted(rows_by_step(path, size).items())]
        for size, path in ((2, worlds.whole(2)), (4, worlds.whole(4)))
    }
    assert [sorted(share, reverse=True) for share in shares[2]] == [[2, 1], [2, 1], [1, 0]] * 2
    assert [sorted(share, reverse=True) for share in shares[4]] == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]] * 2


def test_another_global_batch_is_refused_with_both_worlds_named(worlds: Worlds) -> None:
    """Where `training.global_batch_size` is left out it is batch_size x world size: 3 rows alone, 6 for two."""
    path = worlds.folder / "refused"
    interrupt(worlds.whole(1), path, 4)
    kept = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    words = [*run_words(path), *WORDS, "resume=auto", "training.global_batch_size=null"]
    command = [
        *LAUNCHERS["python"],
        "-m",
        "finetune",
        "train",
        "task=finetune_lora",
        *words,
        "parallel.num_processes=2",
    ]
    done = run_command(command, limit_seconds=_LIMIT_SECONDS)
    assert done.returncode == 2, done.stdout
    said = [line for line in done.stdout.splitlines() if "CheckpointError" in line]
    assert len(said) == 1, f"two processes say it, or none:\n{done.stdout}"
    assert said[0].startswith("finetune: CheckpointError: ")
    assert f"1 process trained with a global batch of {GLOBAL_BATCH_SIZE} examples" in said[0]
    assert "asks for 6 with 2 processes (batch_size x world size)" in said[0]
    assert f"training.global_batch_size={GLOBAL_BATCH_SIZE}" in said[0]
    assert "Traceback" not in done.stdout
    for file, data in kept.items():
        assert file.read_bytes() == data, f"{file} has changed, but the start was refused"
