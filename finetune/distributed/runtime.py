"""`Runtime`: the world of processes that a run trains in, as one object on each rank.

`Runtime` composes four parts that can be read alone: `liveness` (phases, watchdog, leaving), `collectives` (sums, rank
0's value, agreeing on a failure), `stop_requests` (signals on any rank) and `placement` (device, forward, backward).

`initialize_ddp` runs first, and Accelerate adopts its group. The other order cannot work: on an unexpected launch
Accelerate does not fail, but answers "one process, main" on every rank. So the run compares the two worlds before it
trains anything.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from finetune import __version__
from finetune.distributed.accelerate_library import Accelerator, DistributedType
from finetune.distributed.collectives import Collectives
from finetune.distributed.device import best_precision, choose_precision
from finetune.distributed.environment import LaunchEnvironment, has_accelerate_settings
from finetune.distributed.joined_world import ProcessContext
from finetune.distributed.liveness import Liveness
from finetune.distributed.placement import Placement
from finetune.distributed.stop_requests import StopRequests
from finetune.errors import LaunchError
from finetune.fallbacks import Fallbacks
from finetune.threads import set_waiting

if TYPE_CHECKING:
    from finetune.config.schema import Config

_log = logging.getLogger(__name__)
_MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "no"}
"""What Accelerate is asked for. In fp16, Accelerate would skip a batch when a gradient overflows. The training step
computes the batch again with a smaller loss scale, so Accelerate must not scale the loss."""
_PLAIN_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Runtime:
    """What a training step needs from the world of processes: four parts, and this process's place.

    Attributes:
        is_closed: whether this process has left the world.
    """

    def __init__(
        self,
        context: ProcessContext,
        environment: LaunchEnvironment,
        fallbacks: Fallbacks,
        config: Config,
        launcher_settings: Mapping[str, tuple[object, str]],
    ) -> None:
        self._given = launcher_settings
        self.is_closed = False
        self.environment = environment
        self.fallbacks = fallbacks
        self.precision = choose_precision(config.training.precision, best=best_precision(context.device))
        if has_accelerate_settings(os.environ):
            from finetune.distributed.accelerate_settings import refuse_another_precision

            refuse_another_precision(self.precision, config.training.precision, os.environ)
        if context.device.type == "cuda":
            torch.cuda.set_device(context.device)  # in a world of one, Accelerate takes the current one
            if config.training.memory_fraction < 1:
                torch.cuda.set_per_process_memory_fraction(config.training.memory_fraction, context.device)
        self._accelerator = Accelerator(
            cpu=context.device.type == "cpu",
            mixed_precision=_MIXED_PRECISION[self.precision],
            gradient_accumulation_steps=1,
        )
        self.liveness = Liveness(context)
        self._compare_worlds()
        self._log_first_line()
        self.collectives = Collectives(self.liveness)
        self.stop_requests = StopRequests(self.collectives, self.liveness)
        self.placement = Placement(
            self._accelerator,
            config,
            self.precision,
            liveness=self.liveness,
            collectives=self.collectives,
            stop_requests=self.stop_requests,
        )
        if context.distributed:
            # Before a group is made: making it waits for all ranks, and the watchdog names a rank that is gone.
            self.liveness.start_watchdog(
                environment,
                step_timeout_minutes=config.parallel.step_timeout_minutes,
                broadcast=self.collectives.broadcast_from_main,
            )
            try:
                self.collectives.connect_hosts(config.parallel.timeout_minutes)
            except BaseException as error:
                self.close(error)
                raise

    @property
    def context(self) -> ProcessContext:
        """This process's rank, world size and device, which all parts read."""
        return self.liveness.context

    @context.setter
    def context(self, context: ProcessContext) -> None:
        self.liveness.context = context

    @property
    def rank(self) -> int:
        """This process's rank, 0 alone."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return self.context.world_size

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.context.device

    @property
    def is_main_process(self) -> bool:
        """True on the one process that writes."""
        return self.context.rank == 0

    @property
    def threads(self) -> dict[str, Any]:
        """How many threads compute on the CPU in this process, and how they wait, for run.json."""
        return {"count": torch.get_num_threads(), **set_waiting()._asdict()}

    def with_launcher_values(self, config: Config) -> Config:
        """Return the configuration with the chosen folder and the launcher's values, see `settings_of_accelerate`."""
        return config.with_values(self._given)

    def set_folder(self, output_dir: str) -> None:
        """Set the run's folder, which `with_launcher_values` gives to the configuration."""
        self._given = {**self._given, "output_dir": (output_dir, "default")}

    def close(self, error: BaseException | None) -> None:
        """Leave the world: end what was opened, and report an error to the other ranks. Not a collective."""
        self.is_closed = True
        try:
            with self.liveness.leaving(error):
                self.collectives.leave()
                self.liveness.run_closing_actions(error)
        finally:
            self.collectives.forget_groups()
            self.placement.forget_model()

    def _compare_worlds(self) -> None:
        accelerator, engine = self._accelerator, self._accelerator.distributed_type
        pairs = {
            "world size": (self.world_size, accelerator.num_processes),
            "rank": (self.rank, accelerator.process_index),
            "device": (_device_name(self.device), _device_name(accelerator.device)),
            "precision": (_MIXED_PRECISION[self.precision], accelerator.mixed_precision),
            "gradient accumulation": (1, accelerator.gradient_accumulation_steps),
            "parallelism": ("plain", "plain" if engine in _PLAIN_TYPES else str(engine.value)),
        }
        different = [f"{name}: ours {a}, Accelerate's {b}" for name, (a, b) in pairs.items() if a != b]
        if different:
            raise LaunchError(
                f"finetune and Accelerate see different worlds (launcher {self.environment.launcher}): "
                f"{'; '.join(different)}. Remove the ACCELERATE_* variables or the accelerate config file that ask for "
                "something else."
            )

    def _log_first_line(self) -> None:
        import transformers

        _log.info(
            "finetune %s, torch %s, transformers %s, Python %s; "
            "launcher %s, device %s, %s, world of %d; threads: %d, %s",
            __version__,
            torch.__version__,
            transformers.__version__,
            platform.python_version(),
            self.environment.launcher,
            self.device,
            self.precision,
            self.world_size,
            torch.get_num_threads(),
            set_waiting(),
        )


def _device_name(device: torch.device) -> str:
    """`cpu` and `cpu:0` are one device, and `cuda` is the current GPU."""
    if device.type == "cuda" and device.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"
