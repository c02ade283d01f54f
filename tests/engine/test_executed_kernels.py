"""No model family of the engine meets a reference kernel of oneDNN, which takes hundreds of times as long as others."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from tests.engine.executed_kernels import COMPUTED, METHODS, Kernel, kernels_of_a_child


def assert_no_reference_kernel(kernels: list[Kernel]) -> None:
    """In bf16 a reference kernel is accepted where oneDNN has no fast one for this CPU, and it is named."""
    fast_in_bf16 = {kernel.primitive for kernel in kernels if "bf16" in kernel.shape and not kernel.is_reference}
    slow = [kernel for kernel in kernels if kernel.is_reference]
    avoidable = [kernel for kernel in slow if "bf16" not in kernel.shape or kernel.primitive in fast_in_bf16]
    assert not avoidable, f"{len(avoidable)} reference kernels, of which the first is {avoidable[0]}"
    if slow:
        names = sorted({f"{kernel.primitive} {kernel.name}" for kernel in slow})
        print(f"oneDNN has no fast kernel in bf16 for the instructions of this CPU: {', '.join(names)}")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("weights", ["16 or 32 bits", "4-bits"])
def test_no_family_executes_a_reference_kernel(weights: str) -> None:
    if weights == "4-bits" and find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    kernels = kernels_of_a_child(weights)
    if not kernels:
        capability = torch.backends.cpu.get_cpu_capability()
        pytest.skip(
            f"with {capability}, torch gives oneDNN no product; test_products.py times a strided operand instead"
        )
    methods = len(METHODS) - (weights == "4-bits")
    assert len({kernel.case for kernel in kernels}) >= len(COMPUTED) * methods  # in bf16 at least
    assert_no_reference_kernel(kernels)
