"""The predicted peak against what the allocator reports, over shapes, methods and ways through the engine."""

from __future__ import annotations

import itertools
import os
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config

from finetune.config.schema import LoraSection, OptimSection, PreferenceSection
from finetune.data.batches import pad
from finetune.data.encoded import EncodedExample
from finetune.data.preferences import EncodedPair
from finetune.engine import products
from finetune.engine.layout import pack
from finetune.engine.loss import BY_DEVICE, summed_cross_entropy
from finetune.engine.products import unchanged_weights
from finetune.model.base import checkpoint_gradients
from finetune.model.lora import add_lora
from finetune.training.forward import Computation
from finetune.training.memory import forecast
from finetune.training.memory.forecast import OptimizerNeed, forecast_step, optimizer_need
from finetune.training.optim import build_optimizer
from finetune.training.preferences.losses import PreferenceLoss
from finetune.training.preferences.microbatches import put_pairs_together, summed_preferences
from tests.diagnose.error_table import WRITE, cases_of_page, record_error
from tests.diagnose.measured import held_by, peak_of
from tests.model.variants import VARIANTS
from tests.tiny_models import WIDE_HEADS, WINDOW, build_tiny, tiny_gemma2_config, tiny_phi3_config, tiny_phi_config

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 3000, "hidden_size": 96, "intermediate_size": 320, "max_position_embeddings": 1024}
WIDER = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 8000}
CONFIGS = {
    "phi3": lambda **sizes: tiny_phi3_config(**{**SIZES, "num_hidden_layers": 5, "sliding_window": 150, **sizes}),
    "wider phi3": lambda **sizes: tiny_phi3_config(**{**SIZES, **WIDER, "num_hidden_layers": 7, **sizes}),
    "phi": lambda **sizes: tiny_phi_config(**{**SIZES, "num_hidden_layers": 5, **sizes}),
    "gemma2": lambda **sizes: tiny_gemma2_config(
        **{**SIZES, "num_hidden_layers": 5, "head_dim": 24, "sliding_window": 150, **sizes}
    ),
    "qwen3": lambda **sizes: Qwen3Config(
        **{**WIDE_HEADS, **WINDOW, **SIZES, "num_hidden_layers": 5, "max_window_layers": 2, "sliding_window": 150},
    ),
    "gpt2": lambda: GPT2Config(vocab_size=3000, n_embd=96, n_layer=5, n_head=4, n_positions=1024),
    "phimoe": lambda **sizes: VARIANTS["Phi-3.5-MoE"].config(
        **{**SIZES, "num_hidden_layers": 5, "num_attention_heads": 24, **sizes}
    ),
}

DPO = PreferenceLoss("dpo", PreferenceSection())


def rows(number: int = 6, *, shared: int = 0, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random rows, about a third of whose tokens carry loss; perhaps with a beginning in common."""
    random = torch.Generator().manual_seed(seed)
    beginning = torch.randint(3, 3000, (shared,), generator=random)
    made = []
    for _ in range(number):
        length = int(torch.randint(80, 200, (), generator=random))
        ids = torch.cat([beginning, torch.randint(3, 3000, (length,), generator=random)])
        made.append((ids, torch.rand(len(ids), generator=random) < 0.35))
    return made


def sft(choices):
    """The loss of the answers."""
    return partial(summed_cross_entropy, choices=choices)


def prepare(model, method: str, *, checkpointed: bool, dropout: float = 0.0):
    adapted = add_lora(model, LoraSection(r=4, dropout=dropout)) if method == "lora" else model
    if checkpointed:
        checkpoint_gradients(adapted)
    return adapted.train()


def dpo(choices):
    """The loss of pairs."""
    return partial(summed_preferences, loss=DPO, choices=choices)


def measure(model, optimizer, microbatch, *, number: int = 1, loss_of=sft) -> int:
    """The peak of a step that is not the first, with all that is held besides."""

    def step() -> None:
        for _ in range(number):
            loss_of(BY_DEVICE)(model, microbatch()).reshape(-1)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return held_by(model, optimizer) + peak_of(step)


def predict(config, microbatch, method: str, *, accumulates: bool = False, loss_of=sft, **options):
    with torch.device("meta"):
        model = prepare(AutoModelForCausalLM.from_config(config), method, **options)
    model.config.use_cache = False
    need = optimizer_need(build_optimizer(model, OptimSection()), device_type="cpu")
    assert need is not None
    how = Computation(loss_of=loss_of, device_type="cpu", accumulates=accumulates)
    return forecast_step(model, microbatch, how).peak(need)


CASES = [
    ("phi3", "lora", False, "packed"),
    ("phi3", "full", True, "padded"),
    ("phi3", "lora", False, "shared"),
    ("phi", "full", True, "packed"),
    ("qwen3", "full", True, "packed"),
    ("gemma2", "lora", False, "padded"),
    ("gpt2", "lora", False, "padded"),
    ("phimoe", "lora", True, "padded"),
    ("wider phi3", "full", False, "padded"),
]
PAIRS = [("phi3", True, "packed"), ("gemma2", False, "padded"), ("wider phi3", False, "shared")]
"""DPO, always with LoRA."""


def name_of(family: str, method: str, checkpointed: bool, way: str) -> str:
    """As the table of docs/plan.md has it."""
    through = {"packed": "packed", "padded": "padded", "shared": "packed, shared prefixes"}[way]
    return f"{family}, {'LoRA' if method == 'lora' else method}, {through}{', checkpointing' * checkpointed}"


def test_the_table_of_the_docs_has_these_cases_and_no_others():
    if not os.environ.get(WRITE):
        names = [*itertools.starmap(name_of, CASES), *(name_of(family, "DPO", *rest) for family, *rest in PAIRS)]
        assert sorted(cases_of_page()) == sorted(names)


@pytest.mark.parametrize(("family", "method", "checkpointed", "way"), CASES)
def test_the_predicted_peak_is_the_measured_one(family, method, checkpointed, way):
    config = CONFIGS[family]()
    given = rows(shared=120 if way == "shared" else 0)
    make = (lambda: pad([EncodedExample(*row) for row in given])) if way == "padded" else (lambda: pack(given))
    predicted = predict(config, make(), method, checkpointed=checkpointed)
    model = prepare(build_tiny(config), method, checkpointed=checkpointed)
    measured = measure(model, build_optimizer(model, OptimSection()), make)
    error = predicted.total / measured - 1
    assert abs(error) < 0.10, predicted
    record_error(name_of(family, method, checkpointed, way), measured, error)


def pairs(number: int = 3) -> list[EncodedPair]:
    """Random pairs: a prompt of 120 tokens, and two answers that carry loss."""
    random = torch.Generator().manual_seed(0)
    made = []
    for _ in range(number):
        prompt = torch.randint(3, 3000, (120,), generator=random)
        answers = [torch.randint(3, 3000, (length,), generator=random) for length in (60, 90)]
        sides = [torch.cat([prompt, answer]) for answer in answers]
        made.append(EncodedPair(*(EncodedExample(ids, torch.arange(len(ids)) >= 120) for ids in sides)))
    return made


@pytest.mark.parametrize(("family", "checkpointed", "way"), PAIRS)
def test_the_predicted_peak_of_pairs_is_the_measured_one(family, checkpointed, way):
    """Policy and reference, in one micro-batch."""
    config = CONFIGS[family]()
    collate = pad if way == "padded" else partial(pack, share_prefixes=way == "shared")
    given = pairs()

    def make():
        return put_pairs_together(given, rows=collate)

    predicted = predict(config, make(), "lora", checkpointed=checkpointed, loss_of=dpo)
    model = prepare(build_tiny(config), "lora", checkpointed=checkpointed)
    measured = measure(model, build_optimizer(model, OptimSection()), make, loss_of=dpo)
    error = predicted.total / measured - 1
    assert abs(error) < 0.10, predicted
    record_error(name_of(family, "DPO", checkpointed, way), measured, error)


def test_the_copies_of_an_adapter_in_the_type_of_the_run_are_there_all_the_time():
    config, given = CONFIGS["phi3"](), rows(1)
    with torch.device("meta"):
        planned = add_lora(AutoModelForCausalLM.from_config(config), LoraSection(r=300)).train()
    model = add_lora(build_tiny(config), LoraSection(r=300)).train()
    how = Computation(loss_of=sft, device_type="cpu", dtype=torch.bfloat16, accumulates=False)
    predicted = forecast_step(planned, pack(given), how).peak(OptimizerNeed(0, 0))

    def step() -> None:
        with unchanged_weights():  # as in `train_step`
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = sft(BY_DEVICE)(model, pack(given))
            loss.backward()
        model.zero_grad()

    step()
    measured = sum(weight.nbytes for weight in model.parameters()) + peak_of(step)
    assert abs(predicted.total / measured - 1) < 0.05, (predicted, measured)
    copies = predicted.parts["adapter"] // 2
    assert copies > 0.1 * measured, "so that it would be seen if they were not counted"


def test_graphs_keep_the_memory_of_a_pass_unless_gradients_are_checkpointed(monkeypatch):
    microbatch = pack(rows(1))

    def peak(*, checkpointed: bool = False, captures: bool = True):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_phi3_config())
            model = prepare(model, "lora", checkpointed=checkpointed)
        how = Computation(loss_of=sft, device_type="cpu")
        return forecast_step(model, microbatch, how, captures=captures).peak(OptimizerNeed(0, 0))

    alone, graphed = peak(captures=False), peak()
    of_pass = sum(alone.parts[part] for part in ("activations", "logits", "workspace"))
    assert graphed.total - alone.total == graphed.parts["workspace"] - alone.parts["workspace"] == of_pass > 0
    assert peak(checkpointed=True) == peak(checkpointed=True, captures=False)
    monkeypatch.setattr(forecast, "TOKENS_WITHOUT_PADDING", microbatch.num_computed / 2)
    assert peak().total - alone.total == round(of_pass / 2)


def test_gradients_that_are_added_up_are_there_all_the_time():
    config = CONFIGS["phi3"](num_hidden_layers=5)
    given = rows()
    predicted = predict(config, pack(given), "full", checkpointed=False, accumulates=True)
    model = prepare(build_tiny(config), "full", checkpointed=False)
    measured = measure(model, build_optimizer(model, OptimSection()), lambda: pack(given), number=2)
    assert abs(predicted.total / measured - 1) < 0.10, predicted
    assert predicted.parts["gradients"] == sum(weight.nbytes for weight in model.parameters())


@pytest.mark.parametrize(("device_type", "loss_of"), [("cpu", sft), ("cuda", dpo)])
def test_few_layers_tell_what_many_take(device_type, loss_of, monkeypatch):
    """Also with LongRoPE, which looks at positions, and with dropout."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    rope |= {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "original_max_position_embeddings": 512}
    config = CONFIGS["phi3"](num_hidden_layers=6, rope_parameters=rope)
    with torch.device("meta"):
        model = prepare(AutoModelForCausalLM.from_config(config), "lora", checkpointed=False, dropout=0.1)
    need = optimizer_need(build_optimizer(model, OptimSection()), device_type=device_type)
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    how = Computation(loss_of=loss_of, device_type=device_type, dtype=dtype, accumulates=False)
    microbatch = pack(rows()) if loss_of is sft else put_pairs_together(pairs(), rows=pack)
    extrapolated = forecast_step(model, microbatch, how).peak(need)
    assert len(model.get_base_model().get_decoder().layers) == 6  # as it was
    assert all(weight.is_meta for weight in model.parameters())
    monkeypatch.setattr("finetune.training.memory.forecast.MORE_LAYERS", 6)
    whole = forecast_step(model, microbatch, how).peak(need)
    assert abs(extrapolated.total / whole.total - 1) < 0.005
    for part, size in whole.parts.items():
        assert abs(extrapolated.parts[part] - size) <= 0.01 * whole.total, part


def test_an_optimizer_that_needs_data_is_not_known():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["phi3"]())
    section = OptimSection(optimizer="transformers.optimization.Adafactor", args={"relative_step": False})
    optimizer = build_optimizer(model, section)
    known = optimizer_need(optimizer, device_type="cpu")
    real = build_tiny(CONFIGS["phi3"]())
    twin = build_optimizer(real, section)
    for weight in real.parameters():
        weight.grad = torch.ones_like(weight)
    twin.step()
    state = sum(v.nbytes for s in twin.state.values() for v in s.values() if torch.is_tensor(v))
    assert known is None or known.state == state


def test_a_plan_for_a_gpu_counts_no_products_that_this_cpu_widens(monkeypatch):
    model = add_lora(build_tiny(CONFIGS["phi3"]()).to(torch.bfloat16), LoraSection(r=4)).train().to("meta")
    microbatch = pack(rows(4))

    def peaks(device_type):
        made = []
        for widened in ((), (torch.bfloat16,)):
            monkeypatch.setattr(products, "WIDENED", frozenset(widened))
            how = Computation(
                loss_of=lambda choices: partial(summed_cross_entropy, choices=choices),
                device_type=device_type,
                dtype=torch.bfloat16,
            )
            made.append(forecast_step(model, microbatch, how).peak(OptimizerNeed(0, 0), world_size=1).total)
        return made

    plain, widened = peaks("cuda")
    assert plain == widened
    plain, widened = peaks("cpu")
    assert plain < widened
