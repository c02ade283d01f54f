"""The configuration of a run: composed from files and overrides, checked as a whole, then frozen."""

from finetune.config.compose import load_config
from finetune.config.schema import Config

__all__ = ["Config", "load_config"]
