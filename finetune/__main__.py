"""Run the `finetune` command: ``python -m finetune train quickstart …``, or ``cmd=train run=quickstart …``."""

from __future__ import annotations

import sys

from finetune.cli import main

if __name__ == "__main__":
    main(sys.argv[1:])
