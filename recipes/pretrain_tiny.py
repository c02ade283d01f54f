"""Make phi_tiny, the base model that comes with the package: random weights, trained on text that a script makes.

    python recipes/make_tiny_corpus.py runs/phi_tiny_text
    python recipes/pretrain_tiny.py

First a drill in copying, then the corpus, from where the drill ended; about 20 minutes on two cores. The model ends as
bf16 safetensors with its tokenizer in runs/phi_tiny/phi_tiny. The words after the command apply to both.
"""

from pathlib import Path

from finetune import (
    Trainer,
    build_base_model,
    build_tokenizer,
    command,
    encode_examples,
    launch,
    load_config,
    load_examples,
    stop_ids,
)


def train(words: list[str], task: str) -> None:
    """Train every weight on plain text, and keep the result in bf16."""
    config = load_config(words, task=task)

    with launch(config) as runtime:
        tokenizer = build_tokenizer(config.model)
        examples = load_examples(config.data)
        splits = encode_examples(examples, tokenizer, config.data, fallbacks=runtime.fallbacks)
        model = build_base_model(config.model)

        trainer = Trainer(runtime, config, model, tokenizer, splits)
        train_loader, val_loader, _ = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)

        if runtime.is_main_process:
            # What a chat stops at is known to the tokenizer's template; generation must know it too.
            model.generation_config.eos_token_id = stop_ids(tokenizer)
            model.generation_config.pad_token_id = tokenizer.pad_token_id
            folder = Path(config.output_dir) / "phi_tiny"
            model.bfloat16().save_pretrained(folder)
            tokenizer.save_pretrained(folder)


def main(words: list[str]) -> None:
    """The drill, then the corpus."""
    train(words, task="pretrain_drill")
    train(words, task="pretrain_corpus")


if __name__ == "__main__":
    command(main)
