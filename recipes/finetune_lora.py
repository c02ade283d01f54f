"""Fine-tune a LoRA adapter on chat messages, and compare it with its base.

Run it under whatever starts your processes; the arguments after it choose configs and set keys:

    python recipes/finetune_lora.py model=phi_tiny data=orders
    torchrun --nproc_per_node 2 recipes/finetune_lora.py model=phi4_mini data=chats.jsonl
    accelerate launch recipes/finetune_lora.py model=phi4 data=chats.jsonl optim.learning_rate=1e-4
"""

from finetune import (
    Trainer,
    add_lora,
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
    config = load_config(overrides, task="finetune_lora")

    # Join the processes of the launch, whatever started them, and leave in good order, whatever happens inside.
    with launch(config) as runtime:
        # Encode the rows as token ids, with a mask of those that carry loss: once per node, then from a cache.
        examples = load_examples(config.data)
        tokenizer = build_tokenizer(config.model)
        splits = encode_examples(examples, tokenizer, config.data, fallbacks=runtime.fallbacks)

        # The base is frozen; the adapter's small matrices train beside its linear layers.
        model = add_lora(build_base_model(config.model), config.lora)

        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
        trainer.run_test(test_loader)


if __name__ == "__main__":
    command(main)
