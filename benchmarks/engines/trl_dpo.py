"""TRL's DPOTrainer, whose reference is the base with its adapter switched off, like ours."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.clock import RankReport, StepClock
from benchmarks.engines.transformers_trainer import arguments, lora_config
from benchmarks.engines.trl_sft import score_targets_only
from benchmarks.job import Job, row_shape
from benchmarks.worker import Order


def train(order: Order, options: Mapping[str, Any], clock: StepClock) -> RankReport:
    """Train the job with its pairs in their order, as the options have it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.base_model import TORCH_TYPES

    trl: Any = importlib.import_module("trl")
    if options.get("only_targets"):
        score_targets_only()
    job = order.job
    keywords = arguments(order, options)
    keywords["gradient_accumulation_steps"] //= 2  # two rows are a pair
    auto: Any = AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = _trainer_of_ids(trl)(
            model=auto.from_pretrained(order.base, dtype=TORCH_TYPES[job.precision]),
            args=trl.DPOConfig(**keywords, max_length=job.longest),
            train_dataset=_pairs(job),
            processing_class=AutoTokenizer.from_pretrained(order.base),
            peft_config=lora_config(order.job.shape.family),
        )
    clock.watch()
    trainer.train()
    trainer.save_model(str(Path(order.folder) / "adapter"))
    lines = [line for line in trainer.state.log_history if "loss" in line]
    rows = [row_shape(row) for row in job.rows()]
    steps = [rows[step * job.global_batch : (step + 1) * job.global_batch] for step in range(job.steps)]
    return RankReport(rows=steps, losses={line["step"]: line["loss"] for line in lines})


def _trainer_of_ids(trl: Any) -> Any:
    """The trainer for rows that are token ids already."""

    class Trainer(trl.DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

    return Trainer


def _pairs(job: Job) -> Any:
    """A `datasets.Dataset` of prompt_ids, chosen_ids and rejected_ids."""
    from datasets import Dataset

    rows = job.rows()
    pairs = [(*pair, pair[0].is_target.index(True)) for pair in zip(rows[0::2], rows[1::2], strict=True)]
    return Dataset.from_dict(
        {
            "prompt_ids": [chosen.ids[:prompt] for chosen, _, prompt in pairs],
            "chosen_ids": [chosen.ids[prompt:] for chosen, _, prompt in pairs],
            "rejected_ids": [rejected.ids[prompt:] for _, rejected, prompt in pairs],
        }
    )
