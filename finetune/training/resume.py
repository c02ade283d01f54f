"""Compare a resumed run with its start. The schema says for each key whether it may change.

A changed key that changes the curve is refused unless `resume.allow` names it. Only a run that resumes imports this.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.config.keys import on_resume, values
from finetune.config.run_config import config_from_record
from finetune.config.run_paths import recorded_paths
from finetune.config.saved import is_same_path
from finetune.config.schema import Config, OnResume
from finetune.errors import CheckpointError, ConfigError
from finetune.runs.comparison import differing, effects_that_count, is_allowed
from finetune.runs.record import SPLITS, digest_of, read_versions
from finetune.runs.recorded_run import RecordedRun
from finetune.runs.state import read_state
from finetune.runs.verification import newest_valid
from finetune.training.validation import best_merit
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.runs.folder import RunFolder
    from finetune.runs.state import TrainerState
    from finetune.training.validation import Criteria


_log = logging.getLogger(__name__)


_ROWS = OnResume("rows", "the encoded rows, which the files, the chat template and the tokenizer decide")
_COLUMNS = OnResume("rows", "the columns of the rows, which reward functions or the environment get")
_BASE = OnResume("always", "the model that is trained")
_CODE = {
    "loss": OnResume("always", "the loss function of the script"),
    "optimizer": OnResume("always", "the optimizer of the script"),
}
"""A script's own code, by its name in the fingerprints. See `Hooks.fingerprints`."""
_CODE_OF_KEYS = {
    "reward.functions": OnResume("always", "the rewards"),
    "rollout.tools": OnResume("always", "the results of calls"),
    "rollout.environment": OnResume("always", "the turns of conversations"),
    "validation.metrics": OnResume("always", "the metrics of validations: those before and after are not comparable"),
}
"""Functions that a key names, in a file or an installed module."""
_WHOLE_FILES = "digests of whole files, comments included"
_CODE_KEYS = {"loss": "training.objective", "optimizer": "optim.optimizer"}
"""The keys by which `resume.allow` accepts other code."""
_ADAPTED_LAYERS = {f"lora.{name}" for name in ("target_modules", "layers", "init", "new_tokens", "modules_to_save")}
"""Keys that decide which weights of the base are under an adapter, and so the digest of the base."""
_OWN_TO_EACH_START = ("resume", "resume_allow")
_MAX_SHOWN = 60


class _Difference(NamedTuple):
    """One key with two values, as text."""

    key: str
    before: str
    now: str
    origin: str
    effect: OnResume

    def __str__(self) -> str:
        change = f"{self.key}: started with {self.before}, now {self.now} ({self.origin})"
        return f"{change}: {self.effect.decides}" if self.effect.decides else change


def accepted_changes(
    folder: RunFolder,
    config: Config,
    fingerprints: Mapping[str, str],
    former: Mapping[str, str] = MappingProxyType({}),
    refuse_misfit: Callable[[Path], None] = lambda checkpoint: None,
    precision: str | None = None,
) -> list[dict[str, Any]]:
    """Return the changes of a resumed run that change its curve and that `resume.allow` allows, for run.json.

    Each has the step of the newest checkpoint. No later step has the old value.

    `former` are fingerprints of the same code as earlier versions recorded them. `precision` is the one that this start
    computes in, whatever `training.precision` says.

    Called before config.yaml and run.json are overwritten, on the main process, if the run resumes and has checkpoints.
    A CheckpointError lists every difference that changes the curve and is not allowed. `refuse_misfit` raises one for a
    checkpoint that this run cannot load. It is called if a change is allowed: `resume.allow` cannot make a checkpoint
    fit, and after the record is overwritten, the run could not resume with its own values either.
    """
    run = RecordedRun(folder.path)
    start = _recorded_start(run)
    before = _config_in(start) or run.config
    if before is None:
        _log.warning("%s, so nothing in it could be compared with this start", run.why_no_config)
    differences = _differences(before, config, recorded_paths(folder.path)) if before else []
    rows = _other_rows(run, folder, start, fingerprints)
    counting = effects_that_count(before or config, config, has_same_rows=rows == [])
    if run.part("script").get("metrics"):
        counting.add("answers")  # the configuration does not have the metrics of a script
    differences = _with_computed_precision(differences, run.record.get("precision"), precision, config)
    matters = [difference for difference in differences if difference.effect.matters in counting] + (rows or [])
    matters += _other_base(run, fingerprints) + _other_code(run, fingerprints, former)
    newest = newest_valid(folder) if matters else None
    if matters and newest is None:
        return []  # the run starts from its beginning
    if "reference" in fingerprints and "reference" not in run.part("fingerprints"):
        _log.warning(
            "an earlier version trained the steps so far against a reference with other rows for lora.new_tokens. From "
            "here on, the reference is the model that the run started from, so losses before and after this step are "
            "not comparable"
        )
    # With another adapter, the digest of the base tells nothing unless the checkpoint fits.
    is_adapter_changed = any(difference.key in _ADAPTED_LAYERS for difference in matters)
    certain = [difference for difference in matters if not (is_adapter_changed and difference.effect is _BASE)]
    _refuse_unless_allowed(folder, certain, config)
    if newest is not None:
        try:
            refuse_misfit(newest)
        except CheckpointError as error:
            raise CheckpointError(_refusal(folder, certain, misfit=error)) from error
    _refuse_unless_allowed(folder, matters, config)
    if harmless := [
        str(difference)
        for difference in differences
        if difference not in matters and difference.key not in _OWN_TO_EACH_START
    ]:
        _log.info("changed since the start, with no effect on the curve: %s", "; ".join(harmless))
    for difference in matters:
        _log.warning("accepted by resume.allow: %s", difference)
    step = int(newest.name.removeprefix("step-")) if newest else 0
    return [{"step": step, "key": one.key, "before": one.before, "now": one.now} for one in matters]


def without_other_criteria(state: TrainerState, criteria: Criteria) -> TrainerState:
    """Return a resumed state that fits the criteria of this run.

    If the metric of a criterion has changed, the best value of the old metric is dropped, because values of different
    metrics cannot be compared. A checkpoint of an older version records no metric. Its metric counts as unchanged.
    """
    best, stopping = state.best_metric or criteria.best, state.stopping_metric or criteria.stopping
    if best == stopping and state.stopping_merit is None:  # an older version kept one value for both
        state = replace(state, stopping_merit=best_merit(state, best))
    if stopping != criteria.stopping:
        _log.warning(
            "early_stopping.metric is %s now and was %s: validations without improvement are counted anew",
            *(criteria.stopping, stopping),
        )
        state = replace(state, stopping_merit=None, validations_without_improvement=0)
    if best != criteria.best:
        _log.warning(
            "checkpoint.best_metric is %s now and was %s: the best step so far, %s, is forgotten",
            *(criteria.best, best, state.best_step),
        )
        state = replace(state, best_loss=None, best_step=None, best_value=None)
    return state


def refuse_other_global_batch(folder: RunFolder, config: Config, *, global_batch_size: int, world_size: int) -> None:
    """Raise CheckpointError when a resumed run has another global batch size, because this would change the curve."""
    last = _last_state(folder)
    if last is None or last.global_batch_size == global_batch_size:
        return
    path = newest_valid(folder)
    state = last if path is None else read_state(path)
    if path is None or state.global_batch_size == global_batch_size:
        return
    source = "training.global_batch_size" if config.training.global_batch_size else "batch_size x world size"
    before, now = counted(state.world_size, "process"), counted(world_size, "process")
    raise CheckpointError(
        f"output_dir={folder.path} holds a run that {before} trained with a global batch of "
        f"{state.global_batch_size} examples, this run asks for {global_batch_size} with {now} "
        f"({source}). Set training.global_batch_size={state.global_batch_size}, which any number of processes can "
        "keep, or start another run with output_dir=. Nothing was changed."
    )


def _last_state(folder: RunFolder) -> TrainerState | None:
    """Return the newest state that can be read, from a checkpoint that is not verified."""
    for step in reversed(folder.checkpoint_steps()):
        with suppress(CheckpointError):
            return read_state(folder.checkpoint(step))
    return None


def _recorded_start(run: RecordedRun) -> Mapping[str, Any] | None:
    """Return the result of `record_of_start`; None if it is missing or damaged."""
    start = run.part("started_with")
    values = {name: value for name, value in start.items() if name != "sha256"}
    return values if values.keys() == {"config", "rows"} and start.get("sha256") == digest_of(values) else None


def _config_in(start: Mapping[str, Any] | None) -> Config | None:
    """Return the recorded configuration of a start, also with former names of keys; None if it cannot be read."""
    try:
        return config_from_record(start["config"]) if start else None
    except ConfigError:
        return None


def _differences(before: Config, now: Config, recorded: Mapping[str, str]) -> list[_Difference]:
    """Return the keys that differ, in the order of the schema. Keys that the start does not record are skipped.

    Two paths are equal if they name the same place, `recorded` having the absolute paths of the start.
    """
    known, current = values(before, only_set=True), values(now)
    if missing := current.keys() - known.keys():
        _log.warning(
            "the record of the start is incomplete or of an older version, so these keys could not be compared: %s",
            ", ".join(key for key in current if key in missing),
        )
    return [
        _Difference(key, *short_texts(*pair), origin=now.origin(key), effect=on_resume(key))
        for key, pair in differing([known, current])
        if key in known and not is_same_path(key, pair, recorded)
    ]


def _with_computed_precision(
    differences: Sequence[_Difference], before: object, now: str | None, config: Config
) -> list[_Difference]:
    """Compare the precisions of the two starts instead of the key, because the device decides what `auto` means."""
    key = "training.precision"
    if not isinstance(before, str) or now is None:  # the record is of an earlier version
        return list(differences)
    others = [difference for difference in differences if difference.key != key]
    origin = "auto on this device" if config.training.precision == "auto" else config.origin(key)
    return others if before == now else [*others, _Difference(key, before, now, origin, on_resume(key))]


def _other_rows(
    run: RecordedRun, folder: RunFolder, start: Mapping[str, Any] | None, now: Mapping[str, str]
) -> list[_Difference] | None:
    """Return the splits whose rows have changed. If run.json does not record the rows, warn and return None.

    Reward functions also get columns that are not encoded. They are compared if the encoded rows are the same.
    """
    if start is None:
        _log.warning("%s does not record the rows of the start, so they could not be compared", folder.record_file)
        return None
    before = start["rows"]
    changed = [
        _Difference("data", _digest(before.get(split)), _digest(now.get(split)), split, _ROWS)
        for split in SPLITS
        if before.get(split) != now.get(split)
    ]
    columns = [fingerprints.get("columns") for fingerprints in (run.part("fingerprints"), now)]
    if changed or None in columns or columns[0] == columns[1]:
        return changed
    return [_Difference("data", _digest(columns[0]), _digest(columns[1]), "all columns", _COLUMNS)]


def _other_base(run: RecordedRun, now: Mapping[str, str]) -> list[_Difference]:
    """Return what has changed of the base: its weights, if both starts train an adapter on them, or its config.json.

    Another version of transformers may read the same config.json in another way.
    """
    names = {"base": "weights"}
    if run.part("versions").get("transformers") == read_versions().get("transformers"):
        names["model_config"] = "config"
    return [
        _Difference("model", f"{names[name]} {before[:12]}", f"{names[name]} {after[:12]}", "the base itself", _BASE)
        for name, (before, after) in differing([run.part("fingerprints"), now])
        if name in names and isinstance(before, str) and isinstance(after, str)
    ]


def _other_code(run: RecordedRun, now: Mapping[str, str], former: Mapping[str, str]) -> list[_Difference]:
    """Return the functions with changed code, and a script's functions that only one of the two starts has."""
    before = run.part("fingerprints")
    # If only one start names functions, the keys differ. Runs of earlier versions recorded no digests of them.
    changed = [key for key in _CODE_OF_KEYS if before.keys() & now.keys() >= {key} and before[key] != now[key]]
    return [_Difference(key, str(before[key]), now[key], _WHOLE_FILES, _CODE_OF_KEYS[key]) for key in changed] + [
        _Difference(_CODE_KEYS[name], before.get(name, "none"), now.get(name, "none"), f"the script's {name}", effect)
        for name, effect in _CODE.items()
        if before.get(name) not in (now.get(name), former.get(name, now.get(name)))
    ]


def _refuse_unless_allowed(folder: RunFolder, differences: Sequence[_Difference], config: Config) -> None:
    if refused := [difference for difference in differences if not is_allowed(difference.key, config.resume_allow)]:
        raise CheckpointError(_refusal(folder, refused))


def _refusal(folder: RunFolder, refused: Sequence[_Difference], misfit: CheckpointError | None = None) -> str:
    lines = "".join(f"\n  {difference}" for difference in refused)
    names = {difference.key for difference in refused}
    names = {name for name in names if name == "data" or "data" not in names or not name.startswith("data.")}
    if misfit is not None:
        lines += f"\nresume.allow accepts this, but no checkpoint can be loaded then: {misfit}"
        instead = "start another run with output_dir="
    elif all(difference.effect.fits for difference in refused):
        instead = f"to accept the change on purpose, add resume.allow={','.join(sorted(names))}"
    else:
        instead = "since its checkpoints fit no other, start another run with output_dir="
    return (
        f"output_dir={folder.path} holds a run that was started with another configuration. This changes its curve:"
        f"{lines}\nRestore the old values and files to go on, or, {instead}. Nothing was changed."
    )


def short_texts(before: object, now: object) -> tuple[str, str]:
    """Return two values as short texts that differ: their common part is shortened first."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = [
            name for name in {**before, **now} if (name in before, before.get(name)) != (name in now, now.get(name))
        ]
        before, now = ({name: side[name] for name in names if name in side} for side in (before, now))
    texts = [value if isinstance(value, str) else json.dumps(value, default=str) for value in (before, now)]
    if max(map(len, texts)) > _MAX_SHOWN:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
        start = max(0, len(list(same)) - 20)
        texts = [("... " if start else "") + text[start:] for text in texts]
        texts = [text if len(text) <= _MAX_SHOWN + 4 else f"{text[:_MAX_SHOWN]} ..." for text in texts]
    return texts[0], texts[1]


def _digest(value: object) -> str:
    """Shorten the digest of some rows. Pairs have one for each side, and labelled rows one for their labels."""
    return f"rows {'/'.join(part[:12] for part in value.split('/'))}" if isinstance(value, str) else "none"
