"""The journal of a run: it owns the run's folder and writes every file in it except the checkpoints.

Main process only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.render import SCHEMA_LINE, resolved_yaml, schema_text
from finetune.config.run_paths import resolved_paths
from finetune.errors import PreemptedError, RunFailedError
from finetune.inference.losses import LossSums
from finetune.logs import log_only_to, log_to_file, stop_logging_to
from finetune.runs.durable import disk_failures_end_the_run, replace_file
from finetune.runs.folder import RunFolder
from finetune.runs.metrics import subset_key
from finetune.runs.record import RunRecord, RunStart, Status, record_of_start
from finetune.runs.state import TrainerState
from finetune.terminal import shown_folder
from finetune.training.reporting.events import Interval, RunEvents
from finetune.training.reporting.progress import TRACE_VIEWER, show_what_next
from finetune.training.reporting.run_warnings import RunWarnings
from finetune.training.saver import Saved, Saver
from finetune.training.step import StepResult
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.fallbacks import Fallbacks
    from finetune.inference.scores import Evaluation
    from finetune.runs.checkpoints import Snapshot
    from finetune.training.profiling import Profile

_log = logging.getLogger(__name__)


class Journal:
    """Open the run's folder and record every event in it. `result` is the outcome, as run.json will record it.

    Raises:
        CheckpointError: the folder cannot be used, see `RunFolder.open`, or its run was started with another
            configuration, see `accepted_changes`. Nothing was changed.
    """

    def __init__(
        self,
        config: Config,
        fallbacks: Fallbacks,
        *,
        world: Mapping[str, Any],
        global_batch: Mapping[str, Any],
        fingerprints: Mapping[str, str],
        former_fingerprints: Callable[[], Mapping[str, str]] = dict,
        rows_read_as: Mapping[str, Sequence[str]] | None = None,
        warnings: RunWarnings | None = None,
        energy: Callable[[], dict[str, float]] = dict,
        refuse_misfit: Callable[[Path], None] = lambda checkpoint: None,
    ) -> None:
        self.folder = RunFolder(config.output_dir).open(config.resume)
        self.result: dict[str, Any] = {}
        self.is_closed = False
        self._example_prompt: str | None = None
        self._profile_summary: str | None = None
        self._fallbacks = fallbacks
        self._config = config
        self._num_steps = 0
        self._energy = energy
        self._interval = Interval()
        self._last_step_at = time.monotonic()
        self._events = RunEvents(config, self.folder, fallbacks, warnings or RunWarnings())
        self._saver = Saver(self.folder, config.checkpoint, fallbacks, before=self._before_save)
        self._num_tokens = self._num_computed = 0
        self._saving = {"checkpoints": 0, "blocked_seconds": 0.0, "write_seconds": 0.0}
        self._record = RunRecord(self.folder.record_file, before=self.folder.refuse_lost_folder)
        with ExitStack() as opened:  # if this fails, the caller has no journal to close
            opened.callback(self.folder.close)
            changes: list[dict[str, Any]] = []
            if config.resume == "auto" and self.folder.checkpoint_steps():
                from finetune.training.resume import accepted_changes, refuse_other_global_batch  # only then

                size = global_batch["global_batch_size"]
                refuse_other_global_batch(self.folder, config, global_batch_size=size, world_size=world["world_size"])
                changes = accepted_changes(
                    self.folder, config, fingerprints, former_fingerprints(), refuse_misfit, world.get("precision")
                )
            recorded = config.model_copy(update={"resume_allow": []})  # an allowed change holds for one start only
            with disk_failures_end_the_run("Writing", self.folder.path):
                self._log_file = log_to_file(self.folder.log_file)
                opened.callback(stop_logging_to, self._log_file)
                replace_file(self.folder.schema_file, schema_text().encode())
                replace_file(self.folder.config_file, f"{SCHEMA_LINE}\n{resolved_yaml(recorded)}".encode())
            start = RunStart(
                **world,
                global_batch=global_batch,
                fallbacks=fallbacks.as_records(),
                fingerprints=fingerprints,
                rows_read_as=rows_read_as or {},
                resolved_paths=resolved_paths(config),
                started_with=record_of_start(recorded, fingerprints),
                resume_changes=changes,
            )
            self._record.start(start)
            opened.callback(self._events.close)
            self._opened = opened.pop_all()

    def recorded(self, name: str) -> Mapping[str, Any] | None:
        """Return a mapping in run.json of a resumed run: `memory`. Empty if it is missing; None if the run is new."""
        if not self.folder.checkpoint_steps():
            return None
        from finetune.runs.recorded_run import RecordedRun

        return RecordedRun(self.folder.path).part(name)

    def record(self, **entries: Any) -> None:
        """Record in run.json what was chosen or measured before step 1, for example the memory choice."""
        self._record.update(**entries)

    def start_training(self, state: TrainerState, num_steps: int, *, owes_validation: bool = False) -> None:
        """Start or continue training at `state`, and remove the later events from metrics.jsonl."""
        self.result["num_skipped_steps"] = state.num_skipped_steps
        if state.num_overflows:
            self.result["num_overflows"] = state.num_overflows
        self._record.update(num_steps=num_steps)
        self._num_steps = num_steps
        self._events.start(state.step, num_steps, owes_validation=owes_validation)
        self._energy()  # what was spent before does not count
        self._last_step_at = time.monotonic()

    def step(self, state: TrainerState, result: StepResult, *, data_wait_seconds: float | None = None) -> None:
        """Record an optimizer step; `state` is the one after it. For the time of waiting see `Interval.add`."""
        now = time.monotonic()
        seconds = max(now - self._last_step_at, 1e-9)
        self._last_step_at = now
        self._num_tokens += result.num_tokens
        self._num_computed += result.num_computed
        self._interval.add(
            seconds=seconds,
            num_tokens=result.num_tokens,
            data_wait_seconds=data_wait_seconds,
            rank_seconds=result.rank_seconds,
        )
        if num_overflows := state.num_overflows - self.result.get("num_overflows", 0):
            self.result["num_overflows"] = state.num_overflows
        if result.is_skipped:
            self.result["num_skipped_steps"] = state.num_skipped_steps
            _log.warning(
                "step %d is skipped (number %d of at most %d: training.max_skipped_steps): %s; weights and optimizer "
                "are unchanged",
                state.step,
                state.num_skipped_steps,
                self._config.training.max_skipped_steps,
                result.not_finite,
            )
        self._events.write(
            "step",
            step=state.step,
            epoch=_epoch_of_last_step(state),
            loss=result.loss,
            learning_rate=result.learning_rate,
            grad_norm=result.grad_norm,
            num_targets=result.num_targets,
            num_tokens=result.num_tokens,
            num_computed=result.num_computed,
            tokens_per_second=result.num_tokens / seconds,
            **({"skipped": True} if result.is_skipped else {}),
            **({} if state.loss_scale is None else {"loss_scale": state.loss_scale}),
            **({"overflows": num_overflows} if num_overflows else {}),
            **result.metrics,
        )
        if state.step % self._config.training.log_every == 0 or state.step == self._num_steps:
            self.folder.refuse_lost_folder()  # writing to the open file of metrics would not fail
            interval, self._interval = self._interval, Interval()
            self._events.write("resources", step=state.step, **interval.metrics(), **self._energy())

    def validation(self, state: TrainerState, sums: LossSums, *, metrics: Mapping[str, float]) -> None:
        """Record a validation after a step; `metrics` are its metrics other than the loss."""
        best_metric = self._config.checkpoint.best_metric
        if metrics:
            self.result["validation_figures"] = dict(metrics)
        self._events.write(
            "validation",
            step=state.step,
            epoch=_epoch_of_last_step(state),
            loss=sums.loss,
            standard_error=sums.standard_error,
            num_targets=int(sums.num_targets),
            **metrics,
            **({} if best_metric == "loss" else {"best_metric": best_metric}),
        )
        self._last_step_at = time.monotonic()  # validation does not count towards the next step

    def save(self, snapshot: Snapshot, *, best: int | None) -> None:
        """Begin to write a checkpoint, see `Saver.save`."""
        self._note_saved(self._saver.save(snapshot, best=best))
        self._last_step_at = time.monotonic()

    def collect_saves(self) -> None:
        """Record a checkpoint that has been written in the background, see `Saver.collect`."""
        self._note_saved(self._saver.collect())

    def finish_saves(self, *, is_last: bool) -> bool:
        """Wait for the save in progress, see `Saver.finish`. Return whether the newest checkpoint is on the disk."""
        self._note_saved(self._saver.finish(is_last=is_last))
        return self._saver.error is None

    def profile(self, profile: Profile) -> None:
        """Record the profile of some steps, and log its table of operators."""
        self._profile_summary = profile.describe()
        trace = shown_folder(self.folder.path / profile.file)
        _log.info("%s. Open %s in %s\n%s", self._profile_summary, trace, TRACE_VIEWER, profile.table)
        self._record.update(profile=profile.as_record())
        self._last_step_at = time.monotonic()  # writing it does not count towards the next step

    def end_training(self) -> None:
        """Close the live view and log the cost of saving."""
        if self._saving["checkpoints"] and "saving" not in self.result:
            self.result["saving"] = self._saving
            written, waited = counted(int(self._saving["checkpoints"]), "checkpoint"), self._saving["blocked_seconds"]
            _log.info("%s written; training waited %.2f s", written, waited)
        if self._num_computed < self._num_tokens and "shared_tokens" not in self.result:
            shared = self.result["shared_tokens"] = 1 - self._num_computed / self._num_tokens
            _log.info("%.0f%% of all tokens were in shared prefixes, computed once", 100 * shared)
        self._events.close_view()

    def test(self, evaluation: Evaluation) -> None:
        """Record the result of the test phase: the scores of both models, and their answers in run.json."""
        self._example_prompt = next((row.question for row in evaluation.answers if row.question), None)
        self.result["answers"] = [
            {
                **({"context": row.context} if row.context else {}),
                "prompt": row.prompt,
                "expected": row.expected,
                **{name: row.answers.get(name) for name in ("tuned", "base")},
            }
            for row in evaluation.answers
        ]
        self.result["test_split"] = evaluation.split
        self.result["test_rows"] = evaluation.num_rows
        self.result["test_rows_left_out"] = evaluation.num_left_out
        if evaluation.verdicts:
            self.result["verdict"] = {name: verdict.as_record() for name, verdict in evaluation.verdicts.items()}
        if evaluation.unended:
            self.result["unended"] = {"sentence": evaluation.unended, **evaluation.num_unended}
        if evaluation.forgetting is not None:
            self.result["forgetting"] = evaluation.forgetting.as_record()
            _log.info("%s", evaluation.forgetting)
        for model, scores in evaluation.scores.items():
            metrics = {"exact_match": None, "json_valid": None, **scores.metrics}
            in_subsets = {
                subset_key(metric, name): value
                for name, each in evaluation.subsets.items()
                for metric, value in {**each.scores[model].metrics, "loss": each.scores[model].loss}.items()
            }
            self._events.write("test", model=model, **metrics, loss=scores.loss, **in_subsets)
            self.result[f"test_{model}"] = {"loss": scores.loss, **metrics}

    def close(self, error: BaseException | None) -> None:
        """Record how the run ended and release the folder. Later calls do nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            self._note_saved(self._saver.close(error))
            self.end_training()
            self._events.metrics.close()
            status, reason = _status(error), f"{type(error).__name__}: {error}"
            if error is None and "num_skipped_steps" not in self.result and not self.folder.adapter.exists():
                status, reason = "stopped", "its script did not train"
            self._record.update(fallbacks=self._fallbacks.as_records())
            if status == "preempted":
                self.result["why"] = str(error)
            elif status != "completed":
                self.result["error"] = reason
            self._record.finish(status, self.result)
            self._events.close()  # last, because a tracker may upload for longer than a launcher waits
            if status == "completed":
                self._say_what_was_written()
                step = self.result.get("best_step")
                taken, profile = list(self._fallbacks), self._profile_summary
                show_what_next(self.folder.path, self._example_prompt, step=step, profile=profile, fallbacks=taken)
            else:  # the command prints it on the screen
                cause = "from the keyboard" if isinstance(error, KeyboardInterrupt) else reason
                log_only_to(self._log_file, __name__, f"the run {status}: {cause}")
        except RunFailedError:
            if error is None:
                raise  # else report the first error: a full disk refuses run.json too
        finally:
            self._opened.close()

    def abandon(self) -> None:
        """Release the folder and record nothing, because the results are not kept."""
        self.is_closed = True
        self._saver.close(None)
        self._opened.close()

    def _before_save(self) -> None:
        self.folder.refuse_lost_folder()
        # If a checkpoint survives a crash, so must the metrics of the steps before it.
        self._events.metrics.sync()

    def _note_saved(self, saved: list[Saved]) -> None:
        for checkpoint in saved:
            self._events.write(
                "checkpoint",
                step=checkpoint.step,
                path=checkpoint.path.relative_to(self.folder.path).as_posix(),
                num_bytes=checkpoint.num_bytes,
                blocked_seconds=round(checkpoint.blocked_seconds, 6),
                write_seconds=round(checkpoint.write_seconds, 6),
            )
            self._saving["checkpoints"] += 1
            self._saving["blocked_seconds"] += checkpoint.blocked_seconds
            self._saving["write_seconds"] += checkpoint.write_seconds

    def _say_what_was_written(self) -> None:
        descriptions = [f"{record['what']}: {record['used']}" for record in self._fallbacks.as_records()]
        fallbacks = f"fallbacks taken: {'; '.join(descriptions)}" if descriptions else "no fallbacks taken"
        num_skipped = self.result.get("num_skipped_steps", 0)
        _log.info(
            "%s: adapter/, checkpoints/, metrics.jsonl, run.json, config.yaml, log.txt written; %s%s",
            shown_folder(self.folder.path),
            fallbacks,
            f"; {counted(num_skipped, 'step')} skipped" if num_skipped else "",
        )


def _status(error: BaseException | None) -> Status:
    if error is None:
        return "completed"
    if isinstance(error, PreemptedError):
        return "preempted"
    return "failed" if isinstance(error, Exception) else "stopped"


def _epoch_of_last_step(state: TrainerState) -> int:
    """Return the epoch of the step just done. `state.epoch` is the epoch of the next step."""
    return state.epoch if state.steps_in_epoch else state.epoch - 1
