"""`finetune rehearse`: run the commands of a whole job, one after the other, on a tiny random model of the same family.

`STAGES` at the end of this file lists what is run. A stage is a function that returns a sentence about its result, or
raises the error that the real run would end with.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from finetune.diagnose.folder_checks import check_cache
from finetune.diagnose.plan import make_plan
from finetune.diagnose.plan_record import Plan
from finetune.diagnose.rehearsal_commands import Commands, StageError
from finetune.diagnose.rehearsal_overrides import Change, Scale, changes, override
from finetune.distributed.device import accelerator_type
from finetune.errors import LOST_IN_ROUNDING, CheckpointError, FinetuneError, RunFailedError
from finetune.logs import waiting
from finetune.model.fp8_base import wants_fp8
from finetune.model.stand_in import write_stand_in
from finetune.runs.folder import RunFolder, existing_folder
from finetune.runs.recorded_run import RecordedRun
from finetune.runs.verification import OPTIMIZER_FILE
from finetune.terminal import visible

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.diagnose.plan_devices import Device


class Stage(NamedTuple):
    """A stage of every rehearsal."""

    name: str
    run: Callable[[Rehearsal, Path], str]
    """Takes the rehearsal and the file for a command's output. Returns a sentence about the result."""
    is_needed: bool = True
    """Whether the later stages need its results."""


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """The result of one stage."""

    name: str
    seconds: float = 0.0
    outcome: Literal["ok", "failed", "not run"]
    what: str
    """A sentence about the result, or the error."""
    exit_code: int = 0
    log: str | None = None
    """The file with the output of its command."""


@dataclass(kw_only=True)
class Rehearsal:
    """The rehearsal of one run: what is rehearsed, and the results so far."""

    config: Config
    """The complete real run."""
    arguments: Sequence[str]
    """The arguments that describe the real run."""
    folder: Path
    device: Device
    """The device to plan for."""
    steps: int
    """The most optimizer steps to take."""
    minutes: float
    """A stage that still runs this many minutes after the start has failed."""
    processes: int | None = None
    """The number of processes of the real launch. None if the configuration says it."""
    results: list[StageResult] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    """What is not rehearsed, besides what `changes` says."""
    plan: Plan | None = None

    def __post_init__(self) -> None:
        parallel = self.config.parallel
        self.world_size = self.processes or parallel.world_size or parallel.num_processes or 1
        self.commands = Commands(self.minutes)

    @property
    def failed(self) -> list[StageResult]:
        """The stages that ended with an error. The real run would end with the same error."""
        return [result for result in self.results if result.outcome == "failed"]

    def run(self) -> None:
        """Run all stages. After a stage that others need has failed, the later stages are not run."""
        (self.folder / "logs").mkdir(parents=True)
        missing = ""
        for stage in STAGES:
            if missing:
                what = f"it needs what `{missing}` makes"
                self.results.append(StageResult(name=stage.name, outcome="not run", what=what))
                continue
            result = self._run(stage)
            self.results.append(result)
            if stage.is_needed and result.outcome == "failed":
                missing = stage.name

    def _run(self, stage: Stage) -> StageResult:
        log, begun, code = self.folder / "logs" / f"{stage.name}.log", time.monotonic(), 0
        try:
            with waiting(f"rehearsing: {stage.name}"):
                what = stage.run(self, log)
        except FinetuneError as error:
            what, code = str(error), error.exit_code
        return StageResult(
            name=stage.name,
            seconds=time.monotonic() - begun,
            outcome="failed" if code else "ok",
            what=visible(what),
            exit_code=code,
            log=str(log) if log.is_file() else None,
        )

    def choose_changes(self, measured_rows: int = 0) -> None:
        """Choose the keys that the rehearsal sets. Called again when the number of measured rows is known."""
        real = None if self.plan is None else self.plan.batches.steps
        scale = Scale(min(self.steps, real or self.steps), real, self.world_size, measured_rows, self.minutes)
        self.changes = changes(self.config, scale, stand_in=self.folder / "stand-in")

    def overrides(self) -> list[str]:
        """Return the arguments of the real run, and those that make it a rehearsal."""
        tokenizer = override("model.tokenizer", self.config.model.tokenizer or self.config.model.path)
        return [*self.arguments, tokenizer, *(change.override for change in self.changes)]

    def train(
        self, log: Path, name: str, *, resume: str = "never", kill_when: Callable[[], bool] | None = None
    ) -> bool:
        """Run `finetune train` in the folder `name`; return whether `kill_when` ended it."""
        output_dir = override("output_dir", str(self.folder / name))
        return self.commands.run(log, "train", *self.overrides(), output_dir, f"resume={resume}", kill_when=kill_when)

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for JSON, see docs/rehearse.md."""
        return {
            "version": 1,
            "stages": [vars(result) for result in self.results],
            "changes": [change.as_record() for change in self.changes],
            "not_rehearsed": [*self.limits, *(change.limit for change in self.changes if change.limit)],
            "plan": None if self.plan is None else self.plan.as_record(),
        }


@contextmanager
def rehearsal_folder(config: Config, keep: Path | None) -> Iterator[Path]:
    """Make the folder of a rehearsal beside the run's folder. When the block ends, remove everything but the logs.

    If `keep` is given, use that folder instead and remove nothing.

    Raises:
        CheckpointError: `keep` is not empty, or no folder can be made.
    """
    if keep is not None:
        if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
            raise CheckpointError(f"--keep {keep} is there already and not empty. Name a new folder.")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    run = Path(config.output_dir).expanduser().absolute()
    prefix = f"{run.name}.rehearsal-"
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=existing_folder(run.parent)))
    except OSError:  # the stage `folders` reports it; the other stages can run elsewhere
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except BaseException:  # no stage has failed, so nobody needs the logs
        shutil.rmtree(folder)
        raise
    for inside in folder.iterdir():
        if inside.name != "logs":
            shutil.rmtree(inside)


def _plan(rehearsal: Rehearsal, _: Path) -> str:
    config = rehearsal.config.with_values({"parallel.world_size": (rehearsal.world_size, "rehearsal")})
    if config.lora.quantize != "none" and rehearsal.device.type != "cuda":
        config = config.with_values({"lora.quantize": ("none", "rehearsal")})
        rehearsal.limits.append("the plan is made with lora.quantize=none: name the GPU with --device")
    if wants_fp8(config) and rehearsal.device.type != "cuda":
        config = config.with_values({"model.frozen_precision": ("auto", "rehearsal")})
        rehearsal.limits.append("the plan is made with model.frozen_precision=auto: name the GPU with --device")
    rehearsal.plan = plan = make_plan(config, rehearsal.device)
    steps = plan.batches.steps
    return f"{plan.parameters:,} parameters, {'steps not known' if steps is None else f'{steps:,} steps'}"


def _check_folders(rehearsal: Rehearsal, _: Path) -> str:
    config, folder = rehearsal.config, RunFolder(rehearsal.config.output_dir)
    folder.check(config.resume)
    folder.check_writable()
    cache = check_cache(config.data.cache_dir)
    if cache.level == "problem":
        raise CheckpointError(f"{cache.what}. Fix: {cache.fix}.")
    return f"output_dir={folder.path} can be written"


def _write_stand_in(rehearsal: Rehearsal, _: Path) -> str:
    config = rehearsal.config
    if config.resume == "auto" and RunFolder(config.output_dir).checkpoint_steps():
        rehearsal.limits.append("the real run resumes from the checkpoints in output_dir, the rehearsal does not")
    width = config.lora.r if config.training.method == "lora" and config.lora.init != "default" else 0
    made = write_stand_in(config.model, rehearsal.folder / "stand-in", seed=config.seed, least_width=width)
    rehearsal.choose_changes()
    return made


def _read_data(rehearsal: Rehearsal, log: Path) -> str:
    """Encode and check all rows of all splits. The real run will find them in its cache."""
    try:
        rehearsal.commands.run(log, "preview", *rehearsal.overrides(), "--rows", "0", "--json")
    except StageError as error:
        found = _last_json(log).get("findings", [])
        problems = [f"{each['what']}. Fix: {each['fix']}." for each in found if each["level"] == "problem"]
        raise StageError("\n".join(problems) or str(error), error.exit_code) from None
    record = _last_json(log)
    rows = {name: split["rows"] for name, split in record["splits"].items() if split is not None}
    rehearsal.choose_changes(max((count for name, count in rows.items() if name != "train"), default=0))
    counts = ", ".join(f"{name}: {count:,} rows" for name, count in rows.items())
    bad = [f"{found['level']}: {found['what']}" for found in record["findings"] if found["level"] != "ok"]
    return "; ".join([counts, *bad])


def _train(rehearsal: Rehearsal, log: Path) -> str:
    rehearsal.train(log, "whole")
    run = RecordedRun(rehearsal.folder / "whole")
    losses = [value for _, value in run.points("step", "loss")]
    numbers = {name: len(run.of(name)) for name in ("validation", "checkpoint")}
    counts = ", ".join(f"{number} {name}{'s' * (number != 1)}" for name, number in numbers.items())
    tested = "tested" if run.of("test") else "no test split"
    summary = f"{len(losses)} steps, loss {losses[0]:.4g} to {losses[-1]:.4g}, {counts}, {tested}"
    fallbacks = [
        f"fallback: {each.get('what')} is {each.get('used')}: {each.get('why')}" for each in run.entries("fallbacks")
    ]
    return "; ".join([summary, *fallbacks])


def _kill(rehearsal: Rehearsal, log: Path) -> str:
    """Train again, and kill all processes as soon as a checkpoint is committed."""
    folder = RunFolder(rehearsal.folder / "killed")
    if not rehearsal.train(log, "killed", kill_when=lambda: bool(folder.checkpoint_steps())):
        what = "the run ended before it could be killed"
        rehearsal.limits.append(f"a kill in mid-run: {what} (try more --steps)")
        return what
    return f"SIGKILL to all processes once the checkpoint of step {folder.checkpoint_steps()[-1]} was committed"


def _resume(rehearsal: Rehearsal, log: Path) -> str:
    rehearsal.train(log, "killed", resume="auto")
    whole, killed = (_digests(rehearsal.folder / name) for name in ("whole", "killed"))
    differing = [name for name in whole if killed.get(name) != whole[name]]
    if not differing:
        return f"the same bytes as the run that was not killed: {', '.join(whole)}"
    what = f"{', '.join(differing)} differ from the files of the run that was not killed"
    training = rehearsal.config.training
    if training.deterministic or training.device == "cpu" or accelerator_type() is None:
        raise StageError(f"{what}. docs/checkpoints.md has the limits of an exact resume.", RunFailedError.exit_code)
    return f"{what}, as a GPU's kernels may: training.deterministic=true repeats them exactly"


def _merge(rehearsal: Rehearsal, log: Path) -> str:
    words = ("merge", str(rehearsal.folder / "killed"), str(rehearsal.folder / "merged"))
    try:
        rehearsal.commands.run(log, *words)
    except StageError as error:
        if LOST_IN_ROUNDING not in str(error):
            raise
        rehearsal.limits.append("whether `merge` may round: after so few steps, an adapter is smaller than a rounding")
        rehearsal.commands.run(log, *words, "--dtype", "float32")
    return next((line for line in log.read_text().splitlines() if line.startswith("Reloaded by")), "merged")


def _verify(rehearsal: Rehearsal, log: Path) -> str:
    rehearsal.commands.run(log, "verify", str(rehearsal.folder / "merged"))
    return "the merged folder answers as the run does"


def _digests(run: Path) -> dict[str, str]:
    """Return digests of the trained weights and of the last optimizer state, by file name."""
    last = RunFolder(run).checkpoint(RunFolder(run).checkpoint_steps()[-1])
    files = [*sorted((run / "adapter").glob("*.safetensors")), *sorted(last.glob(OPTIMIZER_FILE))]
    return {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _last_json(log: Path) -> dict[str, Any]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    record: dict[str, Any] = json.loads(next((line for line in reversed(lines) if line.startswith("{")), "{}"))
    return record


STAGES = (
    Stage("plan", _plan, is_needed=False),
    Stage("folders", _check_folders, is_needed=False),
    Stage("stand-in", _write_stand_in),
    Stage("data", _read_data),
    Stage("train", _train),
    Stage("kill", _kill),
    Stage("resume", _resume),
    Stage("merge", _merge),
    Stage("verify", _verify),
)
