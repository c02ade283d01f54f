"""The bound of a GGUF file follows from the rounding of its type on the model at hand.

tests/export/test_llama_cpp.py compares what llama.cpp itself makes of it.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from finetune.errors import CheckpointError, RunFailedError
from finetune.export.gguf_served import _LEAST_BOUND, MODEL_FILE, ROUNDING_KEY, gguf_bound
from finetune.export.rounding import ROUNDED, _Rounded, measure_rounding
from finetune.export.vectors import relative_by_position
from tests.export.finished_runs import add_drawn_adapter, build_base
from tests.export.gguf_files import write_gguf

F32, F16, BF16, Q8_0 = 0, 1, 32, 7
PROMPTS = [list(range(3, 27)), [9, 8, 7]]
VECTORS = SimpleNamespace(
    vectors=[
        SimpleNamespace(token_ids=PROMPTS[0], positions=[5, 23]),
        SimpleNamespace(token_ids=PROMPTS[1], positions=[2]),
    ]
)


def logits(model):
    with torch.no_grad():
        first, second = (model(input_ids=torch.tensor([ids])).logits[0] for ids in PROMPTS)
    return torch.cat([first[[5, 23]], second[[2]]])


def far(model, expected):
    return float(relative_by_position(logits(model), expected).max())


def stored(model, file_type):
    """The model with its matrices rounded, and computed in fp32."""
    rounded = copy.deepcopy(model)
    for name, weight in rounded.named_parameters():
        if weight.ndim > 1 and "lora_" not in name:
            weight.data = ROUNDED[file_type](weight.data)
    return rounded


def test_q8_0_is_ggml_s():
    """A block of 32 has a scale in f16, and 8-bit integers. One value is half a step off an integer, and is rounded."""
    block = torch.zeros(64)
    block[:4] = torch.tensor([-127.0, 1.0, 2.4, 0.2])
    assert ROUNDED[Q8_0](block)[:4].tolist() == [-127.0, 1.0, 2.0, 0.0]
    assert torch.equal(ROUNDED[Q8_0](block * 2**-9), ROUNDED[Q8_0](block) * 2**-9)
    values = torch.randn(5, 320, generator=torch.Generator().manual_seed(0))
    steps = values.view(-1, 32).abs().amax(-1, keepdim=True) / 127
    apart = (ROUNDED[Q8_0](values) - values).view(-1, 32).abs() / steps
    assert 0.45 < float(apart.max()) < 0.5 + 127 * 2**-11
    assert torch.equal(ROUNDED[Q8_0](values[:, :33]), values[:, :33].half().float()), (
        "no blocks of 32: as the converter does"
    )


def changed(model, part, factor):
    """A copy of the model in which each tensor with `part` in its name is multiplied by a factor."""
    other = copy.deepcopy(model)
    for name, weight in other.named_parameters():
        if part in name:
            weight.data *= factor
    return other


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["phi3", "phi"])
@pytest.mark.parametrize(("file_type", "scale"), [(F32, 1.05), (F16, 1.05), (BF16, 1.5), (Q8_0, 1.5)])
def test_rounded_weights_are_within_the_bound_and_other_weights_are_not(kind, file_type, scale):
    """A wrong scale of 5 % shows in 16 bits of which 11 are digits. Coarser types move logits further than that."""
    tuned = add_drawn_adapter(build_base(kind), kind, scale=0.3).eval()
    expected, bound = logits(tuned), max(_LEAST_BOUND, 2 * measure_rounding(tuned, VECTORS, file_type))
    assert far(stored(tuned, file_type), expected) < bound
    wrong = {"scale": ("lora_B", scale), "base alone": ("lora_B", 0.0), "damaged": ("layers.1.mlp", 0.5)}
    for what, (part, factor) in wrong.items():
        assert far(stored(changed(tuned, part, factor), file_type), expected) > bound, what


def test_the_types_are_in_the_order_of_their_steps_and_f32_rounds_keys_and_values():
    tuned = add_drawn_adapter(build_base()).eval()
    measured = [measure_rounding(tuned, VECTORS, file_type) for file_type in (F32, F16, BF16)]
    assert 2**-16 < measured[0] < measured[1] < measured[2] / 2


def test_the_figure_is_that_of_the_positions_of_the_test_vectors():
    """The package computes all rows at once, this test one by one: a few of many inputs are rounded the other way."""
    tuned = add_drawn_adapter(build_base()).eval()
    exact = {id(weight) for name, weight in tuned.named_parameters() if "lora_" in name}
    with _Rounded(BF16, exact):
        rounded = logits(tuned)
    expected = relative_by_position(rounded, logits(tuned))
    assert measure_rounding(tuned, VECTORS, BF16) == pytest.approx(float(expected.max()), rel=0.05)


def test_16_bit_weights_are_compared_with_themselves_in_fp32():
    tuned = build_base(dtype=torch.bfloat16).eval()
    wide = copy.deepcopy(tuned).float()
    assert measure_rounding(tuned, VECTORS, F16) == measure_rounding(wide, VECTORS, F16)
    assert all(weight.dtype == torch.bfloat16 for weight in tuned.parameters())


def test_numbers_that_do_not_fit_f16_are_refused():
    """Otherwise the bound would be infinite, and everything equal."""
    model = changed(build_base().eval(), "layers.0.mlp.down_proj", 1e6)
    assert measure_rounding(model, VECTORS, BF16) < 1
    with pytest.raises(RunFailedError, match="too large for f16"):
        measure_rounding(changed(model, "layers.1.mlp.gate_up_proj", 1e6), VECTORS, F16)


def test_a_file_says_how_far_its_rounding_goes_or_is_refused(tmp_path):
    write_gguf(tmp_path / MODEL_FILE, {"general.name": "a"})
    with pytest.raises(CheckpointError, match=r"GGUF file in .* does not say how far .* Export it again"):
        gguf_bound(tmp_path)
    for measured, bound in ((0.25, 0.5), (2**-12, _LEAST_BOUND)):
        write_gguf(tmp_path / MODEL_FILE, {ROUNDING_KEY: measured})
        assert gguf_bound(tmp_path) == bound
