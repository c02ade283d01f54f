"""Load the model of a run: its adapter on its base, or the fully tuned model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.run_config import load_run_config
from finetune.config.schema import Config, ModelSection, ParallelSection
from finetune.errors import CheckpointError, ConfigError, ModelError, first_line
from finetune.fallbacks import Fallback
from finetune.runs.durable import read_manifest
from finetune.runs.folder import RunFolder
from finetune.runs.record import read_run_record
from finetune.runs.recorded_run import RecordedRun, suggest_run
from finetune.runs.state import read_state
from finetune.runs.verification import OPTIMIZER_FILE

if TYPE_CHECKING:
    from finetune.distributed.runtime import Runtime
    from finetune.runs.model_files import LoadedRun

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run's configuration and the weights to use. Nothing is loaded yet."""

    recorded: RecordedRun
    config: Config
    """The configuration of the training, with the changes of this command."""
    weights: Path
    """`adapter/` or a checkpoint, verified."""
    base_model: ModelSection
    """The model from which the training began."""

    @property
    def base(self) -> FinishedRun | None:
        """The base of a run that trained every weight, to load in its place; None if the run has no such base."""
        if not self.is_full or self.base_model.init == "random":
            return None
        return replace(self, config=self.config.model_copy(update={"model": self.base_model}))

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return self.recorded.folder

    @property
    def is_full(self) -> bool:
        """True if every weight was trained, so that `weights` holds a whole model."""
        return self.config.training.method == "full"

    def on_all_ranks(self) -> FinishedRun:
        """The same run, for all processes that the launch started."""
        return replace(self, config=self.config.model_copy(update={"ddp": None}))

    @property
    def fingerprints(self) -> dict[str, Any]:
        """The digests of rows, template and base that the training recorded, by name; empty if it recorded none."""
        return self.recorded.part("fingerprints")

    @property
    def weights_name(self) -> str:
        """The path of the weights in the run's folder: `adapter`, `checkpoints/step-000012`."""
        return self.weights.relative_to(self.folder.path).as_posix()


def find_run(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    base: str | None = None,
    checkpoint: str | None = None,
    is_alone: bool = False,
) -> FinishedRun:
    """Read a run's configuration and verify its weights. Imports no torch.

    `parallel` and `ddp` come from this command, not from the configuration of the training; with `is_alone`, one
    process is used, however many the launch started. `base` replaces the adapter's base in the configuration.
    `checkpoint` is a step, a checkpoint's name, or `latest`; None: the published weights in `adapter/`.

    Raises:
        CheckpointError: the folder holds no run, its weights are missing or damaged, or see `read_run_record`.
        ConfigError: the overrides are wrong, or a base is given for a run without an adapter.
    """
    recorded = RecordedRun(path)
    folder = recorded.folder
    folder.refuse_irregular_files()
    if not folder.config_file.is_file():
        raise CheckpointError(
            f"{path} is not the folder of a run: it has no {folder.config_file.name}. {suggest_run(path)}"
        )
    read_run_record(folder.record_file)  # refuses values of other types
    weights = recorded.find_weights(checkpoint)
    if checkpoint is None and recorded.status != "completed":
        _warn_of_earlier_end(recorded)
    config = load_run_config(folder.path, overrides)
    if not any(override.startswith(("parallel.", "parallel=")) for override in overrides):
        config = config.model_copy(update={"parallel": ParallelSection()})
    if not _changes("ddp", overrides):
        config = config.model_copy(update={"ddp": False if is_alone else None})
    _refuse_useless_changes(path, config, overrides, base)
    saved, model = None, config.model
    if not _changes("model.tokenizer", overrides):
        # The base's tokenizer may have changed since. A run that has not ended may have saved none.
        saved = next((place for place in (weights, folder.adapter) if (place / "tokenizer.json").is_file()), None)
    if saved is not None:
        model = model.model_copy(update={"tokenizer": str(saved)})
    elif model.path and not model.tokenizer:
        model = model.model_copy(update={"tokenizer": model.path})
    base_model = model
    if base is not None:
        model = _pretrained(model, base)
    elif config.training.method == "full":
        model = _pretrained(model, str(weights))
    elif model.init == "random":
        model = _pretrained(model, str(folder.base))
    data = config.data
    if saved is not None and not _changes("data.chat_template", overrides):
        # The saved tokenizer has the template with its date, and the file may be gone.
        data = data.model_copy(update={"chat_template": None})
    config = config.model_copy(update={"model": model, "data": data})
    return FinishedRun(recorded=recorded, config=config, weights=weights, base_model=base_model)


def choose_split(asked: str | None, available: Collection[str]) -> str:
    """Return the split to measure: the requested one, or test, or validation if there is no test split.

    Raises:
        ConfigError: the run has no such split.
    """
    held_out = [name for name in ("test", "validation") if name in available]
    split = asked or next(iter(held_out), "test")
    if split not in available:
        other = f"--split {held_out[0]}" if held_out else "the training rows with --split train"
        raise ConfigError(
            f"this run has no {split} split. Give one with data.{split}=FILE_OR_SPLIT. Or measure {other}."
        )
    if asked is None and split == "validation":
        _log.info("this run has no test split, so its validation split is measured; data.test=FILE_OR_SPLIT gives one")
    return split


def load_finished_run(runtime: Runtime, run: FinishedRun) -> LoadedRun:
    """Load a run and place its model on the device, or shard it across the ranks (`parallel.sharding`).

    Collective: every rank.

    Raises:
        ModelError: the base or the tokenizer cannot be loaded, or the adapter does not fit the base.
    """
    loaded = read_finished_run(runtime, run)
    place_finished_run(runtime, run.config, loaded.model)
    return loaded


def read_finished_run(runtime: Runtime, run: FinishedRun) -> LoadedRun:
    """Read a run's model and tokenizer on the CPU, as `load_finished_run` does before it places the model."""
    from finetune.model.tokens import build_run_tokenizer
    from finetune.runs.model_files import LoadedRun

    if run.config.rollout.tools or run.config.rollout.environment:
        _log.warning(
            "the run learned in conversations with tools or an environment. Nothing calls them here, so answers and "
            "metrics are not comparable with its validations in metrics.jsonl"
        )
    tokenizer = build_run_tokenizer(run.config)
    model = _load_base(runtime, run.config)
    if run.config.training.method == "lora":
        model = put_adapter_on(model, run)
    return LoadedRun(model, tokenizer)


def place_finished_run(runtime: Runtime, config: Config, model: Any) -> None:
    """Place a loaded model on the device, or shard it across the ranks, and prepare its answers. Collective."""
    from finetune.inference.answer_graphs import agree_on_replays

    runtime.placement.fit_threads(model)
    if runtime.placement.shard_size is None:
        runtime.placement.place(model)
        runtime.collectives.agree_set_up()
    else:
        runtime.collectives.agree_set_up()  # a rank that cannot read the model ends the others before they share it
        runtime.placement.shard(model)
    agree_on_replays(runtime, config.training, model)


def put_adapter_on(base: Any, run: FinishedRun) -> Any:
    """Return the base as a PeftModel with the run's adapter, whose tensors must all fit. Warn if the base has changed.

    Raises:
        ModelError: the adapter does not fit the base.
    """
    from finetune.model.saved_adapter import load_adapter
    from finetune.runs.model_files import load_model

    path = run.config.model.path
    try:
        model = load_adapter(base, run.weights)
        load_model(model, run.weights)  # strict, while peft only warns of missing tensors
    except Exception as error:  # from several libraries, for other shapes or names
        if not run.weights.is_dir():
            raise CheckpointError(
                f"{run.weights} was removed while the model was loaded: a run that trains keeps only its newest "
                "checkpoints (checkpoint.save_total_limit). Run the command again."
            ) from error
        if isinstance(error, (ConfigError, ModelError)):
            raise
        raise ModelError(
            f"the adapter in {run.weights} does not fit the base {path}: {first_line(error)} "
            "Name the base that it was trained on with --set model.path=FOLDER."
        ) from error
    if other := other_base(model, run):
        _log.warning("%s", other)
    return model


def other_base(model: Any, run: FinishedRun) -> str | None:
    """Return a sentence if an adapter was trained on other base weights; None if not, or if that is not known.

    The model is as `put_adapter_on` returns it.
    """
    from finetune.model.lora import fingerprint_base

    trained_on, lora = run.fingerprints.get("base"), run.config.lora
    # A machine that cannot quantize loads the base of a QLoRA run in 16 bits, so the two digests differ.
    if trained_on is None or lora.quantize != "none" or fingerprint_base(model, lora) == trained_on:
        return None
    return f"{run.config.model.path} has other weights than the base that {run.folder.path} was trained on"


def _load_base(runtime: Runtime, config: Config) -> Any:
    """Load the base as the run did: in 4 bits if the run did and this machine can."""
    from finetune.model.base import build_base_model
    from finetune.model.quantized import build_quantized_base, refuse_where_quantizing_is_impossible

    quantize = config.lora.quantize
    if config.training.method == "full" or quantize == "none":
        return build_base_model(config.model)
    try:
        refuse_where_quantizing_is_impossible(config.lora, config.model, runtime.device)
    except ConfigError as error:
        used = f"the base in {runtime.precision}"
        runtime.fallbacks.take(Fallback(what="lora.quantize", wanted=quantize, used=used, why=str(error)))
        return build_base_model(config.model)
    return build_quantized_base(config.model, config.lora, runtime.device)


def _warn_of_earlier_end(recorded: RecordedRun) -> None:
    """Warn if a run has trained on since it published `adapter/`, and has not ended again."""
    folder = recorded.folder
    with suppress(IndexError, ValueError, CheckpointError):  # no checkpoint that can be read
        state = read_state(folder.checkpoint(folder.checkpoint_steps()[-1]))
        published = _digests_of_weights(folder.adapter)
        if all(
            _digests_of_weights(folder.checkpoint(step)) != published for step in {state.step, state.best_step or 0}
        ):
            _log.warning(
                "%s holds the weights of an earlier end of the run, which has trained on to step %d since and has not "
                "ended again (%s). --checkpoint latest takes its newest weights",
                *(folder.adapter, state.step, recorded.state),
            )


def _digests_of_weights(folder: Path) -> dict[str, Any]:
    """Return the digests of the model's tensors in a manifest; empty if there is no folder."""
    if not folder.is_dir():
        return {}
    entries = read_manifest(folder).items()
    return {name: entry for name, entry in entries if name.endswith(".safetensors") and name != OPTIMIZER_FILE}


def _changes(key: str, overrides: Sequence[str]) -> bool:
    return any(override.startswith(f"{key}=") for override in overrides)


def _refuse_useless_changes(path: Path, config: Config, overrides: Sequence[str], base: str | None) -> None:
    """Refuse a base for a run without an adapter, and settings of an adapter that is trained."""
    if config.training.method == "full":
        change = next((each for each in overrides if each.startswith("model.path=")), base and f"--base {base}")
        if change:
            raise ConfigError(f"{change}: {path} trained every weight, so no base is needed. Drop it.")
    settings = [each for each in overrides if each.startswith("lora.") and not each.startswith("lora.quantize=")]
    if settings:
        raise ConfigError(f"{settings[0]}: the adapter of {path} is trained, and keeps its own settings. Drop it.")


def _pretrained(section: ModelSection, path: str) -> ModelSection:
    return section.model_copy(update={"path": path, "init": "pretrained", "config": None, "revision": None})
