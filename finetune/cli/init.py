"""`finetune init`: ask for model, data and place, and write a run file."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import filterfalse, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.commands import Overrides
from finetune.cli.overrides import config_from_overrides, run_and_overrides
from finetune.config.compose import DEFAULT_TASK, compose
from finetune.config.config_files import GROUPS, files_in, is_address, is_list_or_glob, is_path, resolve_shipped
from finetune.config.keys import code_keys, fields, section_class, values
from finetune.config.listing import MADE_FOR, list_configs, list_model_families, other_models
from finetune.config.render import SCHEMA_FILE, SCHEMA_LINE, TRAIN_WITH, inline_yaml, schema_text
from finetune.config.schema import AUTO_VALIDATION, Config, as_list, name_files
from finetune.config.yaml_reader import COMMAND_LINE
from finetune.data.examples import check_local_rows, holds_out_by_default, is_all_here, load_examples
from finetune.data.readers import SUFFIXES, suffix_of
from finetune.errors import CheckpointError, ConfigError, FinetuneError
from finetune.logs import importing, waiting
from finetune.runs.default_folder import with_chosen_folder
from finetune.runs.durable import replace_file
from finetune.runs.folder import RunFolder
from finetune.runs.output_files import refuse_unwritable, writes
from finetune.terminal import say

if TYPE_CHECKING:
    from finetune.config.translation import Translation

_DEFAULTS = {"model": "phi_tiny", "data": "orders"}
"""They train at once, on any machine and without a network."""
_REPLACED = {
    "model": ("path", "revision", "tokenizer"),
    "data": ("path", "mixture", "name", "revision", "train", "columns"),
}
"""The keys that belong to the model or the rows of another tool's file. They go when an override chooses others."""
_STAND_INS = {"model.path": "shipped:phi_tiny", "data.path": "shipped:orders", "reward.functions": "length"}
"""What takes the place of keys that a translation leaves open, while it is checked."""
_MOST_ROWS = 1000
"""The most rows that are encoded to find the mean number of tokens in a row."""
_ASK_VALIDATION = "Rows to validate on: auto (5 % of them, none of fewer than 40), null, a number, a share or a file"


def init_from_overrides(
    overrides: Overrides = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="The file to write. Default: named after the run's folder.")
    ] = None,
    sources: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="Translate this file of axolotl, LLaMA-Factory, TRL, Transformers or DeepSpeed. Repeatable, for files "
            "of one run.",
        ),
    ] = None,
    is_full: Annotated[
        bool, typer.Option("--full", help="Also write the keys that keep their defaults, commented out.")
    ] = False,
) -> None:
    """Ask for what the overrides leave open, and write a run file. Without a terminal, print one with the defaults.

    What a file of another tool leaves open is not filled in: it stays open.

    Raises:
        ConfigError: an override is wrong, the source cannot be translated, or the file exists. Nothing is written then.
        RunFailedError: the disk is full.
    """
    overrides = overrides or []
    if run := run_and_overrides(overrides)[0]:
        raise ConfigError(f"init takes no run file, got {run}. It writes a new one: give model=, data= or single keys.")
    _refuse_existing(file)
    is_asking = sys.stdin.isatty() and sys.stdout.isatty()
    if sources:
        text = _translated_run_file(sources, overrides, file, is_full=is_full)
    else:
        overrides = [*overrides, *_answers(overrides, file, is_asking=is_asking)]
        config = config_from_overrides(overrides, command="init")
        _refuse_as_train(config)
        if is_asking and file is None:
            file = _file_of(config.output_dir)
            _refuse_existing(file)
        notes = (_template_to_choose(config), ())
        groups = _group_files(overrides)
        text = _commented_run_file(config, groups, file or "FILE.yaml", {}, notes, is_full=is_full)
    if file is None:
        sys.stdout.write(text)
        return
    _refuse_existing(file)  # another program may have written it meanwhile
    with writes(file, "Name another file with --file."):
        replace_file(file, text.encode())
    with suppress(OSError), (file.parent / SCHEMA_FILE).open("x", encoding="utf-8") as schema:  # for editors only
        schema.write(schema_text())
    if number := text.count("\n# DECIDE: "):
        say(f"decisions to make: {number}. Look for DECIDE in {file}.")
    run = text.partition("\n")[0].removeprefix(TRAIN_WITH)
    say(f"wrote {file}\nnext: finetune plan {run}, then finetune train {run}")


def _translated_run_file(sources: Sequence[Path], overrides: Sequence[str], file: Path | None, *, is_full: bool) -> str:
    """Return the text of a run file for files of another tool. Overrides win over what the files say."""
    from finetune.config.translation import translate_file

    typed = compose(overrides, complete=False)
    is_chosen = typed.origin("training.objective") != "default"
    objective = typed.training.objective if is_chosen else None
    translation = translate_file(sources[0], objective=objective, others=sources[1:])
    chosen = {override.partition("=")[0].strip() if "=" in override else "data" for override in overrides}
    replaced = {f"{section}.{key}" for section, keys in _REPLACED.items() if section in chosen for key in keys}
    if chosen & {"data.path", "data.mixture"}:
        replaced |= {"data.path", "data.mixture", "data.train"}
    for key in replaced:
        translation.leave_out(key)
    config = _accepted(overrides, translation, chosen)
    has_sequences = translation.packs_rows and not chosen & {"training.batch_size", "training.global_batch_size"}
    if has_sequences and (counted := _tokens_per_row(config)):
        translation.count_rows(config, *counted)
        config = _accepted(overrides, translation, chosen)
    decide, settled = translation.comments(chosen | replaced)
    missing = {f"# DECIDE: Set {key}": ", or add it to the command." for key in _open_keys(config)}
    decide += [start + end for start, end in missing.items() if not any(line.startswith(start) for line in decide)]
    decide += _template_to_choose(config)
    groups = {group: name for group, name in _group_files(overrides).items() if group in chosen}
    notes = (decide, settled)
    return _commented_run_file(config, groups, file or "FILE.yaml", translation.came_from, notes, is_full=is_full)


def _accepted(overrides: Sequence[str], translation: Translation, chosen: Collection[str]) -> Config:
    """Compose the configuration of a translation, and change what `finetune train` would refuse of the translation.

    Raises:
        ConfigError: no change of the translation makes the configuration acceptable.
    """
    while True:
        compose_with = partial(config_from_overrides, command="init", translated=[*translation.settings.values()])
        try:
            config = compose_with(overrides, complete=False)
            _refuse_as_train(compose_with([*overrides, *(f"{key}={_STAND_INS[key]}" for key in _open_keys(config))]))
        except ConfigError as error:
            if not translation.change(str(error), chosen):
                raise
        else:
            return config


def _open_keys(config: Config) -> list[str]:
    """Return the keys that a run needs and that this configuration leaves open."""
    is_set = {
        "model.path": config.model.path or config.model.config,
        "data.path": config.data.label,
        "reward.functions": not config.objective.generates_answers or config.reward.functions,
    }
    return [key for key in _STAND_INS if not is_set[key]]


def _refuse_as_train(config: Config) -> None:
    """Raise the errors of `finetune train` that do not depend on the model, the rows and this machine."""
    from finetune.training.checks import check_settings
    from finetune.training.validation import LOSS

    validation, best = config.validation, {config.early_stopping.metric, config.checkpoint.best_metric}
    rewards = config.objective.generates_answers
    if rewards or validation.metrics or validation.by or best != {LOSS}:  # what the objective's own functions check
        with importing():
            from finetune.training.setup import check_config

        check_config(config)
    else:
        check_settings(config)


def _template_to_choose(config: Config) -> list[str]:
    """Return a comment if the model's tokenizer has no chat template. One that is only on the hub is not looked at."""
    from finetune.data.chat_template import WITHOUT_TEMPLATE

    name = config.model.tokenizer or config.model.path
    if name is None or config.data.chat_template or config.model.chat_template or config.data.format == "text":
        return []
    with suppress(OSError, ValueError, AttributeError):  # ValueError: no JSON
        settings = _find_tokenizer_file(config, "tokenizer_config.json")
        if settings is None or json.loads(settings.read_text(encoding="utf-8")).get("chat_template"):
            return []
        if not any(_find_tokenizer_file(config, f"chat_template.{suffix}") for suffix in ("jinja", "json")):
            advice = f"DECIDE: {name} has no chat template, which rows of messages need. Set {WITHOUT_TEMPLATE}."
            return [f"# {line}" for line in textwrap.wrap(advice, width=98, break_on_hyphens=False)]
    return []


def _find_tokenizer_file(config: Config, file: str) -> Path | None:
    """Return the path of a file of the tokenizer, in its folder or in the cache of the hub. The hub is not asked."""
    from finetune.config.hub import Repository, cached_file

    name = config.model.tokenizer or config.model.path
    if name is None:
        return None
    folder = Path(resolve_shipped(name)).expanduser()
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    with suppress(OSError, ValueError):  # ValueError: no hub id
        return cached_file(Repository(name, config.model.revision, "model"), file)
    return None


def _tokens_per_row(config: Config) -> tuple[float, str] | None:
    """Return the mean tokens of the first rows, and how they were counted. None if the rows are not on this machine."""
    if not config.data.label or not is_all_here(config.data):
        return None
    with TemporaryDirectory() as cache, suppress(FinetuneError), waiting("counting the tokens of the rows"):
        few = min(config.data.max_rows or _MOST_ROWS, _MOST_ROWS)
        sample = {"data.max_rows": few, "data.validation": None, "data.test": None, "data.cache_dir": cache}
        config = config.with_values({key: (value, COMMAND_LINE) for key, value in sample.items()})
        if _find_tokenizer_file(config, "tokenizer_config.json") is None:
            lengths = [sum(map(len, row.contents)) / 4 for row in load_examples(config.data).train]
            how = "at 4 characters a token, because the tokenizer is not on this machine"
        else:
            with importing():
                from finetune.fallbacks import Fallbacks
                from finetune.model.tokens import build_run_tokenizer
                from finetune.training.objective import encode_for_objective

            rows = encode_for_objective(config, build_run_tokenizer(config), fallbacks=Fallbacks(strict=False)).train
            lengths, how = rows.lengths.tolist(), "with the model's tokenizer"
        longest = config.data.max_length
        mean = sum(min(length, longest) for length in lengths) / len(lengths)
        return mean, f"The first {len(lengths):,} rows have {mean:.0f} tokens on average, counted {how}."
    return None


def _answers(overrides: Sequence[str], file: Path | None, *, is_asking: bool) -> list[str]:
    """Return overrides for what is left open: the answers, or the defaults."""
    config = config_from_overrides(overrides, command="init", complete=False)
    is_set = {
        "model": config.model.path or config.model.config,
        "data": config.data.path or config.data.mixture or config.data.train,
    }
    chosen = {override.partition("=")[0] for override in overrides}
    still_open = [group for group in _DEFAULTS if not is_set[group] and group not in chosen]
    answers: list[str] = []
    for group in still_open:
        answers.append(f"{group}={_QUESTIONS[group]([*overrides, *answers]) if is_asking else _DEFAULTS[group]}")
    config = config_from_overrides([*overrides, *answers], command="init", complete=False)
    if config.origin("output_dir") == "default":
        place = with_chosen_folder(config).output_dir
        if is_asking:
            place = _prompt("The folder of the run", place, partial(_free_folder, file))
        answers.append(f"output_dir={place}")
    if config.origin("data.validation") == "default" and holds_out_by_default(config.data):
        check = partial(_validation_rows, [*overrides, *answers])
        rows = _prompt(_ASK_VALIDATION, AUTO_VALIDATION, check) if is_asking else AUTO_VALIDATION
        answers.append(f"data.validation={rows}")
    return answers


def _ask_model(overrides: Sequence[str]) -> str:
    say(f"{MADE_FOR}:")
    for name, description in list_model_families()[MADE_FOR]:
        say(f"  {name:<16} {description}", indent=" " * 19)
    say("It trains these too (finetune config list describes them):")
    for line in other_models():
        say(f"  {line}", indent=" " * 4)
    question = "Model: one of these, a folder or a hub id"
    return _prompt(question, _DEFAULTS["model"], partial(_existing, "model", overrides))


def _ask_data(overrides: Sequence[str]) -> str:
    here = sorted(path.name for path in Path().glob("*.jsonl"))
    default = here[0] if len(here) == 1 else _DEFAULTS["data"]
    question = "Data: a file, a folder, a hub id, or orders, which is shipped"
    return _prompt(question, default, partial(_existing, "data", overrides))


_QUESTIONS: dict[str, Callable[[Sequence[str]], str]] = {"model": _ask_model, "data": _ask_data}


def _prompt(question: str, default: str, check: Callable[[str], str]) -> str:
    try:
        answer: str = typer.prompt(question, default=default, value_proc=check)
    except typer.Abort:  # Ctrl-C or Ctrl-D
        raise KeyboardInterrupt from None
    return answer


def _existing(group: str, overrides: Sequence[str], answer: str) -> str:
    """Refuse a name that is neither a config with a path of its own, nor a path that exists, nor a hub id."""
    try:
        path = getattr(compose([f"{group}={answer}"], complete=False), group).path
        where = Path(resolve_shipped(name_files(path))).expanduser()
    except ConfigError as error:
        raise typer.BadParameter(str(error).removeprefix("command line: ")) from None
    if path is None:
        raise typer.BadParameter(f"{answer} leaves {group}.path open. Give a path or a hub id.")
    if not is_list_or_glob(files_in(answer)) and not where.exists() and not is_address(path):
        if path.startswith((".", "/", "~")) or path.count("/") != 1 or suffix_of(where) in SUFFIXES:
            raise typer.BadParameter(f"there is no file or folder {path} (looked in {Path.cwd()}).")
        say(f"{path} is not a folder here: it is read from the Hugging Face Hub.")
    elif group == "data" and not any(map(is_address, as_list(path))):
        _check_rows([*overrides, f"data={answer}"])
    return answer


def _check_rows(overrides: Sequence[str]) -> None:
    """Refuse rows on this machine that cannot be read, and say what the run file must set to read the first one."""
    config = config_from_overrides(overrides, command="init", complete=False)
    try:
        check_local_rows(config.data)
    except FinetuneError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        check_local_rows(config.data, config.objective.reads)
    except FinetuneError as error:
        say(f"These rows need more settings, in the run file or in this command: {error}")


def _validation_rows(overrides: Sequence[str], answer: str) -> str:
    """Refuse an answer that is neither a size nor rows that can be read, if the training rows can be read."""
    with suppress(FinetuneError):
        check_local_rows(config_from_overrides(overrides, command="init", complete=False).data)
        try:
            answered = [*overrides, f"data.validation={answer}"]
            check_local_rows(config_from_overrides(answered, command="init", complete=False).data)
        except FinetuneError as error:
            raise typer.BadParameter(str(error).removeprefix(f"{COMMAND_LINE}: ")) from None
    return answer


def _free_folder(file: Path | None, answer: str) -> str:
    try:
        RunFolder(answer).check()
    except CheckpointError as error:
        raise typer.BadParameter(str(error)) from None
    if file is None and _file_of(answer).exists():
        raise typer.BadParameter(f"its run file would be {_file_of(answer)}, which exists. Name another folder.")
    return answer


def _file_of(folder: str) -> Path:
    return Path(f"{Path(folder).expanduser().resolve().name}.yaml")


def _refuse_existing(file: Path | None) -> None:
    if file is None:
        return
    if file.suffix not in (".yaml", ".yml"):
        name = file.with_name(f"{file.name}.yaml")
        raise ConfigError(f"--file is {file}, but a run file ends in .yaml or .yml. Name it {name}, for example.")
    if file.exists() or file.is_symlink():
        raise ConfigError(f"{file} exists already. Nothing was written; name another file with --file.")
    refuse_unwritable("--file", file)


def _group_files(overrides: Sequence[str]) -> dict[str, str]:
    """Return the names of the group files that the overrides choose, in the order of `GROUPS`."""
    pairs = dict(override.partition("=")[::2] for override in (f"task={DEFAULT_TASK}", *overrides))
    return {group: pairs[group] for group in GROUPS if group in pairs and not is_path(group, pairs[group])}


def _find_unread_keys(config: Config, chosen: Sequence[str]) -> dict[str, str]:
    """Return the keys among `chosen` that the run will not read, and why. A model that is still open reads its own."""
    from finetune.training.unread_keys import find_unread_keys

    if config.model.path is None:
        chosen = [key for key in chosen if not key.startswith("model.")]
    return find_unread_keys(config, chosen, has_metrics=bool(config.validation.metrics), world_size=None)


def _commented_run_file(
    config: Config,
    groups: Mapping[str, str],
    file: object,
    came_from: Mapping[str, Sequence[str]],
    notes: tuple[Sequence[str], Sequence[str]],
    *,
    is_full: bool,
) -> str:
    """Write a run file that gives this configuration: each key that it sets, with its meaning.

    The file sets the keys that the overrides set, and chooses the group files that they choose. No file may set the
    keys that let code run, so the command in the first line has them. The file also sets the keys
    of `came_from`, which has the settings of another tool that they were translated from. The first of the `notes` are
    written before the keys, the second after them. With `is_full`, all other keys follow, commented out.
    """
    given = values(config)
    is_typed = {key: config.origin(key).startswith(COMMAND_LINE) for key in given}
    for_code = [f"{key}={json.dumps(given[key])}" for key in code_keys() if is_typed[key] and given[key]]
    is_set = {key: key in came_from or (is_typed[key] and key not in code_keys()) for key in given}
    unread = _find_unread_keys(config, [key for key in given if is_set[key]])
    lines = [
        f"{TRAIN_WITH}{shlex.join([str(file), *for_code])}",
        "# Overrides after it win over this file: optim.learning_rate=1e-4",
        f"# Editors complete and check its keys with the schema: finetune config schema > {SCHEMA_FILE}",
        SCHEMA_LINE,
        *(["", *notes[0]] if notes[0] else []),
    ]
    for group, name in groups.items():
        lines += [
            "",
            f"# {dict(list_configs()[group]).get(name, f'Chooses a {group}.')}",
            f"{group}: {inline_yaml(name)}",
        ]
    for key in filter(is_set.get, given):
        written = () if config.origin(key).startswith(COMMAND_LINE) else came_from.get(key, ())
        sources = [f"# Translated from {source}" for source in written]
        if key in unread:
            sources.append(f"# It has no effect in this run: {unread[key]}.")
        lines += ["", f"# {fields()[key].description}", *sources, f"{key}: {inline_yaml(given[key])}"]
    lines += ["", *notes[1]] if notes[1] else []
    if not is_full:
        command = shlex.join(["finetune", "config", "show", str(file)])
        lines += ["", f"# {command} lists all other keys with their values, and finetune help KEY explains one."]
        lines += ["# finetune init --full writes them here, too."]
        return "".join(f"{line}\n" for line in lines)
    lines += ["", "# All other keys, with the values that they have now. Remove the # before a key to set it."]
    for section, keys in groupby(filterfalse(is_set.get, given), lambda key: key.rpartition(".")[0]):
        title = f"{section}: {(section_class(section) or Config).__doc__}".lstrip(": ")
        lines += ["", f"# === {title}"]
        for key in keys:
            lines += [f"# {fields()[key].description}", f"#{key}: {inline_yaml(given[key])}"]
    return "".join(f"{line}\n" for line in lines)
