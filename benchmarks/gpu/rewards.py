"""Part `rewards`: GRPO on Phi-4-mini's shape: the update, a whole step, and the sampling of answers."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.base_model import TORCH_TYPES, make_base, write_base_without_weights
from benchmarks.clock import RankReport, StepClock, forget_peak, peak_memory
from benchmarks.engines import ours
from benchmarks.gpu.runs import against_plan, plan_of
from benchmarks.gpu.session import Session
from benchmarks.gpu.timing import synchronize, with_adapter
from benchmarks.job import FIRST_TEXT_ID, Job
from benchmarks.worker import Order, timed
from finetune.data.encoded import EncodedExamples, EncodedSplits
from finetune.engine.fused import fused_or_not, replayed_or_not
from finetune.inference import decoding
from finetune.inference.sampling import Sampling
from finetune.runs.folder import RunFolder
from finetune.runs.rollouts import write_rollout
from finetune.training.rewards import functions

_END_ID = 2


class _Sizes(NamedTuple):
    """The prompts and answers of a step."""

    prompts: int
    answers: int
    """To each prompt."""
    tokens: int
    """Of a prompt, and of an answer."""


def train(session: Session, *, generates: bool, words: Sequence[str] = ()) -> dict[str, Any]:
    """Time steps of GRPO, and compare the peak of memory with the plan.

    A shared prompt counts once for each answer, as in metrics.jsonl, and once in all among the distinct tokens.

    Args:
        session: where to compute.
        generates: whether the model generates the answers. Otherwise they are on record, so that a step is its update.
        words: more settings.
    """
    sizes = _Sizes(2, 4, 24) if session.is_tiny else _Sizes(8 if generates else 4, 8, 2048)
    steps, warmup = (2, 1) if generates or session.is_tiny else (6, 3)
    job = replace(session.job("mini"), steps=steps, warmup_steps=warmup)
    with TemporaryDirectory() as name, _rewarding_by_tokens():
        folder = Path(name)
        write_base_without_weights(job, folder / "base")
        order = Order(
            engine="ours",
            words=(*_words(sizes), *words),
            job=job,
            base=str(folder / "base"),
            folder=str(folder),
            has_weights=False,
        )
        plan = plan_of(order, task="finetune_grpo")
        recorded = None if generates else _recorded(RunFolder(folder / "recorded"), job, sizes)
        forget_peak(session.device)
        report = timed(order, lambda clock: _train(order, sizes, recorded, clock))
        events = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        learnt = [event for event in events if event["event"] == "step"]
    seconds = [after - before for before, after in pairwise(mark.wall for mark in report.marks)][warmup - 1 :]
    timed_steps = list(zip((event["num_tokens"] for event in learnt[warmup:]), seconds, strict=True))
    rates = [num_tokens / time for num_tokens, time in timed_steps]
    repeated = sizes.prompts * (sizes.answers - 1) * sizes.tokens
    distinct_rates = [(num_tokens - repeated) / time for num_tokens, time in timed_steps]
    generated = {name: learnt[-1][name] for name in ("rollout_seconds", "answer_length")} if generates else {}
    return {
        "job": f"{job.name}, {sizes.prompts} prompts, {sizes.answers} answers each, {sizes.tokens} tokens",
        "median_tokens_per_second": statistics.median(rates),
        "median_distinct_tokens_per_second": statistics.median(distinct_rates),
        "slowest_tokens_per_second": min(rates),
        "fastest_tokens_per_second": max(rates),
        "median_step_ms": 1e3 * statistics.median(seconds),
        "timed_steps": len(rates),
        **generated,
        "first_step_seconds": report.marks[0].wall,
        "timed_peak_allocated_bytes": report.timed_peak_memory,
        "peak_reserved_bytes": report.peak_reserved,
        **against_plan(session, report, plan),
    }


def sample(session: Session, *, by: Literal["engine", "graph", "transformers"], batch: int) -> dict[str, Any]:
    """Time answers to different prompts that are sampled together: 512 tokens each, and 128 new ones.

    Args:
        session: where to compute.
        by: the engine, which a run uses on CPUs only, the engine with CUDA graphs (`training.graphs=true`), which a
            CPU computes step by step, or transformers' `generate`.
        batch: the number of answers.
    """
    batch, prompt, new = (min(batch, 4), 8, 6) if session.is_tiny else (batch, 512, 128)
    model = _model(session)
    prompts = _rows(random.Random(0), batch, prompt, model.config.vocab_size)

    def seconds_for(num_tokens: int) -> float:
        asked = decoding.Decoding(stop_ids=[_END_ID], max_new_tokens=num_tokens, sampling=Sampling(), keeps_stop=True)
        synchronize(session)
        started = time.perf_counter()
        answers = decoding.sample_answers(model, prompts, asked, batch_size=batch)
        synchronize(session)
        counts.append(sum(len(answer.ids) for answer in answers))
        return time.perf_counter() - started

    counts: list[int] = []
    is_cuda = session.device == "cuda"
    autocast = torch.autocast(session.device, dtype=torch.bfloat16) if is_cuda else nullcontext()
    chosen = patch.object(decoding, "engine_continues", lambda _: by != "transformers")
    with chosen, replayed_or_not(by == "graph"), fused_or_not(is_cuda), autocast:
        seconds_for(2)
        forget_peak(session.device)
        whole, beginning = seconds_for(new), seconds_for(1)
    return {
        "answers": batch,
        "new_tokens_per_second": counts[1] / whole,
        "prompt_ms": 1e3 * beginning,
        "ms_per_token": 1e3 * (whole - beginning) / (new - 1),
        "peak_allocated_bytes": peak_memory(session.device),
    }


def _words(sizes: _Sizes) -> tuple[str, ...]:
    return (
        *(
            "training.objective=grpo",
            "reward.functions=length",
            "data.path=shipped:orders",
            f"data.max_length={sizes.tokens}",
        ),
        *(f"rollout.num_generations={sizes.answers}", f"rollout.max_completion_length={sizes.tokens}"),
        f"training.global_batch_size={sizes.prompts}",
    )


def _rewarding_by_tokens() -> Any:
    """Within the block, reward `length` tells answers of the same length apart, which the real one would not."""
    tokens: Mapping[str, functions.Score] = {"length": lambda answer: sum(answer.ids) % 97 / 97}
    return patch.object(functions, "built_in_functions", lambda *_, **__: tokens)


def _train(order: Order, sizes: _Sizes, recorded: RunFolder | None, clock: StepClock) -> RankReport:
    """Train through what a recipe calls."""
    from finetune import Trainer, add_lora, build_tokenizer, launch, load_config

    config = load_config([*ours.words(order), *order.words], task="finetune_grpo")
    with launch(config) as runtime:
        clock.watch()
        model = add_lora(ours.base_model(order, config, runtime.device), config.lora)
        number = order.job.steps * sizes.prompts
        prompts = _rows(random.Random(0), number, sizes.tokens, model.config.vocab_size)
        # Each row needs an answer; nothing reads it.
        rows = [([*ids, FIRST_TEXT_ID], [False] * len(ids) + [True]) for ids in prompts]
        splits = EncodedSplits(EncodedExamples.from_rows(rows, end_id=_END_ID, row_type="messages"))
        trainer = Trainer(runtime, config, model, build_tokenizer(config.model), splits)
        loader: Any = trainer.prepare_dataloaders().train
        loader.recorded = recorded
        trainer.run_training(loader)
    return RankReport()


def _recorded(folder: RunFolder, job: Job, sizes: _Sizes) -> RunFolder:
    """Write made-up answers for each step, as a run with these sizes records them."""
    folder.path.mkdir()
    rng = random.Random(1)
    for step in range(1, job.steps + 1):
        ids = iter(_rows(rng, sizes.prompts * sizes.answers, sizes.tokens, job.shape.vocabulary))
        groups = [
            {"answers": [{"ids": next(ids), "rewards": {"length": rng.random()}} for _ in range(sizes.answers)]}
            for _ in range(sizes.prompts)
        ]
        write_rollout(folder, {"step": step, "groups": groups})
    return folder


def _rows(rng: random.Random, number: int, tokens: int, vocabulary: int) -> list[list[int]]:
    return [rng.choices(range(FIRST_TEXT_ID, vocabulary), k=tokens) for _ in range(number)]


@cache
def _model(session: Session) -> Any:
    job = session.job("mini")
    return with_adapter(make_base(job, job.shape, dtype=TORCH_TYPES[job.precision]), job.precision).eval()
