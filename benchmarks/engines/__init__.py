"""The engines that are compared. Each module has `train(order, options, clock)`; none is imported before its turn."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

_OURS = "benchmarks.engines.ours"
_TRL = "benchmarks.engines.trl_sft"
_TRL_DPO = "benchmarks.engines.trl_dpo"
_TRAINER = "benchmarks.engines.transformers_trainer"
_ACCELERATE = "benchmarks.engines.accelerate_loop"
_LOOP = "benchmarks.engines.plain_loop"
_UNSLOTH = "benchmarks.engines.unsloth_sft"
_FOR_TRL = ("trl", "datasets")


class Engine(NamedTuple):
    """An engine in one configuration."""

    module: str
    meaning: str
    """For the results page."""
    options: Mapping[str, Any] = MappingProxyType({})
    needs: tuple[str, ...] = ()
    """Modules that must be installed."""
    is_for_cuda: bool = False
    """It does not run elsewhere."""
    has_own_environment: bool = False
    """It runs with the Python that `--unsloth` names, because its packages conflict with those of the other engines."""


_SINGLE = {"batch_size": 1}
_GROUPED = {"batch_size": 4, "sampling": "group_by_length"}
_PACKED = {"batch_size": 1, "packing": True, "sampling": "random"}
_TARGETS = {"only_targets": True}
_SIXTEEN = {"batch_size": 16, "sampling": "group_by_length"}
_LIGER = {"liger": True}
_FLASH = {"attention": "flash_attention_2"}
_FLEX = {"attention": "flex_attention"}
_VARLEN = {"attention": "torch_varlen"}
_FREE = {"batch_size": 16, "padding_free": True}
_FLAT = {"batch_size": 16, "flattened": True}
_STEP = {"batch_size": 64}
_PACKED_4096 = _PACKED | {"pack_tokens": 4096}
_FOR_TRL_LIGER = (*_FOR_TRL, "liger_kernel")
_NF4 = {"quantized": True}
_FOR_NF4_LIGER = ("bitsandbytes", "liger_kernel")

ENGINES: dict[str, Engine] = {
    "ours": Engine(_OURS, "finetune, micro-batches cut by tokens"),
    "trl-1x16": Engine(_TRL, "TRL SFTTrainer, one row in a micro-batch", _SINGLE, _FOR_TRL),
    "trl-1x16-targets": Engine(
        _TRL, "TRL, one row in a micro-batch, loss positions only", _SINGLE | _TARGETS, _FOR_TRL
    ),
    "trl-grouped": Engine(_TRL, "TRL SFTTrainer, rows grouped by length, four in a micro-batch", _GROUPED, _FOR_TRL),
    "trl-grouped-targets": Engine(_TRL, "TRL, grouped by length, loss positions only", _GROUPED | _TARGETS, _FOR_TRL),
    "trl-packed": Engine(_TRL, "TRL SFTTrainer, packing (best fit, position ids)", _PACKED, _FOR_TRL),
    "trl-packed-targets": Engine(_TRL, "TRL, packing, loss positions only", _PACKED | _TARGETS, _FOR_TRL),
    "trl-1x16-liger": Engine(
        _TRL, "TRL SFTTrainer with Liger's layers (CUDA only)", _SINGLE | _LIGER, _FOR_TRL_LIGER, True
    ),
    "trl-1x16-flash": Engine(
        _TRL, "TRL SFTTrainer with FlashAttention (CUDA only)", _SINGLE | _FLASH, (*_FOR_TRL, "flash_attn"), True
    ),
    "trl-grouped-16": Engine(
        _TRL, "TRL SFTTrainer, rows grouped by length, sixteen in a micro-batch", _SIXTEEN, _FOR_TRL
    ),
    "trl-grouped-16-liger": Engine(
        _TRL, "the same with Liger's layers (CUDA only)", _SIXTEEN | _LIGER, _FOR_TRL_LIGER, True
    ),
    "trl-packed-flash-liger": Engine(
        _TRL,
        "TRL, packing into 4096 tokens, with FlashAttention and Liger's layers (CUDA only)",
        _PACKED_4096 | _FLASH | _LIGER,
        (*_FOR_TRL, "flash_attn", "liger_kernel"),
        True,
    ),
    "trl-packed-flex": Engine(
        _TRL, "TRL, packing into 4096 tokens, FlexAttention (CUDA only)", _PACKED_4096 | _FLEX, _FOR_TRL, True
    ),
    "trl-packed-flex-liger": Engine(
        _TRL, "the same with Liger's layers (CUDA only)", _PACKED_4096 | _FLEX | _LIGER, _FOR_TRL_LIGER, True
    ),
    "trl-packed-varlen-liger": Engine(
        _TRL,
        "TRL, packing into 4096 tokens, torch's varlen attention and Liger's layers (CUDA only)",
        _PACKED_4096 | _VARLEN | _LIGER,
        _FOR_TRL_LIGER,
        True,
    ),
    "trl-free": Engine(_TRL, "TRL, sixteen rows in a micro-batch without padding", _FREE, _FOR_TRL),
    "trl-free-flex": Engine(_TRL, "the same with FlexAttention (CUDA only)", _FREE | _FLEX, _FOR_TRL, True),
    "trl-free-flex-liger": Engine(
        _TRL, "the same with FlexAttention and Liger's layers (CUDA only)", _FREE | _FLEX | _LIGER, _FOR_TRL_LIGER, True
    ),
    "trl-free-varlen": Engine(
        _TRL, "the same with torch's varlen attention (CUDA only)", _FREE | _VARLEN, _FOR_TRL, True
    ),
    "trl-free-varlen-liger": Engine(
        _TRL,
        "the same with torch's varlen attention and Liger's layers (CUDA only)",
        _FREE | _VARLEN | _LIGER,
        _FOR_TRL_LIGER,
        True,
    ),
    "trl-dpo": Engine(_TRL_DPO, "TRL DPOTrainer, four pairs in a micro-batch", {"batch_size": 4}, _FOR_TRL),
    "trl-dpo-targets": Engine(_TRL_DPO, "TRL DPO, loss positions only", {"batch_size": 4} | _TARGETS, _FOR_TRL),
    "trl-dpo-1-targets": Engine(
        _TRL_DPO, "TRL DPO, one pair in a micro-batch, targets only", _SINGLE | _TARGETS, _FOR_TRL
    ),
    "trainer": Engine(_TRAINER, "transformers Trainer, four rows in a micro-batch", {"batch_size": 4}),
    "trainer-1x16": Engine(_TRAINER, "transformers Trainer, one row in a micro-batch", {"batch_size": 1}),
    "trl-free-64-varlen-liger": Engine(
        _TRL,
        "TRL, all rows of a step without padding, varlen attention and Liger (CUDA only)",
        _FREE | _VARLEN | _LIGER | _STEP,
        _FOR_TRL_LIGER,
        True,
    ),
    "trainer-flat": Engine(
        _TRAINER, "transformers Trainer, sixteen rows in a micro-batch without padding", _FLAT, ("datasets",)
    ),
    "trainer-flat-varlen-liger": Engine(
        _TRAINER,
        "the same with torch's varlen attention, Liger's layers and its fused loss (CUDA only)",
        _FLAT | _VARLEN | _LIGER,
        ("datasets", "liger_kernel"),
        True,
    ),
    "trainer-flat-64-varlen-liger": Engine(
        _TRAINER,
        "the same with all rows of a step (CUDA only)",
        _FLAT | _VARLEN | _LIGER | _STEP,
        ("datasets", "liger_kernel"),
        True,
    ),
    "peft-nf4-liger": Engine(
        _LOOP,
        "a plain loop with PEFT, bitsandbytes (NF4) and Liger's layers, one row in a micro-batch",
        _NF4,
        _FOR_NF4_LIGER,
    ),
    "peft-nf4-checkpointed-liger": Engine(
        _LOOP, "the same with gradient checkpointing", _NF4 | {"checkpointed": True}, _FOR_NF4_LIGER
    ),
    "full-fp32-liger": Engine(
        _LOOP,
        "a plain loop with transformers and Liger's layers, all weights in fp32, one row in a micro-batch",
        {"weights": "fp32"},
        ("liger_kernel",),
    ),
    "full-bf16-liger": Engine(_LOOP, "the same with weights in bf16", {"weights": "bf16"}, ("liger_kernel",)),
    "unsloth": Engine(
        _UNSLOTH,
        "unsloth with its defaults, but a base in 16 bits; two rows in a micro-batch",
        {"batch_size": 2, "checkpointed": True},
        has_own_environment=True,
    ),
    "unsloth-plain": Engine(
        _UNSLOTH,
        "the same without gradient checkpointing",
        {"batch_size": 2, "checkpointed": False},
        has_own_environment=True,
    ),
    "accelerate": Engine(_ACCELERATE, "a plain Accelerate loop, four rows in a micro-batch", {"batch_size": 4}),
}
