"""Set torch's settings of the whole process for a launch, and restore them after it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from finetune.distributed.device import rounded_products

_log = logging.getLogger(__name__)

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_TF32_OF_ENVIRONMENT = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
"""Images for GPUs set it for every program."""


@contextmanager
def torch_settings_of_run(*, deterministic: bool) -> Iterator[None]:
    """Within the block, products in fp32 are not rounded, and algorithms are deterministic if asked."""
    with ExitStack() as settings:
        if rounded := rounded_products():
            level = logging.INFO if _TF32_OF_ENVIRONMENT in os.environ else logging.WARNING
            types = ", ".join(f"{name} on {device}" for device, name in rounded.items())
            _log.log(
                level,
                "torch was told to round the factors of products in fp32 (%s). This run does not, because its "
                "configuration alone decides its numbers. training.precision=bf16 makes products faster",
                types,
            )
            settings.enter_context(exact_products())
        if deterministic:
            settings.enter_context(deterministic_algorithms())
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """Within the block, do not round the factors of products in fp32. torch has one setting, and one by device."""
    backends: Any = torch.backends
    cuda, cpu = backends.cuda.matmul, backends.mkldnn.matmul
    of_cuda, of_cpu = cuda.fp32_precision, cpu.fp32_precision
    try:
        of_all = torch.get_float32_matmul_precision()
    except RuntimeError:  # the setting of a device differs from it
        of_all = None
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if of_all is not None:
            torch.set_float32_matmul_precision(of_all)
        cuda.fp32_precision, cpu.fp32_precision = of_cuda, of_cpu


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Make torch compute the same bits every time inside the block. On CUDA, other operations are an error."""
    workspace = os.environ.get(_WORKSPACE)
    os.environ.setdefault(_WORKSPACE, ":4096:8")  # without a fixed workspace, torch refuses all products on CUDA
    settings: Any = torch.utils.deterministic
    fills_memory = settings.fill_uninitialized_memory
    was_enabled = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    settings.fill_uninitialized_memory = False  # takes time, and only shows reads of memory that was never written
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=only_warned)
        settings.fill_uninitialized_memory = fills_memory
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
