"""Faults over tiny runs: killed, damaged, out of disk, deceived."""

import os

STRIDE = int(os.environ.get("FINETUNE_FULL_SWEEP") or 0)
"""1: every point is tried; N: every N-th operation on files, and every point of all else; 0: a share of all."""
IS_FULL = STRIDE > 0
