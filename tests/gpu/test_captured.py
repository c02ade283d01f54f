"""Small micro-batches that CUDA graphs replay (`training.graphs=true`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune import load_config
from finetune.engine.captured import CapturedMicrobatches
from finetune.engine.layout import pack
from finetune.engine.loss import summed_cross_entropy
from finetune.training.optim import trainable_parameters
from finetune.training.train import train
from tests.engine.prefix_rows import rows_of
from tests.gpu.models import placed, write_inputs
from tests.gpu.test_runs import TOLERANCES, losses_of, words_on
from tests.tiny_training import record


@pytest.mark.parametrize("more", [[], ["lora.dropout=0.3"]], ids=["plain", "dropout"])
def test_a_run_with_graphs_learns_what_a_run_without_them_does(
    more: list[str], device: torch.device, tmp_path: Path
) -> None:
    """With dropout, the masks are drawn for padding too, so only a second run with graphs has the same masks."""
    inputs, losses, adapters = write_inputs(tmp_path), [], []
    for number, graphs in enumerate(("true", "true" if more else "false")):
        run = tmp_path / f"run-{number}"
        words = [*words_on(device, "bf16", inputs, run), *more, "training.max_steps=8", f"training.graphs={graphs}"]
        train(load_config([*words, f"output_dir={run}"]))
        losses.append(losses_of(run))
        adapters.append(
            torch.cat([part.flatten() for part in load_file(run / "adapter/adapter_model.safetensors").values()])
        )
        if device.type == "cuda":
            assert record(run)["fallbacks"] == []
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCES[device.type, "bf16"])
    assert (adapters[0] - adapters[1]).norm() <= 0.1 * adapters[1].norm()


def test_graphs_give_their_memory_back_and_are_captured_again(device: torch.device, only_on_cuda: None) -> None:
    model, given_up = placed("phi-4-mini", "bf16", device), []
    passes = CapturedMicrobatches(
        model,
        lambda choices: partial(summed_cross_entropy, choices=choices),
        trainable_parameters(model),
        device,
        partial(torch.autocast, "cuda", torch.bfloat16),
        given_up.append,
    )
    rows = [rows_of([*range(first, first + 30), 40], [*range(first, first + 30), 41, 42]) for first in (3, 5)]

    def losses() -> list[float]:
        computed = [passes(pack(each, to_bucket=True), 7.0) for each in rows * 2]
        return [loss.item() for loss in computed if loss is not None]

    first, (place,) = losses(), passes.places.values()
    assert place.graph is not None
    assert len(first) == 4
    assert first[:2] == pytest.approx(first[2:], rel=1e-5)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    passes.free()
    assert torch.cuda.memory_reserved() < reserved
    assert losses() == pytest.approx(first, rel=1e-5)
    assert place.graph is not None
    assert given_up == []
