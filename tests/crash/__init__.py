"""Faults over tiny runs: killed, damaged, out of disk, deceived."""

import os

IS_FULL = bool(os.environ.get("FINETUNE_FULL_SWEEP"))
"""Whether every point is tried, or a share of them."""
