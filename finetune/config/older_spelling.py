"""Translate other spellings of keys: aliases, the keys of earlier systems, and in the folders of earlier runs the keys
that this project renamed.

The settings of each file and of the command line are translated before they are merged, so an older key has the same
precedence as ours. Types were written ``!pyobject package.Class``. No type is resolved here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from finetune.config.schema import ALIASES
from finetune.config.yaml_reader import Setting

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Renamed:
    """The older key is read as another one, with all keys below it."""

    key: str
    convert: Callable[[object], object] | None = None


@dataclass(frozen=True)
class Dropped:
    """The older key is left out: it has no counterpart and needs none."""

    reason: str
    if_value: Callable[[object], bool] | None = None
    """If given, the key is dropped only with a value that this accepts; otherwise it is checked like our own keys."""


@dataclass(frozen=True)
class Refused:
    """The older key asks for something that this toolkit does not do."""

    reason: str


Rule = Renamed | Dropped | Refused

_LOSS = "the loss is always next-token cross-entropy over all target tokens of the global batch. Remove the key."
_ONE_DEVICE = "a process has one device, training.device, for all it does"
_NOT_CAUSAL = (
    "only causal language models are trained: the loss is always next-token cross-entropy. "
    "Choose one with model=NAME or model.path=…, and remove model.type."
)

_CAUSAL_LM_NAME = re.compile(r"(?i)causal_?lm|\w*forcausallm|phi|phi[-_]?[0-9][\w.-]*|phi[-_]?(tiny|moe)")


def _is_causal_lm(value: object) -> bool:
    # The last part of `microsoft/phi-4` or `transformers.Phi3ForCausalLM`, but not of `phi-3.5`.
    name = re.split(r"/|\.(?=[A-Za-z_])", str(value))[-1]
    return value is None or bool(_CAUSAL_LM_NAME.fullmatch(name))


def _only_item(value: object) -> object:
    """Return the 3 of ``[3]``. Longer lists stay and are refused as the wrong type: their items have no names."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _number(value: object) -> object:
    return int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value) else value


def _class_name(value: object) -> object:
    return f"torch.optim.{value}" if isinstance(value, str) and value.isidentifier() else value


def _share(value: object) -> object:
    """Make 1 the float 1.0, which is refused: as a ratio it is all steps, and as warmup_steps one step."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


_EMPTY = Dropped("it is empty", lambda value: value in (None, [], {}))

RENAMED = {
    "lora.targets": "lora.target_modules",
    "training.trackers": "training.report_to",
    "training.dpo_beta": "preference.beta",
    "checkpoint.keep": "checkpoint.save_total_limit",
}
"""Keys that this project renamed. They are read only in the folders of runs that saved them."""

ADDED = {"data.split_rule": "position"}
"""Keys that this project added, with the value that describes a run from before. A run records all of its keys."""

REMOVED = {"data.stream": "data.max_rows alone reads the first rows of a hub data set"}
"""Keys that this project removed, and why. Runs of earlier versions saved them."""

TABLE: dict[str, tuple[Rule, ...]] = {
    **{alias: (Renamed(key, _share if key == "optim.warmup_steps" else None),) for alias, key in ALIASES.items()},
    **{older: (Dropped(reason),) for older, reason in REMOVED.items()},
    "training.optimizer_type": (Renamed("optim.optimizer", _class_name),),
    "training.optimizer_args": (_EMPTY, Renamed("optim.learning_rate", _only_item)),  # the first argument in torch
    "training.optimizer_kwargs": (_EMPTY,),
    **{
        f"training.{older}.{name}": (Renamed(key),)
        for older in ("optimizer_args", "optimizer_kwargs")
        for name, key in (("lr", "optim.learning_rate"), ("weight_decay", "optim.weight_decay"), ("*", "optim.args"))
    },
    "training.path": (Renamed("output_dir"),),
    "training.seed": (Renamed("seed"),),
    "training.checkpoint_at": (Renamed("checkpoint.save_every_epochs"),),
    "training.epochs": (Renamed("training.num_epochs"),),
    "num_epochs": (Renamed("training.num_epochs"),),
    "epochs": (Renamed("training.num_epochs"),),
    "early_stopping.type": (Dropped("there is one rule, and early_stopping.patience sets it"),),
    "early_stopping.args": (_EMPTY, Renamed("early_stopping.patience", _only_item)),
    "early_stopping.args.*": (Renamed("early_stopping"),),
    "early_stopping.kwargs": (_EMPTY,),
    "early_stopping.kwargs.*": (Renamed("early_stopping"),),
    "validation.validator.device": (Dropped(_ONE_DEVICE),),
    "testing.tester.device": (Dropped(_ONE_DEVICE),),
    "parallel.master_port": (Renamed("parallel.master_port", _number),),
    **dict.fromkeys(("criterion", "criterion.*", "training.criterion", "training.criterion.*"), (Refused(_LOSS),)),
    "model.type": (Dropped("the class follows from the model's own config.json", _is_causal_lm), Refused(_NOT_CAUSAL)),
}
"""Older keys (``.*``: anything below) and their rules. The first rule that applies counts."""


def translate(settings: list[Setting], problems: list[str]) -> list[Setting]:
    """Translate the settings of one file or of the command line, with one warning for all renamed keys.

    `problems` receives refused keys, and keys that are given in both spellings.
    """
    kept: list[Setting] = []
    refused: set[str] = set()
    for setting in settings:
        older, rule = _rule(setting)
        if isinstance(rule, Refused):
            if older not in refused:
                problems.append(f"{setting.origin}: {older}: refused: {rule.reason}")
            refused.add(older)
        elif isinstance(rule, Dropped):
            _log.warning("%s: %s is left out: %s", setting.origin, setting.dotted, rule.reason)
        elif rule is not None:
            kept.append(_renamed(setting, older, rule))
        elif setting.dotted == "data.mixture":
            kept.append(replace(setting, value=_without_removed(setting.value)))
        else:
            kept.append(setting)
    if renamed := [setting for setting in kept if setting.older_key and setting.older_key not in ALIASES]:
        first = f"{renamed[0].older_key} is an older spelling of {renamed[0].dotted}"
        others = [f"{setting.older_key} of {setting.dotted}" for setting in renamed[1:]]
        _log.warning("%s: %s", renamed[0].origin, ", ".join([first, *others]))
    _report_both_spellings(kept, problems)
    return kept


def with_current_keys(settings: Iterable[Setting]) -> list[Setting]:
    """Give today's keys to the settings that a run of an earlier version saved, and leave out removed keys."""
    current = [_with_current_key(setting) for setting in settings if setting.dotted not in REMOVED]
    saved = {setting.dotted: setting for setting in current}
    if not {"resume_allow", "data.split_seed", "checkpoint.save_every"} <= saved.keys():
        return current  # cut short, or not written by a run, which saves all of these
    origin = saved["data.split_seed"].origin
    added = [(key, value) for key, value in ADDED.items() if key not in saved]
    return current + [Setting(key=tuple(key.split(".")), value=value, origin=origin) for key, value in added]


def _with_current_key(setting: Setting) -> Setting:
    if setting.dotted in RENAMED:
        return replace(setting, key=tuple(RENAMED[setting.dotted].split(".")))
    if setting.dotted == "data.mixture":
        return replace(setting, value=_without_removed(setting.value))
    if setting.dotted == "resume_allow" and isinstance(setting.value, list):
        return replace(setting, value=[RENAMED.get(str(name), name) for name in setting.value])
    return setting


def _without_removed(sources: object) -> object:
    """Leave removed keys out of the sources of a mixture."""
    if not isinstance(sources, list) or not all(isinstance(source, Mapping) for source in sources):
        return sources
    return [{key: value for key, value in source.items() if f"data.{key}" not in REMOVED} for source in sources]


def _rule(setting: Setting) -> tuple[str, Rule | None]:
    """Return the older key of the rule for a setting, without ``.*``, and the rule."""
    for depth in range(len(setting.key), 0, -1):
        older = ".".join(setting.key[:depth])
        for rule in TABLE.get(older if depth == len(setting.key) else f"{older}.*", ()):
            if not isinstance(rule, Dropped) or rule.if_value is None or rule.if_value(setting.value):
                return older, rule
    return "", None


def _renamed(setting: Setting, older: str, rule: Renamed) -> Setting:
    below = setting.key[older.count(".") + 1 :]
    value = rule.convert(setting.value) if rule.convert else setting.value
    key = (*rule.key.split("."), *below)
    if key == setting.key:
        if value is not setting.value:
            _log.warning("%s: %s is read as the number %s", setting.origin, setting.dotted, value)
        return replace(setting, value=value)
    return replace(setting, key=key, value=value, older_key=setting.dotted)


def _report_both_spellings(settings: list[Setting], problems: list[str]) -> None:
    written: dict[tuple[str, ...], Setting] = {}
    for setting in settings:
        other = written.setdefault(setting.key, setting)
        if other.older_key != setting.older_key:
            first = f"{other.older_key or other.dotted} ({other.origin})"
            again = setting.older_key or setting.dotted
            problems.append(f"{setting.origin}: {again}: means the same as {first}. Keep one of the two.")
