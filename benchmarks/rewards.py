"""Learn from rewards: ours against TRL's GRPOTrainer with its own generation, on the same prompts.

    python -m benchmarks.rewards

LoRA in fp32 on a phi3-class model with random weights, one thread. A step has 4 prompts with 8 answers each. Prompts
are as long as the longest answer. Each engine runs in a process of its own; rounds alternate, and the first step of a
process only warms up. Seconds are CPU seconds. Tokens are those of all prompts and answers; a shared prompt counts once
for each of its answers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROMPTS, ANSWERS, LENGTH = 4, 8, 128
STEPS, WARM_UP, ROUNDS = 4, 1, 3
HIDDEN, MLP, LAYERS, HEADS, KV_HEADS = 512, 1368, 8, 8, 2
_WORDS = ["please", "send", "three", "crates", "of", "oranges", "to", "Marta", "Ruiz", "in", "Porto", "by", "Friday"]
ENGINES = ("ours", "trl", "trl-one-batch")
"""TRL with 4 micro-batches of a group each, and with all answers in one."""


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Reward answers by their text, so that groups differ."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [text.count("e") / max(1, len(text)) for text in texts]


class Clock:
    """Adds up CPU seconds of calls, step by step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and is timed."""

        def timing(*given: Any, **named: Any) -> Any:
            begin = time.process_time()
            try:
                return call(*given, **named)
            finally:
                self.seconds.append(time.process_time() - begin)

        return timing


def write_inputs(folder: Path) -> None:
    """Write the base with the tokenizer of phi_tiny, and the prompts."""
    import torch
    from transformers import Phi3Config, Phi3ForCausalLM

    from finetune import build_tokenizer, load_config

    config = load_config(["model=phi_tiny", "data.path=none"])
    tokenizer = build_tokenizer(config.model)
    torch.manual_seed(0)
    shape = Phi3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    Phi3ForCausalLM(shape).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    rng = random.Random(0)
    rows = []
    for _ in range(PROMPTS * STEPS):
        text = ""
        while True:
            longer = f"{text} {rng.choice(_WORDS)}".strip()
            turns = [{"role": "user", "content": longer}]
            encoded: Any = tokenizer.apply_chat_template(turns, add_generation_prompt=True)
            if len(encoded["input_ids"]) > LENGTH:
                break
            text = longer
        rows.append({"prompt": [{"role": "user", "content": text}]})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_ours(folder: Path, out: Path) -> dict[str, Any]:
    """Train with finetune."""
    from finetune import load_config, train
    from finetune.training import step, training_run
    from finetune.training.rewards import rollouts

    generating, updating = Clock(), Clock()
    tokens: list[int] = []
    train_step = step.train_step

    def counting(*given: Any, **named: Any) -> Any:
        result = train_step(*given, **named)
        tokens.append(result.num_tokens)
        return result

    loader: Any = rollouts.RolloutLoader
    loader._generate = generating.timed(loader._generate)
    training_run.train_step = updating.timed(counting)  # type: ignore[attr-defined]
    words = [
        *(f"model.path={folder / 'base'}", f"data.path={folder / 'train.jsonl'}", f"data.cache_dir={out}"),
        *("reward.functions=benchmarks.rewards.reward", "reward.functions_from=benchmarks.rewards"),
        *(f"output_dir={out / 'run'}", f"rollout.num_generations={ANSWERS}"),
        *(f"rollout.max_completion_length={LENGTH}", f"training.global_batch_size={PROMPTS}"),
        *(f"training.batch_size={PROMPTS * ANSWERS}", f"training.max_steps={STEPS}", "lora.r=16", "lora.alpha=32"),
        *("training.precision=fp32", "optim.warmup_steps=0", "data.max_length=512"),
    ]
    train(load_config(words, task="finetune_grpo"))
    return {"generating": generating.seconds, "updating": updating.seconds, "tokens": tokens}


def run_trl(folder: Path, out: Path, *, batch_size: int) -> dict[str, Any]:
    """Train with TRL."""
    trl: Any = importlib.import_module("trl")
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    generating = Clock()
    whole: list[float] = []
    tokens: list[int] = []

    class Timing(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            whole.append(time.process_time() - self.begin)

    class Trainer(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            made = generating.timed(super()._generate_and_score_completions)(inputs)
            tokens.append(int(made["prompt_mask"].sum() + made["completion_mask"].sum()))
            return made

    config = trl.GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=PROMPTS * ANSWERS // batch_size,
        num_generations=ANSWERS,
        max_completion_length=LENGTH,
        max_steps=STEPS,
        learning_rate=1e-5,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    auto: Any = AutoModelForCausalLM
    targets = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    trainer = Trainer(
        model=auto.from_pretrained(folder / "base"),
        reward_funcs=reward,
        args=config,
        train_dataset=load_dataset("json", data_files=str(folder / "train.jsonl"), split="train", cache_dir=str(out)),
        processing_class=AutoTokenizer.from_pretrained(folder / "base"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"),
        callbacks=[Timing()],
    )
    trainer.train()
    updating = [one - other for one, other in zip(whole, generating.seconds, strict=True)]
    return {"generating": generating.seconds, "updating": updating, "tokens": tokens}


def run(engine: str, folder: Path) -> dict[str, Any]:
    """Train with one engine in this process."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out:
        if engine == "ours":
            return run_ours(folder, Path(out))
        return run_trl(folder, Path(out), batch_size=PROMPTS * ANSWERS if engine == "trl-one-batch" else ANSWERS)


def _speeds(found: Mapping[str, list[float]]) -> dict[str, float]:
    """Return tokens per CPU second of updates and of whole steps, after the warm-up."""
    generating, updating, tokens = (sum(found[name][WARM_UP:]) for name in ("generating", "updating", "tokens"))
    return {"update": tokens / updating, "step": tokens / (generating + updating)}


def main() -> None:
    """Measure all engines in turn and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sys.stdout.write("\n" + json.dumps(run(options.one[0], Path(options.one[1]))) + "\n")
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    speeds: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        for _ in range(options.rounds):
            for engine in ENGINES:
                command = [sys.executable, "-m", "benchmarks.rewards", "--one", engine, folder]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(f"{engine} failed:\n{done.stderr[-2000:]}")
                speed = _speeds(json.loads(done.stdout.splitlines()[-1]))
                speeds[engine].append(speed)
                sys.stderr.write(f"{engine}: update {speed['update']:,.0f} tokens/s, step {speed['step']:,.0f}\n")
    for engine, found in speeds.items():
        medians = {what: statistics.median(one[what] for one in found) for what in ("update", "step")}
        sys.stdout.write(f"{engine:<14} update {medians['update']:>8,.0f} tokens/s   step {medians['step']:>8,.0f}\n")
    for what in ("update", "step"):
        for engine in ENGINES[1:]:
            ratios = [ours[what] / theirs[what] for ours, theirs in zip(speeds["ours"], speeds[engine], strict=True)]
            low, high = min(ratios), max(ratios)
            sys.stdout.write(f"{what}, ours / {engine}: {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})\n")


if __name__ == "__main__":
    main()
