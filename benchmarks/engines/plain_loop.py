"""A loop in plain torch over a model of transformers with Liger's layers: an adapter on a base in NF4, or all weights.

Each micro-batch is one row. Weights are made on the device, so that nothing is read from the disk.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from benchmarks.clock import RankReport, StepClock
from benchmarks.engines.peer_rows import labels_of
from benchmarks.engines.transformers_trainer import lora_config
from benchmarks.job import LEARNING_RATE, MAX_GRAD_NORM, row_shape
from benchmarks.worker import Order


def train(order: Order, options: Mapping[str, Any], clock: StepClock) -> RankReport:
    """Train the job with rows in its order. Liger's layers are Triton kernels, so that they are left out on a CPU."""
    import torch

    job = order.job
    is_cuda = job.device == "cuda"
    if is_cuda:
        importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_phi3()
    model = _with_adapter(order, options) if options.get("quantized") else _whole(order, options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0, fused=is_cuda)
    clock.watch()
    model.train()
    report, rows, size = RankReport(), job.rows(), job.global_batch
    for step in range(job.steps):
        batch, total = rows[step * size : (step + 1) * size], torch.zeros((), device=job.device)
        for row in batch:
            ids, labels = (torch.tensor([values], device=job.device) for values in (row.ids, labels_of(row)))
            with torch.autocast(job.device, torch.bfloat16, enabled=job.precision == "bf16"):
                loss = model(input_ids=ids, labels=labels, use_cache=False).loss / size
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report.rows.append([row_shape(row) for row in batch])
        report.losses[step + 1] = float(total)
    report.first_rows = list(range(size))
    return report


def _whole(order: Order, options: Mapping[str, Any]) -> Any:
    from benchmarks.base_model import TORCH_TYPES, make_wide_base

    return make_wide_base(order.job, dtype=TORCH_TYPES[options["weights"]], attn_implementation="sdpa")


def _with_adapter(order: Order, options: Mapping[str, Any]) -> Any:
    from peft import get_peft_model

    from benchmarks.base_model import TORCH_TYPES, make_wide_base

    job = order.job
    model = make_wide_base(job, dtype=TORCH_TYPES[job.precision], attn_implementation="sdpa")
    _quantize(model, job.device)
    model.requires_grad_(False)
    if options.get("checkpointed"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return get_peft_model(model, lora_config(job.shape.family))


def _quantize(model: Any, device: str) -> None:
    """Put bitsandbytes' layers in place of all linear layers but the head, one after the other."""
    import torch

    layers = importlib.import_module("bitsandbytes").nn
    for parent in list(model.get_decoder().modules()):
        for name, layer in list(parent.named_children()):
            if not isinstance(layer, torch.nn.Linear):
                continue
            how = {"quant_type": "nf4", "compress_statistics": True}
            quantized = layers.Linear4bit(
                *(layer.in_features, layer.out_features, layer.bias is not None),
                **{"compute_dtype": layer.weight.dtype, "device": "meta", **how},
            )
            weight = layer.weight.data.cpu()
            quantized.weight = layers.Params4bit(weight, requires_grad=False, module=quantized, **how).to(device)
            setattr(parent, name, quantized)
            del layer.weight
    model.is_loaded_in_4bit = True
