"""One recipe's curve: the same small training, started in any way, read back and compared."""

from __future__ import annotations

import functools
import glob
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from finetune.training.trainer import Trainer
from tests.curve_table import Row, record_row
from tests.in_process import run_script
from tests.launches import REPOSITORY, run_command
from tests.tiny_runs import random_model_words, write_base, write_rows

NUM_STEPS = 6
GLOBAL_BATCH_SIZE = 8
LORA, FULL = "recipes.finetune_lora:main", "recipes.finetune_full:main"
_LIMIT_SECONDS = 480


class Run(NamedTuple):
    """What a run wrote."""

    record: dict[str, Any]
    losses: list[float]
    other_losses: list[float]
    num_targets: list[int]
    adapter: torch.Tensor
    """All trained weights; those of the whole model after full fine-tuning."""


class Case(NamedTuple):
    """One run of the recipe: what may differ from the run that it is compared with, and what must not."""

    batch_size: int
    dropout: float = 0.0
    recipe: str = LORA
    words: tuple[str, ...] = ()
    """Keys that change how the same is computed."""
    note: str = ""
    """What the table says of them."""

    @property
    def name(self) -> str:
        """Of the run's folder."""
        parts = ["full" if self.recipe == FULL else "lora", self.batch_size, self.dropout, *self.words]
        return "_".join(str(part).replace("=", "-") for part in parts)

    @property
    def reference(self) -> Case:
        """The run of one plain process that must come out the same: with dropout, at the same micro-batches."""
        if self.dropout:
            return Case(self.batch_size, self.dropout, self.recipe)
        return Case(REFERENCE_BATCH_SIZE, recipe=self.recipe)

    @property
    def split(self) -> str:
        """Rows of a micro-batch x micro-batches of a full global batch."""
        return f"{self.batch_size}x{-(-GLOBAL_BATCH_SIZE // self.batch_size)}"

    def row(self, form: str, world_size: int) -> Row:
        """Its place in the table."""
        full = ["full fine-tuning"] if self.recipe == FULL else []
        note = ", ".join([*full, *([self.note] if self.note else [])])
        return Row(form, world_size, self.split, f"{self.dropout:g}", note)


REFERENCE_BATCH_SIZE = 3
"""Three rows, three and two: no split that is compared with it cuts a global batch at the same places."""
SPLITS, DROPOUT_SPLITS = (tuple(Case(size, dropout) for size in (1, 2, 8)) for dropout in (0.0, 0.1))
"""1x8, 2x4 and 8x1: in the last, one rank has all that there is to do."""
PLAIN_CASES = (Case(2), Case(2, 0.1))
"""For a launcher whose world size and splits others have tried."""
ALONE = (
    *(Case(REFERENCE_BATCH_SIZE), *SPLITS),
    Case(2, words=("training.gradient_checkpointing=true",), note="gradient_checkpointing"),
    Case(REFERENCE_BATCH_SIZE, words=("training.kernels=reference",), note="kernels=reference"),
    Case(8, words=("training.packing=false",), note="packing=false"),
    Case(8, words=("training.max_tokens_per_microbatch=40",), note="max_tokens_per_microbatch=40"),
)
"""What one process does in several ways."""


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="finetune-curves-")


@functools.cache
def curve_inputs() -> Path:
    """A folder with rows and a tokenizer, for all runs of this session; removed when it ends."""
    folder = Path(_folder().name)
    write_base(folder / "tokenizer")
    write_rows(folder / "rows")  # 18 rows: the third step of an epoch has 2, which are one micro-batch for one rank
    return folder


def recipe_words(output_dir: Path, *words: str) -> list[str | Path]:
    """The recipe and its words, for any launcher."""
    return [REPOSITORY / "recipes" / "finetune_lora.py", *run_words(output_dir, *words)]


def run_words(output_dir: Path, *words: str) -> list[str]:
    """The words of the run that all curves are of; later words win."""
    inputs = curve_inputs()
    return [
        *random_model_words(inputs / "tokenizer"),
        f"data.path={inputs / 'rows'}",
        f"data.cache_dir={inputs / 'cache'}",
        f"output_dir={output_dir}",
        "seed=3",
        "lora.r=4",
        "optim.learning_rate=1e-2",
        "training.device=cpu",
        "training.precision=fp32",
        f"training.batch_size={REFERENCE_BATCH_SIZE}",
        f"training.global_batch_size={GLOBAL_BATCH_SIZE}",
        f"training.max_steps={NUM_STEPS}",
        "testing.num_samples=0",
        *words,
    ]


def reporting_words(
    folder: Path, cases: Sequence[Case], *words: str, recipe: Sequence[str] = (), prefix: str = ""
) -> list[str | Path]:
    """A script and its words that run these cases one after the other, each rank reporting into `folder`.

    Args:
        folder: of the reports, and of the folders of the runs.
        cases: what to run.
        words: for each of them.
        recipe: what trains in place of the case's own recipe, `module:function`, and its first words.
        prefix: begins the names of the runs' folders.
    """
    script: list[str | Path] = [REPOSITORY / "tests" / "distributed" / "reporting_recipe.py", folder]
    for case in cases:
        own = [f"training.batch_size={case.batch_size}", f"lora.dropout={case.dropout}", *case.words]
        # Every weight trains: at the adapter's rate the loss would jump about, and magnify the last bits of a sum.
        own += ["optim.learning_rate=1e-3"] if case.recipe == FULL else []
        script += [*(["--"] if len(script) > 2 else []), *(recipe or [case.recipe])]
        script += run_words(folder / f"{prefix}{case.name}", *own, *words)
    return script


def read_run(folder: Path) -> Run:
    """What a run wrote into its folder."""
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    checkpoint = folder / "checkpoints" / f"step-{NUM_STEPS:06d}"
    files = [checkpoint / name for name in ("adapter_model.safetensors", "model.safetensors")]
    tensors = load_file(next(file for file in files if file.exists()))
    return Run(
        record=json.loads((folder / "run.json").read_text()),
        losses=[event["loss"] for event in steps],
        other_losses=[event["loss"] for event in events if event["event"] in ("validation", "test")],
        num_targets=[event["num_targets"] for event in steps],
        adapter=torch.cat([tensors[name].double().flatten() for name in sorted(tensors)]),
    )


@functools.cache
def curve_alone() -> Run:
    """The curve of one plain process, which all others are compared with."""
    output_dir = curve_inputs() / "alone"
    script, *words = recipe_words(output_dir)
    done = run_script(Path(script), words)  # launchers are what the promise is about, and here is none
    assert done.returncode == 0, done.stdout
    run = read_run(output_dir)
    assert (run.record["world_size"], run.record["backend"]) == (1, "none")
    assert (len(run.losses), len(run.other_losses)) == (NUM_STEPS, 4)
    assert run.losses[3] < run.losses[0] - 0.05, "a run that learns nothing proves nothing"
    return run


@functools.cache
def runs_alone(*cases: Case) -> Path:
    """The folder of runs that one process trains one after the other."""
    folder = Path(tempfile.mkdtemp(prefix="alone-", dir=curve_inputs()))
    script, *words = reporting_words(folder, cases)
    with patch.object(Trainer, "run_training", Trainer.run_training):  # the script replaces it
        done = run_script(Path(script), words)
    assert done.returncode == 0, done.stdout
    return folder


def reference_of(case: Case) -> Run:
    """What a case must come out as."""
    if case.reference == Case(REFERENCE_BATCH_SIZE):
        return curve_alone()
    return read_run(runs_alone(case.reference) / case.reference.name)


def reports_of_run(folder: Path, name: str) -> list[dict[str, Any]]:
    """What each process that trained in a run reported, in order of rank."""
    reports = [json.loads(file.read_text()) for file in folder.glob(f"{glob.escape(name)}.*.json")]
    return sorted(reports, key=lambda report: report["rank"])


def assert_one_world(reports: Sequence[dict[str, Any]], world_size: int) -> None:
    """The second promise: as many processes as ranks, each rank once, all of them met, and one that writes."""
    assert [report["rank"] for report in reports] == list(range(world_size))
    assert [report["world_size"] for report in reports] == [world_size] * world_size
    assert [report["ranks_met"] for report in reports] == [2**world_size - 1] * world_size
    assert [report["writes"] for report in reports] == [True] + [False] * (world_size - 1)


def assert_cases(form: str, folder: Path, cases: Sequence[Case], *, world_size: int, launcher: str) -> None:
    """Each case was trained in one world of this size, as its reference was, and has its row in the table."""
    for case in cases:
        reports = reports_of_run(folder, case.name)
        assert_one_world(reports, world_size)
        assert {report["launcher"] for report in reports} == {launcher}
        run = read_run(folder / case.name)
        assert (run.record["world_size"], run.record["launcher"]) == (world_size, launcher)
        assert_one_curve(run, reference_of(case), case.row(form, world_size))


def run_and_report(
    command: Sequence[str | Path],
    folder: Path,
    cases: Sequence[Case],
    *words: str,
    recipe: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> None:
    """Start these cases under a launcher; see `reporting_words`."""
    told = reporting_words(folder, cases, *words, recipe=recipe)
    done = run_command([*command, *told], variables=variables, limit_seconds=_LIMIT_SECONDS)
    assert done.returncode == 0, done.stdout


def assert_one_curve(run: Run, expected: Run, row: Row | None = None) -> None:
    """The first promise: the same losses at every step, the same adapter in the end.

    Args:
        run: what is looked at.
        expected: what it must come out as.
        row: where the table of docs/one-curve.md speaks of it.
    """
    assert run.num_targets == expected.num_targets
    pairs = list(zip(run.losses + run.other_losses, expected.losses + expected.other_losses, strict=True))
    of_losses = max(abs(ours - theirs) / max(1.0, abs(theirs)) for ours, theirs in pairs)
    of_adapter = float(torch.linalg.norm(run.adapter - expected.adapter) / torch.linalg.norm(expected.adapter))
    assert of_losses <= 1e-6, f"{row}: {pairs}"
    assert of_adapter <= 1e-5, f"{row}: {of_adapter}"
    if row is not None:
        record_row(row, num_steps=len(run.losses), of_losses=of_losses, of_adapter=of_adapter)
