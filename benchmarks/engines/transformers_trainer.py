"""The plain Trainer of transformers, on a PEFT model: with padded rows, or with rows that stand one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.clock import RankReport, StepClock
from benchmarks.engines import torch_varlen
from benchmarks.engines.peer_rows import SeenRows, dataset_of
from benchmarks.job import LEARNING_RATE, LORA_ALPHA, LORA_RANK, LORA_TARGETS, MAX_GRAD_NORM
from benchmarks.worker import Order


def train(order: Order, options: Mapping[str, Any], clock: StepClock) -> RankReport:
    """Train the job as the options have it."""
    from peft import get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        DataCollatorWithFlattening,
        Trainer,
        TrainingArguments,
    )

    from benchmarks.base_model import make_base

    auto: Any = AutoModelForCausalLM
    init = model_arguments(order, options)
    model = (
        auto.from_pretrained(order.base, **init) if order.has_weights else make_base(order.job, order.job.shape, **init)
    )
    tokenizer = AutoTokenizer.from_pretrained(order.base)
    keywords = arguments(order, options)
    collate: Any = DataCollatorForSeq2Seq(tokenizer)
    if options.get("flattened"):
        collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)  # type: ignore[no-untyped-call]
    collator = SeenRows(collate, keywords["gradient_accumulation_steps"])
    trainer = Trainer(
        model=get_peft_model(model, lora_config(order.job.shape.family)),
        args=TrainingArguments(**keywords, use_liger_kernel=options.get("liger", False)),
        train_dataset=dataset_of(order.job),
        processing_class=tokenizer,
        data_collator=collator,
    )
    clock.watch()
    trainer.train()
    trainer.save_model(str(Path(order.folder) / "adapter"))
    return report_of(trainer, collator, order)


def report_of(trainer: Any, seen: SeenRows, order: Order) -> RankReport:
    """What a Trainer has done. Its first line of the log is that of the first step."""
    lines = [line for line in trainer.state.log_history if "loss" in line]
    report = RankReport(losses={line["step"]: line["loss"] for line in lines})
    seen.fill(report, order.job)
    return report


def model_arguments(order: Order, options: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers is told when it makes or loads the base model."""
    from benchmarks.base_model import TORCH_TYPES

    init = {"dtype": TORCH_TYPES[order.job.precision]}
    if "attention" in options:
        torch_varlen.register()
        init["attn_implementation"] = options["attention"]
    return init


def arguments(order: Order, options: Mapping[str, Any]) -> dict[str, Any]:
    """What every Trainer is told. On the CPU a model in bf16 is trained without autocast."""
    job = order.job
    per_rank = job.global_batch // job.processes
    batch_size = min(options["batch_size"], per_rank)
    return {
        "output_dir": str(Path(order.folder) / "run"),
        "max_steps": job.steps,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": per_rank // batch_size,
        "train_sampling_strategy": options.get("sampling", "sequential"),
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "linear",
        "max_grad_norm": MAX_GRAD_NORM,
        "gradient_checkpointing": False,
        "bf16": job.device == "cuda" and job.precision == "bf16",
        "use_cpu": job.device == "cpu",
        "dataloader_pin_memory": job.device == "cuda",
        "logging_first_step": True,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": job.seed,
    }


def lora_config(family: str) -> Any:
    """The adapter for a model of this type."""
    from peft import LoraConfig

    targets = list(LORA_TARGETS[family])
    return LoraConfig(task_type="CAUSAL_LM", r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=targets)
