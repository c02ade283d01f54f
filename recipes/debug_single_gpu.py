"""See whether a model and your data work at all: a handful of rows and steps, shapes logged, full tracebacks.

On the GPU where there is one, else on the CPU; deterministic either way:

    python recipes/debug_single_gpu.py model=phi4_mini data=phi4 data.path=chats.jsonl
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


def main(words: list[str]) -> None:
    """A few steps and a look at them."""
    config = load_config(words, task="debug")

    with launch(config) as runtime:
        tokenizer = build_tokenizer(config.model)
        examples = load_examples(config.data)
        splits = encode_examples(examples, tokenizer, config.data, fallbacks=runtime.fallbacks)
        model = add_lora(build_base_model(config.model), config.lora)
        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()

        # With task=debug the trainer logs the shapes, devices and first tokens of what passes through here.
        trainer.run_training(train_loader, val_loader)
        trainer.run_test(test_loader)


if __name__ == "__main__":
    command(main)
