"""The commands of `finetune`, with their arguments and options."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from finetune import __version__
from finetune.terminal import fold, print_json, say


def _with_dashes(name: str) -> str:
    """Let `--max_new_tokens` name the option `--max-new-tokens`."""
    return name.replace("_", "-") if name.startswith("--") else name


_MEANT = {
    **dict.fromkeys(("list", "ls"), "runs"),
    **dict.fromkeys(("run", "fit", "resume"), "train"),
    **dict.fromkeys(("models", "tasks", "presets"), "config list"),
    **dict.fromkeys(("eval", "test"), "evaluate"),
    **dict.fromkeys(("infer", "inference", "predict"), "generate"),
    **{
        "convert": "export",
        "preprocess": "preview",
        "estimate": "plan",
        "status": "watch",
        "upload": "push",
        "version": "--version",
    },
}
"""Names that other tools give to what a command of ours does."""
_AFTER_A_RUN = {
    **{name: name for name in ("evaluate", "generate", "chat")},
    **dict.fromkeys(("merge", "export"), "export"),
    **{"verify": "verify", "push": "export"},
    **{"watch": "runs", "runs": "runs", "diff": "bisect", "bisect": "bisect"},
    **{"upgrade": "bisect", "checkpoints": "runs", "report": "report"},
}
"""The commands about finished runs, with the module in which each is a function. Training does not import them."""


class _Commands(TyperGroup):
    """The commands, with a suggestion for the names of other tools."""

    def list_commands(self, ctx: Any) -> list[str]:
        """List all commands: those before a run, those about finished runs, and the groups."""
        names = [name for name in super().list_commands(ctx) if name not in _AFTER_A_RUN]
        return [*names[:-2], *_AFTER_A_RUN, *names[-2:]]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, and import its module first."""
        if cmd_name in _AFTER_A_RUN and cmd_name not in self.commands:
            module = import_module(f"finetune.cli.{_AFTER_A_RUN[cmd_name]}")
            alone = typer.Typer(add_completion=False)
            # Beside a function for Python scripts, the command has a name of its own.
            function = getattr(module, f"{cmd_name}_command", None) or getattr(module, cmd_name)
            alone.command(cmd_name)(function)
            self.commands[cmd_name] = typer.main.get_command(alone)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the first argument names."""
        if args[0] in _MEANT:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{_MEANT[args[0]]}'?")
        if args[0] not in self.list_commands(ctx):
            from finetune.cli.help import find_task

            if task := find_task(args[0]):
                ctx.fail(f"No such command '{args[0]}'. Did you mean 'train task={task}'?")
            for name in _AFTER_A_RUN:  # typer suggests the names of commands that are loaded
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)


class _TakesOverrides(TyperCommand):
    """A command with OVERRIDES, which may be written as flags. The command's own options win."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write flags as overrides before the options of the command are read."""
        from finetune.config.compose import as_overrides

        own = [name for parameter in self.get_params(ctx) for name in parameter.opts if name.startswith("-")]
        return super().parse_args(ctx, as_overrides(args, own))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, for `train` with the keys that people set."""
        super().format_help(ctx, formatter)
        if self.name == "train":
            from finetune.cli.help import show_frequent_keys

            show_frequent_keys()


app = typer.Typer(
    name="finetune",
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _with_dashes},
    help="Fine-tune Phi models with LoRA: one loss curve under every launcher, and nothing goes wrong in silence.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(
    help="Show the configuration of a run, the schema of all keys, or the configs to choose from.", no_args_is_help=True
)
recipes_app = typer.Typer(help="List the recipes, or copy one to a folder.", invoke_without_command=True)
app.add_typer(config_app, name="config")
app.add_typer(recipes_app, name="recipes")


def _complete_argument(incomplete: str) -> list[str]:
    """Complete an argument in a shell: run files, choices of a group, keys."""
    from finetune.config.compose import list_configs
    from finetune.config.keys import fields

    shipped = list_configs()
    runs_by_name = [name for name, _ in shipped.pop("run")]
    choices = [f"{group}={name}" for group, entries in shipped.items() for name, _ in entries]
    offered = [*runs_by_name, *choices, *(f"{key}=" for key in fields())]
    return [argument for argument in offered if argument.startswith(incomplete)]


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN] OVERRIDES…",
        help="RUN is a name in configs/ or a YAML file. OVERRIDES choose the model (model=phi4, a folder or a hub id) "
        "and the data (data=chats.jsonl), and set keys (optim.learning_rate=1e-4). Flags do the same: --model phi4.",
        autocompletion=_complete_argument,
    ),
]


DeviceOption = Annotated[
    str | None, typer.Option(help="Plan for this device: 'H100 80GB'. Default: the device of this machine.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"finetune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


@app.command("train", cls=_TakesOverrides)
def train_command(overrides: Overrides = None) -> None:
    """Train a model: `finetune train quickstart`, or `finetune train model=phi4_mini data=chats.jsonl`."""
    from finetune.cli.overrides import train_from_overrides

    train_from_overrides(overrides or [])


@app.command("help")
def help_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]",
            help="A command (config show), a task (dpo), a key (lora.r), a model (phi4), or a word to search for.",
        ),
    ] = None,
) -> None:
    """Explain a command, a task or a key, such as plan, dpo or lora.r, or search keys, tasks and pages for a word."""
    from finetune.cli.help import explain_topic, refuse_near_topic, search

    words = words or []
    if explain_topic(words):
        return
    commands: Any = typer.main.get_command(app)
    names = commands.list_commands(None)
    if len(words) != 1 or words[0] in (*names, *_MEANT) or not search(words[0]):
        refuse_near_topic(words, names)
        app([*words, "--help"], prog_name="finetune")


@app.command(cls=_TakesOverrides)
def sweep(
    overrides: Overrides = None,
    trials: Annotated[
        int | None,
        typer.Option(help="Draw this many trials. Default: every combination, if all values are lists.", min=1),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Compare by this metric of validations. Default: validation.loss, or checkpoint.best_metric."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws, not of the runs.", min=0)] = 0,
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
) -> None:
    """Train several times with other values: `lora.r=8,16 'optim.learning_rate=log(1e-5,1e-3)' --trials 12`."""
    from finetune.cli.sweep import SweepOptions, sweep_from_overrides

    options = SweepOptions(trials, metric, seed, halving, only, retry_failed, report_only)
    raise typer.Exit(sweep_from_overrides(overrides or [], options))


@app.command(cls=_TakesOverrides)
def init(
    overrides: Overrides = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="The file to write. Default: named after the run's folder.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Translate this file of axolotl, LLaMA-Factory, TRL, Transformers or DeepSpeed."),
    ] = None,
    is_full: Annotated[
        bool, typer.Option("--full", help="Also write the keys that keep their defaults, commented out.")
    ] = False,
) -> None:
    """Ask for model, data and place, and write a commented run file. Without a terminal, print one."""
    from finetune.cli.init import init_from_overrides

    init_from_overrides(overrides or [], file, source, is_full=is_full)


@app.command(cls=_TakesOverrides)
def doctor(overrides: Overrides = None, as_json: JsonOption = False) -> None:
    """Check launch, versions, devices, network and folders on every process. Takes the OVERRIDES of train."""
    from finetune.cli.overrides import config_from_overrides

    config = config_from_overrides(overrides or [], complete=False)

    from finetune.diagnose.doctor import diagnose

    raise typer.Exit(diagnose(config, as_json=as_json))


@app.command(cls=_TakesOverrides)
def preview(
    overrides: Overrides = None,
    split: Annotated[Literal["train", "validation", "test"], typer.Option(help="The split to show.")] = "train",
    num_rows: Annotated[int, typer.Option("--rows", help="Number of rows to show, from the first on.", min=0)] = 3,
    row: Annotated[
        list[int] | None, typer.Option(help="Show this row in full, counted from 1. Repeatable.", min=1)
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print a line for each token.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show rows as the model will see them: tokens, loss, lengths, truncated rows. Takes the OVERRIDES of train."""
    from finetune.cli.preview import preview_from_overrides

    form: Literal["text", "table", "json"] = "json" if as_json else "table" if tokens else "text"
    code = preview_from_overrides(overrides or [], split=split, num_rows=num_rows, rows=row or [], form=form)
    raise typer.Exit(code)


@app.command(cls=_TakesOverrides)
def plan(
    overrides: Overrides = None,
    device: DeviceOption = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Run a few steps on this machine to measure the time.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict a run: parameters, steps, memory, whether it fits, disk, time. Takes the OVERRIDES of train."""
    from finetune.cli.plan import plan_from_overrides

    raise typer.Exit(plan_from_overrides(overrides or [], device=device, is_probed=probe, as_json=as_json))


@app.command(cls=_TakesOverrides)
def rehearse(
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to take.", min=1)] = 6,  # three saves, a kill after one
    minutes: Annotated[float, typer.Option(help="End a stage that runs so many minutes after the start.", min=0)] = 15,
    processes: Annotated[
        int | None, typer.Option(help="Processes of the real launch. Default: as the OVERRIDES say.", min=1)
    ] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the job in minutes on a tiny random model: train, kill, resume, verify. Takes the OVERRIDES of train."""
    from finetune.cli.rehearse import rehearse_from_overrides

    sizes = {"steps": steps, "minutes": minutes, "processes": processes}
    raise typer.Exit(rehearse_from_overrides(overrides or [], sizes, device=device, as_json=as_json))


@config_app.command("show", cls=_TakesOverrides)
def config_show(overrides: Overrides = None, as_json: JsonOption = False) -> None:
    """Print the configuration of a run and where each value comes from. Takes the OVERRIDES of train."""
    from finetune.cli.overrides import config_from_overrides
    from finetune.config.compose import render_config
    from finetune.config.keys import fields

    config = config_from_overrides(overrides or [], complete=False)
    if as_json:
        origins = {key: config.origin(key) for key in fields()}
        print_json({"config": config.model_dump(mode="json"), "origins": origins}, indent=None)
    else:
        for line in render_config(config).splitlines():
            value, _, origin = line.rpartition("  # ")
            if value and fold(line, sys.stdout) != line:  # too wide for the terminal
                say(value.rstrip(), indent="    ")
                line = f"    # {origin}"
            say(line, indent="    # ")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of a config file, for editors."""
    from finetune.config.compose import json_schema

    print_json(json_schema())


@config_app.command("list")
def config_list(as_json: JsonOption = False) -> None:
    """List the configs to choose from: the shipped ones, and those in ./configs."""
    from finetune.config.compose import list_configs
    from finetune.config.config_files import list_model_families

    if as_json:
        print_json({group: dict(entries) for group, entries in list_configs().items()}, indent=None)
        return
    families = list_model_families()
    for group, entries in list_configs().items():
        for family, listed in families.items() if group == "model" else [("", entries)]:
            say(f"{group}: {family}".rstrip())
            for name, description in listed:
                say(f"  {name:<20} {description}", indent=" " * 23)


@recipes_app.callback()
def recipes_list(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the recipes."""
    if context.invoked_subcommand is None:
        from finetune.cli.init import list_recipes

        if as_json:
            print_json(dict(list_recipes()), indent=None)
            return
        for name, description in list_recipes():
            say(f"{name:<20} {description}", indent=" " * 21)
        say("\nCopy one to this folder: finetune recipes copy finetune_lora")


@recipes_app.command("copy")
def recipes_copy(
    name: Annotated[str, typer.Argument(help="A name from `finetune recipes`.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write to.")] = Path(),
) -> None:
    """Copy a recipe to a folder. Nothing is overwritten."""
    from finetune.cli.init import copy_recipe

    path = copy_recipe(name, folder)
    given = "" if 'run="' in path.read_text(encoding="utf-8") else " model=phi_tiny data=orders"
    say(f"wrote {path}\nnext: python {path}{given}")
