"""Run trials as commands, one after the other, and end weak ones early.

Trials end early by asynchronous successive halving (ASHA; Li et al. 2020, arXiv:1810.05934). With a factor of 3, trials
are compared after their validations 1, 3, 9 and so on. There, a trial goes on if its metric is among the best third of
the trials that have got there so far. Nobody waits for slower trials. Fewer than three trials are not compared, and the
last validation of a run ends no trial, because it is over anyway. Weak trials are stopped, not paused. The decision
depends only on the values at each validation and on the order of the trials, so with one trial at a time a sweep always
ends the same ones.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from finetune.diagnose.rehearsal_commands import error_in, start_command
from finetune.errors import PreemptedError
from finetune.runs.file_lock import try_file_lock
from finetune.runs.metrics import number_in, sign_of, step_of
from finetune.runs.metrics_reader import MetricsReader
from finetune.runs.recorded_run import ENDED_EARLY, Points
from finetune.signals import end_with_parent, received_stop_signal, stops_after_step
from finetune.sweep.trials import FINISHED, Sweep, Trial
from finetune.terminal import say

_POLL_SECONDS = 0.1
_STOP_SECONDS = 15.0
"""How long a trial that was stopped twice may take to end before it is killed."""


class LostComparison(NamedTuple):
    """The comparison that ends a trial."""

    validation: int
    """The number of the validation, counted from 1."""
    step: int
    value: float
    better: int
    """The number of trials with a better metric there."""
    compared: int
    """The number of trials that have got there, this one included."""


def find_lost_comparison(
    points: Points,
    read_others: Callable[[], Sequence[Points]],
    *,
    after: int,
    factor: int,
    sign: int,
    last_step: int | None,
) -> LostComparison | None:
    """Return the first comparison that a trial has lost; None if it goes on.

    `points` are step and metric of its validations so far, of which it was compared `after` the first ones before. One
    of `factor` trials goes on. `sign` is 1 if a higher metric is better, else -1.
    """

    def merit(value: float) -> float:
        return sign * value if math.isfinite(value) else -math.inf

    others: Sequence[Points] | None = None
    number = 1
    while number <= len(points):
        step, value = points[number - 1]
        if number > after and step != last_step:
            others = read_others() if others is None else others
            merits = [merit(other[number - 1][1]) for other in others if len(other) >= number]
            better = sum(other > merit(value) for other in merits)
            compared = len(merits) + 1
            if compared >= factor and better >= compared // factor:
                return LostComparison(number, step, value, better, compared)
        number *= factor
    return None


def run_trials(sweep: Sweep, trials: Sequence[Trial], chosen: Sequence[Trial], *, retries: bool) -> None:
    """Run the chosen trials, each from its last checkpoint. With `retries`, also run those that have failed.

    Trials that are finished, or that another process runs, are left alone.

    Raises:
        PreemptedError: a signal stopped the sweep, and its trial has ended.
        KeyboardInterrupt: stopped by a second Ctrl-C. A second SIGTERM raises Terminated.
    """
    with stops_after_step():
        for trial in chosen:
            if received_stop_signal():
                break
            lock = try_file_lock(trial.lock)
            if lock is None:
                _say(f"{trial.name} is left to the process that runs it")
                continue
            with lock:
                state = trial.state
                is_continued = state == "running" and bool(trial.run.note)  # by the command that was printed for it
                if (state not in FINISHED and not is_continued) or (retries and state == "failed"):
                    trial.run.note_file.unlink(missing_ok=True)  # of a failure
                    _RunningTrial(trial, sweep, [other for other in trials if other is not trial]).wait()
        if stopped_by := received_stop_signal():
            finished = sum(trial.state in FINISHED for trial in trials)
            raise PreemptedError(
                f"the sweep was stopped by {stopped_by.name}: {finished} of {len(trials)} trials are finished. "
                "The same command goes on with the others, from their last checkpoints."
            )


class _RunningTrial:
    """The process of a trial."""

    def __init__(self, trial: Trial, sweep: Sweep, others: Sequence[Trial]) -> None:
        self._trial = trial
        self._sweep = sweep
        self._others = others
        self._metrics = MetricsReader(trial.run.folder.metrics_file)
        self._points: dict[int, float] = {}
        self._num_compared = 0
        self._is_ended_early = False
        _say(f"{trial.name}: {trial.command}")
        log = trial.log
        self._log_start = log.stat().st_size if log.exists() else 0  # earlier starts of this trial have written there
        # If this process is killed, the trial gets SIGTERM and saves a checkpoint.
        self._process = start_command(trial.arguments, log, partial(end_with_parent, signal.SIGTERM))

    def wait(self) -> None:
        """Wait until the trial ends. Stop it if it is weak or if this process is stopped."""
        is_stopping = has_ended = False
        try:
            while not has_ended:
                time.sleep(_POLL_SECONDS)
                has_ended = self._process.poll() is not None  # before the metrics are read: none come after it
                self._compare()
                if received_stop_signal() and not is_stopping:
                    is_stopping = True
                    self._process.terminate()
        finally:
            self._end()  # after an error or a second signal the process still runs
        if not self._is_ended_early:
            self._note_end(is_stopping)

    def _compare(self) -> None:
        """End the trial if it is weak after its last validation."""
        sweep, points = self._sweep, self._read_points()
        if not sweep.halving or self._is_ended_early or len(points) == self._num_compared:
            return
        comparison = find_lost_comparison(
            points,
            lambda: [other.points() for other in self._others],
            after=self._num_compared,
            factor=sweep.halving,
            sign=sign_of(sweep.metric),
            last_step=self._trial.run.num_steps,
        )
        self._num_compared = len(points)
        if comparison is not None:
            self._is_ended_early = True
            self._trial.end(ENDED_EARLY, comparison._asdict())
            rank = f"rank {comparison.better + 1} of {comparison.compared} there"
            value = f"{sweep.metric} {comparison.value:.4g}"
            _say(f"{self._trial.name}: ended early, {value} at step {comparison.step}, {rank}")
            self._process.terminate()

    def _read_points(self) -> Points:
        """Return step and metric of the validations so far."""
        is_new, events = self._metrics.read()
        if is_new:
            self._points.clear()
        for event in events:
            step, value = step_of(event), number_in(event, self._sweep.metric)
            if event["event"] == "validation" and step is not None and value is not None:
                self._points[step] = value
        return sorted(self._points.items())

    def _end(self) -> None:
        """Terminate the process if it still runs, and kill it and its children if it does not end."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _note_end(self, is_stopping: bool) -> None:
        """Say how the trial ended, and note it if it failed."""
        trial, code = self._trial, self._process.returncode
        state, best = trial.state, trial.best_point()
        if code in (0, PreemptedError.exit_code) or is_stopping or state == "running":
            measured = f", {self._sweep.metric} {best[1]:.4g} at step {best[0]}" if best else ""
            _say(f"{trial.name}: {state}{measured}")
            return
        error = error_in(trial.log, start=self._log_start)
        if code < 0:
            error = f"{signal.Signals(-code).name} ended it. The last line of its output: {error}"
        trial.end("failed", {"exit_code": code, "why": error})
        _say(f"{trial.name}: failed with exit code {code}: {error}")


def _say(text: str) -> None:
    """Show a line at once, also in a pipe: a sweep takes hours."""
    say(text)
    sys.stdout.flush()
