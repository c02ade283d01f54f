"""TRL's SFTTrainer, without gradient checkpointing, which it has on by default and which runs the model twice."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.clock import RankReport, StepClock
from benchmarks.engines.peer_rows import SeenRows, dataset_of
from benchmarks.engines.transformers_trainer import arguments, lora_config, model_arguments, report_of
from benchmarks.job import SHARED_PROMPT_TOKENS, Job
from benchmarks.worker import Order

_PACK_TOKENS = 512


def train(order: Order, options: Mapping[str, Any], clock: StepClock) -> RankReport:
    """Train the job as the options have it."""
    from transformers import AutoTokenizer

    from benchmarks.base_model import make_base

    trl: Any = importlib.import_module("trl")  # an extra: type checkers need not find it
    if options.get("only_targets"):
        score_targets_only()
    keywords = arguments(order, options)
    if options.get("packing"):
        tokens, packs = _packs(order.job, options.get("pack_tokens"))
        keywords |= {"packing": True, "packing_strategy": "bfd", "max_length": tokens}
        keywords["gradient_accumulation_steps"] = packs // order.job.processes
    elif options.get("padding_free"):
        keywords |= {"padding_free": True, "max_length": None}  # TRL refuses a limit that it would not apply
    else:
        keywords["max_length"] = order.job.longest
    init = model_arguments(order, options)
    trainer = trl.SFTTrainer(
        model=order.base if order.has_weights else make_base(order.job, order.job.shape, **init),
        args=trl.SFTConfig(
            **keywords,
            model_init_kwargs=init if order.has_weights else None,
            use_liger_kernel=options.get("liger", False),
        ),
        train_dataset=dataset_of(order.job),
        processing_class=AutoTokenizer.from_pretrained(order.base),
        peft_config=lora_config(order.job.shape.family),
    )
    seen = SeenRows(trainer.data_collator, keywords["gradient_accumulation_steps"])
    trainer.data_collator = seen
    clock.watch()
    trainer.train()
    trainer.save_model(str(Path(order.folder) / "adapter"))
    return report_of(trainer, seen, order)


def _packs(job: Job, tokens: int | None) -> tuple[int, int]:
    """Tokens of a packed sequence, and how many of them hold about as many rows as a global batch.

    Unless the tokens are given, the number is even, so that two ranks can share them.
    """
    if tokens is not None:
        return tokens, max(1, round(job.global_batch * job.shape.lengths.mean / tokens))
    prompt = SHARED_PROMPT_TOKENS * job.has_shared_prompt
    tokens = _PACK_TOKENS * (2 if job.longest > _PACK_TOKENS else 1)
    return tokens, 2 * round(job.global_batch * (job.shape.lengths.mean + prompt) / tokens / 2)


def score_targets_only() -> None:
    """Give TRL off CUDA what it does on CUDA: the head at loss positions only.

    TRL 1.16 asks `_use_triton(device)` twice: in `trl.trainer.utils`, whether to gather the loss positions first; in
    `trl.kernels.chunked_logprob`, which kernel to run. Only the first answer is changed.
    """
    module: Any = importlib.import_module("trl.trainer.utils")
    if not callable(getattr(module, "_use_triton", None)):
        raise RuntimeError("this version of TRL decides otherwise where logits are made: read trl.trainer.utils again")
    module._use_triton = lambda device: True
