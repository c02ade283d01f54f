"""Whole steps on a device that is not there, as on a GPU: no operation across devices, and the results of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch

from finetune.config.schema import Config, LoraSection, PreferenceSection
from finetune.data.batches import pad
from finetune.distributed.launch import launch
from finetune.distributed.torch_settings import deterministic_algorithms
from finetune.engine import products
from finetune.engine.decoder import bare_model
from finetune.engine.fused import switch_fused
from finetune.engine.host_embedding import embedding_that_may_leave, keep_embedding_on_host
from finetune.engine.layout import pack
from finetune.engine.loss import cross_entropy_per_target, summed_cross_entropy
from finetune.engine.supported import unsupported_reason
from finetune.inference.sampling import Draw, Sampling
from finetune.model.base import checkpoint_gradients
from finetune.model.lora import add_lora
from finetune.training.optim import trainable_parameters
from finetune.training.preferences.losses import PreferenceLoss
from finetune.training.preferences.microbatches import PreferenceMicrobatch, summed_preferences
from finetune.training.step import StepSettings, train_step
from tests.engine import test_decoder as decoder_tests
from tests.engine.fake_device import KIND, DeviceTensor, FakeDevice, move, use_there
from tests.engine.prefix_rows import rows_of
from tests.rounding import rounding_of
from tests.tiny_models import LLAMA_KIN, build_tiny, tiny_examples, tiny_phi3_config, tiny_phi_config

CONFIGS = {
    "phi3": tiny_phi3_config(),
    "phi": tiny_phi_config(),
    "longrope": decoder_tests.CONFIGS["longrope"],
    **LLAMA_KIN,
}
TARGETS = {family: {"target_modules": ["q_proj", "v_proj"]} for family in ("phi", *LLAMA_KIN)}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dropout": {"dropout": 0.3},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "pissa": {"init": "pissa"},
    "some layers": {"target_modules": ["o_proj", "down_proj"]},
}
TURNS = torch.arange(4, 24).tolist()
ROWS = rows_of([*TURNS, 30, 31], [*TURNS, 30, 32, 33, 34], [*TURNS[:9], 40, 41], [50, 51, 52], targets=0.6)
"""Two beginnings in common, one of them within the other, and a row alone."""
Loss = Callable[[Any, Any], torch.Tensor]

DPO = PreferenceLoss("dpo", PreferenceSection())


def adapted(family: str = "phi3", seed: int = 0, **settings: Any) -> Any:
    """A model with an adapter that does something: its B is not zero."""
    model: Any = add_lora(build_tiny(CONFIGS[family], seed), LoraSection(r=4, **settings))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def loss_and_gradients(model: Any, loss: Loss, microbatch: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(3)  # of dropout
    made = loss(model, microbatch).reshape(-1)
    (made[0] / 7).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return made.tolist(), {name: getattr(grad, "data_on_cpu", grad) for name, grad in gradients.items()}


def gradients_of(model: Any, loss: Loss, microbatch: Any) -> torch.Tensor:
    model.zero_grad()
    with torch.enable_grad():
        _, gradients = loss_and_gradients(model, loss, microbatch)
    model.zero_grad()
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def assert_as_on_the_cpu(
    model: Any, loss: Loss, microbatch: Any, tolerance: float = 1e-5, *, fused: bool = False
) -> None:
    """Compute a loss with its gradients on the CPU and on the device, inside of the device."""
    with torch.utils._python_dispatch._disable_current_modes():
        expected_values, expected = loss_and_gradients(model, loss, microbatch)
        rounding = rounding_of(partial(gradients_of, loss=loss, microbatch=microbatch), model)
    tolerance *= 10 if fused else 1  # fused functions round at other places
    switch_fused(fused)
    try:
        values, gradients = loss_and_gradients(move(model), loss, microbatch.to(torch.device(KIND, 0)))
    finally:
        switch_fused(False)
    assert {type(weight) for weight in model.parameters()} == {DeviceTensor}
    assert values == pytest.approx(expected_values, rel=tolerance, abs=tolerance)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        wide, exact = gradient.double(), expected[name].double()
        assert (wide - exact).norm() <= tolerance * exact.norm() + rounding, name


@pytest.mark.few(4)
@pytest.mark.parametrize(("family", "fused"), [*((it, False) for it in CONFIGS), ("phi", True), ("qwen3", True)])
def test_every_family(device: FakeDevice, family: str, fused: bool) -> None:
    settings = TARGETS.get(family, {})
    assert_as_on_the_cpu(adapted(family, **settings), summed_cross_entropy, pack(ROWS), fused=fused)


@pytest.mark.few(4)
@pytest.mark.parametrize(("kind", "fused"), [*((kind, False) for kind in ADAPTERS), ("lora", True), ("dora", True)])
def test_every_kind_of_adapter(device: FakeDevice, kind: str, fused: bool) -> None:
    assert_as_on_the_cpu(adapted(**ADAPTERS[kind]), summed_cross_entropy, pack(ROWS), fused=fused)


@pytest.mark.parametrize("fused", [False, True])
def test_every_weight(device: FakeDevice, fused: bool) -> None:
    assert_as_on_the_cpu(build_tiny(CONFIGS["phi3"]).train(), summed_cross_entropy, pack(ROWS), fused=fused)


@pytest.mark.few(1)
@pytest.mark.parametrize(("share", "offloads", "dropout"), [(True, False, 0.3), (False, False, 0.0), (True, True, 0.3)])
def test_checkpointing(device: FakeDevice, dropout: float, share: bool, offloads: bool) -> None:
    model = adapted(dropout=dropout)
    checkpoint_gradients(model, offloads=offloads)
    assert_as_on_the_cpu(model, summed_cross_entropy, pack(ROWS, share_prefixes=share), fused=True)


@pytest.mark.parametrize("rows", [pack(ROWS), pad(list(tiny_examples(4)))], ids=["engine", "own forward"])
def test_an_embedding_in_main_memory_is_looked_up_there_and_changes_no_bit(device: FakeDevice, rows: Any) -> None:
    there = rows.to(torch.device(KIND, 0))
    model = add_lora(build_tiny(tiny_phi3_config(tie_word_embeddings=False)), LoraSection(r=4)).train()
    embedding = bare_model(model).get_input_embeddings()
    in_main_memory = embedding.weight
    assert embedding_that_may_leave(model) is in_main_memory
    values, gradients = loss_and_gradients(move(model), summed_cross_entropy, there)
    model.zero_grad()
    embedding.weight = in_main_memory
    keep_embedding_on_host(model)
    assert unsupported_reason(model) is None
    assert loss_and_gradients(model, summed_cross_entropy, there)[0] == values
    for name, weight in model.named_parameters():
        assert isinstance(weight, DeviceTensor) is (weight is not embedding.weight)
        if weight.grad is not None:
            assert torch.equal(weight.grad.data_on_cpu, gradients.pop(name)), name
    assert not gradients
    assert model.get_base_model().device.type == KIND, "generate moves its inputs there"


def test_pairs(device: FakeDevice) -> None:
    rows = pack(rows_of([*TURNS, 30, 31], [*TURNS, 40, 41, 42]))
    assert len(rows.positions) == len(rows.labels) - 1  # two tokens are learnt after the last that the answers share
    pairs = PreferenceMicrobatch(rows=rows, num_tokens=0)
    assert_as_on_the_cpu(adapted(), partial(summed_preferences, loss=DPO), pairs)


def test_dense_attention_for_other_devices(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    use_there(monkeypatch, "dense")
    assert_as_on_the_cpu(adapted(), summed_cross_entropy, pack(ROWS))


APPLE = {
    "engine": (summed_cross_entropy, pack(ROWS)),
    "own forward": (summed_cross_entropy, pad(list(tiny_examples(4)))),
    "pairs": (partial(summed_preferences, loss=DPO), PreferenceMicrobatch(rows=pack(ROWS), num_tokens=0)),
    "padded pairs": (
        partial(summed_preferences, loss=DPO),
        PreferenceMicrobatch(rows=pad(list(tiny_examples(4))), num_tokens=0),
    ),
}


@pytest.mark.parametrize("what", APPLE)
def test_a_device_without_float64(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """As Apple's GPUs are (mps): sums in float64 are on the CPU, their gradients come back, and attention is dense."""
    monkeypatch.setattr(products, "WITHOUT_FLOAT64", {KIND})
    use_there(monkeypatch, "dense")
    with torch.autograd.set_multithreading_enabled(False), FakeDevice(has_float64=False):
        assert_as_on_the_cpu(adapted(), *APPLE[what])


def test_the_models_own_forward(device: FakeDevice) -> None:
    assert_as_on_the_cpu(adapted(), summed_cross_entropy, pad(list(tiny_examples(4))))


def test_losses_without_a_gradient(device: FakeDevice) -> None:
    model, microbatch = adapted().eval(), pack(ROWS)
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        expected = cross_entropy_per_target(model, microbatch)
    losses: Any = cross_entropy_per_target(move(model), microbatch.to(torch.device(KIND, 0)))
    torch.testing.assert_close(losses.data_on_cpu, expected)


def test_in_bf16(device: FakeDevice) -> None:
    """The two round at different places, so the model is one whose gradients do not magnify that."""
    model = adapted(seed=7)
    for weight in model.parameters():
        if not weight.requires_grad:
            weight.data = weight.data.bfloat16()

    def loss(model: Any, microbatch: Any) -> torch.Tensor:
        with torch.autocast(microbatch.input_ids.device.type, dtype=torch.bfloat16):
            return summed_cross_entropy(model, microbatch)

    assert_as_on_the_cpu(model, loss, pack(ROWS), tolerance=0.05)


def test_a_whole_step(device: FakeDevice) -> None:
    """The runtime, the gradient norm and the optimizer too."""
    config = Config.model_validate({"training": {"device": "cpu", "precision": "fp32"}})
    microbatches = [(0, pack(ROWS[:2])), (1, pack(ROWS[2:]))]

    def step(model: Any, place: torch.device) -> tuple[float, float, list[torch.Tensor]]:
        with launch(config) as runtime:
            here, runtime.context = runtime.context, runtime.context._replace(device=place)
            optimizer = torch.optim.AdamW(trainable_parameters(model))
            settings = StepSettings(step=1, learning_rate=1e-2, max_grad_norm=0.1, seed=0)
            result = train_step(runtime, model, optimizer, microbatches, settings)
            runtime.context = here
        weights: list[Any] = trainable_parameters(model)
        return result.loss, result.grad_norm, [getattr(weight, "data_on_cpu", weight.detach()) for weight in weights]

    model = adapted()
    loss, norm, weights = step(move(deepcopy(model)), torch.device(KIND, 0))
    with torch.utils._python_dispatch._disable_current_modes():
        expected_loss, expected_norm, expected = step(model, torch.device("cpu"))
    assert (loss, norm) == pytest.approx((expected_loss, expected_norm), rel=1e-5)
    for mine, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_drawing_a_token_copies_scores_only_where_sums_need_a_fixed_order(
    device: FakeDevice, is_deterministic: bool
) -> None:
    draw = Draw(Sampling(temperature=0.9, top_k=5, top_p=0.9, seed=3), rows=[0, 1])
    scores, ids = torch.randn(2, 64), torch.zeros(2, 3, dtype=torch.int64)
    expected = draw(ids, scores).argmax(-1).tolist()
    again = Draw(Sampling(temperature=0.9, top_k=5, top_p=0.9, seed=3), rows=[0, 1])
    with deterministic_algorithms() if is_deterministic else nullcontext():
        drawn: Any = again(ids.to(KIND), scores.to(KIND))
    assert device.waits["aten::_to_copy"] == is_deterministic
    assert drawn.data_on_cpu.argmax(-1).tolist() == expected


def test_an_operation_across_devices_fails(device: FakeDevice) -> None:
    there = torch.ones(3, device=KIND)
    assert (there + torch.tensor(1.0)).sum().item() == 6.0  # a number of the CPU is no tensor of it
    assert device.waits == {"aten::_local_scalar_dense": 1}
    for wrong in (
        lambda: there + torch.ones(3),
        lambda: there[torch.tensor([0, 1])],
        lambda: there.mul_(torch.ones(3)),
    ):
        with pytest.raises(AssertionError, match="tensors of two devices"):
            wrong()
