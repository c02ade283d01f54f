"""A finished run: load it, let it answer, measure it."""
