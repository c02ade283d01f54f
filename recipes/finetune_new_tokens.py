"""Fine-tune a LoRA adapter together with tokens that the base does not know.

The tokens come from the configuration; their rows of the embedding train and are saved with the adapter:

    python recipes/finetune_new_tokens.py model=phi_tiny data=orders "lora.new_tokens=['<order>', '</order>']"
"""

from finetune import (
    Trainer,
    add_lora,
    add_tokens,
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
    config = load_config(overrides, task="finetune_new_tokens")

    with launch(config) as runtime:
        # Add the tokens before the rows are encoded, so that each is one token there.
        tokenizer = build_tokenizer(config.model)
        add_tokens(tokenizer, config.lora)
        examples = load_examples(config.data)
        splits = encode_examples(examples, tokenizer, config.data, fallbacks=runtime.fallbacks)

        # The base's own rows stay as they are; the new ones train, in both embeddings or in the tied one.
        model = add_lora(build_base_model(config.model), config.lora, tokenizer)

        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
        trainer.run_test(test_loader)


if __name__ == "__main__":
    command(main)
