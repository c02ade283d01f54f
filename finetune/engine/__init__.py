"""The exact and fast part: tensors in, losses out; no files, no ranks."""
