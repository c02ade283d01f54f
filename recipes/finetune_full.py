"""Fine-tune every weight of a model on chat messages.

python recipes/finetune_full.py model=phi_tiny data=orders
torchrun --nproc_per_node 2 recipes/finetune_full.py model=phi4_mini data=chats.jsonl
"""

from finetune import (
    Trainer,
    build_base_model,
    build_tokenizer,
    command,
    encode_examples,
    launch,
    load_config,
    load_examples,
)


def main(overrides: list[str]) -> None:
    """Train, then test."""
    config = load_config(overrides, task="finetune_full")

    with launch(config) as runtime:
        examples = load_examples(config.data)
        tokenizer = build_tokenizer(config.model)
        splits = encode_examples(examples, tokenizer, config.data, fallbacks=runtime.fallbacks)

        # There is no adapter: the model itself trains, in fp32 whatever precision the step computes in.
        model = build_base_model(config.model)

        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
        trainer.run_test(test_loader)


if __name__ == "__main__":
    command(main)
