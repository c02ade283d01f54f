"""The figures of a session on a GPU as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.figures import Figures, Record
from benchmarks.gpu.goals import standings
from benchmarks.gpu.parts import tasks

_KINDS = ("matrix products", "attention", "elementwise and along rows", "copies and gathers")


def render(figures: Figures) -> str:
    """Return the newest outcome of each task: what was reached, whole runs, one micro-batch, and what is right."""
    found = {task.name: figures.last(task.name) or {} for task in tasks()}
    newest = {name: record for name, record in found.items() if "figures" in record}
    failed = {name: record["error"] for name, record in found.items() if "error" in record}
    runs, checks = _runs(newest, _limits(figures)), _checks(newest, failed)
    sampled = [_answers(newest)] if any(_figures(newest, "new_tokens_per_second")) else []
    parts = (_facts(newest), map("- {}".format, standings(figures)), runs, _profile(newest), *sampled, checks)
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _facts(newest: Mapping[str, Record]) -> Iterator[str]:
    for name in ("device", "versions", "code"):
        known = dict.fromkeys(one for record in newest.values() for one in record[name].split(", "))
        yield f"- {name}: {', '.join(known)}"
    yield f"- measured: {' and '.join(sorted({record['at'][:10] for record in newest.values()}))}"
    yield "- repeat one with `python -m benchmarks.gpu_session figures.jsonl --again TASK`"


def _limits(figures: Figures) -> dict[str, float]:
    """Return the measured rate of matrix products by day: no two GPUs of one name are equally fast."""
    measured = (record for record in figures.records if record["task"] == "profile/limit" and "figures" in record)
    return {record["at"][:10]: record["figures"]["matmul_flops_per_second"] for record in measured}


def _runs(newest: Mapping[str, Record], limits: Mapping[str, float]) -> Iterator[str]:
    yield from _head(["run", "tokens / s", "of the limit", "memory, GB", "of the plan's", "first step, s"])
    for task, run in _figures(newest, "median_tokens_per_second"):
        limit = limits.get(newest[task]["at"][:10])
        yield _line(
            f"`{task}`",
            f"{run['median_tokens_per_second']:,.0f}",
            f"{run['flops_per_second'] / limit:.0%}" if limit and "flops_per_second" in run else "–",
            f"{run['timed_peak_allocated_bytes'] / 1e9:.1f}",
            f"{run['peak_over_plan']:.3f}" if "peak_over_plan" in run else "–",
            f"{run['first_step_seconds']:.0f}",
        )


def _profile(newest: Mapping[str, Record]) -> Iterator[str]:
    yield from _head(["micro-batch", "tokens", "ms", "ms of the host", "launches", *(f"{kind}, ms" for kind in _KINDS)])
    for task, step in _figures(newest, "launches"):
        kinds = (f"{step.get(f'{kind}, ms', 0):,.1f}" for kind in _KINDS)
        times = (f"{step[name]:,.1f}" for name in ("median_ms", "host_ms"))
        yield _line(f"`{task}`", f"{step['tokens']:,}", *times, f"{step['launches']:,}", *kinds)


def _answers(newest: Mapping[str, Record]) -> Iterator[str]:
    yield from _head(["answers sampled together", "number", "new tokens / s", "ms for the prompts", "ms for a token"])
    for task, sampled in _figures(newest, "new_tokens_per_second"):
        rates = (f"{sampled[name]:,.1f}" for name in ("new_tokens_per_second", "prompt_ms", "ms_per_token"))
        yield _line(f"`{task}`", str(sampled["answers"]), *rates)


def _checks(newest: Mapping[str, Record], failed: Mapping[str, str]) -> Iterator[str]:
    """Name the checks that are right; show the figures of the others, and of what is measured without a bound."""
    right = [task for task, record in newest.items() if record["figures"].get("is_right")]
    if right:
        yield f"- right: {', '.join(f'`{task}`' for task in right)}\n"
    yield from _head(["check", "figures"])
    for task, record in newest.items():
        found = dict(record["figures"])
        verdict = ["**not right**"] if found.pop("is_right", None) is False else []
        if task not in right and (verdict or task == "kernels/syncs" or record["part"] in ("ranks", "real")):
            named = (f"{name} {_short(x)}" for name, x in found.items() if x != "")
            yield _line(f"`{task}`", ", ".join([*verdict, *named]))
    for task, error in failed.items():
        yield _line(f"`{task}`", f"failed: {error}")


def _figures(newest: Mapping[str, Record], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tasks that have a figure of this name."""
    return ((task, record["figures"]) for task, record in newest.items() if name in record["figures"])


def _head(columns: Sequence[str]) -> Iterator[str]:
    yield _line(*columns)
    yield _line(*("---" for _ in columns))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
