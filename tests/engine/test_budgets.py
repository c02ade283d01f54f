"""What training costs a GPU: the kernels and bytes of a decoder layer, and the waits of an optimizer step.

They are counted from operations on a device that is not there, so no GPU is needed, and no time is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch._inductor import config as inductor_config
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoModelForCausalLM, Phi3Config, PretrainedConfig, Qwen3Config

from finetune.config.schema import Config, LoraSection, ModelSection
from finetune.data.encoded import EncodedExample
from finetune.data.preferences import EncodedPair
from finetune.distributed.launch import launch
from finetune.distributed.liveness import Liveness
from finetune.engine.attention_cuda import VarlenRuns, varlen_attention
from finetune.engine.compiled import run_compiled
from finetune.engine.decoder import Decoder
from finetune.engine.fused import FORMULAS, LAUNCHES, switch_fused
from finetune.engine.layout import pack
from finetune.engine.loss import BY_DEVICE, LossFunction, summed_cross_entropy
from finetune.engine.products import unchanged_weights
from finetune.model.base import checkpoint_gradients
from finetune.model.lora import add_lora
from finetune.model.published import published_sizes
from finetune.training.forward import agree_on_forward
from finetune.training.objective import objective_of
from finetune.training.optim import trainable_parameters
from finetune.training.step import StepSettings, train_step
from tests.engine.fake_device import KIND, FakeDevice, move, register_device
from tests.engine.test_fake_device import ROWS as SHARING_ROWS
from tests.engine.test_fake_device import adapted

TOKENS, RANK = 4096, 16
_FREE = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}
_OVERWRITTEN = {"aten::copy_", "aten::zero_", "aten::fill_"}
"""Operations that do not read their first argument."""


class Costs(TorchDispatchMode):
    """Counts what the operations inside cost on a GPU.

    Each operation reads its inputs and writes its outputs once. Views and memory without values cost nothing.

    Attributes:
        launches: kernels.
        traffic: bytes read and written, except by large products.
        large_products: products of which no side is as narrow as an adapter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.traffic = self.large_products = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function.name().partition(".")[0]
        written = _tensors(made)
        if function.is_view or name in _FREE or name.startswith("prim::") or not any(x.numel() for x in written):
            return made
        read = _tensors((args[1:] if name in _OVERWRITTEN else args, {**(kwargs or {}), "out": None}))
        self.launches += LAUNCHES.get(name, 1)
        if name == "aten::addmm" and args[0].ndim == 2:  # the summand is copied, then the product is added
            self.launches += 1
            self.traffic += 2 * args[0].nbytes
            read[0] = written[0]
        if name in ("aten::mm", "aten::addmm", "aten::addmm_") and min(min(x.shape) for x in read) > RANK:
            self.large_products += 1
        else:
            self.traffic += sum(map(_num_bytes, (*read, *written)))
        return made


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _num_bytes(x: torch.Tensor) -> int:
    """The bytes of a tensor, in which a broadcast dimension counts once."""
    return x.element_size() * prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)


class LayerCost(NamedTuple):
    """What a layer costs; see `Costs`."""

    launches: int
    gigabytes: float
    large_products: int


def cost_of_a_layer(name: str) -> LayerCost:
    """Count forward and backward of a layer with an adapter on each linear layer, in bf16: two layers less one."""
    one, two = (_cost(_config_of(name, num_layers)) for num_layers in (1, 2))
    return LayerCost(
        two.launches - one.launches, (two.traffic - one.traffic) / 1e9, two.large_products - one.large_products
    )


def _config_of(name: str, num_layers: int) -> PretrainedConfig:
    if name == "qwen3":  # as Qwen3-8B
        widths = {"hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 8}
        return Qwen3Config(num_hidden_layers=num_layers, num_attention_heads=32, pad_token_id=0, **widths)
    published = published_sizes(ModelSection(path=name))
    assert published is not None
    sizes = {**published.sizes, "num_hidden_layers": num_layers, "pad_token_id": 0}
    part = sizes.pop("partial_rotary_factor", 1.0)
    sizes.pop("rope_type", None)  # LongRoPE chooses its factors by values
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part}
    return Phi3Config(**{**sizes, "rope_parameters": rope})


def _cost(config: PretrainedConfig) -> Costs:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        model = add_lora(model, LoraSection(r=RANK))
    with _without_data(model):
        decoder = Decoder(model, _causal_attention)
        ids = torch.zeros(TOKENS, dtype=torch.int64, device=KIND)
        with unchanged_weights(), Costs() as costs:
            hidden = decoder.hidden_states(ids, ids, None)
            hidden.backward(torch.empty_like(hidden))
    return costs


@contextmanager
def _without_data(model: torch.nn.Module) -> Iterator[None]:
    """Put a model of the meta device on the fake device inside, where tensors have no data."""
    register_device()
    with torch.autograd.set_multithreading_enabled(False), FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for name, weight in module._parameters.items():
                dtype = torch.float32 if weight is not None and weight.requires_grad else torch.bfloat16
                if weight is not None:
                    there = torch.empty(weight.shape, dtype=dtype, device=KIND)
                    module._parameters[name] = torch.nn.Parameter(there, weight.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=KIND)
        yield


def _causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    edges = torch.empty(2, dtype=torch.int32, device=KIND)
    runs = VarlenRuns(edges, edges, None, TOKENS, TOKENS, TOKENS, None, TOKENS)  # in any rows, not in a batch
    return varlen_attention(q, k, v, runs, q.shape[-1] ** -0.5)


@pytest.fixture
def _fused() -> Iterator[None]:
    switch_fused(True)
    yield
    switch_fused(False)


@pytest.mark.usefixtures("_fused")
def test_a_layer_that_normalizes_heads() -> None:
    """Without these norms it takes 121 kernels and moves 5.0 GB: its projections, gate and up are five products."""
    cost = cost_of_a_layer("qwen3")
    assert cost.large_products == 14
    assert cost.launches <= 132
    assert cost.gigabytes <= 5.4


@pytest.mark.usefixtures("_fused")
@pytest.mark.parametrize(
    ("path", "gigabytes"), [("microsoft/phi-4", 5.2), ("microsoft/Phi-4-mini-instruct", 2.8)], ids=["phi4", "mini"]
)
def test_a_layer_forward_and_backward(path: str, gigabytes: float) -> None:
    cost = cost_of_a_layer(path)
    assert cost.large_products == 8
    assert cost.launches <= 80
    assert cost.gigabytes <= gigabytes


ROWS = torch.randn(24, 96)
FIRST = torch.randn(24, 4, 16)
ANGLES = torch.randn(24, 12), torch.randn(24, 12)
INPUTS: dict[str, tuple[Any, ...]] = {
    "probe": (ROWS,),
    "normalized_with_statistics": (ROWS, torch.randn(96), 1e-5),
    "normalized": (ROWS, torch.randn(96), torch.rand(24, 1)),
    "input_gradient": (ROWS, ROWS + 1, torch.randn(96), torch.rand(24, 1), ROWS - 1),
    "gated": (ROWS, "silu"),
    "rounded_to_fp8": (ROWS, torch.randn(96)),
    "transposed": (torch.arange(24 * 96, dtype=torch.uint8).view(24, 96),),
    "loss_and_gradient": (ROWS, torch.arange(24).unsqueeze(1)),
    "gated_gradient": (ROWS, torch.randn(24, 48), "silu"),
    "split_and_rotated": (ROWS, *ANGLES, [3, 1, 2], 2),
    "rotated_back_and_joined": ([FIRST, FIRST[:, :1].clone(), FIRST[:, :1] + 1], *ANGLES, 2),
}


VARIANTS: dict[str, tuple[Any, ...]] = {
    "finetune::normalized_with_statistics": (FIRST, torch.randn(16), 1e-5),
    "finetune::gated": (ROWS, "gelu_pytorch_tanh"),
    "finetune::gated_gradient": (ROWS, torch.randn(24, 48), "gelu_pytorch_tanh"),
    "finetune::input_gradient": (FIRST, FIRST + 1, torch.randn(16), torch.rand(24, 4, 1)),
}


class _Counted(Exception):
    """Inductor has fused the loops, and need not write them in C++."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "inputs"), [*((name, INPUTS[name.removeprefix("finetune::")]) for name in LAUNCHES), *VARIANTS.items()]
)
def test_a_fused_function_takes_the_kernels_that_it_declares(name: str, inputs: tuple[Any, ...]) -> None:
    """The loops that Inductor makes for a CPU of the same formula are counted; a kernel of a GPU is such a loop."""
    args = tree_map_only(torch.Tensor, lambda x: x.to(torch.bfloat16) if x.is_floating_point() else x, inputs)
    loops: list[list[str]] = []

    def count(nodes: Any) -> Any:
        loops.append([type(node).__name__ for node in nodes if not isinstance(node, NopKernelSchedulerNode)])
        raise _Counted

    torch._dynamo.reset()
    switches = {"_post_fusion_custom_pass": count, "fx_graph_cache": False}
    with inductor_config.patch(switches), pytest.raises(Exception, match="_Counted"):
        run_compiled(FORMULAS[name], *args)
    torch._dynamo.reset()
    assert 1 <= len(loops[0]) <= LAUNCHES[name], loops


STEPS: dict[str, dict[str, Any]] = {
    "rows apart": {"share_prefixes": False},
    "shared prefixes": {},
    "checkpointing": {"gradient_checkpointing": True},
    "pairs": {"objective": "dpo"},
    "pairs without a reference": {"objective": "simpo"},
}
"""By what is trained: the section `training`."""
READ_ONCE = {"aten::_to_copy": 1}
"""The host waits once in a step, to read loss, norm and figures together."""


def waits_of_a_step(
    device: FakeDevice,
    model: Any,
    *,
    number: int = 1,
    loss: LossFunction | None = None,
    world_size: int = 1,
    sharding: str = "none",
    **training: Any,
) -> dict[str, int]:
    """Count by operation how often the host waits in a step of so many micro-batches, after a first step.

    With a `world_size` above 1, the exchanges must be replaced: there is no other rank.
    """
    parallel = {"parallel": {"sharding": sharding}}
    config = Config.model_validate({"training": {"device": "cpu", "precision": "fp32", **training}, **parallel})
    is_of_pairs = config.objective.compares_pairs
    objective = objective_of(config)
    rows: list[Any] = (
        [EncodedPair(*map(EncodedExample._make, SHARING_ROWS[at : at + 2])) for at in (0, 2)]
        if is_of_pairs
        else SHARING_ROWS
    )
    with launch(config) as runtime:
        here, there = runtime.context, torch.device(KIND, 0)
        runtime.context = here._replace(device=there, world_size=world_size, distributed=world_size > 1)
        if config.training.gradient_checkpointing:
            checkpoint_gradients(model)
        optimizer = runtime.placement.prepare_optimizer(torch.optim.AdamW(trainable_parameters(move(model))))
        collate = objective.collate(agree_on_forward(runtime, config.training, model).collate)
        for step in (1, 2):
            device.waits.clear()
            train_step(
                runtime,
                model,
                optimizer,
                [(index, collate(rows).pin_memory()) for index in range(number)],
                StepSettings(step, learning_rate=1e-3, max_grad_norm=0.1, seed=0),
                compute=loss or objective.loss(BY_DEVICE),
            )
        runtime.context = here
    return dict(device.waits)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", STEPS)
def test_the_host_waits_once_in_a_step_and_not_in_a_micro_batch(device: FakeDevice, kind: str) -> None:
    waits = waits_of_a_step(device, adapted(), number=2, **STEPS[kind])
    assert waits == READ_ONCE


@pytest.mark.parametrize("settings", [{"dropout": 0.3}, {"dora": True}], ids=["dropout", "DoRA"])
def test_an_adapter_does_not_make_the_host_wait(device: FakeDevice, settings: dict[str, Any]) -> None:
    waits = waits_of_a_step(device, adapted(**settings), number=2)
    assert waits == READ_ONCE


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_one_of_several_ranks_waits_twice(device: FakeDevice, monkeypatch: pytest.MonkeyPatch, sharding: str) -> None:
    """Until it has computed its own share, so that a fault names the rank that still computes; and to read."""
    exchanged: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: exchanged.append(tensor.device.type))
    monkeypatch.setattr(Liveness, "let_device_finish", lambda _: device.waits.update(["let_device_finish"]))
    waits = waits_of_a_step(device, adapted(), number=2, world_size=2, sharding=sharding)
    assert waits == {**READ_ONCE, "let_device_finish": 1}
    assert exchanged[-3:] == ["cpu", KIND, KIND], "counts, gradients, sums"


@pytest.mark.skipif(Version(version("transformers")) < Version("5.16"), reason="earlier ones read the longest position")
def test_longrope_does_not_make_the_host_wait(device: FakeDevice) -> None:
    model = adapted("longrope")
    summed_cross_entropy(model, pack(SHARING_ROWS))  # it makes its long factors once, which the device cannot
    assert waits_of_a_step(device, model, number=2) == READ_ONCE


def test_a_step_that_is_skipped_waits_twice(device: FakeDevice) -> None:
    """Once more to see whether the weights are finite."""

    def infinite(model: Any, microbatch: Any) -> torch.Tensor:
        return summed_cross_entropy(model, microbatch) * torch.inf

    waits = waits_of_a_step(device, adapted(), number=2, loss=infinite)
    assert sum(waits.values()) == 2
