"""One optimizer step, the loop around it, and the trainer around that."""
