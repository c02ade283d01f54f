"""Check that a model works with your data: a handful of rows and steps, with shapes logged and full tracebacks.

Runs on the GPU if there is one, otherwise on the CPU:

    python recipes/debug_single_gpu.py model=phi4_mini data=chats.jsonl
"""

from finetune import command, load_config, train


def main(overrides: list[str]) -> None:
    """Train for a few steps."""
    config = load_config(overrides, task="debug")

    # The steps of finetune_lora.py in one call. With task=debug they log shapes, devices and first tokens.
    train(config)


if __name__ == "__main__":
    command(main)
