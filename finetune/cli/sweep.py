"""`finetune sweep`: train a run several times with other values, and compare the trials."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.cli.overrides import config_from_overrides
from finetune.cli.report import write_report
from finetune.cli.run_options import refuse_several_processes
from finetune.cli.runs import STYLES
from finetune.errors import ConfigError, FinetuneError, RunFailedError
from finetune.runs.recorded_run import best_point
from finetune.sweep.space import draw_trials, read_space
from finetune.sweep.trials import Sweep, Trial, number_of, open_sweep, trials_of
from finetune.terminal import print_json, print_table, say, shown_folder

if TYPE_CHECKING:
    from finetune.config.schema import Config

_PREFIX = "validation."


class SweepOptions(NamedTuple):
    """The options of the command, see `finetune sweep --help`."""

    trials: int | None = None
    metric: str | None = None
    seed: int = 0
    halving: int = 3
    at_once: int = 1
    only: int | None = None
    retry_failed: bool = False
    report: bool = False
    as_json: bool = False


def sweep_from_overrides(arguments: Sequence[str], options: SweepOptions) -> int:
    """Run the trials that are not finished, and show all of them.

    Args:
        arguments: as for `finetune train`, in which keys may have several values.
        options: see `SweepOptions`.

    Returns:
        The exit code: 0, or 3 if no trial is complete though all have ended; with `only`, if this trial failed.

    Raises:
        FinetuneError: the sweep was refused before its first trial, or a signal stopped it.
    """
    refuse_several_processes("sweep")
    if options.halving == 1:
        raise ConfigError("--halving is 1, but it is a factor: give 2 or more, or 0 to end no trial early.")
    report_line = _report_line if options.as_json else say
    same, space = read_space(arguments)
    drawn = draw_trials(space, seed=options.seed, num_trials=options.trials)
    same, configs = _check(same, drawn, options.metric)
    metric, folder = configs[0].checkpoint.best_metric, _folder_of(configs[0])
    asked = Sweep(
        arguments=same,
        space=space,
        seed=options.seed,
        metric=metric,
        halving=options.halving,
        num_trials=options.trials,
        trials=drawn,
    )
    trials = trials_of(folder, asked)
    wanted = trials if options.only is None else [number_of(trials, options.only)]
    if not options.report:
        _run(asked, trials, wanted, configs, options, report_line)
    if options.only is not None:
        return RunFailedError.exit_code if wanted[0].state == "failed" else 0
    return _show(folder, asked, trials, as_json=options.as_json)


def _run(
    asked: Sweep,
    trials: Sequence[Trial],
    wanted: Sequence[Trial],
    configs: Sequence[Config],
    options: SweepOptions,
    report_line: Callable[[str], None],
) -> None:
    from finetune.sweep.memory import places_for
    from finetune.sweep.running import Runner
    from finetune.threads import share_cores

    gpus: list[str] = []
    if options.at_once > 1:
        by_name = {trial.name: config for trial, config in zip(trials, configs, strict=True)}
        gpus, memory = places_for(by_name, options.at_once)
        report_line(memory)
        share_cores(options.at_once * (configs[0].parallel.num_processes or 1))
    open_sweep(trials[0].folder.parent, asked)
    Runner(trials, asked, at_once=options.at_once, retries=options.retry_failed, gpus=gpus, say=report_line).run(wanted)


def _check(same: Sequence[str], drawn: Sequence[dict[str, str]], metric: str | None) -> tuple[list[str], list[Config]]:
    """Compose and check the configuration of every trial before the first one starts.

    Returns:
        The arguments of all trials without the sweep's folder, and their configurations. `checkpoint.best_metric` is
        the metric by which trials are compared, so that adapter/ has the best weights.

    Raises:
        ConfigError: with every problem of every trial.
    """
    from finetune.data.examples import load_examples
    from finetune.training.checks import check_paths
    from finetune.training.train import trainer_for

    name = None if metric is None else metric.removeprefix(_PREFIX)
    configs: list[Config] = []
    problems: dict[str, list[str]] = {}
    validated: dict[str, bool] = {}
    for number, values in enumerate(drawn, 1):
        arguments = [*same, *(f"{key}={value}" for key, value in values.items())]
        try:
            config = config_from_overrides(arguments, command="sweep")
            if name is not None:
                config = config.with_values({"checkpoint.best_metric": (name, "--metric")})
            check_paths(config)
            trainer_for(config)  # knows which metrics its validations have
            data = str(config.data)
            if data not in validated:
                validated[data] = load_examples(config.data).validation is not None
            if not validated[data]:
                what = "there is no validation split, by which trials are compared"
                raise ConfigError(f"{what}. Name one with data.validation=, or hold rows out: data.validation=10%.")
            configs.append(config)
        except FinetuneError as error:
            problems.setdefault(str(error), []).append(f"trial-{number:03d}")
    if problems:
        lines = [
            f"{problem} ({'every trial' if len(names) == len(drawn) else ', '.join(names)})"
            for problem, names in problems.items()
        ]
        raise ConfigError("\n  ".join(["no trial was started:", *lines]))
    same = [argument for argument in same if not argument.startswith("output_dir=")]
    return same if name is None else [*same, f"checkpoint.best_metric={name}"], configs


def _folder_of(config: Config) -> Path:
    """Return the folder of the sweep. By default it is named after the run: a run of this name may be there already."""
    suffix = "-sweep" if config.origin("output_dir") == "default" else ""
    return shown_folder(Path(f"{config.output_dir}{suffix}").expanduser().absolute())


def _show(folder: Path, sweep: Sweep, trials: Sequence[Trial], *, as_json: bool) -> int:
    """Show a table of all trials, the best one, and where the page is. Returns the exit code."""
    from finetune.report.sentences import best_run, second_line

    results = [TrialResult(trial, trial.state, best_point(trial.points(), sweep.metric)) for trial in trials]
    complete = [result.trial.run for result in results if result.state == "completed"]
    best = complete[0] if len(complete) == 1 else best_run(complete)
    page, no_page = _write_page(folder, [trial for trial in trials if trial.run.folder.holds_run()])
    why_no_best = "" if best else second_line(complete) if complete else "No trial is complete yet."
    code = RunFailedError.exit_code if all(each.state == "failed" for each in results) else 0
    if as_json:
        rows = [result.as_record() for result in results]
        print_json({"folder": str(folder), "best": best and best.name, "report": page, "trials": rows}, indent=None)
        return code
    metric = f"{_PREFIX}{sweep.metric}"
    head = ("trial", *sweep.space, metric, "at step", "state")
    print_table(
        head,
        [result.as_row(is_best=best is not None and best.name == result.trial.name) for result in results],
        right=(metric, "at step"),
    )
    for result in results:
        if result.state == "failed":
            say(f"{result.trial.name} failed: {result.trial.why}; see {result.trial.log}")
    say(f"best: {shown_folder(best.folder.path)}" if best else f"best: none. {why_no_best}")
    say(f"report: {page}" if page else no_page)
    return code


class TrialResult(NamedTuple):
    """A trial as the table shows it."""

    trial: Trial
    state: str
    best: tuple[int, float] | None
    """Step and metric of its best validation."""

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        step, value = self.best or (None, None)
        shown = {"name": self.trial.name, "folder": str(self.trial.folder), "values": self.trial.values}
        return {**shown, "state": self.state, "metric": value, "step": step, "command": self.trial.command}

    def as_row(self, *, is_best: bool) -> list[str | tuple[str, str]]:
        """Return the cells of its row."""
        step, value = ("", "") if self.best is None else (str(self.best[0]), f"{self.best[1]:.4f}")
        name = f"{self.trial.name} (best)" if is_best else self.trial.name
        return [name, *self.trial.values.values(), value, step, (self.state, STYLES.get(self.state, ""))]


def _write_page(folder: Path, trials: Sequence[Trial]) -> tuple[str | None, str]:
    """Write the page about all trials. Returns its path, or None and what to do for it."""
    if not trials:
        return None, "report: none, because no trial has started"
    if find_spec("vl_convert") is None:
        again = "Then give this command again with --report."
        return None, f"report: none, because the extra is missing: pip install 'finetune[report]'. {again}"
    path = folder / "report.html"
    write_report([trial.folder for trial in trials], path, data=False)
    return str(path), ""


def _report_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
