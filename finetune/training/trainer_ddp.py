"""A trainer made from a rank and a config, for scripts that start their own processes and for notebooks."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from finetune.config.compose import config_from_dict
from finetune.config.schema import Config
from finetune.data.batches import EvaluationLoader, TrainLoader
from finetune.distributed.ddp_init import cleanup_ddp, initialize_ddp, is_joined
from finetune.distributed.environment import read_environment
from finetune.distributed.launch import launch
from finetune.errors import ConfigError, LaunchError, PreemptedError
from finetune.fallbacks import Fallbacks
from finetune.inference.scores import Evaluation
from finetune.training.objective import Loaders
from finetune.training.setup import check_config
from finetune.training.train import build_parts
from finetune.training.trainer import Trainer, TrainingResults

if TYPE_CHECKING:
    from finetune.inference.losses import LossSums

_log = logging.getLogger(__name__)


class TrainerDDP(Trainer):
    """A `Trainer` that builds its runtime, tokenizer, rows and model itself.

    It joins the group that `initialize_ddp` made, else the world of the launcher, else the one that `parallel`
    describes (`world_size`, `master_addr`, `master_port`), else it trains alone.

    The run ends as failed after an error in a method, as completed after the test phase, and otherwise when the process
    ends. `close`, or a `with` block, ends it earlier, before or after `cleanup_ddp`. A process is in one
    world at a time, so the next `TrainerDDP` closes the one before.

    A script in this form that is preempted (see `PreemptedError`) ends with exit code 75 and no traceback.

    Collective: every rank makes one.

    Args:
        rank: this process's rank, checked against the world.
        config: a dict in the shape of a run file, or a `Config`, with a section `parallel`.

    Raises:
        ConfigError: the section is missing, or something in the configuration is wrong.
        LaunchError: the world cannot be joined, or this process is another rank in it.

    Example:
        ``with TrainerDDP(0, {"model": "phi_tiny", "data": "orders", "parallel": {"world_size": 1}}) as trainer: …``
    """

    _open: ClassVar[TrainerDDP | None] = None

    def __init__(self, rank: int, config: Mapping[str, object] | Config) -> None:
        self.journal = None
        self._is_trained = False
        self._world = ExitStack()
        config = _checked(config)
        if TrainerDDP._open is not None:
            TrainerDDP._open.close()
        with self._leaving_on_error():
            _join_as_configured(self._world, rank, config)
            runtime = self._world.enter_context(launch(config))
            TrainerDDP._open = self
            atexit.register(self._close_at_exit)
            if rank != runtime.rank:
                raise LaunchError(
                    f"TrainerDDP was given rank {rank}, but this process is rank {runtime.rank} of "
                    f"{runtime.world_size}. Give the rank that initialize_ddp was given, or int(os.environ['RANK'])."
                )
            checked = check_config(config, runtime=runtime)
            super().__init__(runtime, config, *build_parts(runtime, config), checked=checked)

    @property
    def device(self) -> int | torch.device:
        """The index of this process's GPU, or its device if that is not a GPU."""
        device = self.runtime.device
        return device.index if device.type == "cuda" else device

    def prepare_dataloaders(self) -> Loaders:
        """Build the loaders of this rank, and leave the world on an error."""
        with self._leaving_on_error():
            return super().prepare_dataloaders()

    def run_training(
        self, train_loader: TrainLoader, val_loader: EvaluationLoader | None = None
    ) -> tuple[TrainingResults, LossSums | None]:
        """Train to the end, and leave the world on an error. Collective."""
        self._refuse_second_training()  # outside of the block, because the error must not fail a run that has ended
        with self._leaving_on_error():
            results = super().run_training(train_loader, val_loader)
        self._is_trained = True
        return results

    def run_test(self, test_loader: EvaluationLoader | None) -> Evaluation | None:
        """Measure the published weights. The first call also completes the run and releases its folder."""
        with self._leaving_on_error():
            evaluation = super().run_test(test_loader)
            if self.journal is not None:
                self.journal.close(None)
        return evaluation

    def close(self, error: BaseException | None = None) -> None:
        """Leave the world and record in run.json how the run ended. Safe to call twice, and after `cleanup_ddp`.

        Args:
            error: the error that ends the run; without one it is completed if training is, else stopped.
        """
        atexit.unregister(self._close_at_exit)
        if TrainerDDP._open is self:
            TrainerDDP._open = None
        if error is None and not self._is_trained and self.journal is not None:
            self.journal.close(SystemExit("the run was closed before its training was done"))
        world, self._world = self._world, ExitStack()
        world.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error)

    def _close_at_exit(self) -> None:
        # The error that ended the script, if known: torch.multiprocessing does not pass it on.
        self.close(None if self._is_trained else getattr(sys, "last_value", None))

    @contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        """Close at once on an error, so that the other ranks, run.json and the lock do not wait for the script."""
        try:
            yield
        except PreemptedError as error:
            self.close(error)
            if not error.is_reported_elsewhere:
                _log.warning("%s", error)
            raise SystemExit(error.exit_code) from error  # the only way to set the exit code of such a script
        except BaseException as error:
            self.close(error)
            raise


def _checked(config: Mapping[str, object] | Config) -> Config:
    if not isinstance(config, (Mapping, Config)):
        raise ConfigError(
            f"TrainerDDP(rank, config): config is {type(config).__name__}; expected a dict in the shape of a run file, "
            "or what load_config returns."
        )
    keys = config.model_fields_set if isinstance(config, Config) else map(str, config)
    if not any(key == "parallel" or key.startswith("parallel.") for key in keys):
        raise ConfigError(
            "TrainerDDP(rank, config): the config has no section `parallel`, which says how the processes find each "
            "other. Add one, for example parallel: {world_size: 2}; or use Trainer, which reads it from the launcher."
        )
    return config if isinstance(config, Config) else config_from_dict(config, "the dict given to TrainerDDP")


def _join_as_configured(world: ExitStack, rank: int, config: Config) -> None:
    """Join the world that `parallel` describes where neither a launcher nor the script made one."""
    parallel = config.parallel
    is_described = parallel.world_size is not None and parallel.world_size > 1
    if not is_described or is_joined() or read_environment(os.environ).launcher != "none":
        return
    world.callback(cleanup_ddp)
    initialize_ddp(
        timedelta(minutes=parallel.timeout_minutes),
        rank=rank,
        worldsize=parallel.world_size,
        master_addr=parallel.master_addr,
        master_port=parallel.master_port,
        backend=parallel.backend,
        device=None if config.training.device == "auto" else config.training.device,
        flag=config.ddp,
        shares_gpus=parallel.share_gpus,
        fallbacks=Fallbacks(strict=config.strict),
    )
