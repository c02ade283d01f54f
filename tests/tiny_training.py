"""What a recipe does, in this process and at tiny size; and what plain PEFT and transformers make of the result."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune import (
    Trainer,
    add_lora,
    add_tokens,
    build_base_model,
    build_tokenizer,
    encode_examples,
    launch,
    load_config,
    load_examples,
)
from finetune.config.schema import ModelSection
from finetune.training import training_run
from tests.tiny_runs import write_base, write_rows

IDS = list(range(5, 25))
_PLAIN = """
import json, sys, traceback
sys.modules["finetune"] = None  # an import of ours would fail
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

def answer(job):
    ids, found = torch.tensor([job["ids"]]), {}
    for name, (base, adapter, rows) in job["models"].items():
        model = AutoModelForCausalLM.from_pretrained(base)
        if rows > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(rows)
        if adapter:
            model = PeftModel.from_pretrained(model, adapter)
            found[name] = model.eval()(input_ids=ids).logits
            merged = model.merge_and_unload()
            head, embedding = merged.get_output_embeddings().weight, merged.get_input_embeddings().weight
            assert (head is embedding) == merged.config.tie_word_embeddings, name
            found[name + " merged"] = merged(input_ids=ids).logits
        else:
            found[name] = model.eval()(input_ids=ids).logits
    assert not [name for name, module in sys.modules.items() if name.partition(".")[0] == "finetune" and module]
    save_file(found, job["answer"])

for line in sys.stdin:
    try:
        with torch.no_grad():
            answer(json.loads(line))
        problem = ""
    except Exception:
        problem = traceback.format_exc()
    print("answered: " + json.dumps(problem), flush=True)
"""


def write_inputs(folder: Path) -> Path:
    """A base in `base/` and rows in `rows/`."""
    write_base(folder / "base")
    write_rows(folder / "rows")
    return folder


def words_for(inputs: Path, run: Path) -> list[str]:
    """18 rows in global batches of 8 make 3 steps an epoch."""
    return [
        f"model.path={inputs / 'base'}",
        f"data.path={inputs / 'rows'}",
        f"data.cache_dir={inputs / 'cache'}",
        f"output_dir={run}",
        *("training.device=cpu", "training.precision=fp32", "training.global_batch_size=8", "training.batch_size=3"),
        *("training.max_steps=4", "checkpoint.save_every=2", "checkpoint.save_every_epochs=null"),
        *("checkpoint.save_total_limit=9", "testing.num_samples=0", "testing.general_prompts=none", "resume=auto"),
    ]


def train(words: list[str], build_base: Callable[[ModelSection], torch.nn.Module] = build_base_model) -> Trainer:
    """Train, then test: the lines of the recipes, in this process."""
    config = load_config(words)
    with launch(config) as runtime:
        tokenizer = build_tokenizer(config.model)
        add_tokens(tokenizer, config.lora)
        splits = encode_examples(load_examples(config.data), tokenizer, config.data, fallbacks=runtime.fallbacks)
        base = build_base(config.model)
        model = base if config.training.method == "full" else add_lora(base, config.lora, tokenizer)
        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
        trainer.run_test(test_loader)
        return trainer


def break_at(patch: pytest.MonkeyPatch, step: int, error: BaseException | None = None) -> None:
    """Training ends with an error in the middle of a step."""
    whole = training_run.train_step

    def breaking(*args, **keys):
        if args[4].step == step:
            raise error or RuntimeError("power cut")
        return whole(*args, **keys)

    patch.setattr(training_run, "train_step", breaking)


def refuse_to_differ_after_a_break(words: list[str], whole: Path, broken: Path) -> None:
    """A run that broke in its third step and went on must end with the bytes of the whole one."""
    with pytest.MonkeyPatch.context() as patch:
        break_at(patch, 3)
        with pytest.raises(RuntimeError, match="power cut"):
            train([*words, f"output_dir={broken}"])
    train([*words, f"output_dir={broken}"])
    assert "resumed from step=2" in (broken / "log.txt").read_text()
    for folder in ("checkpoints/step-000002", "checkpoints/step-000004", "adapter"):
        assert contents(broken / folder) == contents(whole / folder), folder
    assert curve(broken) == curve(whole)


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def events(run: Path, kind: str | None = None) -> list[dict]:
    """The events of metrics.jsonl, or those of one kind."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind is None or line["event"] == kind]


def losses(run: Path) -> list[float]:
    """The loss of each step."""
    return [event["loss"] for event in events(run, "step")]


def curve(run: Path) -> list[dict]:
    measured = ("tokens_per_second", "rollout_seconds")
    return [{key: value for key, value in e.items() if key not in measured} for e in events(run, "step")]


def record(run: Path) -> dict:
    return json.loads((run / "run.json").read_text())


def adapter_tensors(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def logits_of(trainer: Trainer, ids: Sequence[int] = IDS) -> torch.Tensor:
    with torch.no_grad():
        return trainer.model.eval()(input_ids=torch.tensor([ids])).logits


def plain_logits(
    folder: Path, models: Mapping[str, tuple[Path, Path | None, int]], ids: Sequence[int] = IDS
) -> dict[str, torch.Tensor]:
    """Logits of models in a process in which our package cannot be imported; one for all tests, for its imports.

    Args:
        folder: for what the two processes tell each other.
        models: base, adapter or None, and the rows that the base's embedding must have; by name.
        ids: what the models are given.

    Returns:
        By name, and for an adapter by its name with " merged" too.
    """
    named = {
        name: [str(base), str(adapter) if adapter else None, rows] for name, (base, adapter, rows) in models.items()
    }
    answer = folder / "plain.safetensors"
    job = {"ids": list(ids), "models": named, "answer": str(answer)}
    process = _plain_process()
    assert process.stdin
    assert process.stdout
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    lines = iter(process.stdout.readline, "")
    said = next((line for line in lines if line.startswith("answered: ")), 'answered: "it ended"')
    problem = json.loads(said.removeprefix("answered: "))
    assert not problem, problem
    return load_file(answer)


@cache
def _plain_process() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", _PLAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)  # its input ends, and so does it
    return process
