"""Matrix products by the fastest way: sums with an adapter's part, and nothing kept of shapes that are gone.

test_kernels.py compares plain products with float64.
"""

import os
import runpy
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from finetune.engine import products, wide_products
from finetune.engine.kv_cache import can_pack, copied, packed_layers
from finetune.engine.linear import Linear, linear
from finetune.engine.quantized import in_4_bits_without_data, state_bytes, weight_without_data, widened_bytes
from tests.engine.fake_device import KIND, DeviceTensor, FakeDevice

MANY_SHAPES = """
import resource, torch
from finetune.engine.products import product
torch.set_num_threads(1)
weight = torch.ones(512, 512)
def peak_after(shapes):
    for rows in shapes:
        product(torch.ones(rows, 512), weight)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak_after(range(600, 700))
print(peak_after(range(64, 600)) - before)
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(products.ONEDNN is None, reason="no oneDNN products here (they need AVX-512): nothing to bound")
def test_what_onednn_keeps_of_shapes_that_are_gone_is_bounded():
    """Without the bound, 600 shapes keep 300 MiB."""
    done = subprocess.run([sys.executable, "-c", MANY_SHAPES], capture_output=True, text=True, timeout=240, check=True)
    assert float(done.stdout) < 20


LAYERS_IN_BF16 = """
import torch
from finetune.engine import products, wide_products
products.make_room_for_bf16()
weight = torch.ones(64, 64, dtype=torch.bfloat16)
for layer in range(4):
    for shape in range(products.BF16_SHAPES):
        products.product(torch.ones(64 + shape, 64, dtype=torch.bfloat16), weight)
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(
    products.PROCESSOR.bf16_products != "AVX512-BF16",
    reason="how many kernels oneDNN makes for a product in bf16 was counted on CPUs with AVX512-BF16 and without AMX",
)
def test_the_layers_of_a_micro_batch_in_bf16_share_compiled_code():
    environ = {name: value for name, value in os.environ.items() if name not in products._STORES}
    done = subprocess.run(
        [sys.executable, "-c", LAYERS_IN_BF16],
        env={**environ, "ONEDNN_VERBOSE": "2"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert products.BF16_SHAPES <= done.stdout.count("create:cache_miss") < 3 * products.BF16_SHAPES


def test_a_bound_that_the_user_has_set_is_kept(monkeypatch):
    ours, theirs = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
    monkeypatch.setenv(ours, "")  # so that it is restored
    monkeypatch.delenv(ours)
    monkeypatch.setenv(theirs, "7")
    imported_anew = runpy.run_path(products.__file__)
    assert (os.environ[ours], os.environ[theirs]) == ("32", "7")
    imported_anew["make_room_for_bf16"]()
    assert (os.environ[ours], os.environ[theirs]) == (str(products.BF16_SHAPES), "7")


@pytest.mark.parametrize(
    ("vendor", "capability", "in_bf16", "expected"),
    [
        ("GenuineIntel", "AVX512", "amx_bf16 avx512_bf16", (False, "AMX")),
        ("GenuineIntel", "AVX512", "avx512_bf16", (False, "AVX512-BF16")),
        ("AuthenticAMD", "AVX512_BF16", "avx512_bf16", (True, "AVX512-BF16")),
        ("AuthenticAMD", "AVX2", "", (False, None)),
        ("", "AVX512", "", (True, None)),  # Windows says no vendor
        ("", "DEFAULT", "", (False, None)),
    ],
)
def test_kernels_follow_from_vendor_and_instruction_set(vendor, capability, in_bf16, expected, tmp_path):
    file = tmp_path / "cpuinfo"
    if vendor:
        block = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu avx512f {in_bf16}\n"
        file.write_text(f"{block}\n{block.replace(vendor, 'another')}")
    processor = products.read_processor(file)
    assert (processor.prefers_onednn(capability, has_mkl=True), processor.bf16_products) == expected
    assert processor.prefers_onednn(capability, has_mkl=False) == capability.startswith("AVX512")
    assert processor.vendor == vendor


def test_types_that_a_cpu_does_not_multiply_are_widened(monkeypatch):
    supported = {"_is_mkldnn_bf16_supported": True, "_is_mkldnn_fp16_supported": False}
    for name, answer in supported.items():
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda answer=answer: answer)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert products.PROCESSOR.widened_types("AVX2") == WIDE
    assert products.PROCESSOR.widened_types("AVX512") == {torch.float16}
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert products.PROCESSOR.widened_types("DEFAULT") == {torch.float16}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert products.PROCESSOR.widened_types("DEFAULT") == WIDE, "a torch without oneDNN, on macOS for example"


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("kind", ["cpu", KIND])
def test_a_low_rank_product_is_added_in_either_order(has_bias, has_residual, kind):
    torch.manual_seed(0)
    x, weight, left, right = (torch.randn(sizes) for sizes in ((9, 24), (40, 24), (9, 3), (40, 3)))
    bias = torch.randn(40) if has_bias else None
    residual = torch.randn(9, 40) if has_residual else None
    expected = x @ weight.t() + 0.7 * left @ right.t()
    expected += (0 if bias is None else bias) + (0 if residual is None else residual)
    parts = x, weight, bias, residual, left, right
    with FakeDevice() if kind == KIND else nullcontext():
        there = [part if part is None or kind == "cpu" else DeviceTensor(part.clone()) for part in parts]
        made = products.product(*there[:4], products.LowRank(*there[4:], 0.7))
        scaled = products.scaled_product(there[0], there[1], 0.7)
    torch.testing.assert_close(getattr(made, "data_on_cpu", made), expected)
    torch.testing.assert_close(getattr(scaled, "data_on_cpu", scaled), 0.7 * x @ weight.t())
    if residual is not None:
        assert torch.equal(getattr(there[3], "data_on_cpu", residual), residual)  # it is read, not written


def test_a_weight_is_cast_once_while_it_does_not_change():
    weight = torch.nn.Parameter(torch.randn(4, 3))
    with products.unchanged_weights():
        narrow = products.cast(weight, torch.bfloat16)
        assert products.cast(weight.detach(), torch.bfloat16) is narrow  # as checkpointing hands it out
        assert products.cast(weight[:2], torch.bfloat16).shape == (2, 3)
        assert products.cast(weight, torch.float32) is weight
        assert products.cast(weight, torch.float16).dtype == torch.float16
        with products.unchanged_weights():  # as of a graph, within a step
            assert products.cast(weight, torch.bfloat16) is not narrow
        assert products.cast(weight, torch.bfloat16) is narrow
    with torch.no_grad():
        weight.add_(1)
    for within in (products.unchanged_weights(), nullcontext()):
        with within:
            assert torch.equal(products.cast(weight, torch.bfloat16), weight.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_strided_operand_costs_little_more_than_a_packed_one(dtype):
    """oneDNN's reference kernel, which a strided weight would meet, takes hundreds of times as long."""
    assert products.WORTH_COMPILING <= 16 * 1000 * 1536
    low_rank, dy = torch.randn(16, 1000, dtype=dtype), torch.randn(1000, 3072, dtype=dtype)
    strided, packed = dy[:, :1536], dy[:, :1536].contiguous()
    torch.testing.assert_close(products.product(low_rank, strided.t()), products.product(low_rank, packed.t()))

    def seconds(operand):
        times = []
        for _ in range(5):
            start = time.process_time()
            for _ in range(4):
                products.product(low_rank, operand.t())
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(strided) < 20 * seconds(packed)


@pytest.mark.parametrize("num_adapters", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_layers_compute_the_same(dtype, num_adapters):
    """Two layers with one input: `num_adapters` of them have an adapter, and one has a bias."""
    torch.manual_seed(0)
    parts = [(torch.randn(24, 40), torch.randn(24), None, None), (torch.randn(16, 40), None, None, None)]
    for place in range(num_adapters):
        parts[place] = (*parts[place][:2], torch.randn(3 + place, 40), torch.randn(len(parts[place][0]), 3 + place))
    layers = [Linear(*(part if part is None else part.to(dtype) for part in each), scale=0.7) for each in parts]
    x = torch.randn(5, 40).to(dtype)
    exact = torch.cat(
        [functional.linear(x.double(), whole(layer)) + (0 if layer.bias is None else layer.bias) for layer in layers],
        dim=1,
    )
    with torch.no_grad():
        copies = copied(layers, dtype, packs=True)
        assert len(copies) == 1
        forms = [copies, packed_layers(copies, dtype)] if can_pack(dtype, len(x)) else [copies]
        for form in forms:
            error = (linear(x, *form) - exact).norm()
            assert error <= 4 * torch.finfo(dtype).eps * exact.norm()
    assert [form[0].is_packed for form in forms] == [False, True][: len(forms)]


def whole(layer):
    weight = layer.weight.double()
    return weight if layer.lora_a is None else weight + layer.scale * layer.lora_b.double() @ layer.lora_a.double()


WIDE = frozenset({torch.bfloat16, torch.float16})


@pytest.fixture
def in_small_blocks(monkeypatch):
    """Products in 16 bits as on a CPU without them, and a block smaller than the matrices."""
    monkeypatch.setattr(products, "WIDENED", WIDE)
    monkeypatch.setattr(wide_products, "BLOCK_ROWS", 16)
    monkeypatch.setattr(wide_products, "BLOCK_BYTES", 4 * 40 * 10)


def of(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("dtype", sorted(WIDE, key=str))
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_product_that_is_widened_is_rounded_once(in_small_blocks, dtype, is_transposed):
    torch.manual_seed(0)
    x, residual, bias = of(37, 40, dtype=dtype), of(37, 24, dtype=dtype), of(24, dtype=dtype)
    weight = of(40, 24, dtype=dtype).t() if is_transposed else of(24, 40, dtype=dtype)
    low_rank = products.LowRank(of(37, 4, dtype=dtype), of(24, 4, dtype=dtype), 0.5)
    narrow = 0.5 * low_rank.left.double() @ low_rank.right.double().t()
    exact = x.double() @ weight.double().t()
    one_rounding = {"rtol": torch.finfo(dtype).eps, "atol": 1e-4}
    for found, expected in (
        (products.product(x, weight), exact),
        (products.product(x, weight, bias, residual, low_rank), exact + narrow + bias + residual),
        (products.scaled_product(x, weight, 4.0), 4 * exact),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, **one_rounding)
    outside = products.product(x, weight, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(products.product(x, weight, bias), outside)


def test_sums_of_widened_products_are_not_rounded(in_small_blocks):
    torch.manual_seed(0)
    left, right, sums = of(50, 37), of(37, 24), torch.randn(50, 24)
    exact = left.double() @ right.double()
    found = products.plus_product(None, left, right, torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    added = products.plus_product(sums.clone(), left, right, torch.float32)
    torch.testing.assert_close(added.double(), exact + sums, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(products.plus_product(None, left, right, torch.float32), found)


def test_a_weight_in_4_bits_without_data_has_the_sizes_of_one_with_data():
    """As bitsandbytes lays it out: 64 values share a scale, and 256 of the scales share one in fp32."""
    weight = torch.empty(64, 1001, dtype=torch.bfloat16, device="meta")
    kept = in_4_bits_without_data(weight)
    blocks, outer = 1001, 4
    for twin in (kept, weight_without_data(kept, torch.empty_like)):
        assert (twin.shape, twin.dtype, twin.requires_grad) == ((64 * 1001 // 2, 1), torch.uint8, False)
        assert state_bytes(twin) == blocks + 4 * outer + 4 * (16 + 256 + 1)
        assert (products.full_shape(twin), widened_bytes(twin)) == (weight.shape, weight.nbytes)
        assert (products.widened(twin).dtype, products.widened(twin, torch.float32).dtype) == (
            torch.bfloat16,
            torch.float32,
        )
    assert len(in_4_bits_without_data(weight[:3, :5])) == 8
    assert (state_bytes(weight), widened_bytes(weight), products.full_shape(weight)) == (0, 0, weight.shape)
