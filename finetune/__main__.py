"""``python -m finetune``: the `finetune` command; ``cmd=train run=quickstart …`` says the same in words."""

from __future__ import annotations

import sys

from finetune.cli import main

if __name__ == "__main__":
    main(sys.argv[1:])
