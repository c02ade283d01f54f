"""Compare fp32 losses over a model's own logits with float64: torch's cross-entropy, and finetune's.

    python -m benchmarks.loss_error MODEL ROWS.jsonl
    ATEN_CPU_CAPABILITY=avx2 python -m benchmarks.loss_error MODEL ROWS.jsonl

It takes the second halves of the first 8 conversations, one thread, and the median of 9 CPU times. finetune's time
includes the probabilities, from which the gradient is made.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_ROWS, REPEATS = 8, 9


def main(model_path: str, rows: str) -> None:
    """Print the mean loss, what each fp32 loss is off by, and how long it takes for a target."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    from torch.nn import functional
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finetune.engine.loss_head import nats_and_softmax

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    every_logits, every_labels = [], []
    with Path(rows).open(encoding="utf-8") as lines, torch.no_grad():
        for line in itertools.islice(lines, NUM_ROWS):
            messages = json.loads(line)["messages"]
            ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=False)
            half = ids.shape[1] // 2
            every_logits.append(model(ids).logits[0, half:-1])
            every_labels.append(ids[0, half + 1 :])
    logits, labels = torch.cat(every_logits), torch.cat(every_labels)
    exact = functional.cross_entropy(logits.double(), labels).item()
    sys.stdout.write(f"{torch.backends.cpu.get_cpu_capability()}: {exact:.7f} nats a target in float64\n")
    losses: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "torch": lambda given: functional.cross_entropy(given, labels, reduction="none"),
        "finetune": lambda given: nats_and_softmax(given, labels[:, None], out=given)[0],
    }
    for name, compute in losses.items():
        seconds = []
        for _ in range(REPEATS):
            given = logits.clone()
            begun = time.process_time()
            result = compute(given)
            seconds.append(time.process_time() - begun)
        took = statistics.median(seconds) / len(labels) * 1e6
        sys.stdout.write(f"{name}: off by {result.double().mean().item() - exact:+.1e}, {took:.1f} us for a target\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
