"""Choose what `training.memory=least` keeps in main memory."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from finetune.engine.host_embedding import embedding_that_may_leave
from finetune.training.memory.forecast import CANNOT_TRACE, predict_sizes
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.training.forward import Computation


def least_memory(
    config: Config, model: Any, how: Computation, *, num_rows: int, room: int, usable: int, world_size: int, **rows: Any
) -> dict[str, Any]:
    """Return the attributes of a `MemoryChoice` with which a run takes the least memory, and why.

    Args:
        config: the whole run.
        model: see `finetune.training.memory.choice.choose`.
        how: how the run computes a step.
        num_rows: of the largest micro-batch.
        room: bytes that are free on the device beside the weights.
        usable: bytes of them that a step may take.
        world_size: the number of processes.
        rows: what `predict_sizes` needs to make micro-batches.
    """
    is_checkpointing, is_cuda = config.training.gradient_checkpointing is not False, how.device_type == "cuda"
    why, embedding_on_host = "training.memory=least", False
    if may_keep_embedding_on_host(config, model, how.device_type, world_size):
        with suppress(*CANNOT_TRACE):  # without a prediction, nothing says that the embedding has to leave
            step = predict_sizes(config, model, how, world_size=world_size, **rows)(num_rows, is_checkpointing)
            if embedding_on_host := step.num_bytes > usable:
                why += f", and with the embedding on the device a step needs {format_bytes(step.num_bytes)}"
                why += f", of {format_bytes(max(0, room))} that are free"
    return {
        "gradient_checkpointing": is_checkpointing,
        "offloads": is_checkpointing and is_cuda,
        "embedding_on_host": embedding_on_host,
        "why": why,
    }


def may_keep_embedding_on_host(config: Config, model: Any, device_type: str, world_size: int) -> bool:
    """Return whether a run may look tokens up in main memory: not in CUDA graphs, shards or torch's reducer."""
    is_one_place = world_size == 1 or (config.parallel.sharding == "none" and config.parallel.gradient_sync != "ddp")
    is_replayed = config.training.graphs is True
    return device_type == "cuda" and is_one_place and not is_replayed and embedding_that_may_leave(model) is not None
