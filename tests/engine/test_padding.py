"""Padding a micro-batch to one of few sizes changes no loss and no gradient, whatever is trained and with dropout."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from finetune.config.schema import Config, LoraSection
from finetune.distributed.launch import launch
from finetune.engine.layout import TOKENS_WITHOUT_PADDING, pack, padding_of
from finetune.engine.loss import summed_cross_entropy
from finetune.model.base import checkpoint_gradients
from finetune.model.lora import add_lora
from finetune.training.forward import agree_on_forward, choose_forward, wants_padding
from finetune.training.optim import trainable_parameters
from finetune.training.rewards.groups import put_answers_together, summed_group_loss
from tests.engine.prefix_rows import rows_of
from tests.inference.test_decoding import BOUNDARY, LONGROPE
from tests.tiny_models import build_tiny, tiny_phi3_config, tiny_phi_config
from tests.training.preferences.test_preference_loss import COLLATIONS
from tests.training.preferences.test_preference_objectives import ours, whole_batch
from tests.training.rewards.test_group_loss import Case, scored

CONFIGS = {
    "phi3": tiny_phi3_config(),
    "phi": tiny_phi_config(),
    "longrope": tiny_phi3_config(rope_parameters=LONGROPE, original_max_position_embeddings=BOUNDARY),
}
ROWS = rows_of([*range(4, 4 + BOUNDARY)], [*range(4, 12), 30], [*range(40, 49)], [50, 51, 52, 53, 54], targets=0.6)
"""So short that LongRoPE has its short factors. A row of all their padding would bring the long ones."""
TO_BUCKET = {share: partial(pack, share_prefixes=share, to_bucket=True) for share in (True, False)}
TOLERANCE = {torch.float32: (1e-6, 1e-5), torch.float64: (1e-9, 1e-9)}
"""Of the loss and of the gradient's norm: in fp32 as promise 1 says, and where rounding is negligible."""


def adapted(kind: str, dropout: float) -> Any:
    model: Any = add_lora(build_tiny(CONFIGS[kind]), LoraSection(r=2, alpha=4.0, dropout=dropout))
    torch.manual_seed(1)
    for parameter in trainable_parameters(model):
        parameter.data.normal_(std=0.2)
    return model.train()


def loss_and_gradients(objective: str, model: Any, way: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of a micro-batch with the seed that a step gives it."""
    torch.manual_seed(5)
    if objective not in ("sft", "grpo"):
        sums, gradients = ours(objective, model, [whole_batch(objective)], way)
        return sums, list(gradients)
    if objective == "sft":
        loss = summed_cross_entropy(model, COLLATIONS[way](ROWS)).reshape(1)
    else:
        batch = put_answers_together(scored(), rows=COLLATIONS[way], num_targets=6, per_token=1.0)
        loss = summed_group_loss(model, batch, loss=Case(beta=0.04).loss(), temperature=0.7)
    return loss.detach(), list(torch.autograd.grad(loss[0], trainable_parameters(model)))


@pytest.mark.few(2)
@pytest.mark.parametrize("share", [True, False], ids=["shared", "packed"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("objective", "kind"),
    [
        *(("sft", kind) for kind in CONFIGS),
        *((objective, "phi3") for objective in ("dpo", "kto", "orpo", "simpo", "grpo")),
    ],
)
def test_padding_changes_nothing(
    objective: str, kind: str, dropout: float, dtype: torch.dtype, share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    paddings = []

    def collate(rows: Any) -> Any:
        packed = TO_BUCKET[share](rows)
        paddings.append(packed.num_padding)
        return packed

    monkeypatch.setitem(COLLATIONS, "bucket", collate)
    model = adapted(kind, dropout).to(dtype)
    of_loss, of_gradient = TOLERANCE[dtype]
    loss, gradients = loss_and_gradients(objective, model, "shared" if share else "packed")
    padded_loss, padded = loss_and_gradients(objective, model, "bucket")
    assert max(paddings) > (BOUNDARY if kind == "longrope" else 0)
    torch.testing.assert_close(padded_loss, loss, rtol=of_loss, atol=of_loss, equal_nan=True)  # metrics may be nan
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    difference = torch.stack([(mine - other).norm() for mine, other in zip(padded, gradients, strict=True)]).norm()
    assert norm > 0
    assert difference <= of_gradient * norm


def test_padding_changes_nothing_when_layers_are_computed_again() -> None:
    model = adapted("phi3", 0.3)
    expected = loss_and_gradients("sft", model, "shared")[1]
    checkpoint_gradients(model)
    torch.manual_seed(5)
    loss = summed_cross_entropy(model, TO_BUCKET[True](ROWS))
    for mine, other in zip(torch.autograd.grad(loss, trainable_parameters(model)), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_small_micro_batches_have_few_sizes() -> None:
    sizes = {number + padding_of(number) for number in range(1, TOKENS_WITHOUT_PADDING)}
    assert len(sizes) == 26
    assert all(padding_of(number) <= number / 2 for number in range(1, TOKENS_WITHOUT_PADDING))
    assert padding_of(TOKENS_WITHOUT_PADDING + 1) == 0
    plain, padded = COLLATIONS["shared"](ROWS), TO_BUCKET[True](ROWS)
    number = plain.num_computed
    assert len(padded.input_ids) == number + padding_of(number) > number
    for name in ("num_computed", "num_tokens", "num_targets", "num_rows"):
        assert getattr(padded, name) == getattr(plain, name)
    tokens = padded.layout.tokens
    assert not padded.layout.sees(tokens[number:, None], tokens[:number]).any()
    assert not padded.layout.sees(tokens[:number, None], tokens[number:]).any()
    assert padded.layout.sees(tokens, tokens).all()
    assert padded.layout.longest_row == plain.layout.longest_row
    assert padded.layout.position_ids.max() == plain.layout.position_ids.max() < padded.num_padding


def test_only_adapters_in_16_bits_on_cuda_are_padded_and_only_if_asked() -> None:
    def wants(dtype: torch.dtype = torch.bfloat16, device: str = "cuda", **keys: Any) -> bool:
        return wants_padding(Config.model_validate({"training": keys}).training, device, dtype)

    assert wants(graphs=True)
    assert not any((wants(), wants(graphs=False), wants(graphs=True, method="full")))
    assert not any((wants(torch.float32, graphs=True), wants(device="cpu", graphs=True)))
    section = Config.model_validate({"training": {"graphs": True, "device": "cpu"}})
    model = adapted("phi3", 0.0)
    assert choose_forward(section.training, model, pads=True).collate(ROWS).num_padding > 0
    dora: Any = add_lora(build_tiny(CONFIGS["phi3"]), LoraSection(r=2, dora=True))
    noisy: Any = build_tiny(tiny_phi_config(resid_pdrop=0.1))
    for other in (dora, noisy):  # their own dropout would draw numbers for padding
        assert choose_forward(section.training, other, pads=True).collate(ROWS).num_padding == 0
    with launch(section) as runtime:
        assert agree_on_forward(runtime, section.training, model).collate(ROWS).num_padding == 0
