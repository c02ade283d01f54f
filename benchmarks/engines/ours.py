"""finetune, through what a recipe calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.clock import EnoughError, RankReport, StepClock, peak_memory
from benchmarks.job import LEARNING_RATE, LORA_ALPHA, LORA_RANK, MAX_GRAD_NORM, Job, row_shape
from benchmarks.worker import Order

_END_ID = 2


def train(order: Order, options: Mapping[str, Any], clock: StepClock) -> RankReport:
    """Train the job. The order's words come last, so that each of these can be set otherwise."""
    job = order.job
    from finetune import Trainer, add_lora, build_tokenizer, launch, load_config
    from finetune.data.encoded import EncodedExamples, EncodedSplits

    # A run wants the data's path; the rows are handed over as they are.
    config = load_config([*words(order), "data.path=shipped:orders", *order.words], task="finetune_lora")
    with launch(config) as runtime:
        clock.watch()
        tokenizer = build_tokenizer(config.model)
        base = base_model(order, config, runtime.device)
        if config.lora.quantize != "none":
            clock.loading_peak = peak_memory(job.device)
        model = add_lora(base, config.lora) if job.method == "lora" else base
        splits: Any
        if job.objective == "dpo":
            splits = _pairs(job, config.seed)
        else:
            rows = _so_that_they_come_in_order(job, job.rows(), job.global_batch, config.seed)
            splits = EncodedSplits(EncodedExamples.from_rows(rows, end_id=_END_ID))
        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, _, _ = trainer.prepare_dataloaders()
        with suppress(EnoughError):
            trainer.run_training(train_loader)
    return _report(order) if order.rank == 0 else RankReport()


def base_model(order: Order, config: Any, device: Any) -> Any:
    """Read the base of a run, or make one of the same shape with random weights on the device."""
    import torch

    from benchmarks.base_model import TORCH_TYPES
    from finetune import build_base_model
    from finetune.model.quantized import load_in_4_bits

    if config.lora.quantize != "none":
        return load_in_4_bits(config.model, device)
    if order.has_weights:
        return build_base_model(config.model)
    # The configuration goes on naming the folder: with `init: random` the run would save these weights.
    with torch.device(device):
        made = config.model.model_copy(update={"init": "random"})
        return build_base_model(made, dtype=TORCH_TYPES[order.job.precision])


def words(order: Order) -> list[str]:
    """Return the configuration of the job, without data."""
    job = order.job
    adapter = [
        f"lora.r={LORA_RANK}",
        f"lora.alpha={LORA_ALPHA}",
        f"lora.target_modules={json.dumps(job.shape.lora_targets)}",
    ]
    return [
        f"model.path={order.base}",
        f"data.max_length={job.longest}",
        f"output_dir={Path(order.folder) / 'run'}",
        f"seed={job.seed}",
        f"training.method={job.method}",
        *(adapter if job.method == "lora" else []),
        f"optim.learning_rate={LEARNING_RATE}",
        f"optim.max_grad_norm={MAX_GRAD_NORM}",
        f"training.max_steps={job.steps + (job.method == 'full')}",  # see EnoughError
        f"training.global_batch_size={job.global_batch // (2 if job.objective == 'dpo' else 1)}",
        f"training.objective={job.objective}",
        *_micro_batches(job),
        f"training.precision={job.precision}",
        f"training.device={job.device}",
    ]


def _micro_batches(job: Job) -> list[str]:
    """By tokens. More are faster and take more memory; `real` in fp32 has a figure for each to reach."""
    if job.device == "cuda":
        return []  # there, memory decides
    if job.shape.row_tokens:
        return ["training.batch_size=1"]
    is_lean = (job.size, job.precision, job.objective) == ("real", "fp32", "sft")
    tokens = 4096 if job.has_shared_prompt else 640 if is_lean else 2048
    return [f"training.batch_size={job.global_batch}", f"training.max_tokens_per_microbatch={tokens}"]


def _pairs(job: Job, seed: int) -> Any:
    from finetune.data.encoded import EncodedExamples
    from finetune.data.preferences import EncodedPairs, EncodedPairSplits

    rows = job.rows()
    pairs = list(zip(rows[0::2], rows[1::2], strict=True))
    placed = _so_that_they_come_in_order(job, pairs, job.global_batch // 2, seed)
    chosen, rejected = (EncodedExamples.from_rows([pair[side] for pair in placed], end_id=_END_ID) for side in (0, 1))
    return EncodedPairSplits(train=EncodedPairs(chosen, rejected, "pairs"))


def _so_that_they_come_in_order(job: Job, rows: list[Any], global_batch: int, seed: int) -> list[Any]:
    """The rows or pairs, put so that the shuffling of the run's first epoch brings them into the job's own order."""
    from finetune.data.batches import BatchRule

    rule = BatchRule(lengths=[job.longest] * len(rows), global_batch_size=global_batch, batch_size=1, seed=seed)
    placed = dict(zip(rule.order(0), rows, strict=True))
    return [placed[place] for place in range(len(rows))]


def _report(order: Order) -> RankReport:
    """Rank 0 answers for the rows of all ranks; what the run wrote of its steps must agree."""
    job = order.job
    batch = job.global_batch
    rows = [row_shape(row) for row in job.rows()]
    steps = [rows[step * batch : (step + 1) * batch] for step in range(job.steps)]
    lines = (Path(order.folder) / "run" / "metrics.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "step"]
    is_of_pairs = job.objective == "dpo"
    num_targets = [batch // 2 if is_of_pairs else sum(r.num_targets for r in step) for step in steps]
    expected = [(sum(r.num_tokens for r in step), n) for step, n in zip(steps, num_targets, strict=True)]
    written = [(event["num_tokens"], event["num_targets"]) for event in events]
    if written != expected:
        raise RuntimeError(f"the steps had other rows than the job's: (tokens, targets) {written}, not {expected}")
    losses = {event["step"]: event["loss"] for event in events}
    return RankReport(rows=steps, first_rows=[] if is_of_pairs else list(range(batch)), losses=losses)
