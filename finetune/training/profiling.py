"""Profile some steps of a run with torch's profiler, and write the trace into the run's folder."""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from finetune.errors import ConfigError
from finetune.fallbacks import Fallback
from finetune.runs.durable import describe_os_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune.distributed.runtime import Runtime
    from finetune.runs.folder import RunFolder
    from finetune.training.step import StepResult

_WARM_UP_STEPS = 2
"""The first steps allocate memory, choose kernels and compile."""
_NUM_TABLE_ROWS = 15
_STEP_RANGE = re.compile(r"step \d+: (data|training)")
_log = logging.getLogger(__name__)


class Profile(NamedTuple):
    """The profile of some steps."""

    first_step: int
    last_step: int
    seconds_per_step: float
    """The time of a step, from the wait for its rows to its update, without validation and saving."""
    file: str
    """The trace, relative to the run's folder."""
    table: str
    """The operators that took the most time, as torch's profiler prints them."""

    def describe(self) -> str:
        """Return the time of a step: `profile of steps 3 to 7: 142 ms a step`."""
        steps = _describe_steps(self.first_step, self.last_step)
        return f"profile of {steps}: {1000 * self.seconds_per_step:,.3g} ms a step"

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for run.json."""
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "seconds_per_step": self.seconds_per_step,
            "files": [self.file],
            "summary": self.describe(),
        }


class StepProfiler:
    """A callback that profiles the first steps of rank 0 after a start or resume, after two steps of warm-up.

    As a context manager, it ends an incomplete profile on exit and writes nothing for it. `done` steps came before.
    `write` records a profile; None on other ranks.

    Raises:
        ConfigError: a profiler is running already. torch has only one, and a second one would cut its trace short.
    """

    def __init__(
        self,
        runtime: Runtime,
        folder: RunFolder,
        *,
        num_profiled: int,
        done: int,
        num_steps: int,
        write: Callable[[Profile], None] | None,
    ) -> None:
        self._write_record = write
        self._runtime = runtime
        self._folder = folder
        self._recording: Any = None
        self._first = done + 1 + min(_WARM_UP_STEPS, max(num_steps - done - 1, 0))
        self._last = min(self._first + num_profiled - 1, num_steps)
        self._is_wanted = self._first <= self._last and runtime.is_main_process
        if self._is_wanted:
            from torch._C._autograd import _profiler_enabled

            if _profiler_enabled():
                raise ConfigError(
                    f"training.profile is {num_profiled}, but the script profiles already, and torch has only one "
                    "profiler. Remove one of the two."
                )

    def before_step(self, step: int) -> None:
        """Start if this is the first step to profile. A step may be announced twice, at the end of an epoch."""
        if not self._is_wanted or step != self._first or self._recording is not None:
            return
        from torch.profiler import ProfilerActivity, profile, record_function

        device = self._runtime.device.type.upper()
        activities = {ProfilerActivity.CPU, getattr(ProfilerActivity, device, ProfilerActivity.CPU)}
        self._recording = profile(activities=activities, profile_memory=True)
        self._recording.start()
        self._runtime.liveness.name_ranges(record_function)

    def on_step(self, result: StepResult) -> None:
        """Write the profile after its last step. A preempted run has no time for it; the resumed run makes its own."""
        if self._recording is None or result.step != self._last or result.num_preempted:
            return
        self._runtime.liveness.enter_phase("profiling", result.step)
        try:
            profile = self._write(self._stop())
        except Exception as error:  # training goes on without a profile
            reason = describe_os_error(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            wanted = f"a profile of {_describe_steps(self._first, self._last)}"
            self._runtime.fallbacks.take(Fallback(what="training.profile", wanted=wanted, used="none", why=reason))
        else:
            if self._write_record is not None:
                self._write_record(profile)

    def _stop(self) -> Any:
        recording, self._recording = self._recording, None
        self._runtime.liveness.name_ranges(nullcontext)
        recording.stop()
        return recording

    def _write(self, recording: Any) -> Profile:
        averages = recording.key_averages()
        seconds = sum(event.cpu_time_total for event in averages if _STEP_RANGE.fullmatch(event.key)) / 1e6
        time = "self_device_time_total" if self._runtime.device.type == "cuda" else "self_cpu_time_total"
        name = f"trace-steps-{self._first}-{self._last}-rank0.json.gz"
        self._folder.profile.mkdir(exist_ok=True)
        unfinished = self._folder.profile / f".tmp-{name}"
        recording.export_chrome_trace(str(unfinished))
        unfinished.replace(self._folder.profile / name)
        return Profile(
            self._first,
            self._last,
            seconds_per_step=seconds / (self._last - self._first + 1),
            file=f"{self._folder.profile.name}/{name}",
            table=averages.table(sort_by=time, row_limit=_NUM_TABLE_ROWS, max_name_column_width=40),
        )

    def __enter__(self) -> tuple[Self]:
        return (self,)

    def __exit__(self, *_: object) -> None:
        if self._recording is not None:
            self._stop()
            steps = _describe_steps(self._first, self._last)
            _log.warning("the profile of %s is not written: training ended before", steps)


def _describe_steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
