"""What a finished run left behind: its weights on the CPU, and all that its own files say about them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.compose import load_config
from finetune.inference.finished_run import find_run
from finetune.runs.folder import RunFolder
from finetune.runs.recorded_run import RecordedRun

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config, ModelSection


@dataclass(frozen=True, kw_only=True)
class RunToShip:
    """A run whose weights are whole.

    Attributes:
        folder: the run's.
        weights: `adapter/` or a checkpoint.
        model: the section that loads the base, or the fully tuned model, and the tokenizer of the run.
        config: as it was resolved when the run started.
        recorded: what its folder says of it.
    """

    folder: RunFolder
    weights: Path
    model: ModelSection
    config: Config
    recorded: RecordedRun

    @property
    def is_full(self) -> bool:
        """Every weight was trained: the weights are those of a whole model."""
        return self.config.training.method == "full"


def read_run(path: Path, *, base: str | None = None, checkpoint: str | None = None) -> RunToShip:
    """Read a run's folder; nothing in it changes, and no torch is imported.

    Args:
        path: the run's folder.
        base: where to load the base from, in place of where the run did.
        checkpoint: a step or `latest`; None: the published weights.

    Raises:
        CheckpointError: it is no run's folder, the run has not ended, or its weights are damaged.
        ConfigError: its config.yaml is not one of this version.
    """
    found = find_run(path, base=base, checkpoint=checkpoint, is_alone=True)
    return RunToShip(
        folder=found.folder,
        weights=found.weights,
        model=found.config.model,
        config=load_config([], run=str(found.folder.config_file)),
        recorded=RecordedRun(found.folder.path),
    )


def load_tokenizer(run: RunToShip) -> PreTrainedTokenizerBase:
    """The tokenizer that the run was trained with, its template included."""
    from finetune.model.new_tokens import build_run_tokenizer

    return build_run_tokenizer(run.config.model_copy(update={"model": run.model}))


def load_tuned_model(run: RunToShip) -> Any:
    """The base with the adapter on it as a PeftModel, or the fully tuned model; on the CPU, weights as they are stored.

    Raises:
        ModelError: the base cannot be loaded, or the adapter does not fit it.
    """
    from finetune.inference.finished_run import put_adapter_on
    from finetune.model.base import build_base_model

    model: Any = build_base_model(run.model)
    return model if run.is_full else put_adapter_on(model, run.weights, str(run.model.path))
