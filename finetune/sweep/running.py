"""Run trials as commands of their own, one after the other or several at once, and end weak ones early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from finetune.diagnose.rehearsal_commands import error_in
from finetune.errors import PreemptedError
from finetune.runs.file_lock import FileLock, try_file_lock
from finetune.runs.metrics import MetricsReader, number_in, sign_of
from finetune.runs.recorded_run import Points, best_point, step_of
from finetune.signals import end_with_parent, received_stop_signal, stops_after_step
from finetune.sweep.halving import find_weak
from finetune.sweep.trials import ENDED_EARLY, FINISHED, Sweep, Trial
from finetune.terminal import say

_POLL_SECONDS = 0.1
_STOP_SECONDS = 15.0
"""How long a trial that was stopped twice may take to end before it is killed."""


class RunningTrial:
    """The process of a trial, which has the trial's lock."""

    def __init__(self, trial: Trial, lock: FileLock, place: int, gpus: str | None) -> None:
        self.trial = trial
        self.lock = lock
        self.place = place
        self.compared = 0
        """The number of validations after which it was compared with others."""
        self._metrics = MetricsReader(trial.run.folder.metrics_file)
        self._points: dict[int, float] = {}
        with trial.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "finetune", *trial.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})},
                start_new_session=True,  # Ctrl-C reaches it through this process only
                preexec_fn=partial(end_with_parent, signal.SIGTERM),  # it saves a checkpoint if this process is killed
            )

    def points(self, metric: str) -> Points:
        """Read step and metric of the validations so far."""
        is_new, events = self._metrics.read()
        if is_new:
            self._points.clear()
        for event in events:
            step, value = step_of(event), number_in(event, metric)
            if event["event"] == "validation" and step is not None and value is not None:
                self._points[step] = value
        return sorted(self._points.items())


class Runner:
    """Run trials of a sweep, at most `at_once` at a time. With `retries`, also run trials that have failed.

    `gpus` has the GPUs of each place, as CUDA_VISIBLE_DEVICES names them. If it is empty, the trials see all GPUs.
    """

    def __init__(
        self, trials: Sequence[Trial], sweep: Sweep, *, at_once: int, retries: bool, gpus: Sequence[str]
    ) -> None:
        self._trials, self._sweep = trials, sweep
        self._at_once, self._retries, self._gpus = at_once, retries, gpus
        self._running: list[RunningTrial] = []
        self._is_stopping = False

    def run(self, wanted: Sequence[Trial]) -> None:
        """Run trials, each from its last checkpoint. Those that are finished or run elsewhere are left alone.

        Raises:
            PreemptedError: a signal stopped the sweep, and the trials have ended.
            KeyboardInterrupt: stopped by a second Ctrl-C. A second SIGTERM raises Terminated.
        """
        waiting = deque(wanted)
        with stops_after_step():
            try:
                while self._running or (waiting and not received_stop_signal()):
                    if received_stop_signal() and not self._is_stopping:
                        self._is_stopping = True
                        for running in self._running:
                            running.process.terminate()
                    while waiting and len(self._running) < self._at_once and not self._is_stopping:
                        self._start(waiting.popleft())
                    time.sleep(_POLL_SECONDS)
                    for running in list(self._running):
                        self._look_at(running)
            finally:
                self._end_all()
            if stopped_by := received_stop_signal():
                finished = sum(trial.state in FINISHED for trial in self._trials)
                raise PreemptedError(
                    f"the sweep was stopped by {stopped_by.name}: {finished} of {len(self._trials)} trials are "
                    "finished. The same command goes on with the others, from their last checkpoints."
                )

    def _start(self, trial: Trial) -> None:
        lock = try_file_lock(trial.lock)
        state = trial.state
        if lock is None:
            _say(f"{trial.name} is left to the process that runs it")
        elif state in FINISHED and not (self._retries and state == "failed"):
            lock.release()
        else:
            trial.forget_failure()
            place = min(set(range(self._at_once)) - {running.place for running in self._running})
            _say(f"{trial.name}: {trial.command}")
            gpus = self._gpus[place % len(self._gpus)] if self._gpus else None
            self._running.append(RunningTrial(trial, lock, place, gpus))

    def _look_at(self, running: RunningTrial) -> None:
        has_ended = running.process.poll() is not None  # before the metrics are read: none come after it
        self._compare(running)
        if has_ended:
            self._running.remove(running)
            self._note_end(running)
            running.lock.release()

    def _compare(self, running: RunningTrial) -> None:
        """End a trial that is weak after its last validation."""
        trial, points = running.trial, running.points(self._sweep.metric)
        if not self._sweep.halving or len(points) == running.compared or trial.note:
            return
        weak = find_weak(
            points,
            lambda: [other.points() for other in self._trials if other is not trial],
            after=running.compared,
            factor=self._sweep.halving,
            sign=sign_of(self._sweep.metric),
            last_step=trial.run.num_steps,
        )
        running.compared = len(points)
        if weak is not None:
            trial.end(ENDED_EARLY, weak._asdict())
            _say(f"{trial.name}: ended early, {self._sweep.metric} {weak}")
            running.process.terminate()

    def _note_end(self, running: RunningTrial) -> None:
        """Say how a trial ended, and note it if it failed."""
        trial, code = running.trial, running.process.returncode
        if trial.note:
            return
        state, best = trial.run.state, best_point(trial.points(), self._sweep.metric)
        if code in (0, PreemptedError.exit_code) or self._is_stopping or state == "running":
            measured = f", {self._sweep.metric} {best[1]:.4g} at step {best[0]}" if best else ""
            _say(f"{trial.name}: {state}{measured}")
            return
        why = error_in(trial.log)
        trial.end("failed", {"exit_code": code, "why": why})
        _say(f"{trial.name}: failed with exit code {code}: {why}")

    def _end_all(self) -> None:
        """Stop the processes that an error or a second signal leaves behind, and wait for them."""
        for running in self._running:
            running.process.terminate()
        for running in self._running:
            try:
                running.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(running.process.pid, signal.SIGKILL)
                running.process.wait()
            running.lock.release()


def _say(text: str) -> None:
    """Show a line at once, also in a pipe: a sweep takes hours."""
    say(text)
    sys.stdout.flush()
