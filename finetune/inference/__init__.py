"""Load a finished run, generate answers with it, measure it."""
