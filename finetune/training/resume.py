"""What a run that goes on may have changed since it was started: every key is judged once, here.

A key that changes the curve is refused unless `resume.allow` names it; the others may change as they like.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from finetune.config.older_spelling import saved_with_our_keys
from finetune.config.schema import Config
from finetune.errors import CheckpointError
from finetune.runs.recorded_run import RecordedRun
from finetune.runs.verification import newest_valid, read_state

if TYPE_CHECKING:
    from finetune.runs.folder import RunFolder
    from finetune.runs.state import TrainerState

_log = logging.getLogger(__name__)


class Sides(NamedTuple):
    """A run as it was started, or last resumed, and as it is to go on."""

    before: Config
    now: Config
    has_same_rows: bool
    """Rows to train and to validate on. False too where it is not known."""


@dataclass(frozen=True)
class Effect:
    """What changing a key does to a run.

    Attributes:
        what: what the key decides, for messages.
        on_curve: whether a change changes what later steps compute, the rounding left out of account.
        fits: whether a checkpoint could be loaded after the change at all.
    """

    what: str
    on_curve: Callable[[Sides], bool]
    fits: bool = True


def _always(_: Sides) -> bool:
    return True


def _never(_: Sides) -> bool:
    return False


def _has_other_rows(sides: Sides) -> bool:
    return not sides.has_same_rows


def _has_adapter(sides: Sides) -> bool:
    return any(side.training.method == "lora" for side in (sides.before, sides.now))


def _has_dropout(sides: Sides) -> bool:
    """Masks belong to the micro-batches; without any, how a global batch is cut changes the rounding alone."""
    return any(side.training.method == "lora" and side.lora.dropout > 0 for side in (sides.before, sides.now))


def _is_rate_scaled(sides: Sides) -> bool:
    """A rate that is constant after its warm-up does not look at the end of the run."""
    return "constant" not in (sides.before.optim.schedule, sides.now.optim.schedule)


def _is_rate_scaled_by_epochs(sides: Sides) -> bool:
    has_max_steps = sides.before.training.max_steps is not None and sides.now.training.max_steps is not None
    return _is_rate_scaled(sides) and not has_max_steps


def _each(keys: str, what: str, on_curve: Callable[[Sides], bool], *, fits: bool = True) -> dict[str, Effect]:
    """One effect for several keys, written `section: key key`."""
    section, _, names = keys.rpartition(": ")
    return {f"{section}.{name}".lstrip("."): Effect(what, on_curve, fits) for name in names.split()}


_LOADING = "how rows are brought to the device"
_WORLD = "which processes train; who computes what changes the rounding alone"
EFFECTS: dict[str, Effect] = dict(
    **_each("seed", "the order of rows, dropout and the first weights", _always),
    **_each("ddp", _WORLD, _never),
    **_each("strict", "whether fallbacks are refused", _never),
    **_each("output_dir", "where the run lies", _never),
    **_each("resume resume_allow", "how this start treats the earlier ones", _never),
    **_each(
        "parallel: num_processes world_size rank master_addr master_port backend timeout_minutes step_timeout_minutes "
        "gradient_sync output_device find_unused_parameters",
        _WORLD,
        _never,
    ),
    **_each("model: path revision init config trust_remote_code", "the model that is trained", _always),
    **_each("model: tokenizer chat_template", "which tokens the model is given", _always),
    **_each("model: attention", "how attention is computed, which shows in bf16", _always),
    # The rows themselves are compared, so that a file that was moved is no other file.
    **_each(
        "data: path mixture name revision train validation test split_seed format columns train_on max_length max_rows "
        "stream on_long_row on_no_target on_truncated_answer on_doubled_bos on_untrained_end on_overlap",
        "the rows to train and validate on",
        _has_other_rows,
    ),
    **_each("data: cache_dir num_processes", "how rows are encoded and where they are kept", _never),
    **_each("lora: r", "the shape of the adapter", _has_adapter, fits=False),
    **_each("lora: alpha dropout target_modules rslora", "what the adapter adds to the model", _has_adapter),
    **_each("lora: dora init new_tokens", "which weights the adapter has", _has_adapter, fits=False),
    **_each("lora: start_from", "the adapter's first weights", _has_adapter),
    **_each("lora: start_from_any_base", "whether the adapter's first weights are accepted", _never),
    **_each("lora: quantize", "in which numbers the base is kept", _has_adapter),
    **_each("optim: optimizer", "how gradients become updates", _always, fits=False),
    **_each("optim: weight_decay args max_grad_norm", "how gradients become updates", _always),
    **_each("optim: learning_rate schedule warmup_steps lora_plus_ratio", "the learning rate of every step", _always),
    **_each("training: method", "what is trained", _always, fits=False),
    **_each("training: objective", "which loss is minimised", _always),
    **_each("training: max_steps", "the number of steps, over which the learning rate falls", _is_rate_scaled),
    **_each(
        "training: num_epochs", "the number of steps, over which the learning rate falls", _is_rate_scaled_by_epochs
    ),
    **_each(
        "training: batch_size max_tokens_per_microbatch packing share_prefixes kernels",
        "how a global batch is cut, and with it the dropout masks",
        _has_dropout,
    ),
    **_each("preference: beta", "how much a preferred answer counts", _always),
    **_each("training: neftune_alpha", "the noise on the embedded tokens", _always),
    **_each("training: drop_last", "which rows are trained on", _always),
    **_each("training: precision", "in which numbers a step is computed", _always),
    **_each("training: global_batch_size", "the rows of a step; the checkpoint knows their number", _never),
    **_each("training: gradient_checkpointing deterministic device", "how a step is computed, not what", _never),
    **_each("training: debug log_every report_to", "what is logged", _never),
    # Where it matters the run had ended before, so that no curve is changed: it goes on where there was none.
    **_each("training: on_nonfinite max_skipped_steps", "whether a step that is not finite ends the run", _never),
    **_each("training: num_workers pin_memory prefetch_factor", _LOADING, _never),
    **_each("validation: num_workers pin_memory prefetch_factor batch_size", _LOADING, _never),
    **_each("validation: drop_last", "the rows to validate on: losses before and after do not compare", _always),
    **_each("validation: validate_every", "which steps may be the best, and when patience ends", _never),
    **_each(
        "testing: num_workers pin_memory prefetch_factor batch_size drop_last metrics compare_base max_new_tokens "
        "num_samples",
        "the test after training",
        _never,
    ),
    **_each("early_stopping: patience min_delta", "when training ends, and which step is the best", _never),
    **_each(
        "checkpoint: save_every save_every_epochs save_total_limit background on_disk_failure",
        "what is saved and kept",
        _never,
    ),
)
"""Every key of the schema; `dict` refuses one that is judged twice."""

_ROWS = Effect("the rows themselves, wherever they lie", _has_other_rows)
_SPLITS = ("data.train", "data.validation")
_OWN_TO_EACH_START = ("resume", "resume_allow")
_MAX_SHOWN = 60


class _Difference(NamedTuple):
    """One key with two values, as text."""

    key: str
    before: str
    now: str
    origin: str
    effect: Effect

    def __str__(self) -> str:
        return f"{self.key}: started with {self.before}, now {self.now} ({self.origin}): {self.effect.what}"

    def is_allowed(self, names: Sequence[str]) -> bool:
        return any(self.key == name or self.key.startswith(f"{name}.") for name in names)


def record_of_start(config: Config, fingerprints: Mapping[str, str]) -> dict[str, Any]:
    """What run.json keeps for the comparison, with a digest of its own: no edit and no torn file passes for it."""
    rows = {split: fingerprints[split] for split in _SPLITS if split in fingerprints}
    values = {"config": config.model_dump(mode="json"), "rows": rows}
    return {**values, "sha256": _sha256(values)}


def accepted_changes(folder: RunFolder, config: Config, fingerprints: Mapping[str, str]) -> list[dict[str, str]]:
    """Compare a run with its start, before config.yaml and run.json are written anew. Main process only.

    Args:
        folder: the run's, open.
        config: what the run is to go on with.
        fingerprints: digests by name; those of `data.train` and `data.validation` are compared.

    Returns:
        What changes the curve and is allowed by `resume.allow`, for run.json. Empty where nothing is resumed.

    Raises:
        CheckpointError: names every difference that changes the curve and is not allowed.
    """
    if config.resume != "auto" or not folder.checkpoint_steps():
        return []
    run = RecordedRun(folder.path)
    start = _recorded_start(run)
    before = _config_in(start) or run.config
    if before is None:
        _log.warning("%s, so nothing in it could be compared with this start", run.why_no_config)
    rows = _other_rows(folder, start, fingerprints)
    sides = Sides(before or config, config, has_same_rows=rows == [])
    found = list(_differences(sides))
    matters = [it for it in found if it.effect.on_curve(sides)] + (rows or [])
    if matters and newest_valid(folder) is None:
        return []  # the run starts from its beginning
    if refused := [it for it in matters if not it.is_allowed(config.resume_allow)]:
        raise CheckpointError(_refusal(folder, refused))
    if harmless := [str(it) for it in found if it not in matters and it.key not in _OWN_TO_EACH_START]:
        _log.info("changed since the start, with no effect on the curve: %s", "; ".join(harmless))
    for difference in matters:
        _log.warning("accepted by resume.allow: %s", difference)
    return [{"key": it.key, "before": it.before, "now": it.now} for it in matters]


def refuse_other_global_batch(folder: RunFolder, config: Config, *, global_batch_size: int, world_size: int) -> None:
    """A step of other rows is another curve: where the checkpoints know another number, nothing goes on.

    Args:
        folder: the run's, open.
        config: what the run is to go on with.
        global_batch_size: examples per optimizer step, as this start would have it.
        world_size: processes of this start.

    Raises:
        CheckpointError: names both global batches, and the worlds that they are of.
    """
    last = _last_state(folder) if config.resume == "auto" else None
    if last is None or last.global_batch_size == global_batch_size:
        return
    path = newest_valid(folder)
    state = last if path is None else read_state(path)
    if path is None or state.global_batch_size == global_batch_size:
        return
    given = "training.global_batch_size" if config.training.global_batch_size else "batch_size x world size"
    raise CheckpointError(
        f"output_dir={folder.path} holds a run that {_processes(state.world_size)} trained with a global batch of "
        f"{state.global_batch_size} examples, this run asks for {global_batch_size} with {_processes(world_size)} "
        f"({given}). Set training.global_batch_size={state.global_batch_size}, which any number of processes can keep, "
        "or start another run with output_dir=. Nothing was changed."
    )


def _last_state(folder: RunFolder) -> TrainerState | None:
    """Where the newest checkpoint stands whose state can be read; it is not verified."""
    for step in reversed(folder.checkpoint_steps()):
        with suppress(CheckpointError):
            return read_state(folder.checkpoint(step))
    return None


def _processes(number: int) -> str:
    return f"{number} process{'' if number == 1 else 'es'}"


def at_its_place(state: TrainerState, steps_per_epoch: int) -> TrainerState:
    """The state with its place in the epoch counted anew: other rows, once allowed, may make other epochs."""
    epoch, steps_in_epoch = divmod(state.step, steps_per_epoch)
    return replace(state, epoch=epoch, steps_in_epoch=steps_in_epoch)


def _recorded_start(run: RecordedRun) -> Mapping[str, Any] | None:
    """What `record_of_start` gave; None where it is missing or damaged."""
    start = run.part("started_with")
    values = {name: value for name, value in start.items() if name != "sha256"}
    return values if values.keys() == {"config", "rows"} and start.get("sha256") == _sha256(values) else None


def _config_in(start: Mapping[str, Any] | None) -> Config | None:
    """Former spellings of keys are read as today's; None too where it is of a schema that we cannot read."""
    try:
        return Config.model_validate(saved_with_our_keys(start["config"])) if start else None
    except ValidationError:
        return None


def _differences(sides: Sides) -> Iterator[_Difference]:
    """Keys with two values, in the order of the schema. What config.yaml does not hold is not compared."""
    missing = []
    for key, effect in EFFECTS.items():
        section, _, name = key.rpartition(".")
        before, now = (getattr(side, section) if section else side for side in (sides.before, sides.now))
        if sides.before is not sides.now and name not in before.model_fields_set:
            missing.append(key)
        elif getattr(before, name) != getattr(now, name):
            texts = _shown(getattr(before, name), getattr(now, name))
            yield _Difference(key, *texts, origin=sides.now.origin(key), effect=effect)
    if missing:
        _log.warning(
            "what is known of the start is cut short or of an older version, so these could not be compared: %s",
            ", ".join(missing),
        )


def _other_rows(folder: RunFolder, start: Mapping[str, Any] | None, now: Mapping[str, str]) -> list[_Difference] | None:
    """The splits whose rows have changed; None, with a warning, where run.json does not say what they were."""
    if start is None:
        _log.warning("%s does not tell the rows of the start, so they could not be compared", folder.record_file)
        return None
    before = start["rows"]
    return [
        _Difference("data", _digest(before.get(split)), _digest(now.get(split)), split, _ROWS)
        for split in _SPLITS
        if before.get(split) != now.get(split)
    ]


def _refusal(folder: RunFolder, refused: Sequence[_Difference]) -> str:
    lines = "".join(f"\n  {difference}" for difference in refused)
    names = {it.key for it in refused}
    names = {name for name in names if name == "data" or "data" not in names or not name.startswith("data.")}
    if all(it.effect.fits for it in refused):
        instead = f"to accept the change on purpose, add resume.allow={','.join(sorted(names))}"
    else:
        instead = "its checkpoints fit no other: start another run with output_dir="
    return (
        f"output_dir={folder.path} holds a run that was started with another configuration. "
        f"This changes its curve:{lines}\nGive the old values to go on, or, {instead}. Nothing was changed."
    )


def _shown(before: object, now: object) -> tuple[str, str]:
    """Two values as text, short and yet different: what they have in common gives way first."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = [
            name for name in {**before, **now} if (name in before, before.get(name)) != (name in now, now.get(name))
        ]
        before, now = ({name: side[name] for name in names if name in side} for side in (before, now))
    texts = [value if isinstance(value, str) else json.dumps(value) for value in (before, now)]
    if max(map(len, texts)) > _MAX_SHOWN:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
        start = max(0, len(list(same)) - 20)
        texts = [("... " if start else "") + _cut(text[start:]) for text in texts]
    return texts[0], texts[1]


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 4]} ..."


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _digest(value: object) -> str:
    return f"rows {value[:12]}" if isinstance(value, str) else "none"
