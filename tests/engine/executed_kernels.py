"""Train and answer with the model families of the engine, and name the kernels of oneDNN that ran.

    LOG=log python -m tests.engine.executed_kernels 4-bits > log    # its own process: oneDNN writes its log to stdout

oneDNN has a reference kernel for what no fast kernel of it computes. It is right, and takes hundreds of times as long.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from finetune.config.schema import ModelSection
from finetune.engine import products
from finetune.engine.kv_cache import CachedDecoder
from finetune.engine.layout import pack
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.loss_of_nats import function_of_nats
from finetune.engine.products import unchanged_weights
from finetune.model.quantized import load_in_4_bits
from tests.engine.test_decoder import CONFIGS, with_lora
from tests.tiny_models import build_tiny

WIDE = {"hidden_size": 64, "intermediate_size": 112, "head_dim": 16, "vocab_size": 320, "initializer_range": 0.02}
MANY, FEW = (50, 60, 70), (5, 4)
"""Tokens of rows: with many, adapters are merged into their weights."""
ANSWERED = 3
_EXECUTED = re.compile(r"onednn_verbose,v\d,primitive,exec,cpu,(?P<primitive>\w+),(?P<kernel>[^,]+),(?P<rest>.*)")
COMPUTED = ["phi", "phi3", "llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3_text", "olmo2", "cohere"]
"""Families that differ in the operands of their products: other families share these."""
_CASE = "case: "


class Kernel(NamedTuple):
    """A kernel of oneDNN that ran."""

    case: str
    primitive: str
    name: str
    shape: str
    """Memory formats and sizes, as oneDNN writes them."""

    @property
    def is_reference(self) -> bool:
        return "ref" in re.split(r"[:_]", self.name)


def kernels_of_a_child(*words: str, **variables: str) -> list[Kernel]:
    """Run this module in a process of its own and return the kernels that oneDNN reports."""
    environment = {**os.environ, "ONEDNN_VERBOSE": "1", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "tests.engine.executed_kernels", *words]
    with tempfile.NamedTemporaryFile() as log:  # the child looks into it
        environment["LOG"] = log.name
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.PIPE, timeout=600, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return list(_read(Path(log.name).read_text(encoding="utf-8")))


def _read(log: str) -> Iterator[Kernel]:
    case = ""
    for line in log.splitlines():
        if line.startswith(_CASE):
            case = line.removeprefix(_CASE)
        elif found := _EXECUTED.fullmatch(line):
            yield Kernel(case, found["primitive"], found["kernel"], found["rest"].rpartition(",")[0])


def _rows(lengths: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(3, 300, (n,), generator=generator), torch.arange(n) > n // 2) for n in lengths]


def _learn(model: Any, lengths: tuple[int, ...]) -> None:
    summed_cross_entropy(model.train(), pack(_rows(lengths))).backward()


def _learn_preferences(model: Any, lengths: tuple[int, ...]) -> None:
    """DPO of one pair: the reference is the model without its adapter."""
    packed = pack(_rows(lengths[:2]))

    def of_pair(nats: torch.Tensor) -> torch.Tensor:
        chosen, rejected = (nats[packed.target_row == row].sum() for row in (0, 1))
        return rejected - chosen

    with torch.no_grad(), model.disable_adapter():
        reference, _ = function_of_nats(model, packed, lambda nats: (of_pair(nats), None))
    loss, _ = function_of_nats(model, packed, lambda nats: (-functional.logsigmoid(of_pair(nats) - reference), None))
    loss.backward()


def _answer(model: Any, lengths: tuple[int, ...]) -> None:
    with torch.no_grad():
        decoder = CachedDecoder(model.eval(), [ids.tolist() for ids, _ in _rows(lengths)], most_tokens=100)
        logits = decoder.start()
        for _ in range(ANSWERED):
            logits = decoder.go_on(logits.argmax(1))


METHODS: dict[str, tuple[Callable[[Any, tuple[int, ...]], None], dict[str, Any] | None]] = {
    "LoRA": (_learn, {}),
    "LoRA with dropout": (_learn, {"dropout": 0.1}),
    "full": (_learn, None),
    "DPO": (_learn_preferences, {}),
    "answers": (_answer, {}),
}
"""What is computed, and the settings of the adapter, if there is one."""


def _model(family: str, dtype: torch.dtype, adapter: dict[str, Any] | None, *, in_4_bits: bool) -> Any:
    config = CONFIGS[family]
    model = build_tiny(type(config)(**{**config.to_dict(), **WIDE}), dtype=torch.float32 if adapter is None else dtype)
    if in_4_bits:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = load_in_4_bits(ModelSection(path=folder), torch.device("cpu"))
    model = model if adapter is None else with_lora(model, **adapter)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def main(words: list[str]) -> None:
    """Compute every case, and write its name into the log before it."""
    torch.set_num_threads(1)
    products.WORTH_COMPILING = 0  # these models are small, and not what is asked about
    libc, in_4_bits = ctypes.CDLL(None), "4-bits" in words
    for family in COMPUTED:
        for dtype in (torch.float32, torch.bfloat16):
            for method, (compute, adapter) in METHODS.items():
                if in_4_bits and adapter is None:
                    continue
                model = _model(family, dtype, adapter, in_4_bits=in_4_bits)
                for lengths in (MANY, FEW):
                    libc.puts(f"{_CASE}{family}, {method}, {dtype}, rows of {lengths} tokens".encode())
                    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16), unchanged_weights():
                        compute(model, lengths)
        libc.fflush(None)
        if not list(_read(Path(os.environ["LOG"]).read_text(encoding="utf-8"))):
            return  # all families have the same operands: on this CPU, torch gives oneDNN none of them


if __name__ == "__main__":
    main(sys.argv[1:])
