"""unsloth's LoRA in 16 bits on a CPU, called as its notebooks do. It runs in an environment of its own.

That environment need not have what `finetune` imports, so nothing that this module imports may import `finetune`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.clock import RankReport, StepClock
from benchmarks.engines.peer_rows import SeenRows, dataset_of
from benchmarks.engines.transformers_trainer import arguments, report_of
from benchmarks.job import LORA_ALPHA, LORA_RANK
from benchmarks.worker import Order

_TYPES = {"fp32": "float32", "bf16": "bfloat16"}


def train(order: Order, options: Mapping[str, Any], clock: StepClock) -> RankReport:
    """Train the job. With the option `checkpointed`, gradient checkpointing is on, as it is by default."""
    job = order.job
    if job.device == "cpu":
        os.environ["UNSLOTH_FORCE_CPU"] = "1"  # otherwise it would train on a GPU if there is one
    unsloth: Any = importlib.import_module("unsloth")  # before TRL, whose SFTTrainer it replaces
    trl: Any = importlib.import_module("trl")
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        order.base,
        max_seq_length=job.longest,
        dtype=_TYPES[job.precision],
        load_in_4bit=False,
        **({} if options["checkpointed"] else {"use_gradient_checkpointing": False}),
    )
    model = unsloth.FastLanguageModel.get_peft_model(
        model, r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=list(job.shape.lora_targets), random_state=job.seed
    )
    keywords = arguments(order, options) | {"bf16": job.precision == "bf16", "max_length": job.longest}
    if options["checkpointed"]:
        del keywords["gradient_checkpointing"]
    trainer = trl.SFTTrainer(
        model=model, args=trl.SFTConfig(**keywords), train_dataset=dataset_of(job), processing_class=tokenizer
    )
    seen = SeenRows(trainer.data_collator, keywords["gradient_accumulation_steps"])
    trainer.data_collator = seen
    clock.watch()
    trainer.train()
    trainer.save_model(str(Path(order.folder) / "adapter"))
    return report_of(trainer, seen, order)
