"""`finetune sweep`: train a run several times with other values, and compare the trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from finetune.cli.overrides import config_from_overrides
from finetune.cli.report import write_report
from finetune.cli.run_options import refuse_several_processes
from finetune.cli.runs import STYLES
from finetune.errors import ConfigError, FinetuneError, RunFailedError
from finetune.runs.recorded_run import best_point
from finetune.sweep.space import draw_trials, read_space
from finetune.sweep.trials import Sweep, Trial, open_sweep
from finetune.terminal import print_table, say, shown_folder

if TYPE_CHECKING:
    from finetune.config.schema import Config

_PREFIX = "validation."


class SweepOptions(NamedTuple):
    """The options of the command, see `finetune sweep --help`."""

    trials: int | None
    metric: str | None
    seed: int
    halving: int
    at_once: int
    only: int | None
    retry_failed: bool
    report: bool


def sweep_from_overrides(arguments: Sequence[str], options: SweepOptions) -> int:
    """Run the trials that are not finished, and show all of them; with `only`, run one.

    See `finetune sweep` for the arguments.

    Returns:
        The exit code: 0, or 3 if every trial has failed; with `only`, if this one has.

    Raises:
        FinetuneError: the sweep was refused before its first trial, or a signal stopped it.
    """
    refuse_several_processes("sweep")
    if options.halving == 1:
        raise ConfigError("--halving is 1, but it is a factor: give 2 or more, or 0 to end no trial early.")
    same, space = read_space(arguments)
    drawn = draw_trials(space, seed=options.seed, num_trials=options.trials)
    if options.only is not None and options.only > len(drawn):
        raise ConfigError(f"--only is {options.only}, but this sweep has the trials 1 to {len(drawn)}.")
    same, configs = _check(same, drawn, options.metric)
    folder, metric = _folder_of(configs[0]), configs[0].checkpoint.best_metric
    sweep = Sweep(same, space, options.seed, metric, options.halving, options.trials, drawn)
    open_sweep(folder, sweep)
    trials = sweep.trials_in(folder)
    wanted = trials if options.only is None else [trials[options.only - 1]]
    if not options.report:
        _run(sweep, trials, wanted, dict(zip((trial.name for trial in trials), configs, strict=True)), options)
    if options.only is None:
        return _show(folder, sweep, trials)
    say(f"{wanted[0].name} is {wanted[0].state}")
    return RunFailedError.exit_code if wanted[0].state == "failed" else 0


def _run(
    sweep: Sweep, trials: Sequence[Trial], wanted: Sequence[Trial], configs: Mapping[str, Config], options: SweepOptions
) -> None:
    from finetune.sweep.memory import places_for
    from finetune.sweep.running import Runner
    from finetune.threads import share_cores

    gpus: list[str] = []
    if options.at_once > 1:
        gpus, memory = places_for(configs, options.at_once)
        say(memory)
        share_cores(options.at_once * max(config.parallel.num_processes or 1 for config in configs.values()))
    Runner(trials, sweep, at_once=options.at_once, retries=options.retry_failed, gpus=gpus).run(wanted)


def _check(same: Sequence[str], drawn: Sequence[dict[str, str]], metric: str | None) -> tuple[list[str], list[Config]]:
    """Compose and check the configuration of every trial before the first one starts.

    Returns:
        The arguments of all trials without the sweep's folder, and their configurations. `checkpoint.best_metric` is
        the metric by which trials are compared, so that adapter/ has the best weights.

    Raises:
        ConfigError: with every problem of every trial.
    """
    from finetune.data.examples import has_validation
    from finetune.training.checks import check_paths
    from finetune.training.train import checked_objective

    name = None if metric is None else metric.removeprefix(_PREFIX)
    configs: list[Config] = []
    problems: dict[str, list[str]] = {}
    validates: dict[str, bool] = {}
    for number, values in enumerate(drawn, 1):
        arguments = [*same, *(f"{key}={value}" for key, value in values.items())]
        try:
            config = config_from_overrides(arguments, command="sweep")
            if name is not None:
                config = config.with_values({"checkpoint.best_metric": (name, "--metric")})
            check_paths(config)
            checked_objective(config)  # knows which metrics its validations have
            data = str(config.data)
            if data not in validates:
                validates[data] = has_validation(config.data)
            if not validates[data]:
                what = "there is no validation split, by which trials are compared"
                raise ConfigError(f"{what}. Name one with data.validation=, or hold rows out: data.validation=10%.")
            configs.append(config)
        except FinetuneError as error:
            problems.setdefault(str(error), []).append(f"trial-{number:03d}")
    if problems:
        of = {text: "all trials" if len(names) == len(drawn) else ", ".join(names) for text, names in problems.items()}
        raise ConfigError("\n  ".join(["no trial was started:", *(f"{text} ({of[text]})" for text in of)]))
    same = [argument for argument in same if not argument.startswith("output_dir=")]
    return same if name is None else [*same, f"checkpoint.best_metric={name}"], configs


def _folder_of(config: Config) -> Path:
    """Return the folder of the sweep. By default it is named after the run: a run of this name may be there already."""
    suffix = "-sweep" if config.origin("output_dir") == "default" else ""
    return shown_folder(Path(f"{config.output_dir}{suffix}").expanduser().absolute())


def _show(folder: Path, sweep: Sweep, trials: Sequence[Trial]) -> int:
    """Show a table of all trials, the best one, and where the page is. Returns the exit code."""
    from finetune.report.sentences import best_run, second_line

    states = [trial.state for trial in trials]
    complete = [trial.run for trial, state in zip(trials, states, strict=True) if state == "completed"]
    best = complete[0] if len(complete) == 1 else best_run(complete)
    rows: list[list[str | tuple[str, str]]] = []
    for trial, state in zip(trials, states, strict=True):
        found = best_point(trial.points(), sweep.metric)
        name = f"{trial.name} (best)" if best is not None and best.name == trial.name else trial.name
        measured = [f"{found[1]:.4f}", str(found[0])] if found else ["", ""]
        rows.append([name, *trial.values.values(), *measured, (state, STYLES.get(state, ""))])
    metric = f"{_PREFIX}{sweep.metric}"
    print_table(("trial", *sweep.space, metric, "at step", "state"), rows, right=(metric, "at step"))
    for trial, state in zip(trials, states, strict=True):
        if state == "failed":
            say(f"{trial.name} failed: {trial.why}\n  its output: {trial.log}")
    for trial in trials:
        found, held = best_point(trial.points(), sweep.metric), trial.run.result.get("best_step")
        if found is not None and held is not None and held != found[0]:
            say(
                f"{trial.name}: adapter/ holds step {held}, because step {found[0]} has no checkpoint. Set "
                "checkpoint.save_every so that every validated step has one."
            )
    why_none = second_line(complete) if complete else "no trial is complete"
    say(f"best: {shown_folder(best.folder.path)}" if best else f"best: none, {why_none}")
    say(f"report: {_write_page(folder, [trial.folder for trial in trials if trial.run.folder.holds_run()])}")
    return RunFailedError.exit_code if all(state == "failed" for state in states) else 0


def _write_page(folder: Path, runs: Sequence[Path]) -> str:
    """Write the page about all trials. Returns where it is, or why there is none."""
    if not runs:
        return "none, no trial has started"
    if find_spec("vl_convert") is None:
        return "none, the extra is missing: pip install 'finetune[report]', then the same command with --report"
    return write_report(runs, folder / "report.html", data=False)
