"""`finetune train`: what the recipes spell out, with the method taken from the config."""

from __future__ import annotations

import os
from collections.abc import Sequence


def train_from_words(words: Sequence[str], *, run: str | None = None) -> None:
    """Train, test and say what was written.

    Collective: every process of the launch.
    """
    from finetune.config.compose import load_config
    from finetune.distributed.environment import read_environment

    read_environment(os.environ)  # half a launch is refused before seconds are spent on imports
    config = load_config(words, run=run)

    from finetune.data.encode import encode_examples
    from finetune.data.examples import load_examples
    from finetune.distributed.launch import launch
    from finetune.model.base import build_base_model
    from finetune.model.lora import add_lora
    from finetune.model.new_tokens import build_run_tokenizer
    from finetune.model.quantized import build_quantized_base, refuse_where_quantizing_is_impossible
    from finetune.training.trainer import Trainer

    with launch(config) as runtime:
        has_adapter = config.training.method == "lora"
        is_quantized = has_adapter and config.lora.quantize != "none"
        if is_quantized:  # before anything is read
            refuse_where_quantizing_is_impossible(config.lora, config.model, runtime.device)
        tokenizer = build_run_tokenizer(config)
        splits = encode_examples(load_examples(config.data), tokenizer, config.data, fallbacks=runtime.fallbacks)
        if is_quantized:
            base = build_quantized_base(config.model, config.lora, runtime.device)
        else:
            base = build_base_model(config.model)
        model = add_lora(base, config.lora, tokenizer) if has_adapter else base
        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
        trainer.run_test(test_loader)
