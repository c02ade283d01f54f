"""When a run validates, saves and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from finetune.runs.state import TrainerState
from finetune.training.validation import Criteria
from finetune.units import ceil_share

if TYPE_CHECKING:
    from finetune.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """The steps after which a run validates, saves and ends. Steps count from 1.

    `validate_every` and `save_every` are numbers of steps, and `save_every_epochs` is a number of epochs. If
    `validate_every` is None, a run validates at the end of each epoch.
    """

    steps_per_epoch: int
    num_steps: int
    validate_every: int | None = None
    save_every: int | None = None
    save_every_epochs: int | None = None

    @classmethod
    def of(cls, config: Config, steps_per_epoch: int) -> Cadence:
        """Make the cadence of a configuration."""
        return cls(
            steps_per_epoch=steps_per_epoch,
            num_steps=config.training.max_steps or ceil_share(config.training.num_epochs, steps_per_epoch),
            validate_every=config.validation.validate_every,
            save_every=config.checkpoint.save_every,
            save_every_epochs=config.checkpoint.save_every_epochs,
        )

    def is_last(self, step: int) -> bool:
        """Return whether the run is complete after this step."""
        return step >= self.num_steps

    def validates_after(self, step: int) -> bool:
        """Return whether a step validates. The last one always does, so that the best adapter is known."""
        return step % (self.validate_every or self.steps_per_epoch) == 0 or self.is_last(step)

    def saves_after(self, step: int) -> bool:
        """Return whether a step saves. The last one always does."""
        epochs, within = divmod(step, self.steps_per_epoch)
        by_steps = self.save_every is not None and step % self.save_every == 0
        by_epochs = self.save_every_epochs is not None and within == 0 and epochs % self.save_every_epochs == 0
        return by_steps or by_epochs or self.is_last(step)

    def most_checkpoints(self, *, keep: int, has_best: bool) -> int:
        """Return the most checkpoints on the disk at once: `keep` of them stay, and the best with `has_best`."""
        num_saves = sum(map(self.saves_after, range(1, self.num_steps + 1)))
        return min(num_saves, keep + has_best + 1)  # one is being written

    def owes_validation(self, state: TrainerState) -> bool:
        """Return whether the run was preempted before the validation that was due after its last step."""
        step, num_without = state.step, state.validations_without_improvement
        if state.validated_step is not None:
            return self.validates_after(step) and state.validated_step != step
        if step == 0 or step == state.best_step or not self.validates_after(step):
            return False
        return num_without < sum(map(self.validates_after, range((state.best_step or 0) + 1, step + 1)))


class StopRules(NamedTuple):
    """The rules by which the loop ends a run early."""

    patience: int | None = None
    """Validations without improvement after which the run stops; None: it never stops early."""
    criteria: Criteria = Criteria()
    """Which metric counts."""
    max_skipped_steps: int = 0
    """Steps of the run, over all its starts, that may be skipped because they were not finite."""

    @classmethod
    def of(cls, config: Config) -> StopRules:
        """Make the rules of a configuration."""
        training = config.training
        skips = training.max_skipped_steps if training.on_nonfinite == "skip" else 0
        return cls(config.early_stopping.patience, Criteria.of(config), skips)
