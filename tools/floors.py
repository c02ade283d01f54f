"""Print the oldest version that pyproject.toml allows of each dependency but torch, as constraints for pip.

    python tools/floors.py > floors.txt
    pip install -c floors.txt -e .

torch is left out because PyPI has its older releases for CUDA only. docs/installing.md says how its floor was found.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path


def floors() -> list[str]:
    """Return a line such as `numpy==2.0` for each dependency."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [re.sub(r">=([\d.]+),.*", r"==\1", requirement) for requirement in project["dependencies"]]
    return [line for line in lines if not line.startswith("torch==")]


if __name__ == "__main__":
    print("\n".join(floors()))
