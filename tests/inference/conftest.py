"""Two small runs on what is shipped: an adapter and every weight of phi_tiny, on a handful of orders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from finetune import (
    Trainer,
    add_lora,
    build_base_model,
    build_tokenizer,
    encode_examples,
    launch,
    load_config,
    load_examples,
)

NUM_ROWS = 12
NO_PROMPTS = "testing.general_prompts=none"


def shipped_words(folder: Path) -> list[str]:
    """Beside `quickstart`: a few of its rows and steps, below a folder."""
    own = [f"data.max_rows={NUM_ROWS}", "training.max_steps=4", "training.batch_size=6", "optim.warmup_steps=0"]
    limits = ["training.precision=fp32", "testing.metrics=[exact_match]", "testing.max_new_tokens=12", NO_PROMPTS]
    return [*own, *limits, f"output_dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}"]


def train(folder: Path, *words: str) -> Path:
    """What a recipe does, on a few rows; the run's folder."""
    config = load_config([*shipped_words(folder), *words], run="quickstart")
    with launch(config) as runtime:
        tokenizer = build_tokenizer(config.model)
        splits = encode_examples(load_examples(config.data), tokenizer, config.data, fallbacks=runtime.fallbacks)
        base = build_base_model(config.model)
        model = add_lora(base, config.lora) if config.training.method == "lora" else base
        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
        trainer.run_test(test_loader)
    return folder / "run"


@pytest.fixture(scope="session")
def adapter_run(tmp_path_factory):
    """A run with an adapter and the checkpoints of its steps 2 and 4. Read only."""
    return train(tmp_path_factory.mktemp("adapter"), "checkpoint.save_every=2", "checkpoint.save_total_limit=9")


@pytest.fixture(scope="session")
def full_run(tmp_path_factory):
    """A run that trained every weight. Read only."""
    words = ["training.method=full", "training.max_steps=2", "optim.learning_rate=1e-3"]
    return train(tmp_path_factory.mktemp("full"), *words)


@pytest.fixture
def own_copy(adapter_run, tmp_path):
    """A copy of the adapter's run that a test may change."""
    return Path(shutil.copytree(adapter_run, tmp_path / "own"))
