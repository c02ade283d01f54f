"""Fine-tune a LoRA adapter on answers that are better or worse than others (DPO, KTO, ORPO, SimPO).

Rows are {"prompt": …, "chosen": …, "rejected": …} or, for KTO, {"prompt": …, "completion": …, "label": true or false},
texts or lists of turns:

    python recipes/finetune_preferences.py model=phi4_mini data=pairs.jsonl
    python recipes/finetune_preferences.py task=finetune_kto model=phi4_mini data=labelled.jsonl
    torchrun --nproc_per_node 2 recipes/finetune_preferences.py model=phi4_mini data=pairs.jsonl
"""

from finetune import (
    Trainer,
    add_lora,
    build_base_model,
    build_tokenizer,
    command,
    encode_for_objective,
    launch,
    load_config,
)


def main(overrides: list[str]) -> None:
    """Train on pairs."""
    config = load_config(overrides, task="finetune_preferences")

    with launch(config) as runtime:
        # Both answers of a pair lie in one micro-batch: the prompt that they share is computed once.
        tokenizer = build_tokenizer(config.model)
        splits = encode_for_objective(config, tokenizer, fallbacks=runtime.fallbacks)

        # Where the loss has a reference, it is the base itself, with the adapter switched off: no second model.
        model = add_lora(build_base_model(config.model), config.lora)

        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, _ = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)


if __name__ == "__main__":
    command(main)
