"""The benchmark of many ranks runs, and its page has every part."""

import os
import re
import subprocess
import sys

import pytest

from benchmarks.scale import PARTS
from tests.launches import REPOSITORY

PAGE = REPOSITORY / "docs" / "scale.md"


@pytest.mark.slow
@pytest.mark.process
def test_all_parts_run_with_few_ranks_and_with_fewer_open_files_than_ranks():
    sizes = ["--ranks", "40", "--rows", "64", "--seconds", "0.2", "--open-files", "40"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "benchmarks.scale", *sizes]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(r"^\| ([\d,]+) \|.*$", done.stdout, flags=re.MULTILINE)
    assert rows[:3] == ["40", "40", "64"], done.stdout
    assert re.findall(r"^(\w+) \(\d+ cores", done.stdout, flags=re.MULTILINE) == list(PARTS)


def test_the_page_names_the_command_of_each_part():
    text = PAGE.read_text(encoding="utf-8")
    assert [part for part in PARTS if f"python -m benchmarks.scale {part}" not in text] == []
