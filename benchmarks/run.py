"""Run engines beside each other, round after round, and write what they cost.

python -m benchmarks.run --quick
python -m benchmarks.run --sizes real --rounds 3 --engines ours trl-grouped trl-grouped-targets
python -m benchmarks.run --recorded --write-readme
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks.bench import ROOT, Bench, StepFailedError
from benchmarks.engines import ENGINES
from benchmarks.job import SIZES, Job
from benchmarks.machine import machine_and_versions, seconds_others_use
from benchmarks.results_page import legend, put_into, render

README = Path(__file__).resolve().parent / "README.md"
_BUSY = 0.2
_UNSLOTH_ADVICE = "Make an environment with unsloth as benchmarks/README.md says, and name its Python: --unsloth PYTHON"


@dataclass(frozen=True)
class Setting:
    """A job and who runs it."""

    job: Job
    engines: tuple[str, ...]
    """Each a key of `ENGINES`, with words of its own behind it."""


def recorded_settings(steps: int) -> list[Setting]:
    """What the README's results are made of."""
    grouped = ("ours", "trl-grouped-targets")
    both = (*grouped, "trl-grouped")
    lean, faster = (f"ours training.max_tokens_per_microbatch={tokens}" for tokens in (640, 2048))
    others = (faster, "trl-1x16-targets", "trl-packed-targets", "trainer", "accelerate")
    job = Job(size="real", steps=steps, warmup_steps=min(3, steps - 1))
    return [
        Setting(job, (*both, *others)),
        # A step of the real model takes TRL half a minute.
        Setting(replace(job, size="smollm2", steps=5, warmup_steps=2), (*grouped, lean, "trl-1x16-targets")),
        Setting(replace(job, size="gemma3", steps=3, warmup_steps=1), ("ours", "trl-1x16-targets")),
        Setting(
            replace(job, size="smollm2", precision="bf16", steps=5, warmup_steps=2),
            ("ours", "ours training.precision=fp32", "unsloth", "unsloth-plain"),
        ),
        Setting(replace(job, size="qwen2"), (*grouped, "trl-1x16-targets")),
        Setting(replace(job, size="phi2"), (*grouped, "trl-1x16-targets")),
        Setting(replace(job, size="s32k"), both),
        Setting(replace(job, size="s100k"), grouped),
        Setting(replace(job, precision="bf16"), ("ours", "trl-1x16-targets", "trl-1x16")),
        Setting(replace(job, has_shared_prompt=True), grouped),
        Setting(replace(job, processes=2), grouped),
    ]


def main(words: Sequence[str]) -> int:
    """Do the runs that the words ask for; those that are done already are not done again."""
    wish = _read(words)
    settings = _settings(wish)
    try:
        bench = Bench(wish.folder, wish.unsloth)
    except StepFailedError as error:
        _say(f"{wish.unsloth} cannot run the benchmark: {error}\n{_UNSLOTH_ADVICE}")
        return 2
    load = seconds_others_use()
    if load > _BUSY:
        _say(f"other programs use {load:.1f} cores: the figures will be noisy. Better: an idle machine.")
    settings = [_installed(setting, bench) for setting in settings]
    total = wish.rounds * (1 + sum(1 + len(setting.engines) for setting in settings))
    count = failures = 0
    for number in range(1, wish.rounds + 1):
        count += 1
        failures += not _once(bench, None, "help", number, f"[{count}/{total}] round {number}")
        for setting in settings:
            # The order of the engines turns from round to round: none is always the first on a cool machine.
            turn = (number - 1) % max(1, len(setting.engines))
            for engine in ("limit", *setting.engines[turn:], *setting.engines[:turn]):
                count += 1
                failures += not _once(bench, setting.job, engine, number, f"[{count}/{total}] round {number}")
    asked = {"", *(setting.job.fingerprint() for setting in settings)}
    runs = [run for run in bench.runs() if run["work"] in asked]
    minutes = sum(run["seconds"] for run in runs) / 60
    machine = {**machine_and_versions(ROOT, wish.rounds, load), "time": f"{minutes:.0f} minutes for all of these runs"}
    if bench.unsloth_versions:
        machine["versions in unsloth's environment"] = bench.unsloth_versions
    (bench.folder / "results.json").write_text(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")
    page = render(runs, machine, wish.device)
    (bench.folder / "results.md").write_text(f"{page}\n{legend(runs)}\n")
    if wish.write_readme:
        put_into(README, page, wish.device)
        (README.parent / f"results-{wish.device}.json").write_text((bench.folder / "results.json").read_text())
    _say(page)
    return 1 if failures else 0


def _once(bench: Bench, job: Job | None, engine: str, number: int, where: str) -> bool:
    """One run, unless it was done before. Whether all is well."""
    name = f"{where}: {job.name if job else ''} {engine}".rstrip()
    if bench.is_done(job, engine, number):
        _say(f"{name}: done before")
        return True
    started = time.monotonic()
    try:
        if job is None:
            figures = bench.measure_help()
        elif engine == "limit":
            figures = bench.measure_limit(job)
        else:
            figures = bench.train(job, engine, number)
    except (StepFailedError, ValueError) as error:
        bench.note(job, engine, number, error=str(error), seconds=time.monotonic() - started)
        _say(f"{name}: failed\n{error}")
        return False
    bench.note(job, engine, number, figures=figures, seconds=time.monotonic() - started)
    shown = ", ".join(f"{key} {value:,.4g}" for key, value in figures.items())
    _say(f"{name}: {shown} ({time.monotonic() - started:.0f} s)")
    return True


def _installed(setting: Setting, bench: Bench) -> Setting:
    """Return the setting without the engines that are not installed, and say which these are."""
    engines = {name: ENGINES[name.split()[0]] for name in setting.engines}
    absent = {name for name, engine in engines.items() if not all(map(find_spec, engine.needs))}
    if absent:
        _say(f"{setting.job.name}: left out, not installed: {', '.join(sorted(absent))}. pip install -e '.[bench]'")
    if "unsloth " not in bench.unsloth_versions:
        elsewhere = {name for name, engine in engines.items() if engine.has_own_environment}
        if elsewhere:
            _say(f"{setting.job.name}: left out: {', '.join(sorted(elsewhere))}. {_UNSLOTH_ADVICE}")
        absent |= elsewhere
    return Setting(setting.job, tuple(name for name in setting.engines if name not in absent))


def _settings(wish: argparse.Namespace) -> list[Setting]:
    if wish.recorded:
        return recorded_settings(wish.steps or 30)
    if wish.quick:
        job = Job(size="real", steps=wish.steps or 11, warmup_steps=min(2, (wish.steps or 11) - 1))
        return [Setting(job, tuple(wish.engines or ("ours", "trl-grouped-targets")))]
    on_gpu = wish.device == "cuda"
    sizes = wish.sizes or (["phi4-mini", "phi4"] if on_gpu else ["real"])
    steps = wish.steps or (10 if on_gpu else 30)
    gpu_engines = ("ours", "trl-1x16", "trl-1x16-liger")
    if wish.pairs and not wish.engines:
        wish.engines = ["ours", "trl-dpo", "trl-dpo-targets"]
    engines = tuple(wish.engines or (gpu_engines if on_gpu else ("ours", "trl-grouped", "trl-grouped-targets")))
    jobs = [
        Job(
            size=size,
            precision=wish.precision or ("bf16" if on_gpu else "fp32"),
            has_shared_prompt=wish.shared_prompt,
            objective="dpo" if wish.pairs else "sft",
            processes=processes,
            device=wish.device,
            steps=steps,
            warmup_steps=min(3, steps - 1),
        )
        for size in sizes
        for processes in wish.processes
    ]
    return [Setting(job, engines) for job in jobs]


def _read(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=(__doc__ or "").splitlines()[0])
    preset = parser.add_mutually_exclusive_group()
    preset.add_argument(
        "--quick", action="store_true", help="real, ours against length-grouped TRL, 11 steps, one round"
    )
    preset.add_argument("--recorded", action="store_true", help="everything that the README's results hold")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), help="default: real; with CUDA phi4-mini phi4")
    parser.add_argument(
        "--engines",
        nargs="+",
        type=_engine,
        metavar="ENGINE",
        help=f"of {', '.join(ENGINES)}; words for ours follow in the same argument: 'ours training.kernels=reference'",
    )
    parser.add_argument("--rounds", type=_positive, default=None, help="default 3; with --quick 1")
    parser.add_argument("--steps", type=_positive, help="optimizer steps, at least 2. Default 30; with CUDA 10")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="default fp32; with CUDA bf16")
    parser.add_argument("--processes", nargs="+", type=_positive, default=[1], help="ranks; several: one after another")
    parser.add_argument("--shared-prompt", action="store_true", help="put one 150-token system prompt before each row")
    parser.add_argument("--pairs", action="store_true", help="DPO on pairs of answers, ours against TRL's")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--unsloth", type=_file, metavar="PYTHON", help="the Python of an environment with unsloth")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "benchmarks", help="default: runs/benchmarks")
    parser.add_argument("--write-readme", action="store_true", help="put the results into benchmarks/README.md")
    wish = parser.parse_args(words)
    wish.rounds = wish.rounds or (1 if wish.quick else 3)
    if wish.steps == 1:
        parser.error("--steps 1 leaves no step behind the warm-up: ask for 2 or more")
    return wish


def _engine(text: str) -> str:
    if text.split()[:1] == [] or text.split()[0] not in ENGINES:
        raise argparse.ArgumentTypeError(f"'{text}' names none of: {', '.join(ENGINES)}")
    return text


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"expected the Python of an environment, but {text} is not a file")
    return Path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got '{text}'")
    return int(text)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # Told to stop, leave the way an error does: the process that is being measured is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
