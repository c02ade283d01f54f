"""See whether a model and your data work at all: a handful of rows and steps, shapes logged, full tracebacks.

On the GPU where there is one, else on the CPU; deterministic either way:

    python recipes/debug_single_gpu.py model=phi4_mini data=phi4 data.path=chats.jsonl
"""

from finetune import command, load_config, train


def main(words: list[str]) -> None:
    """A few steps and a look at them."""
    config = load_config(words, task="debug")

    # The steps of finetune_lora.py in one call. With task=debug they log shapes, devices and first tokens.
    train(config)


if __name__ == "__main__":
    command(main)
