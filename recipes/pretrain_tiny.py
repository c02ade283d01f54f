"""Make phi_tiny, the base model that comes with the package: random weights, trained on text that a script makes.

    python recipes/pretrain_tiny.py

Writes text and tokenizer to runs/phi_tiny_text, trains in runs/phi_tiny, and leaves the model as bf16 safetensors in
runs/phi_tiny/phi_tiny. The words choose configs and set keys, as everywhere.
"""

from pathlib import Path

from make_tiny_corpus import make_corpus

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


def main(words: list[str]) -> None:
    """Make the text, train on it, keep the result."""
    config = load_config(words, task="pretrain_tiny")

    with launch(config) as runtime:
        # One process writes the text; the others must not look for it before it is there.
        if runtime.is_main_process:
            make_corpus(Path(str(config.data.path)).parent)
        runtime.barrier()

        tokenizer = build_tokenizer(config.model)
        examples = load_examples(config.data)
        splits = encode_examples(examples, tokenizer, config.data, fallbacks=runtime.fallbacks)
        model = build_base_model(config.model)

        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, _ = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)

        if runtime.is_main_process:
            folder = Path(config.output_dir) / "phi_tiny"
            model.bfloat16().save_pretrained(folder)
            tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    command(main)
