"""`finetune evaluate`: measure a finished run on one of its splits."""

from __future__ import annotations

import json
import logging
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from finetune.cli.run_options import (
    BaseOption,
    CheckpointOption,
    JsonOption,
    OptionRules,
    RunFolderArgument,
    SetOption,
    find_run_folder,
    giving_back_logs,
    log_as_this_rank,
    read_run_arguments,
)
from finetune.errors import ConfigError, ModelError, RequirementError, RunFailedError
from finetune.fallbacks import Fallback
from finetune.logs import importing
from finetune.terminal import print_json, print_table, shown_folder

if TYPE_CHECKING:
    from finetune.distributed.runtime import Runtime
    from finetune.inference.answers import Metric
    from finetune.inference.finished_run import FinishedRun
    from finetune.inference.harness import Results
    from finetune.inference.scores import Evaluation
    from finetune.inference.suites import Suite
    from finetune.runs.model_files import LoadedRun

Split = Literal["train", "validation", "test", "none"]

_log = logging.getLogger(__name__)


@giving_back_logs()
def evaluate(
    run: str | Path,
    *,
    split: Split | None = None,
    metrics: Sequence[str] | Mapping[str, Metric] = (),
    suites: Sequence[str] = (),
    against: str | Path | None = None,
    base: str | Path | None = None,
    checkpoint: str | int | None = None,
    overrides: Sequence[str] | Mapping[str, object] = (),
) -> Evaluation | None:
    """Measure a finished run on one of its splits, base against tuned, as `finetune evaluate` does.

    Collective: every process of a launch. Return the scores, verdicts and answers on rank 0, and None on other ranks.

    Args:
        run: the run's folder, or its name in `runs`.
        split: the rows to measure on; None: test, or validation if there are no test rows. "none": no rows, only the
            suites, which is the default for suites of a run that was trained on pairs or labelled answers.
        metrics: names of built-in metrics, or functions by name. They measure generated answers, as those of
            `testing.metrics` do, which are measured too.
        suites: prompts to answer as well: `json`, `tools`, `harmless`, or paths of files.
        against: another run to compare with, in place of the base.
        base: another place of the base.
        checkpoint: a step or `latest`; None: the published weights.
        overrides: keys of the run's configuration.

    Raises:
        FinetuneError: see its subclasses in `finetune.errors`.
    """
    from finetune.config.own_functions import METRIC_PARAMETERS, refuse_uncallable, resolve_functions
    from finetune.config.python_values import overrides_of
    from finetune.inference.answers import METRICS
    from finetune.inference.finished_run import find_run
    from finetune.inference.suites import read_suites

    given, suites = ([each] if isinstance(each, str) else list(each or ()) for each in (metrics, suites))
    if others := [each for each in (*given, *suites) if not isinstance(each, str)]:
        raise ConfigError(
            f"metrics or suites has {others[0]!r}; expected names. Give functions by name: metrics={{NAME: function}}."
        )
    log_as_this_rank()
    folder, base, checkpoint = read_run_arguments(run, base, checkpoint)
    other = None if against is None else read_run_arguments(against, name="against")[0]
    found = find_run(folder, overrides_of(overrides), base=base, checkpoint=checkpoint)
    own = metrics if isinstance(metrics, Mapping) else {}
    if "loss" in own:  # each evaluation has the verdict on the loss by this name
        raise ConfigError("metrics has loss, a name that finetune uses itself. Choose another name.")
    for name, metric in own.items():
        refuse_uncallable(metric, f"metrics[{name!r}]", METRIC_PARAMETERS)
    split = _choose_rows(found, split, given, suites)
    names = [] if split == "none" else [*found.config.testing.metrics, *([] if own else given)]
    functions = {**resolve_functions(names, METRICS, asked_by="--metric"), **own}
    evaluations: list[Evaluation] = []
    _measure_rows(found, split, functions, read_suites(suites), other, {}, evaluations.append)
    return evaluations[0] if evaluations else None


def evaluate_command(
    run_folder: RunFolderArgument,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="OVERRIDES…")] = None,
    split: Annotated[
        Split | None,
        typer.Option(help="The rows to measure. Default: test, or validation without test rows. none: only suites."),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="Measure generated answers: a name, or ./scores.py:function. Repeatable.")
    ] = None,
    metrics_from: Annotated[
        list[str] | None, typer.Option(help="A module of your own installed package that --metric may name.")
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Answer a suite too: json, tools, harmless, or a file. Repeatable, or a,b."),
    ] = None,
    base: BaseOption = None,
    checkpoint: CheckpointOption = None,
    settings: SetOption = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN2",
            help="Compare with another run on the same rows, not with the base.",
            callback=find_run_folder,
        ),
    ] = None,
    fail_if_worse: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC[:MARGIN]",
            help="Exit with 3 if the metric, or loss, is worse by more than MARGIN (0), at 95 %. Repeatable.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write scores and answers to a new JSON file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write scores and verdicts to a new Markdown file.")] = None,
    harness: Annotated[
        str | None, typer.Option(metavar="TASKS", help="Run lm-evaluation-harness on TASKS (a,b) instead.")
    ] = None,
    harness_tasks: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A folder that describes more TASKS.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate as the options say: print the measures, and write them to a file if one is named."""
    from finetune.config.own_functions import METRIC_PARAMETERS, resolve_functions, split_functions_in_files
    from finetune.inference.answers import METRICS
    from finetune.inference.finished_run import find_run
    from finetune.inference.harness import require_harness
    from finetune.inference.suites import read_suites

    _refuse_to_overwrite("--output", output)
    _refuse_to_overwrite("--markdown", markdown)
    rules = OptionRules(
        {
            "--harness": harness,
            "--harness-tasks": harness_tasks,
            "--split": split,
            "--metric": metric or None,
            "--metrics-from": metrics_from or None,
            "--suite": suite or None,
            "--markdown": markdown,
            "--against": against,
            "--fail-if-worse": fail_if_worse or None,
        }
    )
    rules.need("--harness-tasks", "--harness")
    rules.exclude(
        "--harness",
        "--split",
        "--metric",
        "--metrics-from",
        "--suite",
        "--markdown",
        "--against",
        "--fail-if-worse",
        because="--harness measures its own tasks, not rows of the run. Run finetune evaluate once with each.",
    )
    rules.need("--metrics-from", "--metric")
    if harness is not None:
        require_harness()
    log_as_this_rank()
    changes = [*(overrides or []), *(settings or [])]
    run = find_run(run_folder, changes, base=base, checkpoint=checkpoint, is_alone=harness is not None)
    if harness is not None:
        from finetune.inference.evaluation_record import with_finite_numbers

        results = _measure_by_harness(run, harness, harness_tasks)
        measured = {"run": str(run.folder.path), "weights": run.weights_name, "harness": results}
        record = with_finite_numbers(measured)
        print_json(record, indent=None) if as_json else _show_harness(results)
        if output is not None:
            _write("--output", output, record)
        return
    split = _choose_rows(run, split, metric or [], suite or [])
    own, files = split_functions_in_files(metric or [], "--metric")
    names = [] if split == "none" else [*run.config.testing.metrics, *own]
    allowed = [*(metrics_from or []), *files]
    metrics = resolve_functions(names, METRICS, allowed, asked_by="--metric", parameters=METRIC_PARAMETERS)
    suites = read_suites(suite or [])
    comparable = [*([] if split == "none" else ["loss"]), *metrics, *(each.metric for each in suites)]
    limits = _read_limits(fail_if_worse or [], comparable)
    report = partial(_report, run, limits=limits, as_json=as_json, output=output, markdown=markdown)
    _measure_rows(run, split, metrics, suites, against, limits, report)


def _measure_rows(
    run: FinishedRun,
    split: Split | None,
    metrics: Mapping[str, Metric],
    suites: Sequence[Suite],
    against: Path | None,
    limits: Mapping[str, float],
    report: Callable[[Evaluation], None],
) -> None:
    """Find the rows and the model to compare with, and measure. For `limits` and `report`, see `_measure`."""
    from finetune.data.examples import check_local_rows
    from finetune.inference.finished_run import choose_split, find_run
    from finetune.inference.prompts import read_general_prompts

    other = find_run(against) if against is not None else None
    if limits and against is None and not run.config.testing.compare_base:
        raise ConfigError(
            f"--fail-if-worse {next(iter(limits))}: there is no verdict on it, because there is nothing to compare "
            "with. Set testing.compare_base=true, or give --against RUN2."
        )
    recorded = [name.removeprefix("data.") for name in run.fingerprints if name.startswith("data.")]
    chosen: str | None = split
    if split != "none":
        if "train" in recorded and _keeps_data(run):  # otherwise the splits are not known before the rows are read
            chosen = choose_split(split, recorded)
        check_local_rows(run.config.data, "answers", is_new=False)
    read_general_prompts(run.config.testing.general_prompts)  # refuses a file before anything is measured
    is_sharded = run.config.parallel.sharding != "none"
    if against is not None and is_sharded:
        raise ConfigError(
            "parallel.sharding: only one model can be sharded, and --against loads two. Drop one of them."
        )
    if other is None and run.config.testing.compare_base and not is_sharded:
        other = run.base
    _measure(run, chosen, metrics, suites, other, limits, report)


def _report(
    run: FinishedRun,
    evaluation: Evaluation,
    *,
    limits: Mapping[str, float],
    as_json: bool,
    output: Path | None,
    markdown: Path | None,
) -> None:
    """Print the scores, and write them to the files that are named."""
    from finetune.inference.evaluation_record import answers_of, markdown_of, record_of, with_finite_numbers
    from finetune.inference.scores import show_evaluation

    record = with_finite_numbers({"run": str(run.folder.path), "weights": run.weights_name, **record_of(evaluation)})
    if as_json:
        print_json(record, indent=None)
    else:
        num_answers = run.config.testing.num_samples
        show_evaluation(evaluation, num_answers=num_answers, with_perplexity=True)
    if output is not None:
        _write("--output", output, {**record, "rows": answers_of(evaluation)})
    if markdown is not None:
        _write("--markdown", markdown, markdown_of(str(shown_folder(run.folder.path)), evaluation, limits))


def _read_limits(options: Sequence[str], known: Sequence[str]) -> dict[str, float]:
    """Return the margin of each metric, or the loss, that `--fail-if-worse` names."""
    limits = {}
    for option in options:
        name, _, margin = option.partition(":")
        if name not in known:
            raise ConfigError(
                f"--fail-if-worse is {option}; expected one of {', '.join(known)}, and a margin after a colon, as in "
                f"{known[-1]}:0.1. Measure others with --metric NAME or --suite NAME."
            )
        try:
            limits[name] = float(margin or 0)
        except ValueError:
            limits[name] = math.nan
        if not 0 <= limits[name] < math.inf:
            raise ConfigError(f"--fail-if-worse is {option}; expected a margin of at least 0, as {name}:0.02.")
    return limits


def _choose_rows(run: FinishedRun, split: Split | None, metrics: Sequence[str], suites: Sequence[str]) -> Split | None:
    """Return the split to measure: "none" if only suites are asked for, and the rows of the run have several answers.

    `metrics` are those that the command names.

    Raises:
        ConfigError: the rows are pairs or labelled answers, or no rows are to be measured and something needs them.
    """
    objective = run.config.objective
    cannot_measure = objective.compares_answers and _keeps_data(run, "path", "mixture", "train", "validation", "test")
    row_type = "pairs of answers" if objective.compares_pairs else "labelled answers"
    if cannot_measure and split != "none":
        other_rows = "rows with one answer with data.path=FILE data.test=FILE"
        if split or metrics or not suites:
            report = shlex.join(["finetune", "report", str(run.folder.path)])
            raise ConfigError(
                f"{run.folder.path} was trained on {row_type}, and evaluate measures rows with one answer. Give such "
                f"{other_rows}, or only suites with --suite NAME; `{report}` shows the rewards."
            )
        _log.info("the run was trained on %s, so only the suites are measured. Or give %s", row_type, other_rows)
        return "none"
    if split == "none" and (metrics or not suites):
        raise ConfigError(
            f"--split none measures only suites. Drop --metric {metrics[0]}, which needs rows."
            if metrics
            else "--split none measures only suites, and there is none. Give --suite NAME."
        )
    return split


def _keeps_data(run: FinishedRun, *keys: str) -> bool:
    """Return whether the command leaves these keys of `data` as the run had them; all that decide rows by default."""
    from finetune.config.config_files import shown_path
    from finetune.config.keys import on_resume

    recorded = ("default", shown_path(run.folder.config_file))
    deciding = [key for key in type(run.config.data).model_fields if on_resume(f"data.{key}").matters != "never"]
    origins = [run.config.origin(f"data.{key}") for key in keys or deciding]
    saved = run.recorded.config
    same = [saved is not None and getattr(saved.data, key) == getattr(run.config.data, key) for key in keys or deciding]
    return all(is_same or origin.startswith(recorded) for is_same, origin in zip(same, origins, strict=True))


def _measure(
    run: FinishedRun,
    split: str | None,
    metrics: Mapping[str, Metric],
    suites: Sequence[Suite],
    other: FinishedRun | None,
    limits: Mapping[str, float],
    report: Callable[[Evaluation], None],
) -> None:
    """Launch the processes and measure the run. The main process reports the evaluation.

    `other` is the model to compare with: another run, or the base of a run that trained every weight. None: the base,
    by switching the adapter off.

    Raises:
        RequirementError: on all ranks, if the run is worse than the limits allow.
    """
    with importing():
        from finetune.distributed.launch import launch
        from finetune.inference.evaluation_record import exceeded_margins
        from finetune.inference.finished_run import read_finished_run
        from finetune.inference.forgetting import measure_forgetting
        from finetune.inference.suites import measure_suites
        from finetune.runs.recorded_rows import read_row_record
        from finetune.training.measuring import KnownRows, measure_split

    recorded = read_row_record(run.folder)
    records = [recorded, read_row_record(other.folder) if other else None]
    trained = [record for record in records if record is not None]
    config = run.config
    if other is not None:
        config = config.model_copy(update={"testing": config.testing.model_copy(update={"compare_base": False})})
    with launch(config, trains=False) as runtime:
        loaded = read_finished_run(runtime, run)
        for suite in suites:
            suite.encode(loaded.tokenizer)  # refuses a suite before anything is measured
        known = KnownRows(recorded, _keeps_data(run), run.fingerprints, others=trained)
        evaluation = measure_split(runtime, config, loaded, split, metrics, known)
        second = None if other is None else _load_other(runtime, run, other)
        if other is not None and second is not None:
            # The rows of RUN, as the other model reads them.
            data = config.data.model_copy(update={"chat_template": other.config.data.chat_template})
            same = {"data": data, "testing": config.testing, "validation": config.validation}
            there = other.config.model_copy(update=same)
            known = KnownRows(recorded, others=trained)
            theirs = measure_split(runtime, there, second, evaluation.split, metrics, known)
            name = "base" if other.folder is run.folder else str(shown_folder(other.folder.path))
            evaluation = evaluation.against(theirs, name)
        evaluation = measure_suites(runtime, evaluation, suites, config.testing, loaded, second)
        is_random, prompts = run.base_model.init == "random", config.testing.general_prompts
        compared_with = "the base" if evaluation.other_name == "base" else evaluation.other_name
        forgetting = measure_forgetting(
            runtime, loaded, prompts, base=second, base_name=compared_with, has_random_base=is_random
        )
        evaluation = replace(evaluation, forgetting=forgetting)
        with runtime.collectives.failing_together("judging the run"):  # the others wait for the report
            if runtime.is_main_process:
                report(evaluation)
                if worse := exceeded_margins(evaluation, limits):
                    raise RequirementError("\n  ".join(worse))


def _load_other(runtime: Runtime, run: FinishedRun, other: FinishedRun) -> LoadedRun | None:
    """Load the model to compare with. The base of a run that trained every weight may be gone: None, as a fallback."""
    from finetune.inference.finished_run import read_finished_run

    try:
        return read_finished_run(runtime, other)
    except ModelError as error:
        if other.folder is not run.folder:
            raise
        wanted, used = "the base of the run as well", "the tuned model alone"
        runtime.fallbacks.take(Fallback(what="testing.compare_base", wanted=wanted, used=used, why=str(error)))
        return None


def _measure_by_harness(run: FinishedRun, tasks: str, folder: Path | None) -> Results:
    with importing():
        from finetune.distributed.launch import launch
        from finetune.inference.finished_run import load_finished_run
        from finetune.inference.harness import run_harness

    with launch(run.config, trains=False) as runtime:
        model, tokenizer = load_finished_run(runtime, run)
        return run_harness(
            model,
            tokenizer,
            [task.strip() for task in tasks.split(",") if task.strip()],
            batch_size=run.config.testing.batch_size,
            task_folder=folder,
        )


def _refuse_to_overwrite(option: str, file: Path | None) -> None:
    if file is None:
        return
    if file.exists():
        raise ConfigError(f"{option} is {file}, which exists already and stays as it is. Name a new file.")
    from finetune.runs.output_files import refuse_unwritable

    refuse_unwritable(option, file)


def _write(option: str, file: Path, content: Mapping[str, Any] | str) -> None:
    from finetune.runs.durable import describe_os_error, replace_file

    _refuse_to_overwrite(option, file)  # another program may have written it meanwhile
    text = (
        content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n"
    )
    try:
        replace_file(file, text.encode())
    except OSError as error:
        raise RunFailedError(f"{file} cannot be written: {describe_os_error(error)}.") from error


def _show_harness(results: Results) -> None:
    rows = [
        [task, name, f"{value:.4f}"]
        for task, metrics in results.items()
        for name, value in metrics.items()
        if isinstance(value, float)
    ]
    print_table(["task", "metric", "value"], rows, title="lm-evaluation-harness")
