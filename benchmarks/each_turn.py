"""Train every turn of conversations with thinking: in one pass over what the turns share, and as rows of their own.

    python -m benchmarks.each_turn

Ten conversations of ten turns, phi_tiny with a LoRA adapter in fp32, one thread. A run computes the loss of all of
them and its gradient in one way; the two ways alternate, and the first pair only warms up. Seconds are CPU seconds.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

TURNS, CONVERSATIONS, PAIRS = 10, 10, 7
QUESTION, THINKING, ANSWER = 12, 60, 20
"""Words of each part of a turn."""
_WORDS = ["please", "send", "three", "crates", "of", "oranges", "to", "Marta", "Ruiz", "in", "Porto", "by", "Friday"]


def conversation(rng: random.Random) -> dict[str, Any]:
    """A conversation in which each answer has its thinking."""

    def words(count: int) -> str:
        return " ".join(rng.choice(_WORDS) for _ in range(count))

    messages: list[dict[str, str]] = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": words(QUESTION)})
        messages.append({"role": "assistant", "content": words(ANSWER), "reasoning_content": words(THINKING)})
    return {"messages": messages}


def main() -> None:
    """Measure both ways and print the medians."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from finetune import add_lora, build_base_model, build_tokenizer, encode_examples, load_config, load_examples
    from finetune.data.batches import TrainLoader
    from finetune.engine.layout import pack
    from finetune.engine.loss import summed_cross_entropy
    from finetune.training.loaders import plan_batches

    torch.set_num_threads(1)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(conversation(rng)) + "\n" for _ in range(CONVERSATIONS)))
        words = ["model=phi_tiny", f"data.path={path}", f"data.cache_dir={folder}", "data.train_on=each_turn"]
        words += ["data.max_length=4096", f"training.batch_size={CONVERSATIONS}"]
        config = load_config(words, task="finetune_lora")
        tokenizer = build_tokenizer(config.model)
        examples = encode_examples(load_examples(config.data), tokenizer, config.data).train
    model = add_lora(build_base_model(config.model).float(), config.lora).train()

    def run(*, is_shared: bool) -> tuple[float, int, float]:
        """CPU seconds, tokens computed and the loss of one way."""
        collate = partial(pack, share_prefixes=is_shared)
        limits = {"max_tokens_per_microbatch": 8192, "share_prefixes": is_shared}
        settled = config.model_copy(update={"training": config.training.model_copy(update=limits)})
        rule = plan_batches(settled, examples, is_packed=True, boundary=None, global_batch_size=CONVERSATIONS)
        loader = TrainLoader(examples, rule, settled.training, rank=0, world_size=1, collate=collate)
        (step,) = loader.steps(0)
        begin, total = time.process_time(), 0.0
        for _, microbatch in step:
            loss = summed_cross_entropy(model, microbatch)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        model.zero_grad()
        return time.process_time() - begin, sum(part.num_computed for _, part in step), total

    pairs = [(run(is_shared=True), run(is_shared=False)) for _ in range(PAIRS + 1)][1:]
    shared, alone = zip(*pairs, strict=True)
    assert abs(shared[0][2] - alone[0][2]) <= 1e-6 * alone[0][2]
    ratios = [theirs[0] / ours[0] for ours, theirs in pairs]
    for name, runs in (("each_turn", shared), ("rows of their own", alone)):
        seconds = statistics.median(one[0] for one in runs)
        sys.stdout.write(f"{name}: {seconds:.2f} CPU seconds, {runs[0][1]:,} tokens computed\n")
    low, high = min(ratios), max(ratios)
    sys.stdout.write(f"ratio: median {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}) of {PAIRS} pairs\n")


if __name__ == "__main__":
    main()
