"""Part `kernels`: what this torch offers, and whether the engine computes the right thing with it."""

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.base_model import TORCH_TYPES, make_base, write_base_without_weights
from benchmarks.gpu.session import Session
from benchmarks.gpu.timing import as_tensors, measure, with_adapter
from benchmarks.job import SIZES, Row
from finetune.engine.attention import attention, choose_kernel, dense_attention
from finetune.engine.attention_cuda import attention_fallback
from finetune.engine.layout import PackedMicrobatch, dense_mask, pack
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.padded import PaddedMicrobatch

_KEY_HEADS = 2
_GROUPS = (1, 3, 4)
"""Query heads to a key head: none shared, as in Phi-4-mini, as in phi-4."""
_WINDOW = 100
_ATTENTION_TOLERANCE = {"bf16": 0.02, "fp32": 1e-4}
"""Relative, in norm. The rounding of bf16 inputs alone is near 0.005."""
_LOSS_TOLERANCE, _GRADIENT_TOLERANCE = 1e-5, 1e-4
"""Of the engine in fp32."""
_BF16_FACTOR, _BF16_ROOM = 1.5, 1e-3
"""In bf16 the engine may be off by so many times the error of the model's own forward, and by so much besides."""
_LAYERS = 2
_MOST_PLACES = 6


def signatures(session: Session) -> dict[str, Any]:
    """Say which attention functions this torch has, and which the engine chooses."""
    figures = {
        "varlen_attn": _parameters("torch.nn.attention.varlen", "varlen_attn"),
        "scaled_dot_product_attention": next(
            line.strip()
            for line in (torch.nn.functional.scaled_dot_product_attention.__doc__ or "").splitlines()
            if line
        ),
        "flash_attn": _version_of("flash_attn"),
        "flash_attn_3": _version_of("flash_attn_interface"),
        "triton": _version_of("triton"),
    }
    device = torch.device(session.device, 0) if session.device == "cuda" else torch.device("cpu")
    downgrade = attention_fallback(device, torch.bfloat16) if device.type == "cuda" else None
    for name, dtype in {"bf16": torch.bfloat16, "fp32": torch.float32}.items():
        figures[f"{name}_kernel"] = choose_kernel(device.type, dtype, has_varlen=downgrade is None)
    figures["bf16_downgrade"] = "none" if downgrade is None else "; ".join(downgrade)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        figures |= {
            "cuda": str(torch.version.cuda),
            "capability": f"{properties.major}.{properties.minor}",
            "device_memory_bytes": properties.total_memory,
        }
    return figures


def attention_against_dense(session: Session, precision: str, head_size: int) -> dict[str, Any]:
    """Compare the engine's attention with plain attention in fp32: grouped heads, window, shared prefixes, targets.

    Errors are relative, in norm; the figures are the worst of all cases.
    """
    tolerance = _ATTENTION_TOLERANCE[precision]
    cases = list(product(_GROUPS, (None, _WINDOW), (False, True), (False, True)))
    worst = dict.fromkeys(("out", "q", "k", "v"), 0.0)
    wrong: list[str] = []
    for number, (groups, window, shares, at_targets) in enumerate(cases):
        microbatch = _microbatch(session, shares)
        dtype = TORCH_TYPES[precision]
        errors = _attention_errors(microbatch, number, groups, head_size, window, at_targets, dtype)
        if not all(error <= tolerance for error in errors.values()):  # NaN is wrong too
            wrong.append(f"{groups} heads a key, window {window}, shared {shares}, at targets {at_targets}")
        worst = {what: max(error, errors[what], key=_nan_last) for what, error in worst.items()}
    return {
        **{f"error_of_{what}": error for what, error in worst.items()},
        "tolerance": tolerance,
        "cases": len(cases),
        "wrong_cases": "; ".join(wrong),
        "is_right": not wrong,
    }


def engine_against_model(session: Session) -> dict[str, Any]:
    """Compare loss and gradients of the engine with those of the model's own forward, row by row.

    In bf16 both are compared with fp32 on the same rounded weights: the engine may not be much further off.
    """
    model = with_adapter(_shallow(session), "bf16")
    rows = _rows(session)
    packed = pack([as_tensors(row) for row in rows]).to(torch.device(session.device))
    with torch.autocast(session.device, dtype=torch.bfloat16):
        bf16 = {"engine": _gradients(model, [packed]), "own": _gradients(model, _alone(session, rows))}
    model.float()
    fp32 = {"engine": _gradients(model, [packed]), "own": _gradients(model, _alone(session, rows))}
    exact = fp32["own"]
    figures: dict[str, Any] = {
        "loss": exact[0],
        "shared_tokens": packed.num_tokens - packed.num_computed,
        "fp32_loss_error": _loss_error(fp32["engine"], exact),
        "fp32_gradient_error": _gradient_error(fp32["engine"], exact),
    }
    for name, result in bf16.items():
        figures[f"bf16_loss_error_of_{name}"] = _loss_error(result, exact)
        figures[f"bf16_gradient_error_of_{name}"] = _gradient_error(result, exact)
    figures["is_right"] = (
        figures["fp32_loss_error"] <= _LOSS_TOLERANCE
        and figures["fp32_gradient_error"] <= _GRADIENT_TOLERANCE
        and all(
            figures[f"bf16_{what}_error_of_engine"] <= _BF16_FACTOR * figures[f"bf16_{what}_error_of_own"] + _BF16_ROOM
            for what in ("loss", "gradient")
        )
    )
    return figures


def synchronisations(session: Session) -> dict[str, Any]:
    """Count how often the host waits for the device in a step: per micro-batch, and besides.

    On CUDA torch warns of each wait; elsewhere the reads of a single number are counted.
    """
    from finetune import add_lora, launch, load_config
    from finetune.training.forward import agree_on_forward
    from finetune.training.optim import build_optimizer
    from finetune.training.step import StepSettings, train_step

    rows = [as_tensors(row) for row in _rows(session)]
    with TemporaryDirectory() as folder:
        words = [f"model.path={folder}", f"data.path={folder}", f"output_dir={folder}/run", "lora.r=16"]
        write_base_without_weights(session.job("chat"), Path(folder))
        config = load_config([*words, f"training.device={session.device}"], task="finetune_lora")
        with launch(config, trains=False) as runtime:
            model = add_lora(_shallow(session), config.lora)
            runtime.placement.place(model)
            optimizer = runtime.placement.prepare_optimizer(build_optimizer(model.train(), config.optim))
            collate = agree_on_forward(runtime, config.training, model).collate
            lock = (lambda rows: rows.pin_memory()) if session.device == "cuda" else (lambda rows: rows)

            def step(number: int) -> Callable[[], object]:
                share = [(index, lock(collate(rows[index::number]))) for index in range(number)]
                how = StepSettings(step=1, learning_rate=1e-4, max_grad_norm=1.0, seed=0)
                return partial(train_step, runtime, model, optimizer, share, how)

            step(1)()
            (one, _), (three, places) = (_count_waits(session, step(number)) for number in (1, 3))
    per_microbatch = (three - one) / 2
    return {
        "per_microbatch": per_microbatch,
        "per_step": one - per_microbatch,
        "counted": "warnings of torch" if session.device == "cuda" else "aten::_local_scalar_dense",
        "places": places,
    }


def attention_speed(session: Session) -> dict[str, Any]:
    """Time attention forward and backward on Phi-4-mini's heads: the engine's, and FlashAttention where installed."""
    size, tokens = SIZES["phi4-mini"], 64 if session.is_tiny else 4096
    dtype = torch.bfloat16 if session.device == "cuda" else torch.float32
    generator = torch.Generator(session.device).manual_seed(0)

    def heads(number: int) -> torch.Tensor:
        made = torch.randn(tokens, number, size.head_dim, generator=generator, device=session.device, dtype=dtype)
        return made.requires_grad_()

    q, k, v = heads(size.heads), heads(size.kv_heads), heads(size.kv_heads)
    layout = (
        pack([(torch.arange(tokens), torch.ones(tokens, dtype=torch.bool))]).to(torch.device(session.device)).layout
    )
    ways: dict[str, Callable[[], torch.Tensor]] = {"engine": lambda: attention(q, k, v, layout)}
    for name, module in {"flash_attn": "flash_attn", "flash_attn_3": "flash_attn_interface"}.items():
        if session.device == "cuda" and find_spec(module) is not None:
            ways[name] = partial(_flash, importlib.import_module(module).flash_attn_func, q, k, v)
    figures: dict[str, Any] = {"tokens": tokens}
    for name, way in ways.items():
        cost = measure(session, lambda way=way: torch.autograd.grad(way().float().sum(), (q, k, v)))  # type: ignore[misc]
        figures[f"{name}_ms"] = 1e3 * cost.seconds
    return figures


def _flash(function: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = function(q[None], k[None], v[None], causal=True)
    made: torch.Tensor = out[0] if isinstance(out, tuple) else out  # some versions of FlashAttention 3 add a number
    return made


def _parameters(module: str, function: str) -> str:
    try:
        return ", ".join(inspect.signature(getattr(importlib.import_module(module), function)).parameters)
    except (ImportError, AttributeError) as error:
        return f"missing: {error}"


def _version_of(module: str) -> str:
    if find_spec(module) is None:
        return "not installed"
    return str(getattr(importlib.import_module(module), "__version__", "installed"))


def _rows(session: Session) -> list[Row]:
    return session.job("prompt").rows()[: 3 if session.is_tiny else 8]


def _microbatch(session: Session, shares: bool) -> PackedMicrobatch:
    rows = [as_tensors(row) for row in _rows(session)]
    return pack(rows, share_prefixes=shares).to(torch.device(session.device))


def _attention_errors(
    microbatch: PackedMicrobatch,
    seed: int,
    groups: int,
    head_size: int,
    window: int | None,
    at_targets: bool,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Return the relative errors of the output and of the gradients of q, k and v."""
    layout, device = microbatch.layout, microbatch.input_ids.device
    queries = microbatch.positions if at_targets else layout.tokens
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, head_size, generator=generator, device=device).to(dtype)

    heads, tokens = groups * _KEY_HEADS, len(microbatch.input_ids)
    given = [random(len(queries), heads), random(tokens, _KEY_HEADS), random(tokens, _KEY_HEADS)]
    grad = random(len(queries), heads)
    at = queries if at_targets else None

    def results(inputs: list[torch.Tensor], attend: Callable[..., torch.Tensor], **how: Any) -> list[torch.Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = attend(*leaves, **how)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    mine = results(given, attention, layout=layout, queries=at, window=window)
    mask = dense_mask(layout, queries, window)
    with sdpa_kernel(SDPBackend.MATH):
        exact = results([x.float() for x in given], dense_attention, mask=mask, scale=head_size**-0.5)
    return {what: _relative(a, b) for what, a, b in zip(("out", "q", "k", "v"), mine, exact, strict=True)}


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    value, exact = value.double(), exact.double()
    return float((value - exact).norm() / exact.norm())


def _shallow(session: Session) -> Any:
    """Make a model as wide as Phi-4-mini, with few layers, where the session computes."""
    job = session.job("chat")
    return make_base(job, replace(job.shape, layers=_LAYERS), dtype=torch.float32)


def _alone(session: Session, rows: list[Row]) -> Iterator[PaddedMicrobatch]:
    """Yield each row as a micro-batch for the model's own forward."""
    for row in rows:
        ids, is_target = as_tensors(row)
        yield PaddedMicrobatch(
            input_ids=ids[None], is_target=is_target[None], num_tokens=len(ids), num_targets=int(is_target[1:].sum())
        ).to(torch.device(session.device))


def _gradients(model: Any, microbatches: Any) -> tuple[float, torch.Tensor]:
    """Return the loss summed over micro-batches, and all gradients in one tensor."""
    model.zero_grad()
    loss = 0.0
    for microbatch in microbatches:
        summed = summed_cross_entropy(model, microbatch)
        summed.backward()  # type: ignore[no-untyped-call]
        loss += float(summed)
    grads = [weight.grad.double().flatten() for weight in model.parameters() if weight.grad is not None]
    return loss, torch.cat(grads)


def _loss_error(result: tuple[float, torch.Tensor], exact: tuple[float, torch.Tensor]) -> float:
    return abs(result[0] - exact[0]) / abs(exact[0])


def _gradient_error(result: tuple[float, torch.Tensor], exact: tuple[float, torch.Tensor]) -> float:
    return _relative(result[1], exact[1])


def _count_waits(session: Session, work: Callable[[], object]) -> tuple[int, str]:
    """Return how often the host waited, and for a GPU in which lines."""
    if session.device != "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            work()
        return sum(e.count for e in profile.key_averages() if e.key == "aten::_local_scalar_dense"), ""
    with warnings.catch_warnings(record=True) as seen, _sync_warnings():
        warnings.simplefilter("always")
        work()
    waits = [warning for warning in seen if "synchronizing CUDA operation" in str(warning.message)]
    places = Counter(f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits)
    return len(waits), ", ".join(f"{place} {count}x" for place, count in places.most_common(_MOST_PLACES))


@contextmanager
def _sync_warnings() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
