"""`finetune help`: explain tasks and keys, and list the keys that people set."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from finetune.config.compose import DEFAULT_TASK, compose
from finetune.config.config_files import shipped_folder
from finetune.config.key_advice import did_you_mean, did_you_mean_key, expected, named_elsewhere
from finetune.config.keys import fields, values
from finetune.config.listing import list_configs
from finetune.config.objectives import OBJECTIVES
from finetune.config.render import inline_yaml
from finetune.config.schema import ALIASES
from finetune.config.yaml_reader import COMMAND_LINE
from finetune.errors import ConfigError
from finetune.terminal import say, screen_width

_FREQUENT = {
    "The model, the rows and the run's folder": ("data.max_length", "data.validation", "output_dir", "resume", "seed"),
    "The length of the run, its batches and processes": (
        *("training.num_epochs", "training.max_steps", "training.batch_size", "training.global_batch_size"),
        "parallel.num_processes",
    ),
    "The adapter": ("lora.r", "lora.alpha", "lora.dropout", "lora.target_modules"),
    "The optimizer": ("optim.optimizer", "optim.learning_rate", "optim.schedule", "optim.warmup_steps"),
    "Measuring and reporting": ("validation.validate_every", "training.report_to"),
}
"""The keys that most runs set."""
_NEEDED = {"finetune_grpo": " reward.functions=exact_match", "finetune_new_tokens": " \"lora.new_tokens=['<order>']\""}
"""An example of what the command of a task needs beside a model and rows."""
_NARROW = 70
"""The meanings of keys do not get a column of their own in a terminal of fewer columns."""
OTHER_WORDS = {
    "out of memory": "oom vram gpu_memory",
    "learning rate": "lr",
    "two GPUs": "multi_gpu multigpu",
    "bf16": "mixed_precision amp half_precision",
    "nf4": "4bit 4_bit int4 bnb",
    "w8a8": "int8",
    "macOS": "mac osx macbook",
    "rewards": "ppo rl rlhf rlvr reinforcement_learning",
    "sweep": "hyperparameter hyperparameters hparams grid_search optuna",
    "forgetting": "catastrophic_forgetting",
    "held out": "overfitting overfit",
    "same bytes": "reproducibility reproducible determinism deterministic",
    "report": "plot chart dashboard",
    "finetune plan": "eta duration how_long",
    "notebook": "jupyter colab ipynb",
    "conversation": "multi_turn multiturn",
    "metrics": "rouge f1",
}
"""What people search for beside the words of the documentation."""
_MOST_FOUND = 10
"""How many keys and pages a search shows."""


def show_frequent_keys() -> None:
    """Print the keys that most runs set, with their meanings and defaults, after the help of `finetune train`."""
    say("Keys that people set, as KEY=VALUE or --KEY VALUE, besides model=, data= and task=:")
    for title, keys in _FREQUENT.items():
        say(f"\n{title}")
        width = screen_width(sys.stdout)
        column, indent = (33, 35) if width is None or width >= _NARROW else (0, 4)
        for key in keys:
            say(f"  {key:<{column}}{'' if column else '  '}{_meaning(key)}", indent=" " * indent)
    say(
        "\nAll keys, with their values for a run: finetune config show OVERRIDES. One key: finetune help KEY.\n"
        "Models, rows, tasks and launches to choose from: finetune config list."
    )


def explain_topic(words: Sequence[str]) -> bool:
    """Explain the task, the key or the config file that a single word names. Return whether there is one."""
    if len(words) != 1:
        return False
    word = words[0].lstrip("-").replace("-", "_")
    word = ALIASES.get(word, word)
    if word in fields():
        say(f"{word}: {_meaning(word)}\nIt takes {expected(word)}.\nSet it with {word}=VALUE or --{word} VALUE.")
        return True
    task = find_task(word)
    if task is None:
        return _explain_file(word)
    config = compose([f"task={task}"], complete=False)
    objective = config.objective
    paper = f" (arXiv:{objective.paper})" if objective.paper else ""
    say(f"{task}: {dict(list_configs()['task'])[task]}\nIt minimises the {objective.title} loss{paper}. It sets:")
    for key, value in values(config).items():
        if config.origin(key) not in ("default", COMMAND_LINE):
            say(f"  {key}={inline_yaml(value)}")
    command = f"finetune train task={task} model=phi4_mini data=FILE{_NEEDED.get(task, '')}"
    say(f"Train it: {command}\nIts rows: finetune preview with the same arguments")
    return True


def _explain_file(word: str) -> bool:
    """Explain a run, a model or another file of `finetune config list`."""
    for group, choices in list_configs().items():
        if word in dict(choices):
            say(f"{group}={word}: {dict(choices)[word]}\nIts keys: finetune config show {group}={word}")
            return True
    is_known = word in _other_words() or named_elsewhere(word)
    # Words without these resemble a command.
    if not is_known and not {"_", "."}.isdisjoint(word) and (hint := did_you_mean_key(word)):
        raise ConfigError(f"{word}: there is no command, task or key of this name. {hint}")
    return False


def search(words: Sequence[str]) -> bool:
    """List the keys, config files and pages that have these words side by side, or else all of them.

    For a word of other tools, list the key or what to do instead first. Return whether there is anything.
    """
    phrase = " ".join(words)
    name = re.sub(r"[\s-]+", "_", phrase.lower())
    ours = _other_words().get(name, "")
    elsewhere = "" if any(key.endswith(f".{name}") for key in fields()) else named_elsewhere(name)
    if ours:
        say(f'{phrase}: searched for "{ours}" instead.')
        words = [ours]
    found = _find(" ".join(words).split()) or _find(*(word.split() for word in words))
    if elsewhere in fields():
        others = [entry for entry in found.pop("Keys", []) if entry[0] != elsewhere]
        found = {"Keys": [(elsewhere, _meaning(elsewhere)), *others][:_MOST_FOUND], **found}
    elif elsewhere:
        say(f"{phrase}: {elsewhere}")
    for title, entries in found.items():
        say(title)
        for name, text in entries:
            say(f"  {name:<33} {text}", indent=" " * 36)
    return bool(found or elsewhere)


def _other_words() -> dict[str, str]:
    """Map what people search for to the words of the documentation."""
    return {name: ours for ours, names in OTHER_WORDS.items() for name in names.split()}


def _find(*phrases: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """Return what has all of these phrases, under the titles of the search.

    Keys with the phrases in their name and pages with them in their title lead.
    """
    joined = [r"[\s_-]+".join(map(re.escape, phrase)) for phrase in phrases]
    patterns = [re.compile(rf"(?<![a-z]){phrase}s?(?![a-z])", re.IGNORECASE) for phrase in joined]

    def count(text: str) -> int:
        return min(len(pattern.findall(text)) for pattern in patterns)

    folder = shipped_folder("docs")
    pages = {page: page.read_text(encoding="utf-8") for page in sorted(folder.rglob("*.md"))}
    titles = {page: text.partition("\n")[0].lstrip("# ") for page, text in pages.items()}
    counts = {page: (count(titles[page]) > 0, count(text)) for page, text in pages.items()}
    ranked = sorted((page for page in pages if counts[page][1]), key=counts.__getitem__, reverse=True)[:_MOST_FOUND]
    files = [(f"{group}={name}", text) for group, choices in list_configs().items() for name, text in choices]
    keys = [(key, _meaning(key)) for key in sorted(fields(), key=lambda key: not count(key))]
    found = {
        "Keys": [(key, text) for key, text in keys if count(f"{key} {text}")][:_MOST_FOUND],
        "Models, rows, tasks and runs": [(name, text) for name, text in files if count(f"{name} {text}")],
        f"Pages in {folder}": [(page.relative_to(folder).as_posix(), titles[page]) for page in ranked],
    }
    return {title: entries for title, entries in found.items() if entries}


def refuse_near_topic(words: Sequence[str], commands: Sequence[str]) -> None:
    """Refuse words that nothing has, and name the section, the key, the task or the model that is like the first one.

    Commands, and a word that is like one, are left to typer.
    """
    if not words or words[0] in commands or (len(words) == 1 and did_you_mean(words[0], commands)):
        return
    parts = {part for key in fields() for part in (key, *key.split("."))}
    choices = parts.union(OBJECTIVES, *map(dict, list_configs().values()))
    hint = did_you_mean(words[0], choices) or "Try another word, or see docs/index.md."
    raise ConfigError(f"{' '.join(words)}: no command, task, key or page has this name. {hint}")


def find_task(word: str) -> str | None:
    """Find a task by its name, with or without `finetune_`, or by the objective that it sets."""
    tasks = dict(list_configs()["task"])
    named = next((name for name in (word, f"finetune_{word}") if name in tasks), None)
    if named or word not in OBJECTIVES:
        return named
    return next(
        name for name in (DEFAULT_TASK, *tasks) if compose([f"task={name}"], complete=False).training.objective == word
    )


def _meaning(key: str) -> str:
    field = fields()[key]
    meaning = str(field.description)
    if "Default: " in meaning:
        return meaning
    return f"{meaning} Default: {inline_yaml(field.get_default(call_default_factory=True))}."
