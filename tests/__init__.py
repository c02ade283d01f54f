"""Tests mirror the package: `finetune/data/encode.py` is tested in `tests/data/test_encode.py`."""
