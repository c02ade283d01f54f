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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from finetune.config.keys import values
from finetune.config.schema import Config
from finetune.diagnose.machine_checks import check_cache
from finetune.diagnose.rehearsal_commands import StageError, run_command
from finetune.diagnose.rehearsal_overrides import override, rehearsed_values, write_stand_in
from finetune.distributed.device import accelerator_type
from finetune.errors import LOST_IN_ROUNDING, NO_GRADIENT, CheckpointError, FinetuneError, RunFailedError
from finetune.logs import waiting
from finetune.runs.folder import RunFolder, existing_folder
from finetune.runs.recorded_run import RecordedRun
from finetune.runs.verification import OPTIMIZER_FILE
from finetune.terminal import visible
from finetune.units import counted, format_bytes

_NEVER_REHEARSED = (
    "the weights of the model: whether they are complete, and what the model learns",
    "the launcher, the network between nodes, and trackers",
)
_RATES = ("optim.learning_rate", "optim.min_learning_rate")


class StageResult(NamedTuple):
    """The result of one stage: a sentence, or the error; `log` is the file with the output of its command."""

    name: str
    outcome: Literal["ok", "failed", "not run"]
    what: str
    seconds: float = 0.0
    exit_code: int = 0
    log: str | None = None


@dataclass(kw_only=True)
class Rehearsal:
    """The rehearsal of one run: what is rehearsed, and the results so far."""

    config: Config
    """The complete real run."""
    arguments: Sequence[str]
    """The arguments that describe the real run."""
    folder: Path
    device: str | None = None
    """The device to plan for, as `finetune plan --device` names it. None: the device of this machine."""
    steps: int
    """The most optimizer steps to take."""
    minutes: float
    """A stage that still runs this many minutes after the start has failed."""
    processes: int | None = None
    """The number of processes of the real launch. None if the configuration says it."""
    results: list[StageResult] = field(default_factory=list)
    limits: list[str] = field(default_factory=lambda: list(_NEVER_REHEARSED))
    """What is not rehearsed."""
    plan: dict[str, Any] | None = None
    """The output of `finetune plan --json`."""
    has_equal_rewards: bool = False
    """Whether the answers of the stand-in had equal rewards in all steps. It then trains with a learning rate of 0."""
    measured_rows: int = 0
    """Rows of the validation split or of the test split, whichever is larger, once they are known."""

    def __post_init__(self) -> None:
        parallel = self.config.parallel
        self.world_size = self.processes or parallel.world_size or parallel.num_processes or 1
        self._until = time.monotonic() + 60 * self.minutes
        if self.config.rollout.server is not None:
            self.limits.append("the server that generates answers: the stand-in generates its own")

    @property
    def failed(self) -> list[StageResult]:
        """The stages that ended with an error. The real run would end with the same error."""
        return [result for result in self.results if result.outcome == "failed"]

    def run(self) -> None:
        """Run all stages. If a stage other than the first two fails, the later stages are not run."""
        (self.folder / "logs").mkdir(parents=True)
        missing = ""
        for name, stage in STAGES.items():
            if missing:
                self.results.append(StageResult(name, "not run", f"it needs what `{missing}` makes"))
                continue
            log, begun, exit_code = self.folder / "logs" / f"{name}.log", time.monotonic(), 0
            try:
                with waiting(f"rehearsing: {name}"):
                    detail = stage(self, log)
            except FinetuneError as error:
                detail, exit_code = str(error), error.exit_code
                missing = "" if name in _NOT_NEEDED else name
            seconds, log_file = time.monotonic() - begun, str(log) if log.is_file() else None
            outcome: Literal["ok", "failed"] = "failed" if exit_code else "ok"
            self.results.append(StageResult(name, outcome, visible(detail), seconds, exit_code, log_file))

    def clean(self) -> None:
        """Remove the folder of the rehearsal. If a stage has failed, leave the logs."""
        for path in self.folder.iterdir():
            if path.name != "logs" or not self.failed:
                shutil.rmtree(path)
        if not self.failed:
            self.folder.rmdir()

    @property
    def changes(self) -> dict[str, Any]:
        """The keys that the rehearsal sets to other values than the real run."""
        real_steps = None if self.plan is None else self.plan["batches"]["steps"]
        return rehearsed_values(
            self.config,
            stand_in=self.folder / "stand-in",
            processes=self.world_size,
            minutes=self.minutes,
            steps=min(self.steps, real_steps or self.steps),
            real_steps=real_steps,
            measured_rows=self.measured_rows,
        ) | {key: 0.0 for key in _RATES if self.has_equal_rewards and values(self.config)[key]}

    def overrides(self) -> list[str]:
        """Return the arguments of the real run, and those that make it a rehearsal."""
        return [*self.arguments, *(override(key, value) for key, value in self.changes.items())]

    def command(self, log: Path, *arguments: str, kill_when: Callable[[], bool] = lambda: False) -> bool:
        """Run a command of finetune within the time that is left; see `run_command`."""
        return run_command(arguments, log, seconds=self._until - time.monotonic(), kill_when=kill_when)

    def train(self, log: Path, run: str, *, resume: str, kill_when: Callable[[], bool] = lambda: False) -> bool:
        """Run `finetune train` in the folder `run`. Return whether `kill_when` ended it."""
        output_dir = override("output_dir", str(self.folder / run))
        return self.command(log, "train", *self.overrides(), output_dir, f"resume={resume}", kill_when=kill_when)

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for JSON, see docs/rehearse.md."""
        real = values(self.config)
        return {
            "version": 2,
            "stages": [result._asdict() for result in self.results],
            "changes": [{"key": key, "real": real[key], "rehearsed": value} for key, value in self.changes.items()],
            "not_rehearsed": self.limits,
            "plan": self.plan,
        }


def make_folder(config: Config) -> Path:
    """Make the folder of a rehearsal beside the run's folder."""
    run = RunFolder(config.output_dir).path
    prefix = f"{run.name}.rehearsal-"
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=existing_folder(run.parent)))
    except OSError:  # the stage `folders` reports it; the other stages can run elsewhere
        return Path(tempfile.mkdtemp(prefix=prefix))


def _plan(rehearsal: Rehearsal, log: Path) -> str:
    overrides = [*rehearsal.arguments, override("parallel.world_size", rehearsal.world_size)]
    device = [] if rehearsal.device is None else ["--device", rehearsal.device]
    if not device and not torch.cuda.is_available():
        real = values(rehearsal.config)
        for key, plain in (("lora.quantize", "none"), ("model.frozen_precision", "auto")):
            if real[key] != plain:
                overrides.append(override(key, plain))
                rehearsal.limits.append(f"the plan is made with {key}={plain}: name the GPU with --device")
    try:
        plan = _run_with_findings(rehearsal, log, "plan", *overrides, *device)
    finally:
        rehearsal.plan = _last_json(log) or None  # also of a run that does not fit
    steps = plan["batches"]["steps"]
    facts = [f"{plan['parameters']:,} parameters", "steps not known" if steps is None else counted(steps, "step")]
    if plan["needed"] is not None:
        facts.append(f"{format_bytes(plan['needed'])} of {format_bytes(plan['device']['memory'])} memory")
    return "; ".join([", ".join(facts), *_warnings(plan)])


def _check_folders(rehearsal: Rehearsal, _: Path) -> str:
    config, folder = rehearsal.config, RunFolder(rehearsal.config.output_dir)
    folder.check(config.resume)
    folder.check_writable()
    cache = check_cache(config)
    if cache.level == "problem":
        raise CheckpointError(f"{cache.what}. Fix: {cache.fix}.")
    can_be_written = f"output_dir={folder.path} can be written"
    return f"{can_be_written}; warning: {cache.what}" if cache.level == "warning" else can_be_written


def _write_stand_in(rehearsal: Rehearsal, _: Path) -> str:
    config = rehearsal.config
    if config.resume == "auto" and RunFolder(config.output_dir).checkpoint_steps():
        rehearsal.limits.append("the real run resumes from the checkpoints in output_dir, the rehearsal does not")
    width = config.lora.r if config.training.method == "lora" and config.lora.init != "default" else 0
    return write_stand_in(config.model, rehearsal.folder / "stand-in", seed=config.seed, least_width=width)


def _read_data(rehearsal: Rehearsal, log: Path) -> str:
    """Encode and check all rows of all splits. The real run will find them in its cache."""
    record = _run_with_findings(rehearsal, log, "preview", *rehearsal.overrides(), "--rows", "0")
    rows = {name: split["rows"] for name, split in record["splits"].items() if split is not None}
    rehearsal.measured_rows = max((number for name, number in rows.items() if name != "train"), default=0)
    counts = ", ".join(f"{name}: {counted(number, 'row')}" for name, number in rows.items())
    return "; ".join([counts, *_warnings(record)])


def _train(rehearsal: Rehearsal, log: Path) -> str:
    try:
        rehearsal.train(log, "whole", resume="never")
    except StageError as error:
        if NO_GRADIENT not in str(error) or not rehearsal.config.objective.generates_answers:
            raise
        rehearsal.has_equal_rewards = True
        rehearsal.limits.append("updates: the answers of the stand-in to a prompt have equal rewards, or none")
        shutil.rmtree(rehearsal.folder / "whole")
        rehearsal.train(log, "whole", resume="never")
    run = RecordedRun(rehearsal.folder / "whole")
    losses = [value for _, value in run.points("step", "loss")]
    numbers = {event: len(run.of(event)) for event in ("step", "validation", "checkpoint")}
    counts = ", ".join(counted(number, event) for event, number in numbers.items())
    tested = "tested" if run.of("test") else "no test split"
    fallbacks = [
        f"fallback: {each.get('what')} is {each.get('used')}: {each.get('why')}" for each in run.entries("fallbacks")
    ]
    return "; ".join([f"loss {losses[0]:.4g} to {losses[-1]:.4g}, {counts}, {tested}", *fallbacks])


def _kill(rehearsal: Rehearsal, log: Path) -> str:
    """Train again, and kill all processes as soon as a checkpoint is committed."""
    folder = RunFolder(rehearsal.folder / "killed")
    if rehearsal.train(log, "killed", resume="never", kill_when=lambda: bool(folder.checkpoint_steps())):
        return f"SIGKILL to all processes once the checkpoint of step {folder.checkpoint_steps()[-1]} was committed"
    reason = "the run ended before it could be killed"
    rehearsal.limits.append(f"a kill in mid-run: {reason} (try more --steps)")
    return reason


def _resume(rehearsal: Rehearsal, log: Path) -> str:
    """Resume the killed run, and compare its files with the files of the other run, which was not killed."""
    rehearsal.train(log, "killed", resume="auto")
    uninterrupted, resumed = (_digests(rehearsal.folder / run) for run in ("whole", "killed"))
    differing = [file for file in uninterrupted if resumed.get(file) != uninterrupted[file]]
    if not differing:
        return f"the same bytes as the run that was not killed: {', '.join(uninterrupted)}"
    difference = f"{', '.join(differing)} differ from the files of the run that was not killed"
    training = rehearsal.config.training
    if training.deterministic or training.device == "cpu" or accelerator_type() is None:
        raise StageError(
            f"{difference}. docs/checkpoints.md has the limits of an exact resume.", RunFailedError.exit_code
        )
    return f"{difference}, as a GPU's kernels may: training.deterministic=true repeats them exactly"


def _merge(rehearsal: Rehearsal, log: Path) -> str:
    arguments = ("merge", str(rehearsal.folder / "killed"), str(rehearsal.folder / "merged"))
    try:
        rehearsal.command(log, *arguments)
    except StageError as error:
        if LOST_IN_ROUNDING not in str(error):
            raise
        rehearsal.limits.append("whether `merge` may round: after so few steps, an adapter is smaller than a rounding")
        rehearsal.command(log, *arguments, "--dtype", "float32")
    return next((line for line in log.read_text().splitlines() if line.startswith("Reloaded by")), "merged")


def _verify(rehearsal: Rehearsal, log: Path) -> str:
    rehearsal.command(log, "verify", str(rehearsal.folder / "merged"))
    return "the merged folder answers as the run does"


def _run_with_findings(rehearsal: Rehearsal, log: Path, *arguments: str) -> dict[str, Any]:
    """Run a command with `--json` and return its output.

    Raises:
        StageError: the command failed. The message has its findings, or else its error.
    """
    try:
        rehearsal.command(log, *arguments, "--json")
    except StageError as error:
        findings = [finding for finding in _last_json(log).get("findings", []) if finding["level"] != "ok"]
        message = "\n".join(f"{finding['what']}. Fix: {finding['fix']}." for finding in findings)
        raise StageError(message or str(error), error.exit_code) from None
    return _last_json(log)


def _warnings(record: dict[str, Any]) -> list[str]:
    findings = record["findings"]
    return [f"{finding['level']}: {finding['what']}" for finding in findings if finding["level"] != "ok"]


def _last_json(log: Path) -> dict[str, Any]:
    """Return the last line of JSON in the output of a command; an empty dict if there is none."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    record: dict[str, Any] = json.loads(next((line for line in reversed(lines) if line.startswith("{")), "{}"))
    return record


def _digests(run: Path) -> dict[str, str]:
    """Return digests of the trained weights and of the last optimizer state, by file name."""
    last = RunFolder(run).checkpoint(RunFolder(run).checkpoint_steps()[-1])
    files = [*sorted((run / "adapter").glob("*.safetensors")), *sorted(last.glob(OPTIMIZER_FILE))]
    return {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


STAGES: dict[str, Callable[[Rehearsal, Path], str]] = {
    "plan": _plan,
    "folders": _check_folders,
    "stand-in": _write_stand_in,
    "data": _read_data,
    "train": _train,
    "kill": _kill,
    "resume": _resume,
    "merge": _merge,
    "verify": _verify,
}
_NOT_NEEDED = ("plan", "folders")
"""No other stage needs the results of these stages."""
