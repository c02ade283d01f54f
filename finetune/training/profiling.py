"""Profile some steps of a run with torch's profiler, and write each rank's trace into the run's folder."""

from __future__ import annotations

import errno
import gzip
import logging
import re
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from finetune.distributed.guardian.faults import format_ranks
from finetune.fallbacks import Fallback
from finetune.runs.durable import describe_os_error, replace_file

if TYPE_CHECKING:
    from finetune.distributed.runtime import Runtime
    from finetune.runs.folder import RunFolder

_WARM_UP_STEPS = 2
"""The first steps allocate memory, choose kernels and compile."""
_COMPRESSION = 5
_NUM_NAMED = 5
_NUM_TABLE_ROWS = 15
_STEP_RANGE = re.compile(r"step \d+: (data|training)")
_log = logging.getLogger(__name__)


class Profile(NamedTuple):
    """The profile of some steps of one rank."""

    first_step: int
    last_step: int
    seconds_per_step: float
    """The time of a step, from the wait for its rows to its update, without validation and saving."""
    shares: dict[str, float]
    """The share of each operator in the time of all, the largest first: time of the GPU if there is one."""
    table: str
    """The table that torch's profiler makes of its averages."""
    file: str
    """The trace, relative to the run's folder."""

    def describe(self) -> str:
        """Name the operators that took the most time: `profile of steps 3 to 7: 142 ms a step; 61 % aten::mm, ...`."""
        most = ", ".join(f"{share:.0%} {name}" for name, share in list(self.shares.items())[:_NUM_NAMED])
        time = f"{1000 * self.seconds_per_step:,.3g} ms a step"
        return f"profile of {_describe_steps(self.first_step, self.last_step)}: {time}; of the time in operators {most}"

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for run.json."""
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "seconds_per_step": self.seconds_per_step,
            "shares": self.shares,
            "files": [self.file],
            "summary": self.describe(),
        }


class StepProfiler:
    """Profile the first steps after a start or resume, after two steps of warm-up.

    As a context manager, it ends an incomplete profile on exit and writes nothing for it.

    Collective: every rank makes one and calls it in the same steps.

    Args:
        runtime: names its phases and collectives in the trace.
        folder: of the run. A rank that cannot see it, on another node, writes nothing.
        wanted: how many steps to profile; 0: none.
        done: steps done before this start.
        num_steps: steps of the whole run.
    """

    def __init__(self, runtime: Runtime, folder: RunFolder, *, wanted: int, done: int, num_steps: int) -> None:
        self._runtime = runtime
        self._folder = folder
        self._recording: Any = None
        self._why_not = ""
        left = num_steps - done
        self._first = done + 1 + min(_WARM_UP_STEPS, max(left - 1, 0))
        self._last = min(self._first + wanted - 1, num_steps)
        self._is_wanted = wanted > 0 and left > 0
        if self._is_wanted and self._last < done + _WARM_UP_STEPS + wanted and runtime.is_main_process:
            _log.warning(
                "training.profile=%d: only %s will be profiled, after %d to warm up: the run ends with step %d",
                wanted,
                _describe_steps(self._first, self._last),
                self._first - done - 1,
                num_steps,
            )

    def before(self, step: int) -> None:
        """Start where this is the first step to profile."""
        if not self._is_wanted or step != self._first or self._recording is not None:
            return
        from torch._C._autograd import _profiler_enabled
        from torch.profiler import ProfilerActivity, profile, record_function

        if _profiler_enabled():  # a second one would cut its trace short
            self._why_not = "the script already profiles, and torch has only one profiler"
            return
        device = self._runtime.device.type.upper()
        activities = {ProfilerActivity.CPU, getattr(ProfilerActivity, device, ProfilerActivity.CPU)}
        self._recording = profile(activities=activities, profile_memory=True)
        self._recording.start()
        self._runtime.name_ranges(record_function)

    def after(self, step: int) -> Profile | None:
        """Write the profile after its last step.

        Collective: every rank, after the same step.

        Returns:
            This rank's profile; None after any other step, or if it could not be written.

        Raises:
            ConfigError: a rank could not write its profile, and the run is strict.
        """
        if not self._is_wanted or step != self._last:
            return None
        self._runtime.at("profiling", step)
        profile = None
        if self._recording is not None:
            try:
                profile = self._write(self._stop())
            except OSError as error:
                self._why_not = describe_os_error(error)
            except Exception as error:  # of the profiler: training continues
                self._why_not = f"{type(error).__name__}: {error}"
        self._agree(has_failed=profile is None)
        return profile

    def _agree(self, *, has_failed: bool) -> None:
        """Record on every rank which ranks have no profile. Collective."""
        ranks = range(self._runtime.world_size)
        failures = self._runtime.sum(float(has_failed and rank == self._runtime.rank) for rank in ranks)
        failed = [rank for rank, failure in zip(ranks, failures, strict=True) if failure]
        if failed:
            self._runtime.fallbacks.take(
                Fallback(
                    what="training.profile",
                    wanted=f"a profile of {_describe_steps(self._first, self._last)}",
                    used=f"{format_ranks(failed)} wrote no trace; training continues",
                    why=self._why_not or f"the log of {format_ranks(failed)} says why",
                )
            )

    def _stop(self) -> Any:
        recording, self._recording = self._recording, None
        self._runtime.name_ranges(nullcontext)
        recording.stop()
        return recording

    def _write(self, recording: Any) -> Profile:
        if not self._folder.record_file.exists():
            raise FileNotFoundError(errno.ENOENT, f"this rank does not see {self._folder.path}")
        averages = recording.key_averages()
        time = "self_device_time_total" if self._runtime.device.type == "cuda" else "self_cpu_time_total"
        shares = _shares_of_operators(averages, time)
        if not shares:
            raise ValueError("the trace has no kernels; the driver may reserve its counters for administrators")
        seconds = sum(event.cpu_time_total for event in averages if _STEP_RANGE.fullmatch(event.key)) / 1e6
        with tempfile.TemporaryDirectory(prefix="finetune-profile-") as scratch:
            plain = Path(scratch) / "trace.json"
            recording.export_chrome_trace(str(plain))
            packed = gzip.compress(plain.read_bytes(), _COMPRESSION, mtime=0)
        name = f"trace-steps-{self._first}-{self._last}-rank{self._runtime.rank}.json.gz"
        self._folder.profile.mkdir(exist_ok=True)
        replace_file(self._folder.profile / name, packed)
        return Profile(
            self._first,
            self._last,
            seconds_per_step=seconds / (self._last - self._first + 1),
            shares=shares,
            table=averages.table(sort_by=time, row_limit=_NUM_TABLE_ROWS, max_name_column_width=40),
            file=f"{self._folder.profile.name}/{name}",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._recording is None:
            return
        self._stop()
        if self._runtime.is_main_process:
            _log.warning(
                "the profile of %s is not written: training ended before", _describe_steps(self._first, self._last)
            )


def _describe_steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _shares_of_operators(averages: Any, time: str) -> dict[str, float]:
    """Return the share of each operator in the time of all, the largest first; empty if no time was recorded.

    `time` names the attribute of torch's averages that holds an operator's own time.
    """
    # A range that was named around operators is not an operator, and a kernel counts for the one that launched it.
    operators = [each for each in averages if each.device_type.name == "CPU" and not each.is_user_annotation]
    total = sum(getattr(operator, time) for operator in operators)
    found = {operator.key: getattr(operator, time) / total for operator in operators if getattr(operator, time) > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
