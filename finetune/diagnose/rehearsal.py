"""`finetune rehearse`: a run's own commands, one after the other, on a tiny random model of the same family."""

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
from typing import TYPE_CHECKING, Any, Literal

from finetune.diagnose.folder_checks import check_cache
from finetune.diagnose.plan import Plan, make_plan
from finetune.diagnose.rehearsal_commands import Commands, StageError, kill_tree, refuse_failure
from finetune.diagnose.rehearsal_words import Change, Scale, changes, word
from finetune.distributed.device import accelerator_kind
from finetune.errors import CheckpointError, FinetuneError, RunFailedError
from finetune.logs import waiting
from finetune.model.stand_in import write_stand_in
from finetune.runs.folder import RunFolder, existing_folder
from finetune.runs.recorded_run import RecordedRun
from finetune.runs.verification import OPTIMIZER_FILE
from finetune.signals import Terminated
from finetune.terminal import visible

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.diagnose.plan_devices import Device

_POLL_SECONDS = 0.005


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of a rehearsal."""

    name: str
    seconds: float
    outcome: Literal["ok", "failed", "not run"]
    what: str
    """What happened; after a failure the error."""
    exit_code: int = 0
    log: Path | None = None
    """The output of its command."""


@dataclass(kw_only=True)
class Rehearsal:
    """What became of a rehearsal."""

    folder: Path
    stages: list[Stage] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    """What was not rehearsed besides the changes."""
    plan: Plan | None = None

    @property
    def failed(self) -> list[Stage]:
        """The stages that the real run would not survive either."""
        return [stage for stage in self.stages if stage.outcome == "failed"]

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for JSON, see docs/rehearse.md."""
        stages = [{**vars(stage), "log": None if stage.log is None else str(stage.log)} for stage in self.stages]
        return {
            "version": 1,
            "stages": stages,
            "changes": [change._asdict() for change in self.changes],
            "not_rehearsed": [*self.missed, *(change.missed for change in self.changes if change.missed)],
            "plan": None if self.plan is None else self.plan.as_record(),
        }


class Rehearser:
    """Rehearse one run.

    Args:
        config: the complete real run.
        words: the words that describe it.
        folder: where to write; it exists.
        device: the device to plan for.
        steps: optimizer steps to take, at most.
        minutes: end a stage that still runs after so many minutes since the start.
        processes: of the real launch; None: as the configuration says.
    """

    def __init__(
        self,
        config: Config,
        words: Sequence[str],
        folder: Path,
        *,
        device: Device,
        steps: int,
        minutes: float,
        processes: int | None,
    ) -> None:
        self._config = config
        self._words = list(words)
        self._folder = folder
        self._device = device
        self._steps = steps
        self._minutes = minutes
        self._commands = Commands(minutes)
        parallel = config.parallel
        self._processes = processes or parallel.world_size or parallel.num_processes or 1
        self._measured_rows = 0
        self._changed: list[str] = []
        self.result = Rehearsal(folder=folder)

    def run(self) -> Rehearsal:
        """Run all stages. One that needs what an earlier one did not make is not run."""
        (self._folder / "logs").mkdir(parents=True)
        self._run("plan", self._plan)
        self._run("folders", self._check_folders)
        if not self._run("stand-in", self._write_stand_in):
            return self.result
        if self._config.resume == "auto" and RunFolder(self._config.output_dir).checkpoint_steps():
            self.result.missed.append("the run would go on from the checkpoints in output_dir: here it begins anew")
        failed = ""
        for name, run in self._in_order():
            if failed:
                what = f"it needs what `{failed}` makes"
                self.result.stages.append(Stage(name=name, seconds=0.0, outcome="not run", what=what))
            elif not self._run(name, run):
                failed = name
        return self.result

    def _in_order(self) -> Iterator[tuple[str, Callable[[Path], str]]]:
        """Yield the stages of which each needs the one before it."""
        yield "data", self._read_data
        yield "train", self._train
        yield "kill", self._kill
        yield "resume", self._resume
        yield "merge", self._merge
        yield "verify", self._verify

    def _run(self, name: str, stage: Callable[[Path], str]) -> bool:
        """Run a stage, record what happened, and return whether all went well."""
        log, begun, code = self._folder / "logs" / f"{name}.log", time.monotonic(), 0
        try:
            with waiting(f"rehearsing: {name}"):
                what = stage(log)
        except StageError as error:
            what, code = str(error), error.exit_code
        except FinetuneError as error:
            what, code = f"{type(error).__name__}: {error}", error.exit_code
        written = log if log.is_file() else None
        seconds = time.monotonic() - begun
        outcome: Literal["ok", "failed"] = "failed" if code else "ok"
        stage_ = Stage(name=name, seconds=seconds, outcome=outcome, what=visible(what), exit_code=code, log=written)
        self.result.stages.append(stage_)
        return not code

    def _plan(self, _: Path) -> str:
        config = self._config.with_values({"parallel.world_size": (self._processes, "rehearsal")})
        if config.lora.quantize != "none":  # a plan refuses what it cannot count
            config = config.with_values({"lora.quantize": ("none", "rehearsal")})
            self.result.missed.append("the plan is that of lora.quantize=none, whose base takes more memory")
        self.result.plan = plan = make_plan(config, self._device)
        steps = plan.batches.steps
        return f"{plan.parameters:,} parameters, {'steps not known' if steps is None else f'{steps:,} steps'}"

    def _check_folders(self, _: Path) -> str:
        folder = RunFolder(self._config.output_dir)
        folder.check(self._config.resume)
        folder.check_writable()
        cache = check_cache(self._config.data.cache_dir)
        if cache.level == "problem":
            raise CheckpointError(f"{cache.what}. Fix: {cache.fix}.")
        return f"output_dir={folder.path} can be written"

    def _write_stand_in(self, _: Path) -> str:
        lora = self._config.lora
        width = lora.r if self._config.training.method == "lora" and lora.init != "default" else 0
        stand_in = self._folder / "stand-in"
        made = write_stand_in(self._config.model, stand_in, seed=self._config.seed, least_width=width)
        self._choose_words()
        return made

    def _choose_words(self) -> None:
        """Choose what the rehearsal sets; again once the number of rows is known."""
        real = None if self.result.plan is None else self.result.plan.batches.steps
        steps = min(self._steps, real or self._steps)
        scale = Scale(steps, real, self._processes, self._measured_rows, self._minutes)
        self.result.changes = changes(self._config, scale, stand_in=self._folder / "stand-in")
        tokenizer = self._config.model.tokenizer or self._config.model.path
        self._changed = [word("model.tokenizer", tokenizer), *(change.word for change in self.result.changes)]

    def _read_data(self, log: Path) -> str:
        """Encode and check all rows of all splits, which fills the cache of the real run."""
        try:
            self._commands.run(log, "preview", *self._words, *self._changed, "--rows", "0", "--json")
        except StageError as error:
            found = _last_json(log).get("findings", [])
            problems = [f"{each['what']}. Fix: {each['fix']}." for each in found if each["level"] == "problem"]
            raise StageError("\n".join(problems) or str(error), error.exit_code) from None
        record = _last_json(log)
        splits = {name: split["rows"] for name, split in record["splits"].items() if split is not None}
        self._measured_rows = max((rows for name, rows in splits.items() if name != "train"), default=0)
        self._choose_words()
        return ", ".join(f"{name}: {rows:,} rows" for name, rows in splits.items()) + _warnings(record)

    def _train(self, log: Path) -> str:
        self._commands.run(log, "train", *self._training_words("whole"))
        run = RecordedRun(self._folder / "whole")
        losses = [value for _, value in run.points("step", "loss")]
        counted = {name: len(run.of(name)) for name in ("validation", "checkpoint")}
        counts = ", ".join(f"{number} {name}{'s' * (number != 1)}" for name, number in counted.items())
        tested = ", tested" if run.of("test") else ", no test split"
        taken = "".join(f"; fallback: {_fallback_in_words(entry)}" for entry in run.entries("fallbacks"))
        return f"{len(losses)} steps, loss {losses[0]:.4g} to {losses[-1]:.4g}, {counts}{tested}{taken}"

    def _kill(self, log: Path) -> str:
        """Train again, and kill all processes as soon as a checkpoint is committed."""
        folder = RunFolder(self._folder / "killed")
        with self._commands.started(log, "train", *self._training_words("killed")) as process:
            while not folder.checkpoint_steps() and process.poll() is None:
                self._commands.refuse_overtime("train")
                time.sleep(_POLL_SECONDS)
            refuse_failure(process, log)
            if process.poll() == 0:
                self.result.missed.append(
                    "a kill in mid-run: the run ended before it could be killed (try more --steps)"
                )
                return "the run ended before it could be killed"
            kill_tree(process)
        return f"SIGKILL to all processes once the checkpoint of step {folder.checkpoint_steps()[-1]} was committed"

    def _resume(self, log: Path) -> str:
        self._commands.run(log, "train", *self._training_words("killed"), "resume=auto")
        whole, killed = (_digests(self._folder / name) for name in ("whole", "killed"))
        differing = [name for name in whole if killed.get(name) != whole[name]]
        if not differing:
            return f"the same bytes as the run that was not killed: {', '.join(whole)}"
        what = f"{', '.join(differing)} differ from those of the run that was not killed"
        training = self._config.training
        if training.deterministic or training.device == "cpu" or accelerator_kind() is None:
            raise StageError(
                f"{what}. docs/checkpoints.md has the limits of an exact resume.", RunFailedError.exit_code
            )
        return f"{what}, as a GPU's kernels may: training.deterministic=true repeats them exactly"

    def _merge(self, log: Path) -> str:
        self._commands.run(log, "merge", str(self._folder / "killed"), str(self._folder / "merged"))
        return next((line for line in log.read_text().splitlines() if line.startswith("Reloaded by")), "merged")

    def _verify(self, log: Path) -> str:
        self._commands.run(log, "verify", str(self._folder / "merged"))
        return "the merged folder answers as the run does"

    def _training_words(self, name: str) -> list[str]:
        return [*self._words, *self._changed, word("output_dir", str(self._folder / name)), "resume=never"]


@contextmanager
def rehearsal_folder(config: Config, keep: Path | None) -> Iterator[Path]:
    """Make the folder of a rehearsal beside that of the run, and remove it, or all but the logs after a failure.

    Args:
        config: the real run.
        keep: a folder to use instead, which stays.

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
    except OSError:  # a stage says so; the others have another place
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except (KeyboardInterrupt, Terminated):  # no stage has failed: nobody needs the logs
        shutil.rmtree(folder)
        raise
    finally:
        for inside in folder.iterdir() if folder.is_dir() else ():
            if inside.name != "logs":
                shutil.rmtree(inside)


def _digests(run: Path) -> dict[str, str]:
    """Return digests of the trained weights and of the last optimizer state, by name."""
    last = RunFolder(run).checkpoint(RunFolder(run).checkpoint_steps()[-1])
    files = [*sorted((run / "adapter").glob("*.safetensors")), *sorted(last.glob(OPTIMIZER_FILE))]
    return {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _last_json(log: Path) -> dict[str, Any]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    record: dict[str, Any] = json.loads(next((line for line in reversed(lines) if line.startswith("{")), "{}"))
    return record


def _warnings(record: dict[str, Any]) -> str:
    return "".join(f"; {found['level']}: {found['what']}" for found in record["findings"] if found["level"] != "ok")


def _fallback_in_words(entry: dict[str, Any]) -> str:
    return f"{entry.get('what')} is {entry.get('used')}: {entry.get('why')}"
