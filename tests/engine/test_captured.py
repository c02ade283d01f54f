"""Small micro-batches in the form that CUDA graphs replay. Without CUDA the same passes are computed, not captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from finetune.config.schema import Config, LoraSection
from finetune.data.batches import pad
from finetune.distributed.launch import launch
from finetune.engine import captured
from finetune.engine.captured import CapturedMicrobatches, Sizes, sizes_of
from finetune.engine.layout import pack
from finetune.engine.loss import summed_cross_entropy
from finetune.model.lora import add_lora
from finetune.training.optim import trainable_parameters
from finetune.training.step import StepSettings, train_step
from tests.engine.fake_device import KIND, FakeDevice, move
from tests.engine.prefix_rows import rows_of
from tests.engine.test_fake_device import CONFIGS
from tests.inference.test_decoding import BOUNDARY, LONGROPE
from tests.tiny_models import build_tiny, tiny_examples, tiny_phi3_config

MODELS = {
    **{family: CONFIGS[family] for family in ("phi3", "qwen3", "gemma3_text", "ministral3") if family in CONFIGS},
    "longrope": tiny_phi3_config(rope_parameters=LONGROPE, original_max_position_embeddings=BOUNDARY),
}
DIVISOR = 7.0
CPU = torch.device("cpu")
make = partial(pack, to_bucket=True)


def marked(*lists: list[int]) -> list[Any]:
    """Rows in which two of three tokens carry loss."""
    return [(torch.tensor(ids), torch.arange(len(ids)) % 3 > 0) for ids in lists]


def rows_from(token: int, *, longer: int = 0) -> list[Any]:
    """Two rows with a beginning in common, and two others, all with other tokens for another first one."""
    start = [*range(token, token + 22 + longer)]
    return marked([*start, 50, 51], [*start, 52, 53, 54], [token, 55, 56, 57, 58], [59, token, 60])


WITHOUT_ROOM = marked([*range(4, 24), *range(30, 34)], [*range(4, 24), *range(40, 48)])
"""They fill 32 tokens, and none of padding is left for further keys."""


def adapted(family: str = "phi3", dropout: float = 0.0, std: float = 0.2) -> Any:
    model: Any = add_lora(build_tiny(MODELS[family]), LoraSection(r=4, dropout=dropout))
    torch.manual_seed(1)
    for weight in trainable_parameters(model):
        weight.data.normal_(std=std)
    return model.train()


def passes_of(model: Any, device: torch.device = CPU) -> CapturedMicrobatches:
    def loss_of(choices: Any) -> Any:
        return partial(summed_cross_entropy, choices=choices)

    return CapturedMicrobatches(model, loss_of, trainable_parameters(model), device, nullcontext, reasons.append)


reasons: list[str] = []


def graphed(passes: CapturedMicrobatches, batch: Any) -> Any:
    loss = passes(batch, DIVISOR)
    assert loss is not None, "this micro-batch is computed as without graphs"
    return loss


def expected(model: Any, batches: Sequence[Any]) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of micro-batches and the sum of their gradients, as a run without graphs computes them."""
    losses, sums = [], [torch.zeros_like(weight) for weight in trainable_parameters(model)]
    for batch in batches:
        loss = summed_cross_entropy(model, batch)
        losses.append(loss.item())
        for total, new in zip(sums, torch.autograd.grad(loss / DIVISOR, trainable_parameters(model)), strict=True):
            total += new
    return losses, sums


def assert_same(losses: Sequence[float], gradients: Sequence[Any], wanted: tuple[list[float], Any]) -> None:
    assert losses == pytest.approx(wanted[0], rel=1e-6, abs=1e-6)
    norm = torch.stack([gradient.norm() for gradient in wanted[1]]).norm()
    pairs = zip(gradients, wanted[1], strict=True)
    difference = torch.stack([(getattr(mine, "data_on_cpu", mine) - other).norm() for mine, other in pairs]).norm()
    assert norm > 0
    assert difference <= 1e-5 * norm


@pytest.mark.parametrize("share", [True, False], ids=["shared", "packed"])
@pytest.mark.parametrize("family", MODELS)
def test_new_rows_in_the_same_tensors_give_the_loss_and_gradients_of_the_ordinary_pass(
    family: str, share: bool
) -> None:
    model = adapted(family)
    rows = [rows_from(4), rows_from(25, longer=2), rows_from(9)]
    wanted = expected(model, [pack(each, share_prefixes=share) for each in rows])
    passes = passes_of(model)
    losses = [graphed(passes, make(each, share_prefixes=share)).item() for each in rows]
    ((sizes, place),) = passes.places.items()
    for edges, last in zip(place.edges, (sizes.tokens, sizes.keys), strict=True):  # of runs, those of padding are empty
        assert (int(edges[-1]), bool((edges.diff() >= 0).all())) == (last, True)
    assert_same(losses, [weight.grad for weight in passes.parameters], wanted)


@pytest.mark.parametrize("family", MODELS)
def test_attention_over_runs_waits_for_no_device_and_gives_the_same(device: FakeDevice, family: str) -> None:
    model, rows = adapted(family), [rows_from(4), rows_from(25, longer=2)]
    with _disable_current_modes():
        wanted = expected(model, [pack(each) for each in rows])
    passes = passes_of(move(model), torch.device(KIND, 0))
    assert passes._is_varlen
    compute, waits = passes.compute, []

    def watched(place: Any) -> torch.Tensor:
        before = device.waits.copy()
        loss = compute(place)
        waits.append(device.waits - before)
        return loss

    passes.compute = watched  # type: ignore[method-assign]
    batches = [make(each) for each in rows]
    before = device.waits.copy()
    losses: list[Any] = [graphed(passes, batch).data_on_cpu.clone() for batch in batches]  # type: ignore[attr-defined]
    assert waits == [{}, {}]
    assert family == "longrope" or device.waits == before
    assert_same([loss.item() for loss in losses], [weight.grad for weight in passes.parameters], wanted)


class Reads(TorchDispatchMode):
    """Notes where the tensors lie that are read and were not made inside, and fails what makes a GPU's host wait."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique", "repeat_interleave", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.places: set[int] = set()
        self._made: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        assert not any(name in function.name() for name in self.WAITS), function
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        inside = {tensor.untyped_storage().data_ptr() for tensor in self._made}
        self.places |= {tensor.untyped_storage().data_ptr() for tensor in tensors} - inside
        made = function(*args, **(kwargs or {}))
        known = self.places | inside
        self._made += [
            leaf
            for leaf in tree_leaves(made)
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in known
        ]
        return made


@pytest.mark.parametrize("family", ["phi3", "longrope"])
def test_all_that_a_pass_reads_keeps_its_place(family: str) -> None:
    passes, reads = passes_of(adapted(family)), []
    compute = passes.compute

    def watched(place: Any) -> torch.Tensor:
        with Reads() as mode:
            loss = compute(place)
        reads.append(mode.places)
        return loss

    passes.compute = watched  # type: ignore[method-assign]
    for token in (4, 25, 9):
        graphed(passes, make(rows_from(token)))
        for weight in passes.parameters:
            weight.grad = None  # as after a step
    assert len(reads[0]) > len(passes.parameters) * 2
    assert reads[0] == reads[1] == reads[2]


def test_a_made_data_set_needs_few_graphs_and_the_rows_alone_choose_them() -> None:
    random = torch.Generator().manual_seed(0)

    def batches(seed: int) -> list[Any]:
        tokens, made = torch.Generator().manual_seed(seed), []
        for lengths in all_lengths:
            beginning = torch.randint(100, (40,), generator=tokens).tolist()
            rows = [
                [*beginning, 100 + i, *torch.randint(100, (n,), generator=tokens).tolist()]
                for i, n in enumerate(lengths)
            ]
            made.append(make([(torch.tensor(ids), torch.arange(len(ids)) >= 40) for ids in rows]))
        return made

    num_rows = torch.randint(2, 9, (60,), generator=random).tolist()
    all_lengths = [torch.randint(30, 400, (number,), generator=random).tolist() for number in num_rows]
    sizes = [sizes_of(batch, None) for batch in batches(1)]
    assert sizes == [sizes_of(batch, None) for batch in batches(2)]
    assert sum(size is None for size in sizes) <= 2
    assert len(set(sizes)) <= 25
    long = make(rows_of([*range(4, 8), *[5] * 8190], targets=0.5))
    assert sizes_of(long, None) is None
    assert sizes_of(pad(list(tiny_examples(2))), None) is None


def test_a_micro_batch_without_padding_is_graphed_only_if_its_keys_fit() -> None:
    apart = make(rows_of([*range(4, 12)], [*range(20, 28)]))
    assert apart.num_padding == 0
    assert sizes_of(apart, None) == Sizes(tokens=16, terms=16, keys=16, runs=16)
    shared = make(WITHOUT_ROOM)
    assert len(shared.input_ids) == 32
    assert shared.num_padding == 0
    assert sizes_of(shared, None) is None  # 52 keys
    passes = passes_of(adapted())
    assert passes(shared, DIVISOR) is None
    assert all(weight.grad is None for weight in passes.parameters)


def test_masks_of_dropout_follow_the_seed() -> None:
    passes, batch, sums = passes_of(adapted(dropout=0.3)), make(rows_from(4)), []
    for seed in (5, 6, 5):
        torch.manual_seed(seed)
        for weight in passes.parameters:
            weight.grad = None
        graphed(passes, batch)
        sums.append(torch.cat([gradient.flatten().clone() for gradient in passes._gradients]))
    assert torch.equal(sums[0], sums[2])
    assert not torch.equal(sums[0], sums[1])


class Graph:
    """Stands in for a CUDA graph, which a CPU has not: a replay computes the captured pass again."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.replay = step

    def pool(self) -> str:
        return "pool"


def capturing(monkeypatch: pytest.MonkeyPatch, passes: CapturedMicrobatches) -> list[Any]:
    """Let passes be captured by a stand-in, and return the pools that it gets."""
    pools: list[Any] = []

    def capture(step: Callable[[], object], pool: Any) -> Graph:
        pools.append(pool)
        before, state = [total.clone() for total in passes._gradients], torch.get_rng_state()
        step()
        torch.set_rng_state(state)
        for total, value in zip(passes._gradients, before, strict=True):
            total.copy_(value)  # a capture computes nothing
        return Graph(step)

    monkeypatch.setattr(captured, "capture", capture)
    passes._captures = True
    return pools


ROWS_OF_STEP = [rows_from(4), rows_from(25), rows_from(9), marked([*range(4, 50)]), rows_from(20)]


def test_the_second_micro_batch_of_a_shape_is_captured_and_all_graphs_share_a_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = adapted()
    wanted = expected(model, [pack(rows) for rows in ROWS_OF_STEP * 2])
    passes = passes_of(model)
    pools = capturing(monkeypatch, passes)
    losses = [graphed(passes, make(rows)).item() for rows in ROWS_OF_STEP * 2]
    assert_same(losses, [weight.grad for weight in passes.parameters], wanted)
    assert len(passes.places) == 2
    assert pools == [None, "pool"]
    passes.free()
    assert all(place.graph is None for place in passes.places.values())
    graphed(passes, make(rows_from(4)))
    assert pools == [None, "pool", None]
    assert not reasons


@pytest.mark.parametrize("fails", ["capture", "pass"])
def test_without_memory_graphs_are_given_up_and_no_gradient_is_lost(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    model, given_up = adapted(dropout=0.3), []
    passes = passes_of(model)
    passes.when_given_up = given_up.append

    def gradients() -> list[torch.Tensor]:
        for weight in passes.parameters:
            weight.grad = None
        for number, rows in enumerate(ROWS_OF_STEP):
            torch.manual_seed(number)
            graphed(passes, make(rows))
        return [total.clone() for total in passes._gradients]

    wanted = gradients()
    passes.places.clear()
    pools, compute, errors = capturing(monkeypatch, passes), passes.compute, [torch.OutOfMemoryError("no room\nat all")]

    def without_room(place: Any) -> torch.Tensor:
        if place.sizes.terms == passes_without_room and errors:
            torch.rand(3)
            raise errors.pop()
        return compute(place)

    if fails == "capture":
        monkeypatch.setattr(captured, "capture", lambda *_: (_ for _ in ()).throw(errors[0]))
    else:
        passes_without_room = sizes_of(make(ROWS_OF_STEP[3]), None).terms  # type: ignore[union-attr]
        passes.compute = without_room  # type: ignore[method-assign]
    for mine, theirs in zip(gradients(), wanted, strict=True):
        assert torch.equal(mine, theirs)
    assert given_up == ["capturing failed: no room" if fails == "capture" else "memory ran out"]
    assert all(place.graph is None for place in passes.places.values())
    assert pools == ([] if fails == "capture" else [None])


def test_steps_with_graphed_and_other_micro_batches_are_those_of_a_run_without_graphs() -> None:
    config = Config.model_validate({"training": {"device": "cpu", "precision": "fp32"}})
    rows = [WITHOUT_ROOM, *ROWS_OF_STEP, WITHOUT_ROOM]  # gradients of ordinary passes come before and after

    def train(to_bucket: bool) -> list[tuple[float, float]]:
        model, results = adapted(std=0.02), []  # steps of a calm model do not magnify rounding
        with launch(config) as runtime:
            optimizer = torch.optim.SGD(trainable_parameters(model))
            graphs = passes_of(model) if to_bucket else None
            batches = list(enumerate(pack(each, to_bucket=to_bucket) for each in rows))
            if to_bucket:
                assert [sizes_of(batch, None) is None for _, batch in batches] == [True, *[False] * 5, True]
            for number in range(1, 4):
                settings = StepSettings(step=number, learning_rate=0.1, max_grad_norm=0.1, seed=0)
                result = train_step(runtime, model, optimizer, batches, settings, graphs=graphs)
                results.append((result.loss, result.grad_norm))
        return results

    graphed, plain = train(True), train(False)
    assert plain[-1][0] < plain[0][0]
    for mine, theirs in zip(graphed, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_memory_that_runs_out_before_any_graph_is_the_run_s_to_answer() -> None:
    """It looks for micro-batches that fit."""
    passes, given_up = passes_of(adapted()), []
    passes.when_given_up = given_up.append

    def without_room(_place: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    passes.compute = without_room  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        passes(make(rows_from(4)), DIVISOR)
    assert not given_up
