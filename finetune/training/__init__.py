"""Train a model: one optimizer step (`step`), the loop around the steps (`loop`), and the trainer around the loop."""
