"""NaN, inf and memory that runs out, for real: in a step of its own, seen by every rank, and never saved as good.

The base has one embedding that is NaN, of a character that a single row has: the step with that row, one in each epoch,
has a loss that is not finite, on the rank that computes the row.
"""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.data.batches import BatchRule
from finetune.distributed.liveness import explain
from finetune.errors import CheckpointError, RunFailedError
from finetune.runs.folder import RunFolder
from finetune.runs.state import TrainerState
from finetune.runs.verification import newest_valid, verify_checkpoint
from recipes.finetune_lora import main
from tests.launches import run_command
from tests.tiny import tiny_tokenizer
from tests.tiny_models import build_tiny, tiny_phi3_config
from tests.tiny_runs import MODEL_VOCABULARY, write_rows
from tests.tiny_training import events, record

BAD = "~"
NUM_EPOCHS, STEPS_PER_EPOCH = 3, 5
NUM_STEPS = NUM_EPOCHS * STEPS_PER_EPOCH
LAST = f"step-{NUM_STEPS:06d}"
FAILED = 3
LIMIT_SECONDS = 400.0
SKIP = "training.on_nonfinite=skip"
WORLDS = {
    "one": [],
    "two": ["parallel.num_processes=2"],
    "ddp": ["parallel.num_processes=2", "parallel.gradient_sync=ddp"],
}


def write_row(file: Path, question: str) -> None:
    """One row more."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "three crates"}]
    with file.open("a") as rows:
        rows.write(json.dumps({"messages": messages}) + "\n")


def write_model(folder: Path, *, is_whole: bool, context: int = 128) -> Path:
    """Untied, since a head with one NaN makes all losses NaN."""
    sizes = {"vocab_size": MODEL_VOCABULARY, "initializer_range": 0.05, "eos_token_id": 320}
    model = build_tiny(tiny_phi3_config(**sizes, tie_word_embeddings=False, max_position_embeddings=context))
    tokenizer = tiny_tokenizer()
    if not is_whole:
        with torch.no_grad():
            model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids(BAD)] = float("nan")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_model(folder / "base", is_whole=False)
    rows = write_rows(folder / "rows", train=17, validation=4, test=2)
    write_row(rows / "train.jsonl", f"send {BAD} to Porto")
    write_row(rows / "test.jsonl", f"{BAD} to Lagos")
    return folder


def words(inputs: Path, output_dir: Path, *more: str) -> list[str]:
    return [
        *(f"model.path={inputs / 'base'}", f"data.path={inputs / 'rows'}", f"data.cache_dir={inputs / 'cache'}"),
        *(f"output_dir={output_dir}", "training.device=cpu", "training.precision=fp32", "lora.r=4", "lora.dropout=0.1"),
        *("training.batch_size=1", "training.global_batch_size=4", f"training.num_epochs={NUM_EPOCHS}"),
        *("seed=2", "optim.learning_rate=1e-2", "checkpoint.save_every=1", "checkpoint.save_total_limit=100"),
        *("testing.num_samples=0", "testing.metrics=[]", "testing.batch_size=1"),
        *more,
    ]


def train(inputs: Path, output_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """`finetune train`, in processes of its own."""
    command = [sys.executable, "-m", "finetune", "train", "task=finetune_lora", *words(inputs, output_dir, *more)]
    return run_command(command, limit_seconds=LIMIT_SECONDS)


def steps(folder: Path) -> list[dict[str, Any]]:
    return events(folder, "step")


def skipped(folder: Path) -> list[int]:
    return [event["step"] for event in steps(folder) if event.get("skipped")]


def result(folder: Path) -> dict[str, Any]:
    return record(folder)["result"]


def newest(folder: Path) -> int | None:
    """The step of the newest checkpoint; all that are there are whole."""
    run = RunFolder(folder)
    assert all(verify_checkpoint(run.checkpoint(step)) == [] for step in run.checkpoint_steps())
    path = newest_valid(run)
    return int(path.name.removeprefix("step-")) if path else None


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for name in (f"checkpoints/{LAST}", "adapter") for path in sorted((folder / name).iterdir())]
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def whole(inputs: Path) -> dict[str, tuple[Path, str]]:
    """A run that skips, by each world: its folder and its log. Trained when it is first asked for."""

    class Runs(dict[str, tuple[Path, str]]):
        def __missing__(self, world: str) -> tuple[Path, str]:
            folder = inputs / f"whole-{world}"
            done = train(inputs, folder, SKIP, *WORLDS[world])
            assert done.returncode == 0, done.stdout
            self[world] = (folder, done.stdout)
            return self[world]

    return Runs()


# --- skip and stop ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.warm
@pytest.mark.parametrize("world", WORLDS)
def test_a_bad_row_costs_one_step_an_epoch_in_every_world(whole: dict[str, tuple[Path, str]], world: str) -> None:
    folder, log = whole[world]
    bad = skipped(folder)
    assert [(step - 1) // STEPS_PER_EPOCH for step in bad] == list(range(NUM_EPOCHS))
    for event in steps(folder):
        assert (
            math.isfinite(float(event["loss"]))
            == math.isfinite(float(event["grad_norm"]))
            == (event["step"] not in bad)
        )
        assert [row.rpartition(":")[2] == "18" for row in event.get("rows", [])].count(True) == (event["step"] in bad)
        assert event["learning_rate"] == pytest.approx(1e-2 * (1 - (event["step"] - 1) / NUM_STEPS)), "a function of it"
    lines = [line for line in log.splitlines() if " is skipped " in line]
    assert len(lines) == NUM_EPOCHS, "one rank says it"
    for number, (step, line) in enumerate(zip(bad, lines, strict=True), start=1):
        assert " WARNING " in line
        assert f"step {step} is skipped (number {number} of at most 5" in line
        assert ("the loss is nan (that of rank " in line) == (world != "one")
        assert "and the gradient norm nan in the step of " in line
        assert "train.jsonl:18" in line
        assert "; weights and optimizer are unchanged" in line
    assert "3 steps skipped" in log

    state = json.loads((folder / "checkpoints" / LAST / "state.json").read_text())
    assert state["num_skipped_steps"] == result(folder)["num_skipped_steps"] == NUM_EPOCHS
    assert newest(folder) == NUM_STEPS
    assert result(folder)["test_tuned"]["loss"] == "NaN", "a bad row of the test split does not end the run"
    verdict = result(folder)["verdict"]["loss"]
    assert (verdict["result"], verdict["num_not_finite"]) == ("not comparable", 1)
    before, after = (folder / "checkpoints" / f"step-{step:06d}" for step in (bad[0] - 1, bad[0]))
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert (before / name).read_bytes() == (after / name).read_bytes(), "nothing moves in a step that is skipped"

    alone, _ = whole["one"]
    assert bad == skipped(alone)
    for mine, its in zip(steps(folder), steps(alone), strict=True):
        assert mine["num_targets"] == its["num_targets"]
        if mine["step"] not in bad:
            assert abs(mine["loss"] - its["loss"]) <= 1e-6 * max(1, its["loss"])
    adapters = [load_file(run / "adapter/adapter_model.safetensors") for run in (folder, alone)]
    ours, theirs = (torch.cat([each[name].double().flatten() for name in sorted(each)]) for each in adapters)
    assert torch.linalg.norm(ours - theirs) <= 1e-5 * torch.linalg.norm(theirs)


@pytest.mark.slow
@pytest.mark.warm
def test_stop_then_skip_then_more_ends_in_the_bytes_of_the_run_that_skipped_all_along(
    whole: dict[str, tuple[Path, str]], inputs: Path, tmp_path: Path
) -> None:
    world = "two"
    bad = skipped(whole[world][0])
    run = tmp_path / "run"

    def fails(step: int, *more: str) -> str:
        done = train(inputs, run, *WORLDS[world], *more)
        assert done.returncode == FAILED, done.stdout
        assert "Traceback" not in done.stdout
        assert record(run)["status"] == "failed"
        assert newest(run) == step - 1
        assert steps(run)[-1]["step"] == step - 1
        error: str = result(run)["error"]
        assert done.stdout.count(error) == 1, "one rank says it"
        return error

    error = fails(bad[0])
    assert f"RunFailedError: step {bad[0]}: the loss is nan" in error
    assert "training.on_nonfinite is stop. The weights were left as before the step" in error
    assert "train.jsonl:18 alone is not finite" in error
    assert "training.on_nonfinite=skip" in error
    error = fails(bad[1], "resume=auto", SKIP, "training.max_skipped_steps=1")
    assert f"step {bad[1]}: the loss is nan" in error
    assert "training.max_skipped_steps is 1, and 1 were skipped before it" in error
    assert result(run)["num_skipped_steps"] == 1
    done = train(inputs, run, *WORLDS[world], "resume=auto", SKIP, "training.max_skipped_steps=3")
    assert done.returncode == 0, done.stdout
    assert contents(run) == contents(whole[world][0])
    assert [{**event, "tokens_per_second": 0} for event in steps(run)] == [
        {**event, "tokens_per_second": 0} for event in steps(whole[world][0])
    ]


@pytest.mark.slow
def test_the_first_and_the_last_step_can_be_skipped_and_a_run_goes_on_from_there(inputs: Path, tmp_path: Path) -> None:
    """Before any update the optimizer has no state to save."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    main(words(inputs, whole, SKIP, "seed=22"))
    assert skipped(whole) == [1, 7, NUM_STEPS]
    for kept in (1, NUM_STEPS):
        shutil.copytree(whole, run)
        for step in range(kept + 1, NUM_STEPS + 1):
            shutil.rmtree(run / f"checkpoints/step-{step:06d}")
        main(words(inputs, run, SKIP, "seed=22", "resume=auto"))
        assert contents(run) == contents(whole)
        assert skipped(run) == [1, 7, NUM_STEPS]
        assert result(run)["num_skipped_steps"] == NUM_EPOCHS
        shutil.rmtree(run)


# --- weights and validations that are not finite --------------------------------------------------------------------

OVERFLOWING = (
    *("optim.optimizer=torch.optim.SGD", "optim.schedule=constant", "optim.learning_rate=1e38"),
    *("optim.weight_decay=1e3", "optim.max_grad_norm=null", "training.max_steps=2"),
)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("checkpoint.save_every=null", "checkpoint.save_every_epochs=null"), "step 2: the loss is nan .*trained"),
        (("checkpoint.save_every=1",), "not saved|not finite"),
        (("checkpoint.save_every=1", "training.max_steps=1"), "step 1 is not saved"),
        (("validation.validate_every=1",), "validation loss after step 1 is nan: these weights are not saved"),
    ],
)
def test_weights_that_overflow_are_never_saved(tmp_path: Path, more: tuple[str, ...], says: str) -> None:
    write_model(tmp_path / "base", is_whole=True)
    write_rows(tmp_path / "rows", train=8, validation=2 if "validate" in more[0] else 0, test=0)
    run = tmp_path / "run"
    with pytest.raises(RunFailedError, match=says):
        main(words(tmp_path, run, *OVERFLOWING, SKIP, *more))
    assert newest(run) is None
    assert not (run / "adapter").exists()


def test_a_bad_row_in_the_validation_split_ends_the_run_before_its_step_is_saved(inputs: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", train=8, validation=2, test=0)
    write_row(rows / "validation.jsonl", BAD)
    run = tmp_path / "run"
    more = (f"data.path={rows}", "validation.validate_every=3", "early_stopping.patience=1", SKIP)
    for resume in ("never", "auto"):
        with pytest.raises(RunFailedError, match=r"validation loss after step 3 is nan.*rows of the validation split"):
            main(words(inputs, run, *more, f"resume={resume}"))
        assert newest(run) == 2
    assert [event["loss"] for event in events(run, "validation")] == ["NaN"]
    state = json.loads((run / "checkpoints/step-000002/state.json").read_text())
    assert (state["best_loss"], state["best_step"], state["num_skipped_steps"]) == (None, None, 0)


def test_a_state_of_before_there_was_skipping_has_skipped_nothing() -> None:
    older = TrainerState(step=3).as_record()
    del older["num_skipped_steps"]
    assert TrainerState.from_record(older, source="here") == TrainerState(step=3, num_skipped_steps=0)
    for value in (-1, "2", True, None):
        with pytest.raises(CheckpointError, match="num_skipped_steps="):
            TrainerState.from_record(older | {"num_skipped_steps": value}, source="here")
    for loss in (math.nan, math.inf):
        with pytest.raises(CheckpointError, match="best_loss="):
            TrainerState.from_record(older | {"best_loss": loss, "best_step": 2}, source="here")


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has 1 GiB\nMore"),
    ],
)
def test_every_sign_of_no_memory_becomes_one_line_of_advice(error: Exception) -> None:
    found = explain(error, None)
    assert isinstance(found, RunFailedError)
    assert found.exit_code == FAILED
    assert re.match("out of memory: (MemoryError|DefaultCPU|CUDA out|std::bad|.Errno 12.)", str(found)), found
    assert "Lower training.batch_size" in str(found)
    assert "\n" not in str(found)
    assert len(f"rank 11 failed during training, step 123456: RunFailedError: {found}") < 440


LONG_ROW, CONTEXT, NUM_ROWS = 3000, 4096, 12


@pytest.fixture(scope="module")
def long_row(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    write_model(folder / "base", is_whole=True, context=CONTEXT)
    write_row(
        write_rows(folder / "rows", train=NUM_ROWS - 1, validation=0, test=0) / "train.jsonl", "qj" * (LONG_ROW // 2)
    )
    return folder


MEMORY_WORDS = (
    *("model.attention=eager", f"data.max_length={CONTEXT}", "training.num_epochs=1", "checkpoint.save_every=2"),
    "training.kernels=reference",  # with eager attention: scores of all pairs of tokens; the engine makes none
    "seed=36",
)


@pytest.mark.slow
@pytest.mark.warm
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone keeps to such a limit")
def test_memory_that_runs_out_leaves_the_last_checkpoint_and_says_what_to_change(
    long_row: Path, tmp_path: Path
) -> None:
    more = [*MEMORY_WORDS, "training.global_batch_size=2", *WORLDS["two"]]
    order = BatchRule(lengths=[1] * NUM_ROWS, global_batch_size=2, batch_size=1, seed=36).order(0)
    long = order.index(NUM_ROWS - 1) // 2 + 1
    assert long > 4, "two checkpoints come before it, and the limit"

    run = tmp_path / "run"
    script = Path(__file__).with_name("little_room.py")
    done = run_command([sys.executable, script, "train", "task=finetune_lora", *words(long_row, run, *more)])
    log = done.stdout
    assert done.returncode == FAILED, log
    last = newest(run)
    assert last in range(2, long), log
    error = result(run)["error"]
    for text in (log, error):
        assert "out of memory: " in text
        for advice in (
            "Lower training.batch_size",
            "training.max_tokens_per_microbatch",
            "gradient_checkpointing=true",
        ):
            assert advice in text, log
    assert f"step {long}" in log
    assert "Committed checkpoints are intact: resume=auto" in log
    assert "Traceback" not in log
    done = train(long_row, run, *more, "resume=auto")
    assert done.returncode == 0, done.stdout
    assert f"resumed from step={last}" in done.stdout
    taken = [event["step"] for event in steps(run) if event["num_tokens"] > LONG_ROW]
    assert taken == [long]
