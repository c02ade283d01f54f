"""Name the command that makes the model of a shipped config. A run imports this module if the model is missing."""

from __future__ import annotations

import re

from finetune.config.config_files import shipped_folder
from finetune.config.schema import Config


def how_to_make(config: Config) -> str:
    """Return a sentence with the first command in the comments of the config file; empty if it makes another model."""
    shipped = re.match(r"shipped configs/([\w/]+\.yaml)", config.origin("model.path"))
    text = (shipped_folder("configs") / shipped[1]).read_text(encoding="utf-8") if shipped else ""
    command = re.search(r"^#   (finetune (?:.*\\\n)*.*output_dir=(\S+))$", text, re.MULTILINE)
    if command is None or not str(config.model.path).startswith(command[2]):
        return ""
    return " To make it, run first: " + re.sub(r"\\\n#\s*", "", command[1])
