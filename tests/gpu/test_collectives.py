"""The runtime's collectives through the backend of the device, NCCL on CUDA, in a group of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from finetune.config.schema import Config
from finetune.distributed.launch import launch
from finetune.distributed.runtime import Runtime
from finetune.engine.layout import pack
from finetune.engine.loss import summed_cross_entropy
from finetune.errors import DataError
from finetune.training.optim import trainable_parameters
from finetune.training.step import StepResult, StepSettings, train_step
from tests.engine.prefix_rows import random_rows
from tests.gpu.models import placed
from tests.launches import free_port, place_variables

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@pytest.fixture
def runtime(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """In a group that is up already, as a script can make one; a world of one would otherwise need none."""
    for name, value in place_variables(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(BACKENDS[device.type])
    try:
        settings = {"device": str(device), "precision": "fp32"}
        with launch(Config.model_validate({"training": settings}), trains=False) as runtime:
            runtime.context = runtime.context._replace(distributed=True)
            runtime.collectives.connect_hosts(timeout_minutes=1)
            yield runtime
    finally:
        dist.destroy_process_group()


def test_every_collective(runtime: Runtime, device: torch.device) -> None:
    assert (runtime.collectives.backend, runtime.device) == (BACKENDS[device.type], device)
    assert runtime.collectives.sum([1.0, 2.0**-40]) == [1.0, 2.0**-40]
    assert runtime.collectives.broadcast_from_main({"from": 0}) == {"from": 0}
    runtime.collectives.barrier()
    runtime.collectives.agree(None, "reading")
    runtime.collectives.refuse_differences("the rows", "digest")
    with pytest.raises(DataError, match="row 7"):
        runtime.collectives.agree(DataError("row 7"), "reading")


def test_a_step_is_that_of_a_process_alone(runtime: Runtime, device: torch.device) -> None:
    def step() -> StepResult:
        model = placed("phi-4-mini", "fp32", device)
        runtime.placement.place(model)
        optimizer = torch.optim.AdamW(trainable_parameters(model))
        microbatches = [(0, pack(random_rows(3, targets=0.5)))]
        settings = StepSettings(step=1, learning_rate=1e-2, max_grad_norm=1.0, seed=0)
        return train_step(runtime, model, optimizer, microbatches, settings, compute=summed_cross_entropy)

    together = step()
    runtime.context = runtime.context._replace(distributed=False)
    alone = step()
    assert (together.loss, together.grad_norm) == pytest.approx((alone.loss, alone.grad_norm), rel=1e-4)
    assert together.num_targets == alone.num_targets > 0
