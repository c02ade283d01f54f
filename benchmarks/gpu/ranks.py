"""Part `ranks`: two ranks against one, one that is lost, and sharded weights.

On GPUs the ranks talk through nccl. If there is one GPU, they share it (`parallel.share_gpus`), and the times mean
nothing. Without a GPU they compute on the CPU, and talk through gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from benchmarks import sharding
from benchmarks.base_model import write_base, write_base_without_weights
from benchmarks.bench import ROOT
from benchmarks.clock import RankReport
from benchmarks.gpu.recovery import (
    FILES,
    WORDS,
    finish,
    largest_difference,
    losses_of,
    reason_in,
    start,
    wait_for_checkpoint,
)
from benchmarks.gpu.session import Session, kept_folder
from benchmarks.job import Job
from benchmarks.summary import figures_of
from benchmarks.worker import Order, torchrun

_ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
)
_LAUNCHERS = {"torchrun": torchrun(2), "accelerate": _ACCELERATE}
"""Arguments of Python. In other forms, one process is started."""
_BATCH = ("training.global_batch_size=8", "training.batch_size=4")
"""The same micro-batches for one rank and for two: with dropout, the curve depends on them."""
_TINY = ("data.max_rows=48", "training.max_steps=4", "validation.validate_every=4")
_FP32 = "training.precision=fp32"
_SHARED = ("parallel.share_gpus=true", "parallel.backend=nccl")
_NCCL_ON_ONE_GPU = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "shared_gpu"), os.environ.get("PYTHONPATH", "")]),
    **{"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_CTAS": "2"},
}
"""With these variables, nccl connects ranks that share a GPU. See `shared_gpu/sitecustomize.py`."""
_CURVE_PROMISE, _WEIGHTS_PROMISE = 1e-6, 1e-5
"""Of the losses and of the adapter, in fp32 (ARCHITECTURE.md)."""
_SECONDS_PROMISED, _SECONDS_WAITED = 15.0, 90.0
_FAILED = 3
"""The exit code of a run that lost a rank."""


def curve(session: Session, *, form: str, precision: str) -> dict[str, Any]:
    """Compare the losses and the adapter of two ranks, started in one way, with those of one process."""
    words = (*_BATCH, f"training.precision={precision}")
    alone = _finished(session, "alone", words)
    together = _finished(session, form, words)
    record = json.loads((together / "run.json").read_text())
    tensors = [load_file(run / _files(session)[0]) for run in (alone, together)]
    weights, others = (torch.cat([found[name].double().flatten() for name in sorted(found)]) for found in tensors)
    figures = {
        **_world(session),
        "launcher": record["launcher"],
        "backend": record["backend"],
        "ranks": record["world_size"],
        "largest_loss_difference": largest_difference(losses_of(alone), losses_of(together)),
        "adapter_difference": float((weights - others).norm() / weights.norm()),
    }
    if precision == "fp32":
        is_equal = figures["largest_loss_difference"] <= _CURVE_PROMISE
        figures["is_right"] = is_equal and figures["adapter_difference"] <= _WEIGHTS_PROMISE and figures["ranks"] == 2
    return figures


def against_one(session: Session, *, words: Sequence[str]) -> dict[str, Any]:
    """Train LoRA on two ranks and on one: losses, tokens per second and the peak of memory of each.

    Args:
        session: where to compute. GPUs of their own train Phi-4-mini's shape, a shared one a small model.
        words: how the ranks share the work.
    """
    job = session.job("mini")
    if _shares(session):
        job = replace(job, size="sharded")
    alone, _ = _trained(job, [])
    together, backend = _trained(replace(job, processes=2), [*_two_ranks(session), *words])
    rates = [figures_of(job, reports)["tokens_per_second"] for reports in (alone, together)]
    curves = [[reports[0].losses[step + 1] for step in range(job.steps)] for reports in (alone, together)]
    figures = {
        **_world(session),
        "backend": backend,
        "job": job.name,
        "tokens_per_second": rates[1],
        "tokens_per_second_of_one": rates[0],
        "times_as_fast": rates[1] / rates[0],
        "peak_bytes_of_one": alone[0].timed_peak_memory,
        "largest_loss_difference": largest_difference(*curves),
    }
    for rank, report in enumerate(together):
        figures[f"peak_bytes_of_rank_{rank}"] = report.timed_peak_memory
    if job.precision == "fp32":
        figures["is_right"] = figures["largest_loss_difference"] <= _CURVE_PROMISE
    return figures


def lose_a_rank(session: Session, *, is_killed: bool) -> dict[str, Any]:
    """Kill rank 1 of a run, or stop it (SIGSTOP), and time how long it takes until all processes have ended."""
    words = [*WORDS, *_BATCH, *_two_ranks(session), "training.max_steps=100000", "parallel.num_processes=2"]
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        process = start([*words, f"data.cache_dir={kept_folder()}/cache"], run)
        try:
            wait_for_checkpoint(process, 2)
            own = psutil.Process(process.pid)
            everyone = [own, *own.children(recursive=True)]
            (rank_1,) = [one for one in own.children() if one.environ().get("RANK") == "1"]
            began = time.monotonic()
            rank_1.kill() if is_killed else rank_1.suspend()
            _, log = process.communicate(timeout=_SECONDS_WAITED)
            _, left = psutil.wait_procs(everyone, timeout=_SECONDS_WAITED)
            seconds = time.monotonic() - began
        finally:
            _end_all(process)
        record = json.loads((run / "run.json").read_text())
    sys.stdout.write(log)
    return {
        **_world(session),
        "backend": record["backend"],
        "seconds_until_all_have_ended": seconds,
        "exit_code": process.returncode,
        "error": str(record["result"].get("error")),
        "processes_left": len(left),
        "is_right": seconds <= _SECONDS_PROMISED and process.returncode == _FAILED and not left,
    }


def same_bytes(session: Session) -> dict[str, Any]:
    """Compare the files of LoRA on a sharded base with those of an unsharded run on as many ranks."""
    words = (*_BATCH, _FP32, *(["training.deterministic=true"] if session.device == "cuda" else []))
    whole = _finished(session, "torchrun", words)
    shards = _finished(session, "torchrun", (*words, "parallel.sharding=fsdp2"))
    files = _files(session)
    equal = [name for name in files if (whole / name).read_bytes() == (shards / name).read_bytes()]
    record = json.loads((shards / "run.json").read_text())
    return {
        **_world(session),
        "backend": record["backend"],
        "shard_size": record["shard_size"],
        "files_compared": len(files),
        "files_with_equal_bytes": len(equal),
        "largest_loss_difference": largest_difference(losses_of(whole), losses_of(shards)),
        "is_right": record["shard_size"] == 2 and len(equal) == len(files),
    }


def gather_checkpoint(session: Session) -> dict[str, Any]:
    """Train all weights of a model, sharded over two ranks, and time how long its checkpoint takes."""
    size = "tiny" if session.is_tiny else "sharded"
    more = [*_two_ranks(session), "checkpoint.background=false"]
    with TemporaryDirectory() as name:
        folder, base = Path(name) / "work", Path(name) / "base"
        folder.mkdir()
        write_base(Job(size=size), base)
        _, step = sharding.measure(base, folder, size, method="full", sharding="fsdp2", num_ranks=2, more=more)
        record = json.loads((folder / "run" / "run.json").read_text())
        newest = max((folder / "run" / "checkpoints").iterdir())
        written = sum(file.stat().st_size for file in newest.glob("*.safetensors"))
    saving = record["result"]["saving"]
    seconds = saving["blocked_seconds"] / saving["checkpoints"]
    return {
        **_world(session),
        "backend": record["backend"],
        "checkpoint_bytes": written,
        "checkpoint_seconds": seconds,
        "bytes_per_second": written / seconds,
        "median_step_seconds": step,
    }


def _files(session: Session) -> list[str]:
    """Return the files of a finished run that hold the adapter and its optimizer."""
    return [name.replace("000012", "000004") if session.is_tiny else name for name in FILES]


def _shares(session: Session) -> bool:
    return session.device == "cuda" and torch.cuda.device_count() < 2


def _two_ranks(session: Session) -> list[str]:
    """Return the settings with which two ranks compute here, and set the variables that they inherit."""
    if _shares(session):
        os.environ.update(_NCCL_ON_ONE_GPU)
    return [f"training.device={session.device}", *(_SHARED if _shares(session) else ())]


def _world(session: Session) -> dict[str, Any]:
    """Say on how many GPUs the figures were taken."""
    return {"gpus": torch.cuda.device_count() if session.device == "cuda" else 0, "ranks_share_a_gpu": _shares(session)}


@cache
def _finished(session: Session, form: str, words: tuple[str, ...]) -> Path:
    """Train the embedded model with the launcher of a form, unless this process has done so; return its folder."""
    run = kept_folder() / f"{form}-{len(list(kept_folder().iterdir()))}"
    own = [*WORDS, *(_TINY if session.is_tiny else ()), *words, f"data.cache_dir={kept_folder()}/cache"]
    own += [f"training.device={session.device}"] if form == "alone" else _two_ranks(session)
    finish(start([*own, *(["parallel.num_processes=2"] if form == "spawn" else [])], run, _LAUNCHERS.get(form, ())))
    return run


def _trained(job: Job, words: Sequence[str]) -> tuple[list[RankReport], str | None]:
    """Train a job with finetune in processes of its own; return what each rank reports, and the ranks' backend."""
    with TemporaryDirectory() as folder:
        base = str(Path(folder) / "base")
        write_base_without_weights(job, Path(base))
        own = ("training.batch_size=1", *words)
        order = Order(engine="ours", words=own, job=job, base=base, folder=folder, has_weights=False)
        done = subprocess.run([sys.executable, *order.command()], cwd=ROOT, capture_output=True, text=True)
        reports = order.reports()
        record = Path(folder) / "run" / "run.json"
        backend = json.loads(record.read_text())["backend"] if record.exists() else None
    if done.returncode or len(reports) != job.processes:
        raise RuntimeError(f"{len(reports)} of {job.processes} ranks have trained: {reason_in(done.stderr)}")
    return reports, backend


def _end_all(process: subprocess.Popen[str]) -> None:
    """End a run that is still there, with all that it started."""
    if process.poll() is None:
        for one in psutil.Process(process.pid).children(recursive=True):
            one.kill()
        process.kill()
        process.communicate()
