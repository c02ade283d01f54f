"""`finetune sweep`: train a run several times with other values, and compare the trials."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.commands import Overrides
from finetune.cli.overrides import config_from_overrides
from finetune.cli.report import write_report
from finetune.cli.run_options import STYLES, OptionRules, refuse_several_processes
from finetune.config.keys import values
from finetune.config.schema import Config, DataSection
from finetune.errors import ConfigError, FinetuneError, RunFailedError, extra_command
from finetune.runs.recorded_run import RecordedRun
from finetune.sweep.running import run_trials
from finetune.sweep.space import draw_trials, read_space
from finetune.sweep.trials import Sweep, Trial, open_sweep
from finetune.terminal import print_table, say, shown_folder

_PREFIX = "validation."


def sweep_from_overrides(
    overrides: Overrides = None,
    num_trials: Annotated[
        int | None,
        typer.Option(
            "--trials", help="Draw this many trials. Default: every combination, if all values are lists.", min=1
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Compare by this metric of validations. Default: validation.loss, or checkpoint.best_metric."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws, not of the runs. Default: 0.", min=0)] = None,
    halving: Annotated[
        int,
        typer.Option(
            help="After the validations 1, N, N*N, … only the best of each N trials go on. 0: no trial ends early.",
            min=0,
        ),
    ] = 3,
    only: Annotated[int | None, typer.Option(help="Run only this trial, as a task of an array does.", min=1)] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Also run the trials that have failed.")] = False,
    report_only: Annotated[
        bool, typer.Option("--report", help="Start no trial: show the table and write the page.")
    ] = False,
) -> int:
    """Run the trials that are not finished, and show all of them; with `only`, run one. Return the exit code.

    The exit code is 3 if every trial has failed, or with `only` if this one has.

    Raises:
        FinetuneError: the sweep was refused before its first trial, or a signal stopped it.
    """
    refuse_several_processes("sweep")
    rules = OptionRules({"--report": report_only, "--only": only, "--retry-failed": retry_failed})
    rules.exclude("--report", "--only", "--retry-failed", because="--report starts no trial. Leave one of them out.")
    if seed is not None and num_trials is None:
        raise ConfigError(
            f"--seed is {seed}. It is the seed with which --trials draws, and without --trials every combination is "
            f"tried. Add --trials N, leave out --seed, or write seed={seed} for the seed of the runs."
        )
    seed = seed or 0
    if halving == 1:
        raise ConfigError("--halving is 1, but it is a factor: give 2 or more, or 0 to end no trial early.")
    same, space = read_space(overrides or [])
    drawn = draw_trials(space, seed=seed, num_trials=num_trials)
    if only is not None and only > len(drawn):
        raise ConfigError(f"--only is {only}, but this sweep has the trials 1 to {len(drawn)}.")
    config = _check(same, drawn[:1] if report_only else drawn, metric, starts_trials=not report_only)
    same = [argument for argument in same if not argument.startswith("output_dir=")]
    if metric is not None:  # so that adapter/ has the weights by which the trial is judged
        same.append(f"checkpoint.best_metric={metric.removeprefix(_PREFIX)}")
    best_metric = config.checkpoint.best_metric
    sweep = Sweep(same, space, seed, best_metric, halving, num_trials, drawn)
    # By default it is named after the run: a run of this name may be there already.
    suffix = "-sweep" if config.origin("output_dir") == "default" else ""
    folder = shown_folder(Path(f"{config.output_dir}{suffix}").expanduser().absolute())
    open_sweep(folder, sweep, is_there=report_only)
    trials = [Trial(folder, number, sweep) for number in range(1, len(drawn) + 1)]
    chosen = trials if only is None else [trials[only - 1]]
    if not report_only:
        run_trials(sweep, trials, chosen, retries=retry_failed)
    if only is None:
        return _show(folder, sweep, trials)
    say(f"{chosen[0].name} is {chosen[0].state}")
    return RunFailedError.exit_code if chosen[0].state == "failed" else 0


@contextmanager
def _each_once(name: str) -> Iterator[None]:
    """Within the block, let a logger write each message once: most keys are the same in all trials."""
    logger, written = logging.getLogger(name), set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        num_before = len(written)
        written.add(record.getMessage())
        return len(written) > num_before

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


@_each_once("finetune.training.unread_keys")
def _check(
    same: Sequence[str], drawn: Sequence[Mapping[str, str]], metric: str | None, *, starts_trials: bool
) -> Config:
    """Compose and check the configuration of every trial before the first one starts. Return the first trial's.

    Raises:
        ConfigError: with every problem of every trial.
    """
    from finetune.training.checks import check_paths
    from finetune.training.setup import check_config
    from finetune.training.unread_keys import find_unread_keys

    unread: list[dict[str, str]] = []
    configs: list[Config] = []
    problems: dict[str, list[str]] = {}
    validates: dict[str, bool] = {}
    for number, of_trial in enumerate(drawn, 1):
        try:
            arguments = [*same, *(f"{key}={value}" for key, value in of_trial.items())]
            config = config_from_overrides(arguments, command="sweep")
            if metric is not None:
                config = config.with_values({"checkpoint.best_metric": (metric.removeprefix(_PREFIX), "--metric")})
            check_paths(config)
            metrics = check_config(config).metrics  # knows which metrics its validations have
            unread.append(find_unread_keys(config, of_trial, has_metrics=bool(metrics), world_size=None))
            data = str(config.data)
            if data not in validates:
                validates[data] = has_validation(config.data)
            if not validates[data]:
                raise ConfigError(
                    "there is no validation split, by which trials are compared. Name one with data.validation=, or "
                    "hold rows out: data.validation=10%."
                )
            configs.append(config)
        except FinetuneError as error:
            problems.setdefault(str(error), []).append(f"trial-{number:03d}")
    if problems:
        lines = ["no trial was started:"]
        for problem, names in problems.items():
            lines.append(f"{problem} ({'all trials' if len(names) == len(drawn) else ', '.join(names)})")
        raise ConfigError("\n  ".join(lines))
    if starts_trials:
        _look_for_equal_trials(drawn, unread, [values(config) for config in configs])
    return configs[0]


def _look_for_equal_trials(
    drawn: Sequence[Mapping[str, str]], unread: Sequence[Mapping[str, str]], given: Sequence[Mapping[str, object]]
) -> None:
    """Refuse a key that has no effect in any trial. Name the trials that will be equal, and why.

    `unread` has the keys that each trial does not read, and why. `given` has the values of all keys of each trial.

    Raises:
        ConfigError: names the keys, and why they have no effect.
    """
    for key in drawn[0]:
        if all(key in of_trial for of_trial in unread):
            reasons = " or ".join(dict.fromkeys(of_trial[key] for of_trial in unread))
            raise ConfigError(
                f"no trial was started: {key} has no effect in any of them, because {reasons}. Trials that differ only "
                f"in it would be equal. Leave {key} out, or change that."
            )
    same: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for number, (texts, of_trial) in enumerate(zip(drawn, unread, strict=True)):
        read = tuple((key, str(given[number].get(key, text))) for key, text in texts.items() if key not in of_trial)
        same.setdefault(read, []).append(number)
    for numbers in same.values():
        if len(numbers) > 1:
            names = " and ".join(f"trial-{number + 1:03d}" for number in numbers)
            say(f"{names} will be equal. {_why_equal([drawn[number] for number in numbers], unread[numbers[0]])}")


def _why_equal(drawn: Sequence[Mapping[str, str]], unread: Mapping[str, str]) -> str:
    """Say why trials are equal, given their values as they were written, and the keys that none of them reads."""
    found = []
    if unread:
        why = "; ".join(f"{key}, because {why}" for key, why in unread.items())
        found.append(f"They differ only in a key without effect there: {why}.")
    written = {key: dict.fromkeys(of_trial[key] for of_trial in drawn) for key in drawn[0] if key not in unread}
    spelled_differently = {key: texts for key, texts in written.items() if len(texts) > 1}
    if shown := spelled_differently or ({} if unread else written):
        same = "; ".join(f"{key} is {' and '.join(texts)}" for key, texts in shown.items())
        found.append(f"Their values are the same: {same}.")
    return " ".join(found)


def _show(folder: Path, sweep: Sweep, trials: Sequence[Trial]) -> int:
    """Show a table of all trials, the best one, and where the page is. Return the exit code."""
    from finetune.report.sentences import best_run, second_line

    for trial in trials:
        trial.read_once()  # for the table and for the page
    states = [trial.state for trial in trials]
    complete = [trial.run for trial, state in zip(trials, states, strict=True) if state == "completed"]
    best = complete[0] if len(complete) == 1 else best_run(complete)
    rows: list[list[str | tuple[str, str]]] = []
    remarks: list[str] = []
    for trial, state in zip(trials, states, strict=True):
        point = trial.best_point()
        name = f"{trial.name} (best)" if best is not None and best.name == trial.name else trial.name
        measured = [f"{point[1]:.4f}", str(point[0])] if point else ["", ""]
        rows.append([name, *trial.values.values(), *measured, (state, STYLES.get(state, ""))])
        if state == "failed":
            remarks.append(f"{trial.name} failed: {trial.run.why or ''}\n  its output: {trial.log}")
        published_step = trial.run.result.get("best_step")
        if point is not None and published_step not in (None, point[0]):
            remarks.append(
                f"{trial.name}: adapter/ holds step {published_step}, because step {point[0]} has no checkpoint. Set "
                "checkpoint.save_every so that every validated step has one."
            )
    metric = f"{_PREFIX}{sweep.metric}"
    print_table(("trial", *sweep.space, metric, "at step", "state"), rows, right=(metric, "at step"))
    if "failed" in states:
        remarks.append("The same command does not try failed trials again; with --retry-failed it does.")
    for remark in remarks:
        say(remark)
    reason = second_line(complete) if complete else "no trial is complete"
    say(f"best: {shown_folder(best.folder.path)}" if best else f"best: none, {reason}")
    say(f"report: {_write_page(folder, [trial.run for trial in trials if trial.run.folder.holds_run()])}")
    return RunFailedError.exit_code if all(state == "failed" for state in states) else 0


def _write_page(folder: Path, runs: Sequence[RecordedRun]) -> str:
    """Write the page about all trials. Returns where it is, or why there is none."""
    if not runs:
        return "none, no trial has started"
    if find_spec("vl_convert") is None:
        return f"none, the extra is missing: {extra_command('report')}, then the same command with --report"
    for run in runs:
        run.folder.refuse_irregular_files()
    return write_report(runs, folder / "report.html", data=False)


def has_validation(section: DataSection) -> bool:
    """Return whether a run on this data has validation rows. Reads at most the first `AUTO_NEEDS_ROWS` of them.

    Raises:
        ConfigError, DataError: see `load_examples`.
    """
    from finetune.data.examples import holds_out_by_default, load_examples
    from finetune.data.held_out import AUTO_NEEDS_ROWS

    splits = load_examples(section)
    if splits.validation is None or not holds_out_by_default(section):
        return splits.validation is not None
    rows = islice(splits.train.parts[0].source.rows(), min(AUTO_NEEDS_ROWS, section.max_rows or AUTO_NEEDS_ROWS))
    return sum(1 for _ in rows) == AUTO_NEEDS_ROWS
