"""A plain loop on Accelerate, as its guide to gradient accumulation with causal models has it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.clock import RankReport, StepClock
from benchmarks.engines.peer_rows import IGNORED, SeenRows, dataset_of
from benchmarks.engines.transformers_trainer import lora_config
from benchmarks.job import LEARNING_RATE, MAX_GRAD_NORM
from benchmarks.worker import Order


def train(order: Order, options: Mapping[str, Any], clock: StepClock) -> RankReport:
    """Train the job with rows in its order, padded to the longest of their micro-batch."""
    import torch
    from accelerate import Accelerator
    from peft import get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        get_linear_schedule_with_warmup,
    )

    from benchmarks.base_model import TORCH_TYPES

    job = order.job
    accumulation = job.global_batch // job.processes // options["batch_size"]
    accelerator = Accelerator(cpu=job.device == "cpu", gradient_accumulation_steps=1)
    torch.manual_seed(job.seed)
    auto: Any = AutoModelForCausalLM
    base = auto.from_pretrained(order.base, dtype=TORCH_TYPES[job.precision])
    collator = SeenRows(DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(order.base)), accumulation)
    loader = torch.utils.data.DataLoader(dataset_of(job), batch_size=options["batch_size"], collate_fn=collator)
    model = get_peft_model(base, lora_config(order.job.shape.family))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=0)
    build_schedule: Any = get_linear_schedule_with_warmup
    scheduler = build_schedule(optimizer, 0, job.steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    clock.watch()
    model.train()

    report = RankReport()
    batches = iter(loader)
    for step in range(1, job.steps + 1):
        share = list(islice(batches, accumulation))
        num_targets = accelerator.reduce(sum((batch["labels"] != IGNORED).sum() for batch in share))
        total = torch.zeros((), device=accelerator.device)
        for position, batch in enumerate(share):
            # DDP takes the mean over ranks of what each has summed up.
            waits = position < len(share) - 1
            with accelerator.no_sync(model) if waits else nullcontext():
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                summed = torch.nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1).float(),
                    batch["labels"][:, 1:].flatten(),
                    ignore_index=IGNORED,
                    reduction="sum",
                )
                accelerator.backward(summed * accelerator.num_processes / num_targets)
            total += summed.detach()
        accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        report.losses[step] = float(accelerator.reduce(total) / num_targets)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(Path(order.folder) / "adapter")
    collator.fill(report, job)
    accelerator.end_training()
    return report
