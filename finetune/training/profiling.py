"""Profile some steps of a run with torch's profiler, and write each rank's trace and memory into the run's folder."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from finetune.distributed.guardian.faults import ranks_in_words
from finetune.fallbacks import Fallback
from finetune.runs.durable import describe_os_error, in_units, replace_file
from finetune.training.trace import MemoryPeak, TimeShares, memory_peak, parse_trace, time_shares

if TYPE_CHECKING:
    from finetune.distributed.runtime import Runtime
    from finetune.runs.folder import RunFolder

_WARM_UP_STEPS = 2
"""The first steps allocate memory, choose kernels and compile."""
_COMPRESSION = 5
_log = logging.getLogger(__name__)


class Profile(NamedTuple):
    """What one rank's profile found, and its files in the run's folder."""

    time: TimeShares
    memory: MemoryPeak | None
    files: tuple[str, ...]
    """Relative to the run's folder; the trace first."""

    def in_words(self) -> str:
        """Say what took the time: `profile of steps 3 to 7: 61 % matrix products, ...; 142 ms a step; ...`."""
        text = f"profile of {_in_words(*self.time.steps)}: {self.time.in_words()}"
        text += f"; {1000 * self.time.seconds_per_step:,.3g} ms a step"
        if self.memory is not None:
            beyond = "" if self.memory.bytes_before else " beyond what was there before"
            text += f"; at most {in_units(self.memory.num_bytes)} of memory{beyond}, in step {self.memory.step}"
        return text

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for run.json."""
        first, last = self.time.steps
        return {
            "first_step": first,
            "last_step": last,
            "seconds_per_step": self.time.seconds_per_step,
            "shares": self.time.shares,
            "peak_memory": self.memory and self.memory.num_bytes,
            "files": list(self.files),
            "summary": self.in_words(),
        }


class StepProfiler:
    """Profile the first steps of a start, after two that warm up.

    As a context it ends a profile whose last step was not reached; nothing is written then.

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
                _in_words(self._first, self._last),
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
            self._why_not = "the script profiles by itself, and torch has one profiler"
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
            This rank's profile; None after any other step, and where it could not be written.

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
            except Exception as error:  # of the profiler, or of a trace in another form: training goes on
                self._why_not = f"{type(error).__name__}: {error}"
        self._agree(has_failed=profile is None)
        return profile

    def _agree(self, *, has_failed: bool) -> None:
        """Let every rank record that some ranks have no profile. Collective."""
        ranks = range(self._runtime.world_size)
        failures = self._runtime.sum(float(has_failed and rank == self._runtime.rank) for rank in ranks)
        failed = [rank for rank, failure in zip(ranks, failures, strict=True) if failure]
        if failed:
            self._runtime.fallbacks.take(
                Fallback(
                    what="training.profile",
                    wanted=f"a profile of {_in_words(self._first, self._last)}",
                    used=f"none of {ranks_in_words(failed)}; training goes on",
                    why=self._why_not or f"the log of {ranks_in_words(failed)} says why",
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
        with tempfile.TemporaryDirectory(prefix="finetune-profile-") as scratch:
            plain = Path(scratch) / "trace.json"
            recording.export_chrome_trace(str(plain))
            data = plain.read_bytes()
        trace = parse_trace(data)
        time, memory = time_shares(trace), memory_peak(trace)
        if self._runtime.device.type == "cuda" and not time.has_kernels:
            raise ValueError("the trace has no kernels; the driver may reserve its counters for administrators")
        end = f"steps-{self._first}-{self._last}-rank{self._runtime.rank}"
        contents = {f"trace-{end}.json.gz": gzip.compress(data, _COMPRESSION, mtime=0)}
        if memory is not None:
            contents[f"memory-{end}.json"] = (json.dumps(memory._asdict(), indent=2) + "\n").encode()
        self._folder.profile.mkdir(exist_ok=True)
        for name, content in contents.items():
            replace_file(self._folder.profile / name, content)
        return Profile(time, memory, tuple(f"{self._folder.profile.name}/{name}" for name in contents))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._recording is None:
            return
        self._stop()
        if self._runtime.is_main_process:
            _log.warning("the profile of %s is not written: training ended before", _in_words(self._first, self._last))


def _in_words(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
