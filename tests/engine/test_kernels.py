"""Every autograd function of the engine against the plain form that it replaces."""

import pytest
import torch
from torch.nn import functional

from finetune.engine import products
from finetune.engine.kv_cache import copied
from finetune.engine.linear import Linear, draw_keep, fold_adapters, linear, normed_linear
from finetune.engine.mlp import CHUNK_ROWS, gated_mlp
from finetune.engine.norm import rms_norm
from finetune.engine.products import product
from finetune.engine.rotary import split_heads

DOUBLE = torch.float64


def tensor(*shape, trained=True):
    return torch.randn(*shape, dtype=DOUBLE, requires_grad=trained)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def plain_linear(x, layer):
    y = functional.linear(x, layer.weight, layer.bias)
    if layer.lora_a is None:
        return y
    dropped = x if layer.keep is None else x * layer.keep
    return y + layer.scale * (dropped @ layer.lora_a.t()) @ layer.lora_b.t()


def some_layer(rows, inputs, outputs, *, weight=False, bias=False, lora=True, dropout=False):
    """`weight`: whether it is trained; the others: whether they are there."""
    return Linear(
        weight=tensor(outputs, inputs, trained=weight),
        bias=tensor(outputs, trained=weight) if bias else None,
        lora_a=tensor(2, inputs) if lora else None,
        lora_b=tensor(outputs, 2) if lora else None,
        keep=torch.rand(rows, inputs) < 0.7 if dropout else None,
        scale=0.7,
    )


def tensors_of(layers):
    return [part for layer in layers for part in layer if isinstance(part, torch.Tensor) and part.dtype == DOUBLE]


def assert_equals_plain(ours, plain, inputs):
    """Same values and same gradients, and gradients that equal finite differences."""
    trained = [value for value in inputs if value is not None and value.requires_grad]
    expected, got = plain(), ours()
    torch.testing.assert_close(got, expected)
    seeds = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(got, trained, seeds), torch.autograd.grad(expected, trained, seeds), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    assert torch.autograd.gradcheck(lambda *_: ours(), trained, fast_mode=True)


LAYERS = {
    "lora": {},
    "frozen": {"lora": False},
    "biased": {"bias": True},
    "dropout": {"dropout": True},
    "trained": {"weight": True, "bias": True, "lora": False},
    "everything": {"weight": True, "bias": True, "dropout": True},
}


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_linear_equals_the_plain_form(kind, with_residual, rows):
    x, layer = tensor(rows, 4), some_layer(rows, 4, 3, **LAYERS[kind])
    residual = tensor(rows, 3) if with_residual else None

    def plain():
        return plain_linear(x, layer) + (0 if residual is None else residual)

    assert_equals_plain(lambda: linear(x, layer, residual=residual), plain, [x, residual, *tensors_of([layer])])


def test_an_adapter_is_folded_into_the_weight_only_where_that_is_exact_and_less_work():
    x, layer = tensor(5, 4), some_layer(5, 4, 3)
    assert fold_adapters([layer], x)[0].lora_a is None
    assert fold_adapters([layer], x[:1]) == [layer]  # too few rows
    assert fold_adapters([some_layer(5, 4, 3, dropout=True)], x)[0].lora_a is not None
    narrow = Linear(*(None if part is None else part.bfloat16() for part in layer[:4]))
    assert fold_adapters([narrow], x.bfloat16())[0] is narrow
    mixed = layer._replace(lora_a=narrow.lora_a, lora_b=narrow.lora_b)
    (beside,) = copied([mixed], DOUBLE, packs=True)  # its weight has the columns of B
    assert fold_adapters([beside], x)[0] is beside


def test_layers_whose_adapters_are_folded_become_one():
    x = tensor(5, 4)
    layers = [some_layer(5, 4, width, **LAYERS[kind]) for width, kind in ((3, "lora"), (2, "frozen"), (1, "biased"))]
    (joined,) = fold_adapters(layers, x)
    assert joined.width == 6
    assert fold_adapters(layers[1:2], x)[0] is layers[1]  # nothing to fold
    assert len(fold_adapters([*layers, some_layer(5, 4, 2, dropout=True)], x)) == 4

    def plain():
        return torch.cat([plain_linear(x, layer) for layer in layers], dim=1)

    assert_equals_plain(lambda: linear(x, *layers), plain, [x, *tensors_of(layers)])


def test_layers_of_one_input_stand_side_by_side():
    x = tensor(5, 4)
    layers = [
        some_layer(5, 4, width, **LAYERS[kind]) for width, kind in ((3, "lora"), (2, "frozen"), (1, "everything"))
    ]

    def plain():
        return torch.cat([plain_linear(x, layer) for layer in layers], dim=1)

    assert_equals_plain(lambda: linear(x, *layers), plain, [x, *tensors_of(layers)])


def test_columns_and_rows_of_a_layer():
    x, layer = tensor(5, 4), some_layer(5, 4, 6, **LAYERS["everything"])
    rows = torch.tensor([3, 0])

    def plain():
        return plain_linear(x, layer)[rows, 2:5]

    assert_equals_plain(lambda: linear(x[rows], layer.columns(2, 5).at_rows(rows)), plain, [x, *tensors_of([layer])])


def test_an_input_without_gradient_gets_none():
    x, layer = tensor(5, 4, trained=False), some_layer(5, 4, 3)
    assert_equals_plain(lambda: linear(x, layer), lambda: plain_linear(x, layer), [x, *tensors_of([layer])])


def test_a_frozen_layer_keeps_not_even_its_input():
    kept = []
    x, layer = tensor(5, 4), some_layer(5, 4, 3, lora=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x, layer)
    assert all(t is not x for t in kept)
    assert any(t is layer.weight for t in kept)


def test_no_rows_give_zero_gradients():
    x, weight = tensor(0, 4), tensor(4)
    layers = [some_layer(0, *sizes, **LAYERS["everything"]) for sizes in ((4, 3), (4, 6), (4, 6), (3, 4))]
    results = [
        linear(x, layers[0]),
        normed_linear(x, layers[1], weight=weight, eps=1e-5)[0],
        gated_mlp(x, weight, 1e-5, [layers[2]], layers[3]),
    ]
    assert [tuple(result.shape) for result in results] == [(0, 3), (0, 6), (0, 4)]
    sum(result.sum() for result in results).backward()
    assert x.grad.shape == (0, 4)
    assert all(not part.grad.any() for part in [weight, *tensors_of(layers)])


def test_the_dropout_mask_is_torchs_own():
    x = torch.rand(33, 7) + 1
    torch.manual_seed(5)
    dropped = functional.dropout(x, 0.3)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(draw_keep(x, 7, 0.3), dropped != 0)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("trained", [False, True])
def test_rms_norm_equals_the_plain_form(trained):
    x, weight = tensor(5, 4), tensor(4, trained=trained)

    def plain():
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    assert_equals_plain(lambda: rms_norm(x, weight, 1e-5), plain, [x, weight])
    x = x.detach()  # the output of a frozen embedding
    if trained:
        assert_equals_plain(lambda: rms_norm(x, weight, 1e-5), plain, [weight])


@pytest.mark.parametrize("kind", LAYERS)
def test_a_normed_linear_is_a_linear_of_the_norm(kind):
    h, weight = tensor(5, 4), tensor(4, trained=kind == "everything")
    layers = [some_layer(5, 4, width, **LAYERS[kind]) for width in (3, 2)]
    assert_equals_plain(
        lambda: normed_linear(h, *layers, weight=weight, eps=1e-5)[0],
        lambda: linear(rms_norm(h, weight, 1e-5), *layers),
        [h, weight, *tensors_of(layers)],
    )


@pytest.mark.parametrize("uses", [slice(0, 1), slice(1, 2), slice(0, 2)], ids=["result", "input", "both"])
def test_a_normed_linear_hands_its_input_on(uses):
    h, weight, layer = tensor(5, 4), tensor(4), some_layer(5, 4, 4)

    def ours():
        return sum(normed_linear(h, layer, weight=weight, eps=1e-5)[uses])

    def plain():
        return sum((linear(rms_norm(h, weight, 1e-5), layer), h * 1)[uses])

    trained = [h] if uses == slice(1, 2) else [h, weight, *tensors_of([layer])]
    assert_equals_plain(ours, plain, trained)


def test_rms_norm_rounds_where_the_model_does():
    from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm

    module = Phi3RMSNorm(64).to(torch.bfloat16)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(9, 64).to(torch.bfloat16)
    assert torch.equal(rms_norm(x, module.weight, module.variance_epsilon), module(x))


@pytest.mark.parametrize("rotary_dim", [4, 6, 8])
def test_rotary_equals_the_models_own(rotary_dim):
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    projected, cos, sin = tensor(5, 7 * 8), tensor(5, rotary_dim, trained=False), tensor(5, rotary_dim, trained=False)

    def plain():
        q, k, v = projected.view(1, 5, 7, 8).transpose(1, 2).split((3, 2, 2), dim=1)
        rotated = (*apply_rotary_pos_emb(q, k, cos[None], sin[None]), v)
        return torch.cat([heads[0].transpose(0, 1).flatten() for heads in rotated])

    def ours():
        groups = split_heads(projected, cos, sin, heads=[3, 2, 2], num_rotated=2)
        assert [tuple(group.shape) for group in groups] == [(5, 3, 8), (5, 2, 8), (5, 2, 8)]
        return torch.cat([heads.flatten() for heads in groups])

    assert_equals_plain(ours, plain, [projected])


@pytest.mark.parametrize("chunk_rows", [2, 3, 100])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("fused", [True, False])
def test_the_gated_mlp_equals_the_plain_form(kind, fused, chunk_rows, monkeypatch):
    monkeypatch.setitem(CHUNK_ROWS, "cpu", chunk_rows)
    trained = kind in ("trained", "everything")
    h, weight = tensor(5, 4), tensor(4, trained=trained)
    gate_up = [some_layer(5, 4, width, **LAYERS[kind]) for width in ((6,) if fused else (3, 3))]
    down = some_layer(5, 3, 4, **LAYERS[kind])

    def plain():
        x = weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5))
        gate, up = torch.cat([plain_linear(x, layer) for layer in gate_up], dim=1).chunk(2, dim=-1)
        return h + plain_linear(functional.silu(gate) * up, down)

    assert_equals_plain(
        lambda: gated_mlp(h, weight, 1e-5, gate_up, down), plain, [h, weight, *tensors_of([down, *gate_up])]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 5, 3), (64, 48, 80), (0, 4, 3)])
def test_a_product_is_one_whatever_its_strides(sizes, dtype, monkeypatch):
    monkeypatch.setattr(products, "WORTH_COMPILING", 0)  # by oneDNN, which these sizes would not reach
    rows, inputs, outputs = sizes
    dense = {
        "x": torch.randn(rows, inputs),
        "weight": torch.randn(outputs, inputs),
        "bias": torch.randn(outputs),
        "residual": torch.randn(rows, outputs),
    }
    given = {name: part.to(dtype) for name, part in dense.items()}
    ways = {
        "dense": given,
        "transposed": given | {"x": given["x"].t().contiguous().t(), "weight": given["weight"].t().contiguous().t()},
        "columns of more": given
        | {name: torch.cat([given[name]] * 2, dim=-1)[:, : len(given[name][0])] for name in ("x", "residual") if rows},
        "one row for all": given | {name: given[name][:1].expand(rows, -1) for name in ("x", "residual")},
    }
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for way, parts in ways.items():
        plain = parts["x"].double() @ parts["weight"].double().t()
        for optional in ((), ("bias",), ("residual",), ("bias", "residual")):
            expected = sum((parts[name].double() for name in optional), start=plain)
            got = product(parts["x"], parts["weight"], **{name: parts[name] for name in optional})
            assert got.dtype == dtype
            torch.testing.assert_close(
                got.double(), expected, rtol=tolerance, atol=tolerance * 10, msg=f"{way} {optional}"
            )


@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
def test_bf16_layers_come_close_to_fp32(adapter_dtype):
    x, residual = torch.randn(33, 16), torch.randn(33, 24)
    layer = Linear(*(torch.randn(shape) for shape in ((24, 16), (24,), (4, 16), (24, 4))), scale=0.5)
    results = []
    for base, adapter in ((torch.float32, torch.float32), (torch.bfloat16, adapter_dtype)):
        weight, bias = (part.to(base) for part in layer[:2])
        a, b = (part.detach().clone().to(adapter).requires_grad_() for part in layer[2:4])
        x_in = x.clone().to(base).requires_grad_()
        y = linear(x_in, layer._replace(weight=weight, bias=bias, lora_a=a, lora_b=b), residual=residual.to(base))
        y.backward(torch.ones_like(y))
        assert a.grad.dtype == b.grad.dtype == adapter
        results.append([part.float() for part in (y.detach(), x_in.grad, a.grad, b.grad)])
    for exact, rounded in zip(*results, strict=True):
        assert (rounded - exact).norm() < 0.01 * exact.norm()


def test_the_gradient_of_a_bias_is_summed_in_its_own_type():
    layer = Linear(torch.randn(4, 3).bfloat16(), torch.zeros(4, requires_grad=True))
    dy = torch.rand(1000, 4).bfloat16()
    (gradient,) = torch.autograd.grad(linear(torch.randn(1000, 3).bfloat16(), layer), layer.bias, dy)
    torch.testing.assert_close(gradient, dy.double().sum(0).float(), rtol=1e-5, atol=0.0)
