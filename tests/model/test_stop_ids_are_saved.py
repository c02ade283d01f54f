"""A run leaves its stop ids, as a list, beside what it saved: adapter, whole model and base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune import build_tokenizer, launch, load_config
from finetune.training.train import build_trainer
from tests.tiny_models import PHI3_SIZES
from tests.tiny_runs import random_model_words, write_base, write_rows


@pytest.mark.parametrize(("method", "init"), [("lora", "random"), ("full", "pretrained")])
def test_generation_config_beside_what_a_run_saves_has_all_stop_ids(method: str, init: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    words = [f"model.path={base}"] if init == "pretrained" else random_model_words(base)
    run = tmp_path / "run"
    words += [f"data.path={write_rows(tmp_path / 'rows')}", f"data.cache_dir={tmp_path / 'cache'}"]
    words += [f"output_dir={run}", "training.max_steps=1", f"training.method={method}", "lora.r=2", "ddp=false"]
    config = load_config(words, task="finetune_lora")
    with launch(config) as runtime:
        trainer = build_trainer(runtime, config)
        train_loader, val_loader, _ = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
    tokenizer = build_tokenizer(config.model)
    stops = tokenizer.convert_tokens_to_ids(["<|end|>", "<|endoftext|>"])
    stops += [PHI3_SIZES["eos_token_id"]] if init == "random" else []  # what the model's own configuration says
    folders = [run / "adapter", *sorted((run / "checkpoints").iterdir())]
    folders += [run / "base"] if (method, init) == ("lora", "random") else []
    for folder in folders:
        record = json.loads((folder / "generation_config.json").read_text())
        assert (record["eos_token_id"], record["pad_token_id"]) == (stops, tokenizer.pad_token_id), folder
