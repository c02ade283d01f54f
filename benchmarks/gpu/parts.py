"""What a session runs, in the order that tells most, and what each task needs. No torch is imported here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.engines import ENGINES
from benchmarks.gpu.session import Kind, Session

TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
"""Of the micro-batches that part `profile` looks at."""
BATCHES = (1, 8, 64, 256)
"""Of answers that part `rewards` samples together."""
HEAD_SIZES = (64, 96, 128)
"""The widths of one head: of the tests, of Phi-3-mini, of phi-4 and Phi-4-mini."""
PEERS: dict[Kind, tuple[str, ...]] = {
    "mini": ("ours", "trl-1x16", "trl-1x16-liger", "trl-1x16-flash"),
    "chat": (
        *("ours", "trl-grouped-16", "trl-grouped-16-liger", "trl-packed-flash-liger"),
        *("trl-packed-flex", "trl-packed-flex-liger", "trl-packed-varlen-liger"),
        *("trl-free-flex", "trl-free-flex-liger", "trl-free-varlen", "trl-free-varlen-liger"),
        *("trl-free-64-varlen-liger", "trainer-flat-varlen-liger", "trainer-flat-64-varlen-liger"),
    ),
}
"""Engines on Phi-4-mini's shape."""


CUT = Path("runs/real-cut")
"""The folder with a part of a real model, which `python -m benchmarks.gpu.real` makes."""
REAL_PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "nf4")
"""In which part `real` trains."""

PHI4_RUNS: Mapping[str, tuple[str, ...]] = {
    "defaults": (),
    "plain": ("training.batch_size=1", "training.gradient_checkpointing=false"),
    "checkpointed": ("training.batch_size=1", "training.gradient_checkpointing=true"),
    "fp8": (
        *("training.batch_size=1", "training.gradient_checkpointing=false"),
        *("training.precision=bf16", "model.frozen_precision=fp8"),
    ),
    "least": ("training.memory=least",),
}
"""The words of the runs of part `phi4`. By default, memory decides."""

_ONE_ROW = ("training.batch_size=1", "training.gradient_checkpointing=false")
QLORA_RUNS: Mapping[str, tuple[str, ...]] = {
    "defaults": ("lora.quantize=nf4",),
    "one-row": ("lora.quantize=nf4", *_ONE_ROW),
    "least": ("lora.quantize=nf4", "training.memory=least"),
}
"""The words of the runs of part `qlora`. One row in a micro-batch is what its peers train."""
QLORA_CARDS = {"least-12gb": 12}
"""The run `least` within the memory of a smaller card, in GB."""
QLORA_PEERS = ("peft-nf4-liger", "peft-nf4-checkpointed-liger")
FULL_PEERS = ("full-fp32-liger", "full-bf16-liger")
"""The other engines of the parts `qlora` and `full`."""

LAUNCH_FORMS = ("torchrun", "accelerate", "spawn")
"""The ways in which part `ranks` starts two ranks; the last is `parallel.num_processes=2`."""


class Switch(NamedTuple):
    """A gain that can be turned off. `python -m benchmarks.gpu_session` measures it on and off."""

    off: tuple[str, ...]
    """The words that turn it off."""
    kind: Kind
    """The job on which it should show."""


SWITCHES = {
    "engine": Switch(("training.kernels=reference",), "chat"),
    "fused": Switch(("training.fused=false",), "mini"),
    "packing": Switch(("training.packing=false",), "chat"),
    "tokens-by-memory": Switch(("training.batch_size=8",), "chat"),
    "workers": Switch(("training.num_workers=0", "training.pin_memory=false"), "chat"),
    "share_prefixes": Switch(("training.share_prefixes=false",), "prompt"),
}
"""The gains of part `gains`. One that is added here is measured."""


class Task(NamedTuple):
    """One measurement: a function that returns figures by name."""

    name: str
    """`PART/WHAT`."""
    function: str
    """Its module and its name, with a colon between them."""
    seconds: int
    """It is ended when it takes longer. A start with less time left leaves it to the next."""
    arguments: Mapping[str, Any] = MappingProxyType({})
    needs: tuple[str, ...] = ()
    """Modules that must be installed."""
    is_for_cuda: bool = False
    """There is nothing to measure elsewhere."""
    needs_cut: bool = False
    """It reads `CUT`."""
    is_isolated: bool = False
    """It leaves settings of its libraries behind, and so has a process of its own."""

    @property
    def part(self) -> str:
        """The part that it belongs to."""
        return self.name.partition("/")[0]


_OF_A_RUN = ("pydantic", "accelerate", "peft", "psutil", "typer", "rich", "jinja2")
"""What finetune's configuration and trainer import beside torch and transformers."""

_IMPORTS = {
    "pydantic": ("pydantic_core", "annotated_types", "typing_inspection", "typing_extensions"),
    "datasets": ("dill", "multiprocess", "pyarrow", "xxhash", "pandas"),
}
"""What these modules import in turn, beside torch's own needs and those of transformers."""
_PACKAGES = {"xdist": "pytest-xdist"}
"""Packages that are not called like their module."""


def tasks() -> Iterator[Task]:
    """Yield all tasks in their order."""
    yield Task("kernels/signatures", "benchmarks.gpu.kernels:signatures", 120)
    for precision, size in (*(("bf16", size) for size in HEAD_SIZES), ("fp32", HEAD_SIZES[-1])):
        how = {"precision": precision, "head_size": size}
        yield Task(f"kernels/attention-{precision}-{size}", "benchmarks.gpu.kernels:attention_against_dense", 180, how)
    yield Task("kernels/engine", "benchmarks.gpu.kernels:engine_against_model", 180, needs=("peft",))
    yield Task("kernels/syncs", "benchmarks.gpu.kernels:synchronisations", 120, needs=_OF_A_RUN)

    yield Task("profile/limit", "benchmarks.gpu.step_profile:limits", 60)
    profile = "benchmarks.gpu.step_profile:profile_microbatch"
    for number in TOKENS:
        yield Task(f"profile/{number}", profile, 120, {"tokens": number}, needs=("peft",))
    yield Task("profile/chat", profile, 120, needs=("peft",))
    for way in ("unfused", "graph"):
        yield Task(f"profile/1024-{way}", profile, 120, {"tokens": 1024, "way": way}, ("peft",), way == "graph")
    for name, more in {"train": (), "train-graphs": ("training.graphs=true",)}.items():
        yield _run(f"profile/1024-{name}", 180, kind="short", words=("training.batch_size=1", *more))

    for kind, engines in PEERS.items():
        yield from (_run(f"peers/{kind}/{engine}", 180, engine=engine, kind=kind) for engine in engines)
    yield Task("peers/attention", "benchmarks.gpu.kernels:attention_speed", 60)

    for name, words in PHI4_RUNS.items():
        yield _run(f"phi4/{name}", 240, kind="phi4", words=words, compares_with_plan=True)

    yield Task("rewards/update", "benchmarks.gpu.rewards:train", 240, {"generates": False}, _OF_A_RUN)
    yield Task("rewards/step", "benchmarks.gpu.rewards:train", 540, {"generates": True}, _OF_A_RUN)
    in_graphs = {"generates": True, "words": ("training.graphs=true",)}
    yield Task("rewards/step-graphs", "benchmarks.gpu.rewards:train", 540, in_graphs, _OF_A_RUN)
    for batch, by in product(BATCHES, ("engine", "graph", "transformers")):
        how = {"by": by, "batch": batch}
        yield Task(f"rewards/{by}-{batch}", "benchmarks.gpu.rewards:sample", 120, how, _OF_A_RUN)
    of_qlora = {"kind": "phi4", "needs": ("bitsandbytes",), "reads_weights": True, "compares_with_plan": True}
    for name, words in QLORA_RUNS.items():
        yield _run(f"qlora/{name}", 420, words=words, **of_qlora)
    for name, gigabytes in QLORA_CARDS.items():
        yield _run(f"qlora/{name}", 420, words=QLORA_RUNS["least"], gigabytes=gigabytes, **of_qlora)
    yield from (_run(f"qlora/{engine}", 240, engine=engine, kind="phi4") for engine in QLORA_PEERS)
    yield Task("real/gradient", "benchmarks.gpu.real:gradient", 120, needs=(*_OF_A_RUN, "gguf"), needs_cut=True)
    for precision in REAL_PRECISIONS:
        needs = (*_OF_A_RUN, "gguf", *(("bitsandbytes",) if precision == "nf4" else ()))
        how, is_for_cuda = {"precision": precision}, precision == "fp16"
        yield Task(f"real/{precision}", "benchmarks.gpu.real:train", 120, how, needs, is_for_cuda, needs_cut=True)
    yield _run("full/mini", 240, kind="mini", method="full", compares_with_plan=True)
    yield from (_run(f"full/{engine}", 240, engine=engine, kind="mini", method="full") for engine in FULL_PEERS)

    for kind in dict.fromkeys(switch.kind for switch in SWITCHES.values()):
        yield _run(f"gains/{kind}/all", 150, kind=kind)
        for name, switch in SWITCHES.items():
            if switch.kind == kind:
                yield _run(f"gains/{kind}/without-{name}", 150, kind=kind, words=switch.off)

    yield Task(
        "recovery/deterministic", "benchmarks.gpu.recovery:kill_and_resume", 180, {"is_deterministic": True}, _OF_A_RUN
    )
    yield Task("recovery/default", "benchmarks.gpu.recovery:kill_and_resume", 180, needs=_OF_A_RUN, is_for_cuda=True)
    yield Task("recovery/tests", "benchmarks.gpu.recovery:run_gpu_tests", 330, needs=(*_OF_A_RUN, "pytest", "xdist"))
    yield from _tasks_of_ranks()
    yield Task("sweep/side-by-side", "benchmarks.gpu.sweeps:side_by_side", 300, needs=_OF_A_RUN)


def _tasks_of_ranks() -> Iterator[Task]:
    module = "benchmarks.gpu.ranks"
    for precision, form in product(("fp32", "bf16"), LAUNCH_FORMS):
        how = {"form": form, "precision": precision}
        yield Task(f"ranks/{form}-{precision}", f"{module}:curve", 240, how, _OF_A_RUN, precision == "bf16")
    yield Task("ranks/same-bytes", f"{module}:same_bytes", 300, needs=_OF_A_RUN)
    for name, key in {"ddp": "gradient_sync", "fsdp2": "sharding"}.items():
        yield Task(f"ranks/{name}", f"{module}:against_one", 500, {"words": [f"parallel.{key}={name}"]}, _OF_A_RUN)
    for name, is_killed in {"killed": True, "stopped": False}.items():
        yield Task(f"ranks/{name}", f"{module}:lose_a_rank", 240, {"is_killed": is_killed}, _OF_A_RUN)
    yield Task("ranks/gather", f"{module}:gather_checkpoint", 300, needs=_OF_A_RUN)


def _run(name: str, seconds: int, *, engine: str = "ours", needs: tuple[str, ...] = (), **arguments: Any) -> Task:
    used = ENGINES[engine]
    return Task(
        name,
        "benchmarks.gpu.runs:train",
        seconds,
        {"engine": engine, **arguments},
        needs=(*_OF_A_RUN, *needs) if engine == "ours" else ("peft", "accelerate", *used.needs),
        is_for_cuda=used.is_for_cuda,
        is_isolated=engine != "ours",
    )


def why_skipped(task: Task, session: Session) -> str | None:
    """Say why a task cannot run here; None if it can."""
    if task.is_for_cuda and session.device != "cuda":
        return "it needs CUDA"
    if task.needs_cut and not CUT.is_dir():
        return f"there is no folder {CUT}: python -m benchmarks.gpu.real makes it where a package registry is reached"
    needed = dict.fromkeys(name for needs in task.needs for name in (needs, *_IMPORTS.get(needs, ())))
    missing = [_PACKAGES.get(name, name) for name in needed if find_spec(name) is None]
    return f"not installed, bring the wheels: {' '.join(missing)}" if missing else None
