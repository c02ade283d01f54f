"""Translate a file of axolotl, LLaMA-Factory, Transformers, PEFT, TRL or DeepSpeed, for `finetune init --from`.

`config/other_tools.py` has the names, and this module the values that differ. Each name of a file becomes a key
or a note that says why not. Of the files that it names, only a configuration of DeepSpeed is read.
"""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from finetune.config.accelerate_file import describe_accelerate_file, is_accelerate_file
from finetune.config.config_files import SUFFIXES_OF_ROWS, path_exists, shown_path
from finetune.config.key_advice import did_you_mean, expected
from finetune.config.keys import fields, section_class, takes
from finetune.config.objectives import OBJECTIVES, ObjectiveFacts
from finetune.config.other_tools import MISSING, NOTHING, OUR_NAME, SWITCHES, VALUES
from finetune.config.render import inline_yaml
from finetune.config.schema import Config, as_list
from finetune.config.yaml_reader import Setting, read_settings
from finetune.errors import ConfigError
from finetune.terminal import without_passwords

AXOLOTL, LLAMA_FACTORY, LIBRARIES = "axolotl", "LLaMA-Factory", "Transformers, PEFT or TRL"
_TELLING = {
    "DeepSpeed": {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"},
    LLAMA_FACTORY: {"finetuning_type", "stage", "cutoff_len", "template", "lora_rank", "lora_target"},
    AXOLOTL: {"base_model", "micro_batch_size", "sequence_len"},
}
"""The names that tell the tool of a file. The tool with most of them counts, `LIBRARIES` if there are none."""
_DEFAULTS: dict[str, dict[str, object]] = {
    "DeepSpeed": {},
    LLAMA_FACTORY: {
        **{"finetuning_type": "lora", "lora_rank": 8, "lora_alpha": None, "learning_rate": 5e-5, "val_size": 0},
        **{"per_device_train_batch_size": 8, "num_train_epochs": 3, "lr_scheduler_type": "linear", "save_steps": 500},
    },
    AXOLOTL: {
        **{"adapter": None, "sequence_len": 512, "excess_length_strategy": "drop", "val_set_size": 0},
        **{"micro_batch_size": 1, "lr_scheduler": "cosine", "warmup_ratio": 0.03},
    },
    LIBRARIES: {
        **{"use_peft": None, "learning_rate": None, "eval_strategy": "no", "save_steps": 500},
        **{"per_device_train_batch_size": 8, "num_train_epochs": 3},
    },
}
"""What a tool does if its file does not say, where finetune would do something else."""
_DEFAULTS_OF_REWARDS: dict[str, object] = {"max_completion_length": 512, "use_bias_correction_kl": True}
"""The same of GRPO in TRL, which axolotl uses. The second multiplies what `beta` weighs."""
_OTHER_NAMES = {"eval_strategy": "evaluation_strategy", "warmup_ratio": "warmup_steps"}
"""Other names for what has a default. In a file that gives one a value, the default does not count."""
_MOST_WARMUP = 100
"""The most warm-up steps of axolotl by default."""

_SAY_OBJECTIVE = ("rl", "stage", "num_generations", "loss_type")
"""Names that tell the objective. They are translated first, in this order."""
_PLACEHOLDERS = ("<EOS_TOKEN>", "<PAD_TOKEN>")
"""Values in TRL that stand for the tokenizer's own tokens."""
_RATES = ("learning_rate", "optimizer.params.lr", "scheduler.params.warmup_max_lr")
"""Names of the learning rate."""
_NEEDED: dict[str, dict[str, object]] = {
    "optim.decay_steps": {"schedule": "wsd"},
    "optim.min_learning_rate": {"learning_rate": 1.0},
}
"""Values of other keys, without which a section refuses every value of a key, or those above a default."""
_PACKING = ("packing", "sample_packing", "neat_packing")
_TYPING_ERROR = 0.8
"""How alike two names are, from 0 to 1, if one of them is taken for a misspelling of the other."""
UNKNOWN = "UNKNOWN: finetune does not know these names and did nothing with them."
OFF = f"{NOTHING}: these are off, or ask for what finetune does anyway."
_EMPTY = f"{NOTHING}: these have no value."
_PROMPT_FORMAT = (
    "Set data.chat_template to a shipped template or a .jinja file of this prompt format. Without it, the model's own "
    "chat template is used."
)
_ALPACA_INPUT = (
    "Set data.chat_template, if your rows have an input. axolotl writes it below ### Input:, and the template alpaca "
    "below the instruction."
)
_READERS = ("arrow", "csv", "json", "parquet", "text")
"""Readers of `datasets`. Where a file names one of them as its rows, `data_files` has the rows."""
_TYPES = ("chat_template", "completion", "input_output", "sharegpt", "pretrain")
"""The types of axolotl's data sets that have no prompt format of their own."""
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", re.IGNORECASE)
_SECRET = re.compile("(hub_token|api_key|secret|password|auth_token|webhook_url)$")

Answer = tuple[dict[str, Any], str]
"""Values for keys of ours, and a sentence about what they leave open. It is empty if they leave nothing open."""


@dataclass
class Translation:
    """The settings of another tool's file, and ours for them.

    Attributes:
        path: the file.
        tool: the name of the tool.
        values: the values of the file and the defaults of the tool, by the tool's names.
        defaults: the names whose values are defaults.
        settings: our settings. Their origin is a line of the file.
        objective: the value of `training.objective`; None if neither the file nor an override says it.
        came_from: for each of our keys, what it was translated from.
        notes: the names without a key of ours, for each sentence about them.
        changed: the keys that were changed because `finetune train` refuses their values.
    """

    path: Path
    tool: str
    values: dict[str, Any]
    defaults: Collection[str] = ()
    objective: str | None = None
    settings: dict[tuple[str, ...], Setting] = field(default_factory=dict)
    came_from: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    def first(self, *names: str) -> Any:
        """Return the first value that these names have in the file, then of the defaults, or None."""
        ordered = sorted(names, key=lambda name: name in self.defaults)
        return next((self.values[name] for name in ordered if self.values.get(name) not in (None, "auto")), None)

    @property
    def facts(self) -> ObjectiveFacts:
        """Return what is known about the objective, which is sft unless it is said."""
        return OBJECTIVES[self.objective or "sft"]

    @property
    def is_full(self) -> bool | None:
        """Return whether all weights are trained. None: the file does not say."""
        if "adapter" in self.values:
            return self.values["adapter"] is None
        method = self.first("finetuning_type")
        if method or self.first("use_peft") is not None:
            return bool(method == "full" or self.first("use_peft") is False)
        return False if self.first("r", "lora_r", "peft_type") else None

    @property
    def packs_rows(self) -> bool:
        """Return whether several rows become one sequence, so that the batch sizes of the file count sequences."""
        return self.facts.learns_answers and any(self.values.get(name) is True for name in _PACKING)

    def count_rows(self, config: Config, tokens_per_row: float, counted: str) -> None:
        """Replace batch sizes that count packed sequences by as many rows as have the same number of tokens.

        Args:
            config: the configuration of this translation.
            tokens_per_row: the mean number of tokens of a row.
            counted: a sentence that says how they were counted.
        """
        sequences, length, packing = config.training.batch_size, config.data.max_length, OUR_NAME[_PACKING[0]]
        rows = max(1, round(sequences * length / tokens_per_row))
        sizes = {"training.batch_size": rows}
        if config.training.global_batch_size is not None:
            sizes["training.global_batch_size"] = rows * (config.training.global_batch_size // sequences)
        for key, size in sizes.items():
            path = (*key.split("."),)
            self.settings[path] = Setting(key=path, value=size, origin=self.path.name)
            self.came_from.setdefault(key, [])
        packed = f"{sequences} packed sequence{'s' * (sequences > 1)} of {length:,} tokens"
        note = (
            f"{' and '.join(f'{key} is {size}' for key, size in sizes.items())} here, where batches count rows: {rows} "
            f"rows have as many tokens as {packed}. {counted} `finetune plan` counts all rows."
        )
        self.notes[note] = self.notes.pop(packing, [])

    def leave_out(self, key: str) -> list[str]:
        """Remove what was translated into one of our keys. Return what that was."""
        self.settings = {path: each for path, each in self.settings.items() if ".".join(path[:2]) != key}
        return self.came_from.pop(key, [])

    def change(self, refusal: str, chosen: Collection[str]) -> bool:
        """Change a setting because `finetune train` refuses the configuration, and note the change.

        If the message says `Set KEY=VALUE`, the key gets this value. Otherwise the first translated key in the message
        gets its default. Keys in `chosen` stay. Return False if there is nothing to change.
        """
        translated = {".".join(path[:2]) for path in self.settings} - {*chosen, "training.objective"}
        for line in map(str.strip, refusal.splitlines()):
            advice = re.search(r"Set ([\w.]+)=([^\s;]+?)[.,;]?(?:\s|$)", line)
            named = [key for key in re.findall(r"(?<![\w.])[a-z_]+(?:\.[a-z_]+)?", line) if key in translated]
            if advice and advice[1] in fields().keys() - {*chosen, *self.changed}:
                key, text = advice.groups()
                source, line, path = self.leave_out(key), line[: advice.start()].strip(), tuple(key.split("."))
                self.settings[path] = Setting(key=path, value=yaml.safe_load(text), origin=self.path.name, text=text)
                self.came_from[key] = []
            elif named:
                key, text = named[0], inline_yaml(fields()[named[0]].get_default(call_default_factory=True))
                source = self.leave_out(key)
            else:
                continue
            self.changed.add(key)
            self.notes[f"{key} is {text} here, not as in the file. Otherwise a run is refused: {line}"] = source
            return True
        return False

    def find(self, name: str) -> Path | None:
        """Find a file that the file names, from the current folder or from the file's own."""
        places = (Path(name), self.path.parent / name)
        return next((path for path in places if path_exists(str(path), is_file=True)), None)

    def comments(self, chosen: Collection[str]) -> tuple[list[str], list[str]]:
        """Return comments on names that are unknown or need a decision, and on the other names without a key.

        `chosen` are the keys of ours for which the decision is made.
        """
        settled: list[str] = []
        decide = [f"# Translated from {self.path.name!r}, a file of {self.tool}. DECIDE marks what you must decide."]
        for sentence, names in self.notes.items():
            key = re.match(r"Set ([\w.]*\w)", sentence)
            is_settled = sentence.startswith((NOTHING, MISSING)) or (key is not None and key[1] in chosen)
            start = "" if is_settled or sentence == UNKNOWN else "DECIDE: "
            lines = [", ".join(name.partition(":")[0] for name in names)] if sentence == _EMPTY else names
            wrapped = textwrap.wrap(f"{start}{sentence}", width=98, break_on_hyphens=False)
            comment = [*(f"# {line}" for line in wrapped), *(f"#     {line}" for line in lines)]
            (settled if is_settled else decide).extend(comment)
        return decide, settled


def translate_file(path: Path, objective: str | None = None, others: Sequence[Path] = ()) -> Translation:
    """Read files of another tool, and translate each of their names. An `objective` wins over the one in the files.

    Raises:
        ConfigError: a file cannot be read, none holds a name of such a tool, or two of them hold the same name.
    """
    if code := [shown_path(file) for file in (path, *others) if file.suffix in (".py", ".ipynb")]:
        raise ConfigError(
            f"{code[0]} holds Python code. --from reads settings and runs no code. End the code with "
            "`print(args.to_dict())` for its TrainingArguments, SFTConfig or other arguments, write what it prints to "
            "a file, and name that file. For a LoraConfig, write `config.save_pretrained('lora')` and name "
            "lora/adapter_config.json in a second --from. Then give the other settings as overrides, such as model= "
            "and data=."
        )
    settings = [setting for file in (path, *others) for setting in _read(file)]
    names = [setting.dotted for setting in settings]
    if others and (twice := next((name for name in names if names.count(name) > 1), "")):
        raise ConfigError(f"{twice} is in several of the files after --from. Leave it in one of them.")
    given = {setting.key[0] for setting in settings}
    if files := [str(each.value) for each in settings if len(each.key) == 2 and each.key[1] == "file_name"]:
        place = shlex.quote(str(path.parent / files[0]))
        raise ConfigError(
            f"{shown_path(path)}: names the files of data sets, as LLaMA-Factory reads them, and holds no settings. "
            f"Translate the YAML file that names one of the data sets, and give its file: data={place}."
        )
    if is_accelerate_file(by_name := {setting.dotted: setting.value for setting in settings}):
        raise ConfigError(describe_accelerate_file(path, by_name))
    is_ours = any(setting.dotted in fields() and len(setting.key) > 1 for setting in settings)
    if is_ours or not given & {name.partition(".")[0] for name in OUR_NAME}:
        raise ConfigError(
            f"{shown_path(path)}: holds no setting of axolotl, LLaMA-Factory, Transformers, PEFT, TRL or DeepSpeed. "
            "--from reads their YAML files, and JSON or a dict. For a run file of finetune write run=FILE."
        )
    tools = sorted((tool for tool in _TELLING if _TELLING[tool] & given), key=lambda tool: -len(_TELLING[tool] & given))
    tool = tools[0] if tools else LIBRARIES
    unknown = sorted(given - {name.partition(".")[0] for name in OUR_NAME})
    if tool == LIBRARIES and len(unknown) > len(given) / 2:
        raise ConfigError(
            f"{shown_path(path)}: most of its settings ({', '.join(unknown[:3])}, …) belong to none of the tools that "
            "--from reads. Write a run file with finetune init, and look up the keys with finetune help KEY."
        )
    defaults = _defaults_of(tool, settings)
    values = defaults | {setting.dotted: setting.value for setting in settings}
    if tool == LLAMA_FACTORY and values.get("stage") == "pt" and values.get("packing") is None:  # its default
        values["packing"] = True
        settings.append(Setting(key=("packing",), value=True, origin=f"{shown_path(path)}: default of {tool}"))
    translation = Translation(path, tool, values, defaults.keys(), objective)
    with_value = {setting.key[0] for setting in settings if setting.value not in (None, False, "", [], {})}
    for other in tools[1:]:
        if names := sorted(_TELLING[other] & with_value):
            sentence = f"This file has names of {other}, too. It is read as a file of {tool}, whose defaults count."
            translation.notes[sentence] = names
    found = translation.find(str(translation.first("deepspeed") or ""))
    settings += [replace(setting, key=("deepspeed", *setting.key)) for setting in _read(found)] if found else []
    translation.values |= {".".join(_without_section(each.key)): each.value for each in settings if len(each.key) > 1}
    order = {name: number for number, name in enumerate(_SAY_OBJECTIVE)}
    for setting in sorted(settings, key=lambda each: order.get(_without_section(each.key)[0], len(order))):
        _translate(setting, translation)
    for name, value in defaults.items():
        if tuple(OUR_NAME[name].split(".")) not in translation.settings:
            _translate(Setting(key=(name,), value=value, origin=f"{shown_path(path)}: default of {tool}"), translation)
    if translation.values.get("bf16") is False and ("training", "precision") not in translation.settings:
        setting = next(setting for setting in settings if _without_section(setting.key) == ("bf16",))
        _add(("training", "precision"), "fp32", setting, translation)
    return translation


def _defaults_of(tool: str, settings: Sequence[Setting]) -> dict[str, object]:
    """Return the defaults of a tool that count beside these settings."""
    values = {_without_section(setting.key)[0]: setting.value for setting in settings}
    has_value = {setting.key[0] for setting in settings if setting.value is not None}
    defaults = {
        name: value
        for name, value in _DEFAULTS[tool].items()
        if all(setting.key[0] != name for setting in settings) and _OTHER_NAMES.get(name) not in has_value
    }
    if values.get("num_generations"):
        defaults |= {name: value for name, value in _DEFAULTS_OF_REWARDS.items() if name not in values}
    if not values.get("beta"):
        defaults.pop("use_bias_correction_kl", None)
    return defaults


def _without_section(key: tuple[str, ...]) -> tuple[str, ...]:
    """Return a name without the section of axolotl's file that it is in, for what other tools name so, too."""
    return key[1:] if key[0] in ("deepspeed", "trl") and len(key) > 1 else key


def _read(path: Path) -> list[Setting]:
    problems: list[str] = []
    settings = read_settings(path, shown_path(path), problems)
    if problems:
        raise ConfigError("\n".join(problems))
    # A dict that Python printed has None.
    return [replace(each, value=None) if each.text == "None" else each for each in settings]


def _translate(setting: Setting, translation: Translation) -> None:
    """Add the values of one setting, or a note."""
    path, value = _without_section(setting.key), setting.value
    depth = next((depth for depth in range(len(path), 0, -1) if ".".join(path[:depth]) in OUR_NAME), 0)
    name, rest = ".".join(path[:depth]), path[depth:]
    meaning = OUR_NAME.get(name, "")
    shown = f"{inline_yaml(setting.dotted)}: {_shown(setting)}"
    values: dict[str, Any] = {}
    if value is None and not setting.origin.endswith(translation.tool) and name not in ("adapter", "max_length"):
        sentence = _EMPTY
    elif not name:
        sentence, shown = UNKNOWN, f"{shown}  {did_you_mean(setting.dotted, OUR_NAME, _TYPING_ERROR)}".rstrip()
    elif value == "auto" and name not in ("bf16", "packing"):
        sentence = f"{NOTHING}: auto."
    elif (name, value) == ("mix_strategy", "concat"):
        sentence = f"{NOTHING}: an epoch has the rows of all sources."
    elif rest and " " not in meaning:
        values, sentence = ({meaning: value}, "") if takes(meaning, dict) else ({}, f"Set {meaning}.")
    elif " " in meaning and (rest or name not in ("gradient_accumulation_steps", "beta", "loss_type")):
        is_off = value in (False, 0, "", "no", "none", [], {}, *_PLACEHOLDERS) and not meaning.startswith(NOTHING)
        is_off |= name.startswith("vllm_") and translation.values.get("use_vllm") is False
        sentence = OFF if is_off else meaning
    else:
        try:
            values, sentence = _answer(name, meaning, value, translation)
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):  # the tool itself would refuse it
            todo = meaning if meaning.endswith(".") else f"Set {meaning}."
            sentence = f"{todo} finetune cannot read this value."
    if (objective := translation.objective) and not all(map(translation.facts.reads_key, values)):
        values, sentence = {}, f"{NOTHING}: training.objective is {objective}, which does not read this."
    for key, ours in values.items():
        parts = (*meaning.split("."), *rest) if rest else tuple(key.split("."))
        sentence = _add(parts, ours, setting, translation) or sentence
    if sentence.startswith(("Set ", "Choose ", "This file")) and (value is False or value in ("", [], {})):
        sentence = OFF
    if sentence:
        translation.notes.setdefault(sentence, []).append(shown)


def _answer(name: str, key: str, value: Any, source: Translation) -> Answer:
    """Convert the value of a name that is one of our keys."""
    for convert in (_convert_training, _convert_optimizer, _convert_cadence, _convert_rows):
        answer = convert(name, value, source)
        if answer is not None:
            return answer
    if name in SWITCHES:
        value = SWITCHES[name] if value else None
        return ({key: [value] if key == "training.report_to" else value}, "") if value else ({}, OFF)
    if isinstance(value, str) and key in _LISTS:
        value = [part.strip() for part in value.split(",")]
    choices = _choices(key)
    chosen = [str(part).lower() for part in (value if isinstance(value, list) else [value])]
    if not choices:
        return {key: value}, ""
    if not set(chosen) <= choices.keys():
        return {}, f"Choose {key}. {fields()[key].description}"
    ours = [yaml.safe_load(choices[part]) for part in chosen if choices[part]]
    return {key: ours if key in _LISTS else ours[0]} if ours else {}, "" if ours else OFF


def _choices(key: str) -> dict[str, str]:
    """Map the values elsewhere for one of our keys to ours."""
    pairs = (choice.partition("=") for choice in VALUES.get(key, "").split())
    return {theirs: ours if equals else theirs for theirs, equals, ours in pairs}


def _add(key: tuple[str, ...], value: Any, setting: Setting, translation: Translation) -> str:
    """Give one of our keys a value. Return a sentence if it does not take the value, or has another one already."""
    dotted = ".".join(key[:2])
    text = setting.text if value is setting.value else None
    candidates = [value, *([text] if text else [])]
    if isinstance(value, (float, str)) and _NUMBER.fullmatch(str(value)):
        candidates += [float(value), int(float(value))] if float(value).is_integer() else [float(value)]
    value = next((candidate for candidate in candidates if _accepts(key, candidate)), translation)
    if value is translation:
        return f"Set {dotted}: {expected(dotted)}."
    earlier = translation.settings.get(key)
    if earlier is not None and earlier.value != value:
        return f"Choose {dotted}: it is {inline_yaml(earlier.value)} here, as translated from {earlier.older_key}."
    place = setting.origin.rpartition(":")[2].strip()
    line = f"{inline_yaml(setting.dotted)}: {_shown(setting)} ({f'line {place}' if place.isdecimal() else place})"
    name = setting.dotted
    if dotted == "training.objective":
        translation.objective = translation.objective or value
    translation.settings[key] = Setting(key=key, value=value, origin=setting.origin, text=text, older_key=name)
    translation.came_from.setdefault(dotted, []).append(line)
    return ""


def _accepts(key: tuple[str, ...], value: Any) -> bool:
    """Return whether one of our keys takes a value, whatever the other keys are."""
    nested = value
    for part in reversed(key[-1:] if len(key) == 1 else key[1:]):
        nested = {part: nested}
    nested |= _NEEDED.get(".".join(key), {})
    try:
        (section_class(key[0]) or Config)(**nested)
    except ValidationError:
        return False
    return True


def _shown(setting: Setting) -> str:
    """Write the value of a setting for a comment, without credentials."""
    if isinstance(setting.value, str) and _SECRET.search(setting.dotted):
        return "(not repeated)"
    return without_passwords(inline_yaml(setting.value))


_LISTS = ("lora.target_modules", "lora.modules_to_save", "lora.new_tokens", "training.report_to")


def _convert_training(name: str, value: Any, source: Translation) -> Answer | None:
    """Convert names about batches, losses and weights, except those whose value `VALUES` converts."""
    match name:
        case "gradient_accumulation_steps":
            batch = source.first("per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu")
            if value == 1 or source.first("batch_size", "train_batch_size"):
                return {}, OFF
            if not isinstance(value, int) or not isinstance(batch, int):
                return {}, OUR_NAME[name]
            note = "training.global_batch_size counts the examples of all processes, and is set for one."
            group = source.first("num_generations") or 1  # TRL counts answers, and global_batch_size prompts
            examples = value * batch // (1 if value * batch % group else group)
            return {"training.global_batch_size": examples}, f"{note} For N processes, set N times as many."
        case "max_steps" if value in (-1, 0):
            return {}, OFF
        case "use_peft" if source.is_full is None:
            return (
                {},
                "Set training.method: lora or full. The file does not say which; without it, an adapter is trained.",
            )
        case "use_peft":
            return {"training.method": "full" if source.is_full else "lora"}, ""
        case "lora_alpha" | "lora_rank" if source.is_full:
            return {}, OFF
        case "lora_alpha" if value is None:  # the default of LLaMA-Factory
            return {"lora.alpha": 2 * source.values["lora_rank"]}, ""
        case "num_generations":
            batch = source.first("per_device_train_batch_size", "micro_batch_size")
            keys = {"rollout.num_generations": value, "training.objective": "grpo"}
            answers = batch * (source.first("gradient_accumulation_steps") or 1) if isinstance(batch, int) else 1
            if not value or answers % value:
                return keys, f"training.global_batch_size counts prompts here, not answers: divide it by {value}."
            return keys | {"training.global_batch_size": answers // value}, ""
        case "loss_type" if not source.facts.generates_answers:  # of TRL
            loss = value[0] if isinstance(value, list) and len(value) == 1 else value  # several are a weighted sum
            ours = _choices("training.objective").get(str(loss))
            if ours in ("dpo", "kto") and source.objective is None:
                return {"training.objective": ours}, ""
            return {}, OFF if value == "nll" or ours == source.objective is not None else OUR_NAME[name]
        case "epsilon_high" if source.first("loss_type") == "cispo":  # TRL's is the largest ratio itself
            return {"grpo.epsilon_high": round(value - 1, 9)}, ""
        case "beta" | "loss_type" if source.facts.generates_answers:
            return {f"grpo.{name}": value}, ""
        case "beta" if not source.facts.learns_answers:
            return {"preference.beta": value}, ""
        case "beta":
            return {}, OUR_NAME[name]
        case "stage" if value == "pt":
            return {"data.format": "text"}, ""
        case "stage" if value == "dpo" and source.first("pref_loss"):
            return _answer("", "training.objective", source.first("pref_loss"), source)
        case "pref_loss":
            return {}, f"{NOTHING}: it is part of the stage."
        case "zero_optimization.stage" if value not in (1, 2):
            return ({"parallel.sharding": "fsdp2"}, "") if value == 3 else ({}, OFF)
        case "zero_optimization.stage" if source.is_full:
            return {"parallel.sharding": "fsdp2", "parallel.reshard_after_forward": False}, ""
        case "zero_optimization.stage":
            note = "ZeRO 1 and 2 shard gradients and optimizer, which are small with LoRA. With training.method=full, "
            return {}, f"{note}set parallel.sharding=fsdp2 and parallel.reshard_after_forward=false."
        case "deepspeed":
            missing = "This file was not found. `init --from` reads it, too. ZeRO-3 is parallel.sharding=fsdp2."
            return {}, f"{NOTHING}: its own settings are listed as deepspeed." if source.find(str(value)) else missing
        case "trust_remote_code" if value:
            return (
                {},
                "Add model.trust_remote_code=true to the command if you trust the model's code. No file allows it.",
            )
        case "trust_remote_code":
            return {}, OFF
    return None


def _convert_optimizer(name: str, value: Any, source: Translation) -> Answer | None:
    """Convert names about the optimizer, its learning rate and its schedule."""
    match name:
        case "warmup_steps" | "warmup_ratio":
            return _warmup(value, source, is_ratio=name == "warmup_ratio")
        case "learning_rate" if value is None:
            defaults = (
                "TrainingArguments has 5e-5, SFTConfig 2e-5, DPOConfig and GRPOConfig 1e-6; finetune has 2e-4, for LoRA"
            )
            return {}, f"Set optim.learning_rate. The file leaves it to its trainer: {defaults}."
        case "optimizer.params.lr" if source.first("scheduler.params.warmup_max_lr") not in (None, value):
            return {}, f"{NOTHING}: the scheduler of DeepSpeed sets the rate to its warmup_max_lr."
        case "scheduler.type" if source.first("scheduler.params.warmup_type") != "linear":
            ours = _choices("optim.schedule").get(str(value).lower())
            note = f"{MISSING}: a logarithmic warm-up, DeepSpeed's default. Here the rate rises linearly."
            return ({"optim.schedule": ours}, note) if ours else None
        case "lr_scheduler_type" | "lr_scheduler" if value == "warmup_stable_decay":
            is_linear = source.first("lr_scheduler_kwargs.decay_type") == "linear"
            note = "" if is_linear else f"{MISSING}: a decay along a cosine. With optim.schedule=wsd, it is linear."
            return {"optim.schedule": "wsd"}, note
        case "optimizer.type" if str(value).lower() == "adam":
            is_decoupled = source.first("optimizer.params.adam_w_mode") is not False
            return {"optim.optimizer": "torch.optim.AdamW" if is_decoupled else "torch.optim.Adam"}, ""
        case "cosine_min_lr_ratio" | "scheduler.params.cos_min_ratio" if value and not source.first(*_RATES):
            return {}, f"Set optim.min_learning_rate to {value:g} times optim.learning_rate."
        case "cosine_min_lr_ratio" | "scheduler.params.cos_min_ratio":
            return {"optim.min_learning_rate": value * float(source.first(*_RATES) or 0)}, ""
        case "lr_scheduler_kwargs.min_lr_rate" | "lr_scheduler_kwargs.min_lr_ratio":
            return _convert_optimizer("cosine_min_lr_ratio", value, source)
        case "adam_beta1" | "adam_beta2":
            return {"optim.args.betas": [source.first("adam_beta1") or 0.9, source.first("adam_beta2") or 0.999]}, ""
        case "optimizer.params.betas" | "optimizer.params.eps" | "adam_epsilon":
            return {f"optim.args.{'betas' if name.endswith('betas') else 'eps'}": value}, ""
        case "max_grad_norm" | "gradient_clipping":
            return {"optim.max_grad_norm": value or None}, ""
    return None


def _warmup(value: Any, source: Translation, *, is_ratio: bool) -> Answer:
    steps, is_axolotl = source.first("warmup_steps"), source.tool == AXOLOTL
    if not value or (is_ratio and (steps or (is_axolotl and steps is not None))):
        return {}, OFF
    if source.first("lr_scheduler_type", "lr_scheduler") == "constant":
        return {}, f"{NOTHING}: the schedule `constant` has no warm-up there."
    total = source.first("max_steps")
    if isinstance(total, int) and total > 0 and (is_ratio or value < 1):
        steps = int(value * total) if is_axolotl and is_ratio else math.ceil(value * total)
        return {"optim.warmup_steps": min(steps, _MOST_WARMUP) if "warmup_ratio" in source.defaults else steps}, ""
    if is_ratio and "warmup_ratio" in source.defaults:
        until = f"{NOTHING} in runs of up to {int(_MOST_WARMUP / value):,} steps"
        note = f"{until}: axolotl's warm-up has at most {_MOST_WARMUP}."
        return {"optim.warmup_steps": value}, f"{note} For a longer run, set optim.warmup_steps={_MOST_WARMUP}."
    if not is_ratio or _accepts(("optim", "warmup_steps"), value):
        return {"optim.warmup_steps": value}, ""
    return {}, f"Set optim.warmup_steps, in optimizer steps. {100 * value:g} % of all steps are warm-up there."


def _convert_cadence(name: str, value: Any, source: Translation) -> Answer | None:
    """Convert names that say when to validate and to save."""
    strategy = source.first("eval_strategy", "evaluation_strategy")
    is_never = strategy in (False, "no")
    has_rows = source.first("val_set_size", "val_size", "eval_dataset", "test_datasets")
    match name:
        case "eval_strategy" | "evaluation_strategy" if is_never and has_rows:
            return {}, "Set data.validation=null to train without validation. Otherwise a run validates once an epoch."
        case "eval_strategy" | "evaluation_strategy":
            return ({"data.validation": None}, "") if is_never else ({}, OFF)
        case "eval_steps" if strategy != "steps" and (source.tool != AXOLOTL or strategy):
            return {}, OFF
        case "dataset_test_split" if is_never:
            return {}, OFF
        case "evals_per_epoch" | "saves_per_epoch":
            note = (
                "Set validation.validate_every and checkpoint.save_every, in steps. Without them it is once an epoch."
            )
            return {}, OFF if value == 1 else note
        case "save_steps" if source.values.get("save_strategy") in (False, "no", "epoch", "best"):
            return {}, OFF
        case "save_steps":
            return {"checkpoint.save_every": value, "checkpoint.save_every_epochs": None}, ""
        case "val_set_size" | "val_size" if source.first("eval_dataset", "test_datasets"):
            return {}, OFF
        case "val_set_size" | "val_size":
            return {"data.validation": None if not value else f"{100 * value:g}%" if value < 1 else f"{int(value)}"}, ""
    return None


def _convert_rows(name: str, value: Any, source: Translation) -> Answer | None:
    """Convert names of rows and templates."""
    match name:
        case "chat_template" | "chat_template_jinja" | "chat_template_path" | "template":
            if str(value).endswith(".jinja"):
                return {"data.chat_template": value}, ""
            return None if str(value).lower() in _choices("data.chat_template") else ({}, _PROMPT_FORMAT)
        case "dataset_text_field":
            return ({"data.columns.text": value}, "") if value != "text" else ({}, OFF)
        case "dataset" | "eval_dataset":
            key = OUR_NAME[name]
            return {}, f"Set {key} to the files of these rows: dataset_info.json says which they are."
        case "test_datasets":
            return _test_sets(value if isinstance(value, list) else [value], source)
        case "excess_length_strategy" if value == "drop" and source.facts.compares_pairs:
            note = f"{NOTHING}: a pair is dropped if one of its two sides is longer than data.max_length."
            return {"data.on_long_row": "drop"}, note
        case "datasets":
            return _data_sets(value if isinstance(value, list) else [value], source.tool)
    return None


def _data_sets(entries: list[Any], tool: str) -> Answer:
    """Translate the `datasets` of axolotl or TRL: one as keys of the data section, several as data.mixture."""
    columns = "instruction input output system tools prompt completion label chosen rejected"
    ours = {f"field_{name}": name for name in columns.split()} | {"field": "text"}
    known = {*ours, "path", "data_files", "split", "name", "revision", "type", "ds_type", "message_property_mappings"}
    known |= {"chat_template"}
    sources, left_out = [], []
    formats: set[str] = set()
    for entry in entries:
        given = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
        given |= given["type"] if isinstance(given.get("type"), Mapping) else {}
        mappings = given.get("message_property_mappings") or {}
        ours["field_messages"] = "conversations" if mappings.get("role") == "from" else "messages"
        source, left = _rows_of(given, tool)
        left_out += left
        if not {theirs for own, theirs in mappings.items() if own != theirs} <= {"from", "value"}:
            left_out.append(f"message_property_mappings: {inline_yaml(mappings)}")
        source["columns"] = {ours[name]: given[name] for name in ours if given.get(name) not in (None, ours[name])}
        sources.append({key: part for key, part in source.items() if part})
        row_type = given["type"].partition(".")[0] if isinstance(given.get("type"), str) else ""
        prompt_format = given.get("chat_template") or (row_type if row_type not in _TYPES else "")
        formats.add(_choices("data.chat_template").get(str(prompt_format), str(prompt_format)))
        left_out += [
            f"{name}: {inline_yaml(part)}" for name, part in given.items() if name not in known | {*ours} and part
        ]
    note = f"Look at what was left out of datasets: {'; '.join(dict.fromkeys(left_out))}." if left_out else ""
    shared: dict[str, Any] = {}
    if len(formats) > 1 or not formats <= {"", *_choices("data.chat_template").values()}:
        note = f"{_PROMPT_FORMAT} datasets has {', '.join(sorted(formats - {''}))}. {note}".rstrip()
    elif prompt_format := formats.pop() if formats else "":
        shared = {"data.chat_template": prompt_format}
        note = f"{_ALPACA_INPUT} {note}".rstrip() if prompt_format == "alpaca" else note
    if len(sources) != 1:  # a list would be refused if a file is named after another split; a file alone trains
        files = [
            {**each, "path": path} if path else each for each in sources for path in as_list(each.get("path")) or [""]
        ]
        return {"data.mixture": files, **shared}, note
    if isinstance(sources[0].get("path"), list):  # all of them train, also files that are named after other splits
        sources[0] = {("train" if key == "path" else key): part for key, part in sources[0].items()}
    renamed = {f"data.columns.{name}": theirs for name, theirs in sources[0].pop("columns", {}).items()}
    return {f"data.{key}": part for key, part in sources[0].items()} | renamed | shared, note


def _rows_of(entry: Mapping[str, Any], tool: str) -> tuple[dict[str, Any], list[str]]:
    """Return where the rows of one of `datasets` are, as keys of the data section, and the settings that are lost."""
    left_out = []
    path, split, files = entry.get("path"), entry.get("split"), entry.get("data_files")
    if files and path in _READERS and not isinstance(files, Mapping):
        path = files
    elif files and path_exists(str(path)) and not isinstance(files, Mapping):  # for axolotl, from the current folder
        path = files if tool == AXOLOTL else [f"{path}/{file}" for file in as_list(files)]
    elif files:
        left_out.append(f"data_files: {inline_yaml(files)}")
    if _are_files(path):
        left_out += [f"split: {inline_yaml(split)}"] if split not in (None, "train") else []
        split = None  # a file has no other split than train
    source = {"path": path, "train": split, "name": entry.get("name"), "revision": entry.get("revision")}
    return {key: part for key, part in source.items() if part}, left_out


def _are_files(path: Any) -> bool:
    return bool(path) and all(
        SUFFIXES_OF_ROWS.search(str(name)) or path_exists(str(name), is_file=True) for name in as_list(path)
    )


def _test_sets(entries: list[Any], source: Translation) -> Answer:
    """Translate the `test_datasets` of axolotl: files, or a split of the rows that are trained on."""
    parts = [_rows_of(entry if isinstance(entry, Mapping) else {"path": entry}, source.tool) for entry in entries]
    if all(_are_files(keys.get("path")) and not left_out for keys, left_out in parts):
        return {"data.validation": [file for keys, _ in parts for file in as_list(keys["path"])]}, ""
    trained = source.first("datasets")
    if len(parts) == 1 and isinstance(trained, list) and len(trained) == 1 and isinstance(trained[0], Mapping):
        [(keys, left_out)], (rows, _) = parts, _rows_of(trained[0], source.tool)
        split = keys.pop("train", None)
        if split and not left_out and keys == {key: part for key, part in rows.items() if key != "train"}:
            return {"data.validation": split}, ""
    return {}, "Set data.validation to files of rows, or to a split of the rows that are trained on."
