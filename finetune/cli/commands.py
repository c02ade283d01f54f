"""What each command takes and says; the work is done elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from finetune import __version__

app = typer.Typer(
    name="finetune",
    help="Fine-tune Phi models with LoRA: one loss curve under every launcher, and nothing goes wrong in silence.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(
    help="Show what a run would use, the schema of all keys, and the configs that are shipped.",
    no_args_is_help=True,
)
recipes_app = typer.Typer(
    help="List the recipes that are shipped, or copy one to where you are.", invoke_without_command=True
)
app.add_typer(config_app, name="config")
app.add_typer(recipes_app, name="recipes")

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN] WORDS…",
        help="RUN is a name in configs/ or a YAML file. WORDS choose configs (model=phi4) and set keys "
        "(optim.learning_rate=1e-4).",
        show_default=False,
    ),
]
RunFolderArgument = Annotated[
    Path, typer.Argument(metavar="RUN_FOLDER", help="A run's folder, for example runs/quickstart.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        _say(f"finetune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


@app.command()
def train(words: Words = None) -> None:
    """Train a model: `finetune train quickstart`, or `… train model=phi4_mini data=phi4 data.path=chats.jsonl`."""
    from finetune.cli.train import train_from_words

    run, rest = _run_and_words(words)
    train_from_words(rest, run=run)


@app.command()
def evaluate(
    run_folder: RunFolderArgument,
    words: Annotated[list[str] | None, typer.Argument(metavar="WORDS…", show_default=False)] = None,
) -> None:
    """Measure a finished run on its test split, base against tuned. WORDS override its config."""
    from finetune.cli.finished import evaluate_run

    evaluate_run(run_folder, words or [])


@app.command()
def generate(
    run_folder: RunFolderArgument,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT…", help="What the user says.", show_default=False)],
    system: Annotated[
        str | None, typer.Option(help="The system turn. Default: the one most training rows have.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.", min=1)] = 256,
) -> None:
    """Ask a finished run: one greedy answer per PROMPT."""
    from finetune.cli.finished import answer_prompts

    for answer in answer_prompts(run_folder, prompts, system=system, max_new_tokens=max_new_tokens):
        _say(answer)


@app.command()
def checkpoints(
    run_folder: RunFolderArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """List what a run has saved: validation loss, size, whole or what is wrong, and where resume=auto goes on."""
    from finetune.inspect.checkpoints import list_checkpoints

    raise typer.Exit(list_checkpoints(run_folder, as_json=as_json))


@app.command()
def doctor(
    words: Words = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Examine launch, versions, devices, address and folders; under a launcher, the whole world. WORDS as for train."""
    from finetune.config.compose import compose

    run, rest = _run_and_words(words)
    config = compose(rest, run=run, complete=False)

    from finetune.inspect.doctor import diagnose

    raise typer.Exit(diagnose(config, as_json=as_json))


@config_app.command("show")
def config_show(words: Words = None) -> None:
    """Print the resolved config and where each value came from."""
    from finetune.config.compose import compose, show

    run, rest = _run_and_words(words)
    _say(show(compose(rest, run=run, complete=False)))


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of a config file, for editors."""
    from finetune.config.compose import json_schema

    _say(json.dumps(json_schema(), indent=2))


@config_app.command("list")
def config_list() -> None:
    """List the configs that are shipped."""
    from finetune.config.compose import list_configs

    for group, entries in list_configs().items():
        _say(f"{group}:")
        for name, description in entries:
            _say(f"  {name:<16} {description}")


@recipes_app.callback()
def recipes_list(context: typer.Context) -> None:
    """List the recipes that are shipped."""
    if context.invoked_subcommand is None:
        from finetune.cli.recipes import list_recipes

        for name, description in list_recipes():
            _say(f"{name:<20} {description}")
        _say("\nCopy one to where you are: finetune recipes copy finetune_lora")


@recipes_app.command("copy")
def recipes_copy(
    name: Annotated[str, typer.Argument(help="A name from `finetune recipes`.")],
    folder: Annotated[Path, typer.Argument(help="Where to write it.")] = Path(),
) -> None:
    """Write a recipe and its config to a folder. Nothing is overwritten."""
    from finetune.cli.recipes import copy_recipe

    for path in copy_recipe(name, folder):
        _say(f"wrote {path}")
    _say(f"next: python {folder / f'{name}.py'}")


def _run_and_words(words: list[str] | None) -> tuple[str | None, list[str]]:
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return None, words or []


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
