"""The table of all commands of `finetune`, and the command line that is made from it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from finetune import __version__
from finetune.signals import raise_at_once, stop_signals_go_to
from finetune.terminal import say


class Command(NamedTuple):
    """A command or a group of commands. `export gguf` is a command of the group `export`."""

    name: str
    function: str
    """``module:function`` in `finetune.cli`, imported when the command is called. Its parameters are the arguments and
    options, and it may return an exit code. Empty for a group that only shows its help."""
    panel: str
    """The title above the command in the help that lists it."""
    summary: str
    takes_overrides: bool = False
    """Whether its arguments are OVERRIDES, which may also be written as flags."""


_BEFORE, _AFTER = "Prepare and train", "Follow a run, and use a finished one"
_FORMATS, _COMMANDS = "Formats", "Commands"
# fmt: off
COMMANDS = (
    Command("train", "overrides:train_from_overrides", _BEFORE,
        "Train a model: `finetune train quickstart`, or `finetune train model=phi4_mini data=chats.jsonl`.",
        takes_overrides=True),
    Command("help", "commands:help_command", _BEFORE,
        "Explain a command, a task or a key, such as plan, dpo or lora.r, or search keys, tasks and pages for a word."),
    Command("sweep", "sweep:sweep_from_overrides", _BEFORE,
        "Train several times with other values: `lora.r=8,16 'optim.learning_rate=log(1e-5,1e-3)' --trials 12`.",
        takes_overrides=True),
    Command("init", "init:init_from_overrides", _BEFORE,
        "Ask for model, data and place, and write a commented run file. Without a terminal, print one.",
        takes_overrides=True),
    Command("doctor", "doctor:doctor", _BEFORE,
        "Check launch, versions, devices and folders, with the OVERRIDES of train. Or prove a family: --model olmo3.",
        takes_overrides=True),
    Command("preview", "preview:preview_from_overrides", _BEFORE,
        "Show rows as the model will see them: tokens, loss, lengths, truncated rows. Takes the OVERRIDES of train.",
        takes_overrides=True),
    Command("plan", "plan:plan_from_overrides", _BEFORE,
        "Predict a run: parameters, steps, memory, whether it fits, disk, time. Takes the OVERRIDES of train.",
        takes_overrides=True),
    Command("rehearse", "rehearse:rehearse_from_overrides", _BEFORE,
        "Run the job in minutes on a tiny random model: train, kill, resume, verify. Takes the OVERRIDES of train.",
        takes_overrides=True),
    Command("evaluate", "evaluate:evaluate_command", _AFTER,
        "Measure a finished run on its test or validation split, base against tuned. OVERRIDES change its config."),
    Command("generate", "generate:generate_command", _AFTER,
        "Ask a finished run: one answer for each PROMPT, each row of --from FILE, or the text of a pipe."),
    Command("chat", "chat:chat", _AFTER,
        "Talk with a finished run. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves."),
    Command("merge", "export:merge_command", _AFTER,
        "Merge a run's adapter into its base, and check that transformers alone loads it with the same answers."),
    Command("export", "", _AFTER,
        "Export a run or a merged model for a server: `finetune export gguf runs/a`. Each format has its own options."),
    Command("export gguf", "export:gguf_command", _FORMATS,
        "A GGUF file for llama.cpp and Ollama, in 16 bits or quantized (`--type q4_k_m`)."),
    Command("export lora", "export:lora_command", _FORMATS,
        "A run's adapter as a GGUF file, and its base beside it: for llama.cpp with one base and several adapters."),
    Command("export ollama", "export:ollama_command", _FORMATS,
        "A Modelfile for Ollama, which imports the merged folder itself."),
    Command("export onnx", "export:onnx_command", _FORMATS,
        "An ONNX model for onnxruntime-genai, in fp32 or int4, compared there with the run."),
    Command("export vllm", "export:vllm_command", _FORMATS,
        "A folder for vLLM, compressed by llm-compressor (fp8, w8a8, w4a16), compared with the run."),
    Command("export smallest", "export:smallest_command", _FORMATS,
        "The smallest of all these that still answers as the run does."),
    Command("export text", "export:text_command", _FORMATS,
        "The text model of a model that also reads images or sound (Gemma 3 4B, Ministral 3), to train it."),
    Command("verify", "verify:verify", _AFTER,
        "Compare a run or a model, in the runtime that serves it, with what was trained, and write a certificate."),
    Command("push", "export:push", _AFTER,
        "Push a run's adapter or a merged model to the hub as one commit, after printing the list of its files."),
    Command("watch", "runs:watch", _AFTER,
        "Follow a run from another terminal, or show one that has ended. Ctrl-C leaves it running."),
    Command("runs", "runs:runs", _AFTER,
        "List the runs in a folder: state, step, losses, when, model, data."),
    Command("diff", "bisect:diff", _AFTER,
        "Compare two runs: config, versions, data, world, results. Exit code 1 if they differ."),
    Command("bisect", "bisect:bisect", _AFTER,
        "Find the first step in which two runs differ, and the cause. Exit code 3 if they differ."),
    Command("upgrade", "bisect:upgrade", _AFTER,
        "Compare another environment with this one: steps and answers of a finished run. Exit code 3 if they differ."),
    Command("checkpoints", "runs:checkpoints", _AFTER,
        "List a run's checkpoints: validation loss, size, whether each is whole, and where resume=auto goes on."),
    Command("report", "report:report", _AFTER,
        "Write one page about one run or several: curves, differences, data, answers. It opens without a network."),
    Command("receipt", "report:receipt", _AFTER,
        "Write the receipt of a finished run: rows, base, operations, time, versions, results. JSON, and a page."),
    Command("config", "", _BEFORE,
        "Show the configuration of a run, the schema of all keys, or the configs to choose from."),
    Command("config show", "config:config_show", _COMMANDS,
        "Print the configuration of a run and where each value comes from. Takes the OVERRIDES of train.",
        takes_overrides=True),
    Command("config schema", "config:config_schema", _COMMANDS,
        "Print the JSON Schema of a config file, for editors."),
    Command("config list", "config:config_list", _COMMANDS,
        "List the configs to choose from: the shipped ones, and those in ./configs."),
    Command("recipes", "recipes:show_recipes", _BEFORE,
        "List the recipes, or copy one to a folder."),
    Command("recipes copy", "recipes:copy_recipe", _COMMANDS,
        "Copy a recipe or a launch file to a folder. Nothing is overwritten."),
)
# fmt: on
"""In the order of `finetune --help`."""
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


def _complete_argument(incomplete: str) -> list[str]:
    """Complete an argument in a shell: run files, choices of a group, keys."""
    from finetune.config.keys import fields
    from finetune.config.listing import list_configs

    shipped = list_configs()
    runs_by_name = [name for name, _ in shipped.pop("run")]
    choices = [f"{group}={name}" for group, entries in shipped.items() for name, _ in entries]
    offered = [*runs_by_name, *choices, *(f"{key}=" for key in fields())]
    return [argument for argument in offered if argument.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN] OVERRIDES…",
        help="RUN is a name in configs/ or a YAML file. OVERRIDES choose the model (model=phi4, a folder or a hub id) "
        "and the data (data=chats.jsonl), and set keys (optim.learning_rate=1e-4). Flags do the same: --model phi4.",
        autocompletion=_complete_argument,
    ),
]


class _Commands(TyperGroup):
    """Commands of the table, with a suggestion for the names of other tools."""

    def _full_name(self, name: str) -> str:
        return f"{self.name} {name}".removeprefix("finetune ")

    def load(self, name: str) -> Any:
        """Return a command with its arguments and options. Until then it has only its summary."""
        row = next((row for row in COMMANDS if row.name == self._full_name(name)), None)
        if row is not None:
            self.commands[name] = _load(row, name)
        return self.commands.get(name)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the format first in the arguments of `finetune export`."""
        if self.name == "export":
            from finetune.cli.export import with_format

            args = with_format(args, self.commands)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find and load the command that the first argument names."""
        full_name = self._full_name(args[0])
        if full_name in _MEANT:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{_MEANT[full_name]}'?")
        if self.load(args[0]) is None:
            from finetune.cli.help import find_task

            if task := find_task(full_name):
                ctx.fail(f"No such command '{args[0]}'. Did you mean 'train task={task}'?")
        return super().resolve_command(ctx, args)


class _Command(TyperCommand):
    """A command whose function may return an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Let `--max_new_tokens` name the option `--max-new-tokens`."""
        options = [name for each in self.get_params(ctx) for name in (*each.opts, *each.secondary_opts)]
        own = {name.replace("-", "_"): name for name in options if name.startswith("--")}
        parts = [argument.partition("=") for argument in args]
        return super().parse_args(ctx, [own.get(name.replace("-", "_"), name) + "".join(rest) for name, *rest in parts])

    def invoke(self, ctx: Any) -> None:
        """Call the function, and exit with its code. Stop signals raise in it, so that it removes temporary files."""
        with stop_signals_go_to(raise_at_once):
            if code := super().invoke(ctx):
                ctx.exit(code)


class _TakesOverrides(_Command):
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


def _load(row: Command, name: str) -> Any:
    """Make a command, or a group of commands. A group's own function is called when no command is named."""
    module, _, attribute = row.function.partition(":")
    function: Any = getattr(import_module(f"finetune.cli.{module}"), attribute) if module else None
    inner = [each for each in COMMANDS if each.name.startswith(f"{row.name} ")]
    made = typer.Typer(name=name, cls=_Commands, add_completion=False, no_args_is_help=not module)
    if not inner:
        cls = _TakesOverrides if row.takes_overrides else _Command
        made.command(name, cls=cls, help=row.summary)(function)
    else:
        made.callback(help=row.summary, invoke_without_command=bool(module))(function or _list_only)
        _list_commands(made, inner)
    return typer.main.get_command(made)


def _list_commands(group: typer.Typer, rows: Sequence[Command]) -> None:
    """Add commands that have only their summaries."""
    for row in rows:
        group.command(row.name.split()[-1], help=row.summary, rich_help_panel=row.panel)(_list_only)


def _list_only() -> None:
    """Stand for a function that has not been imported."""


app = typer.Typer(
    name="finetune",
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune Phi models with LoRA: one loss curve under every launcher, and nothing goes wrong in silence.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
_list_commands(app, [row for row in COMMANDS if " " not in row.name])


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


def help_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]",
            help="A command (config show), a task (dpo), a key (lora.r), a model (phi4), or words to search for.",
        ),
    ] = None,
) -> None:
    """Print what a name means, or where a word is used."""
    from finetune.cli.help import explain_topic, refuse_near_topic, search

    if explain_topic(words := words or []):
        return
    names = [row.name for row in COMMANDS if " " not in row.name]
    if " ".join(words) in ("", *_MEANT, *(row.name for row in COMMANDS)) or not search(words):
        refuse_near_topic([word for word in words if word not in _MEANT], names)
        app([*words, "--help"], prog_name="finetune")
