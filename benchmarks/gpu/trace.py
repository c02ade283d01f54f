"""Divide the time of a trace of torch's profiler among types of operations, for the table of part `profile`.

It reads the file that `torch.profiler` exports for Perfetto, whatever program was profiled, and needs no torch.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

MATRIX: Final = "matrix products"
ATTENTION: Final = "attention"
ROWS: Final = "elementwise and along rows"
COPIES: Final = "copies and gathers"
OPTIMIZER: Final = "optimizer"
EXCHANGE: Final = "exchange with other ranks"
DATA: Final = "waiting for data"
HOST: Final = "Python and launches"
IDLE: Final = "GPU idle"

Trace = dict[str, Any]
Event = dict[str, Any]

_WITH_ALL_THAT_THEY_CALL = {
    ATTENTION: "aten::_?scaled_dot_product|aten::_(flash|efficient)_attention|torch_attn::|flash_attn|_BlockAttention",
    OPTIMIZER: r"Optimizer\.(step|zero_grad)#",
    EXCHANGE: "collective: |c10d::|gloo:|nccl:|record_param_comms",
}
"""The beginnings of the names of ranges and operators whose whole time is of one kind, whatever runs inside."""
_OPERATORS = {
    MATRIX: r"aten::(mm|addmm|bmm|baddbmm|mv|addmv|dot|_scaled_mm|_int_mm)_?$|mkldnn::|bitsandbytes::",
    COPIES: r"aten::(copy_|_to_copy|clone|cat|stack|embedding|gather|scatter|_?index|masked_select|repeat)",
    HOST: r"aten::(view|_unsafe_view|reshape|t|transpose|permute|expand|slice|select|narrow|chunk|split|"
    r"split_with_sizes|tensor_split|unbind|flatten|squeeze|unsqueeze|alias|as_strided|detach|lift_fresh|empty|empty_like|"
    r"empty_strided|new_empty|new_empty_strided|resize|resolve_conj|resolve_neg|result_type|promote_types|is_same_size|to|item|"
    r"_local_scalar_dense|is_nonzero|contiguous)_?$|(torch::)?autograd::|(?!\w+::)",
}
"""Operators by their own time. Those that only describe a tensor, and autograd's and Python's own work, are the host's.
The rest works element by element, or along rows."""
_KERNELS = {
    EXCHANGE: "nccl",
    ATTENTION: "flash|fmha|attention",
    MATRIX: "gemm|gemv|cutlass|cublas|nvjet|xmma|splitK",
    COPIES: "Memcpy|Memset",
}
"""Words in the names of a GPU's kernels, where the operator that launched one does not say more."""
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_STEP = re.compile(r"step (\d+): (data|training)|ProfilerStep#(\d+)")


class TimeShares(NamedTuple):
    """What took the time of some steps.

    Attributes:
        steps: the numbers of the first and of the last step.
        seconds_per_step: from the wait for the rows to the update; validation and saving are left out.
        shares: of that time by kind, the largest first; they add up to 1. Each instant counts once: on a GPU for the
            kernel that ran, without one for the innermost operator of the thread that trains.
        has_kernels: True if the shares are those of a GPU's time.
    """

    steps: tuple[int, int]
    seconds_per_step: float
    shares: dict[str, float]
    has_kernels: bool


def read_trace(path: Path) -> Trace:
    """Read a Chrome trace.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a whole trace.
    """
    trace = json.loads(path.read_bytes())
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError("it has no list of traceEvents")
    return trace


def time_shares(trace: Trace) -> TimeShares:
    """Say what took the time of the steps in a trace.

    Steps are the ranges `step N: data` and `step N: training`, or torch's own `ProfilerStep#N`; without either, the
    whole trace is one step with the number 0.

    Raises:
        ValueError: the trace holds no operator and no kernel.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = _steps(events)
    nested = list(_nested(events))
    kernels = [event for event in events if event.get("cat") in _ON_GPU]
    spans = [_Span(step.start, step.end, 0, _waits_for(step, has_kernels=bool(kernels))) for step in steps]
    if kernels:
        spans += _kernel_spans(kernels, nested)
    else:
        thread = steps[0].thread
        spans += [
            _Span(*_bounds(each.event), each.depth + 1, each.kind)
            for each in nested
            if _thread(each.event) == thread and not _STEP.fullmatch(each.event["name"])
        ]
    micros = _partition(spans)
    total = sum(micros.values())
    if not total:
        raise ValueError("it has no operator and no kernel")
    numbers = sorted({step.number for step in steps})
    shares = {kind: micros[kind] / total for kind in sorted(micros, key=lambda kind: -micros[kind])}
    return TimeShares((numbers[0], numbers[-1]), total / 1e6 / len(numbers), shares, bool(kernels))


class _Step(NamedTuple):
    """A part of a step on the thread that trains, in microseconds."""

    start: float
    end: float
    number: int
    is_data: bool
    thread: tuple[Any, Any]


class _Span(NamedTuple):
    """Time of one kind. Of two spans at the same instant, the one of the higher rank counts."""

    start: float
    end: float
    rank: int
    """0 for a part of a step: only time inside of one counts."""
    kind: str


class _Nested(NamedTuple):
    """An event of the host, and the ones around it on its thread."""

    event: Event
    depth: int
    kind: str
    is_whole: bool
    """Its kind is also that of everything inside."""


def _bounds(event: Event) -> tuple[float, float]:
    return event["ts"], event["ts"] + event.get("dur", 0)


def _thread(event: Event) -> tuple[Any, Any]:
    return event["pid"], event["tid"]


def _steps(events: Sequence[Event]) -> list[_Step]:
    """Find the parts of steps, in the order of time."""
    found = []
    for event in events:
        if event.get("cat") == "user_annotation" and (match := _STEP.fullmatch(event["name"])):
            number = int(match[1] or match[3])
            found.append(_Step(*_bounds(event), number, match[2] == "data", _thread(event)))
    if found:
        return sorted(found)
    timed = [event for event in events if event.get("cat") in ("cpu_op", *_ON_GPU)]
    if not timed:
        raise ValueError("it has no operator and no kernel")
    threads = Counter(_thread(event) for event in timed if event["cat"] == "cpu_op")
    thread = threads.most_common(1)[0][0] if threads else _thread(timed[0])
    return [_Step(min(e["ts"] for e in timed), max(_bounds(e)[1] for e in timed), 0, False, thread)]


def _waits_for(step: _Step, *, has_kernels: bool) -> str:
    """Return the kind of the time in which nothing else runs."""
    return DATA if step.is_data else IDLE if has_kernels else HOST


def _nested(events: Iterable[Event]) -> Iterator[_Nested]:
    """Yield the host's operators and ranges, each after the ones around it."""
    hosts = ("cpu_op", "user_annotation")
    ours = sorted((e for e in events if e.get("cat") in hosts), key=lambda e: (e["ts"], -e.get("dur", 0)))
    open_in: dict[tuple[Any, Any], list[_Nested]] = defaultdict(list)
    for event in ours:
        stack = open_in[_thread(event)]
        while stack and _bounds(stack[-1].event)[1] <= event["ts"]:
            stack.pop()
        around = stack[-1] if stack else None
        whole, own = _kinds(event["name"])
        whole = around.kind if around and around.is_whole else whole
        one = _Nested(event, depth=len(stack), kind=whole or own, is_whole=bool(whole))
        stack.append(one)
        yield one


@cache
def _kinds(name: str) -> tuple[str, str]:
    """Return the kind of all that happens inside a range or operator, where it has one, and that of its own time."""
    whole = (kind for kind, pattern in _WITH_ALL_THAT_THEY_CALL.items() if re.match(pattern, name))
    own = (kind for kind, pattern in _OPERATORS.items() if re.match(pattern, name))
    return next(whole, ""), next(own, ROWS)


def _kernel_spans(kernels: Iterable[Event], nested: Iterable[_Nested]) -> Iterator[_Span]:
    """Give each kernel the kind of the operator that launched it. Exchange counts only where nothing else runs."""
    launched_by = {number: each for each in nested if (number := _external_id(each.event)) is not None}
    for kernel in kernels:
        by = launched_by.get(_external_id(kernel))
        if by is not None and by.is_whole:
            kind = by.kind
        else:
            named = next((kind for kind, words in _KERNELS.items() if re.search(words, kernel["name"])), "")
            kind = named or (by.kind if by is not None and by.kind != HOST else ROWS)
        yield _Span(*_bounds(kernel), 1 if kind == EXCHANGE else 2, kind)


def _external_id(event: Event) -> Any:
    """Return the number that an operator and the kernels that it launched have in common; None without one."""
    return event.get("args", {}).get("External id")


def _partition(spans: Iterable[_Span]) -> dict[str, float]:
    """Share the time of all steps out among the spans. Returns microseconds by kind."""
    spent: defaultdict[str, float] = defaultdict(float)
    running: list[tuple[int, int, _Span]] = []
    starts = sorted(spans)
    edges = sorted({edge for span in starts for edge in (span.start, span.end)})
    position, steps_until = 0, 0.0
    for now, following in pairwise(edges):
        while position < len(starts) and starts[position].start <= now:
            span = starts[position]
            heapq.heappush(running, (-span.rank, position, span))
            if span.rank == 0:
                steps_until = max(steps_until, span.end)
            position += 1
        while running and running[0][2].end <= now:
            heapq.heappop(running)
        if now < steps_until:
            spent[running[0][2].kind] += following - now
    return spent
