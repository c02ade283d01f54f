"""Fine-tune a LoRA adapter on a base that is kept in 4 bits (QLoRA): CUDA and bitsandbytes.

python recipes/finetune_qlora.py model=phi4 data=chats.jsonl
torchrun --nproc_per_node 2 recipes/finetune_qlora.py model=phi4 data=chats.jsonl
"""

from finetune import (
    Trainer,
    add_lora,
    build_quantized_base,
    build_tokenizer,
    command,
    encode_examples,
    launch,
    load_config,
    load_examples,
)


def main(overrides: list[str]) -> None:
    """Train, then test."""
    config = load_config(overrides, task="finetune_qlora")

    with launch(config) as runtime:
        # Build the base first: a machine that cannot quantize is refused before anything is read.
        base = build_quantized_base(config.model, config.lora, runtime.device)

        tokenizer = build_tokenizer(config.model)
        examples = load_examples(config.data)
        splits = encode_examples(examples, tokenizer, config.data, fallbacks=runtime.fallbacks)

        # The adapter trains in fp32 beside the 4-bit weights.
        model = add_lora(base, config.lora)

        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
        trainer.run_test(test_loader)


if __name__ == "__main__":
    command(main)
