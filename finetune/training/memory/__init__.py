"""How much memory a training step takes, and what a run does about it."""
