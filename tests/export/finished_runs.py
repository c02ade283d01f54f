"""Make tiny finished runs, with random instead of trained adapter weights, or train them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from finetune.config.compose import load_config
from finetune.config.render import resolved_yaml
from finetune.inference.finished_run import FinishedRun, find_run
from finetune.model.tokens import set_stop_and_pad_ids
from finetune.runs.durable import committed_folder
from finetune.runs.folder import RunFolder
from finetune.runs.model_files import encode_model, encode_tokenizer
from finetune.runs.record import read_versions
from tests.tiny import Style, tiny_tokenizer
from tests.tiny_models import build_tiny, tiny_phi3_config, tiny_phi_config
from tests.tiny_runs import random_model_words, write_base, write_rows

ROWS = 336
"""Of the embedding: more than the tiny tokenizer has tokens."""
CONFIGS = {"phi3": tiny_phi3_config, "phi": tiny_phi_config}
TARGETS = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "phi": ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"],
}
EVENTS = [
    {"event": "step", "step": 3, "loss": 2.5},
    {"event": "test", "model": "base", "exact_match": 0.0, "json_valid": None, "loss": 3.25},
    {"event": "test", "model": "tuned", "exact_match": 0.75, "json_valid": None, "loss": 1.5},
]


def build_base(kind: str = "phi3", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model whose weights are large enough for an adapter to matter."""
    config = CONFIGS[kind](**{"vocab_size": ROWS, "eos_token_id": 320, "bos_token_id": None, **changes})
    return build_tiny(config, dtype=dtype)


def add_drawn_adapter(base: Any, kind: str = "phi3", *, scale: float = 0.1, **settings: Any) -> Any:
    """Build a PeftModel whose trained tensors were all moved by a seeded draw, as after some training."""
    settings = {"target_modules": TARGETS[kind], "r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **settings}
    return draw_trained(get_peft_model(base, LoraConfig(**settings)), scale)


def draw_trained(model: Any, scale: float = 0.1) -> Any:
    """Move every weight that trains by a seeded draw."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def write_run(
    folder: Path,
    *,
    kind: str = "phi3",
    dtype: torch.dtype = torch.float32,
    style: Style = "phi4_mini",
    full: bool = False,
    words: tuple[str, ...] = (),
    scale: float = 0.1,
    base: Any = None,
    base_sizes: Mapping[str, Any] = MappingProxyType({}),
    tokenizer: Any = None,
    **settings: Any,
) -> FinishedRun:
    """Write the folder of a finished run and, beside it, that of its base: this one, or a tiny one of a kind."""
    base, tokenizer = base or build_base(kind, dtype, **base_sizes), tokenizer or tiny_tokenizer(style)
    base_folder = folder.with_name(f"{folder.name}-base")
    base.save_pretrained(base_folder)
    tokenizer.save_pretrained(base_folder)
    base.config._name_or_path = base.name_or_path = str(base_folder)
    model = build_tiny(base.config, seed=3, dtype=dtype) if full else None
    model = model or add_drawn_adapter(base, kind, scale=scale, **settings)
    set_stop_and_pad_ids(model, tokenizer)
    run = RunFolder(folder)
    run.path.mkdir(parents=True)
    with committed_folder(run.adapter) as writer:
        for name, content in {**encode_model(model), **encode_tokenizer(tokenizer)}.items():
            writer.write(name, content)
    method = "full" if full else "lora"
    config = load_config(
        [
            *(f"model.path={base_folder}", "data.path=owner/rows", f"training.method={method}"),
            *(f"output_dir={folder}", *words),
        ]
    )
    run.config_file.write_text(resolved_yaml(config))
    result = {"step": 3, "best_step": 3, "best_loss": 1.625}
    record = {"versions": read_versions(), "result": result, "global_batch": {"global_batch_size": 8}}
    run.record_file.write_text(json.dumps(record))
    run.metrics_file.write_text("".join(json.dumps(event) + "\n" for event in EVENTS) + '{"event": "te')
    return find_run(folder, is_alone=True)


def words_to_train(place: Path, *more: str) -> list[str]:
    """Write a tokenizer and rows, and return the words that train an adapter on a random base, in `place / "run"`."""
    write_base(place / "tokenizer")
    return [
        *("task=finetune_lora", *random_model_words(place / "tokenizer"), f"output_dir={place / 'run'}"),
        *(f"data.path={write_rows(place / 'rows')}", f"data.cache_dir={place / 'cache'}", "data.on_overlap=warn"),
        *("optim.learning_rate=1e-2", "training.device=cpu", "testing.num_samples=0", *more),
    ]
