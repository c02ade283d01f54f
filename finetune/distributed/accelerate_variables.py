"""Which settings of `accelerate launch` finetune honours, and what they ask for. It refuses all others by name.

`accelerate launch` (1.15) passes its settings on as environment variables. It exports many of them with their defaults
when nobody set them, for example ACCELERATE_MIXED_PRECISION=no and FSDP_RESHARD_AFTER_FORWARD=true, which then mean
"not set".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from finetune.distributed.launcher_variables import read_number

FSDP_SWITCHES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")
"""With these, Accelerate would shard too, and transformers would load the weights on one process of a node alone."""
_FALSE = ("", "0", "f", "false", "n", "no", "none", "off")
_REPLICATE, _SHARD = "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE"

_COMPARED = ("ACCELERATE_USE_CPU", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", _REPLICATE)
"""Settings of any value, which are compared with the configuration or the launch."""
_WITHOUT_EFFECT = re.compile(
    # These change no result, or belong to a part that is refused as a whole.
    "ACCELERATE_(ALLOW_CP_STANDALONE|BYPASS_DEVICE_MAP|CONFIG_DS_FIELDS|CONFIG_FILE|CPU_AFFINITY|DEBUG_MODE"
    r"|DEBUG_RDV_FILE|DEEPSPEED_\w+|DYNAMO_MODE|DYNAMO_USE_\w+|ENABLE_RICH|FP8_\w+|GRADIENT_CLIPPING"
    "|INIT_INCLUDE_BUFFERS|LOG_LEVEL|NUM_PROCESSES|USE_SAGEMAKER)"
    # finetune has its own way to load, prefetch and save weights.
    "|FSDP_(BACKWARD_PREFETCH|CPU_RAM_EFFICIENT_LOADING|FORWARD_PREFETCH|MIN_NUM_PARAMS|STATE_DICT_TYPE"
    "|SYNC_MODULE_STATES|TRANSFORMER_CLS_TO_WRAP|USE_ORIG_PARAMS)"
    r"|PARALLELISM_CONFIG_[CS]P_(?!SIZE)\w+"
)
_ALLOWED_VALUES = {
    "ACCELERATE_MIXED_PRECISION": ("bf16", "fp16"),
    "FSDP_VERSION": ("2",),
    "FSDP_RESHARD_AFTER_FORWARD": ("true",),
    "FSDP_ACTIVATION_CHECKPOINTING": ("true",),
    "FSDP_SHARDING_STRATEGY": ("full_shard", "1"),
    "FSDP_AUTO_WRAP_POLICY": ("transformer_based_wrap",),
    **{f"PARALLELISM_CONFIG_{part}_SIZE": ("1",) for part in ("TP", "CP", "SP")},
}
"""In lower case. A value of `_FALSE` is allowed for every setting."""

_TPU = ("ACCELERATE_IN_TPU_POD", "ACCELERATE_DOWNCAST_BF16", "XLA_USE_BF16", "XLA_DOWNCAST_BF16", "PJRT_DEVICE")
_OTHER_ENGINE = (
    "finetune does not support it: training would silently be plain data parallelism. Use an accelerate config file "
    "with distributed_type MULTI_GPU, MULTI_CPU or NO, and for a model larger than one GPU set parallel.sharding=fsdp2."
)
_LAYER_BY_LAYER = "finetune shards each decoder layer. Remove it, or use TRANSFORMER_BASED_WRAP."
_WHY_REFUSED = {
    "ACCELERATE_USE_FSDP": "finetune does not support version 1 of FSDP. Set fsdp_version: 2 in accelerate's config "
    "file (--fsdp_version 2); or leave FSDP out there, and set parallel.sharding=fsdp2.",
    **dict.fromkeys(("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", *_TPU), _OTHER_ENGINE),
    "ACCELERATE_MIXED_PRECISION": "finetune trains in fp32, bf16 and fp16 only. Set mixed_precision to one of them "
    "(fp32: no), and training.precision.",
    "ACCELERATE_TORCH_DEVICE": "every process would compute on that one device. Unset it and set training.device.",
    "FSDP_SHARDING_STRATEGY": "version 2 of FSDP has no such setting, and accelerate ignores it. Remove it; "
    "fsdp_reshard_after_forward: false replaces SHARD_GRAD_OP, and parallel.shard_size replaces HYBRID_SHARD.",
    "FSDP_AUTO_WRAP_POLICY": _LAYER_BY_LAYER,
    "FSDP_IGNORED_MODULES": _LAYER_BY_LAYER,
    _SHARD: "then no weights are sharded. Set parallelism_config_dp_shard_size to 2 or more.",
}
_NOT_SUPPORTED = "finetune does not support it. Remove it from accelerate's config file or options, or unset it."


class AskedSharding(NamedTuple):
    """What `accelerate launch` asks for with version 2 of FSDP."""

    keys: dict[str, tuple[object, str]]
    """By finetune's key: the value, and the setting that asks for it, ``NAME=value``."""
    world_size: int | None
    """The number of processes that it is made for; None: any."""


def is_cpu_requested(environ: Mapping[str, str]) -> bool:
    """Return whether `accelerate launch --cpu` asked for the CPU."""
    return _is_true(environ.get("ACCELERATE_USE_CPU", ""))


def requested_precision(environ: Mapping[str, str]) -> str | None:
    """Return the mixed precision that `accelerate launch` was asked for; None if nobody asked."""
    asked = environ.get("ACCELERATE_MIXED_PRECISION", "").lower()
    return None if asked in _FALSE else asked


def requested_accumulation(environ: Mapping[str, str]) -> int | None:
    """Return the gradient accumulation that Accelerate would apply in any case; None if nobody asked (1).

    `accelerate launch` exports it for DeepSpeed only; elsewhere it comes from the user's shell.

    Raises:
        LaunchError: it is not a whole number.
    """
    asked = read_number(environ, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    return None if asked == 1 else asked


def requested_sharding(environ: Mapping[str, str]) -> AskedSharding | None:
    """Return what accelerate's FSDP asks for, if nothing of it is refused; None if nobody asked for FSDP."""
    if not _is_fsdp2(environ):
        return None
    asked: dict[str, tuple[object, str]] = {"parallel.sharding": ("fsdp2", "FSDP_VERSION")}
    if environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() in _FALSE:
        asked["parallel.reshard_after_forward"] = (False, "FSDP_RESHARD_AFTER_FORWARD")
    if _is_true(environ.get("FSDP_ACTIVATION_CHECKPOINTING", "")):
        asked["training.gradient_checkpointing"] = (True, "FSDP_ACTIVATION_CHECKPOINTING")
    world_size = None
    if _uses_sizes(environ):
        shard_size = _size(_SHARD, environ)
        asked["parallel.shard_size"] = (shard_size, _SHARD)
        world_size = _size(_REPLICATE, environ) * shard_size
    keys = {key: (value, _assignment(name, environ)) for key, (value, name) in asked.items()}
    return AskedSharding(keys, world_size)


def refused_settings(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the settings of `accelerate launch` that finetune refuses whatever its own configuration says.

    Each is a pair of the setting, ``NAME=value``, and the reason with what to do.
    """
    prefixes: tuple[str, ...] = ("ACCELERATE_",)
    names = set(environ)
    if _is_fsdp2(environ):
        prefixes += ("FSDP_",)
        if _uses_sizes(environ):
            prefixes += ("PARALLELISM_CONFIG_",)
            names.add(_SHARD)  # its default is 1
    return [
        (_assignment(name, environ), _WHY_REFUSED.get(name, _NOT_SUPPORTED))
        for name in sorted(names)
        if (name.startswith(prefixes) or name in _TPU) and not _is_allowed(name, environ)
    ]


def _is_allowed(name: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(name, "").lower()
    if name == _SHARD:
        return _size(name, environ) >= 2
    if name == "PJRT_DEVICE":  # other libraries read it too
        return value != "tpu"
    if name in _COMPARED or _WITHOUT_EFFECT.fullmatch(name):
        return True
    if name in FSDP_SWITCHES and _is_fsdp2(environ):
        return True
    return value in _FALSE or value in _ALLOWED_VALUES.get(name, ())


def _is_fsdp2(environ: Mapping[str, str]) -> bool:
    return _is_true(environ.get(FSDP_SWITCHES[0], "")) and environ.get("FSDP_VERSION") == "2"


def _uses_sizes(environ: Mapping[str, str]) -> bool:
    return _is_true(environ.get(FSDP_SWITCHES[1], ""))


def _is_true(value: str) -> bool:
    """Return whether Accelerate reads a value as true."""
    return value.lower() in ("1", "y", "yes", "t", "true", "on")


def _size(name: str, environ: Mapping[str, str]) -> int:
    text = environ.get(name, "1")
    return int(text) if text.isdecimal() else 0


def _assignment(name: str, environ: Mapping[str, str]) -> str:
    return f"{name}={environ.get(name, '')}"
