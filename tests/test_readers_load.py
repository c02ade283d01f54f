"""The package does not grow in the way of a reader. Lower these numbers when they fall; do not raise them."""

import json
import subprocess
import sys

import pytest

from tests.launches import REPOSITORY
from tools.readers_load import PACKAGE, lines_of_functions, names_defined_twice

MOST_MODULES_RUN = 113
MOST_MODULES_IMPORTED = 126
MOST_LINES_IMPORTED = 25_612
MOST_MODULES_IMPORTED_BEFORE_STEP_1 = 118
MOST_LINES_IMPORTED_BEFORE_STEP_1 = 23_578


def test_each_public_name_has_one_home():
    assert names_defined_twice() == []


def test_no_function_has_more_than_75_lines_but_commands_with_their_options():
    files = [file for file in PACKAGE.rglob("*.py") if file.parent.name != "cli"]
    assert len(files) > 200
    long = [f"{file}:{first}" for file in files for first, length in lines_of_functions(file) if length > 75 + 1]
    assert long == [], "one line is a decorator's"


@pytest.mark.slow
def test_one_run_meets_no_more_modules_than_before():
    done = subprocess.run(
        [sys.executable, "tools/readers_load.py"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    measured = json.loads(done.stdout)
    assert measured["modules_run"] <= MOST_MODULES_RUN
    assert measured["modules_imported"] <= MOST_MODULES_IMPORTED
    assert measured["lines_imported"] <= MOST_LINES_IMPORTED
    assert 0 < measured["modules_imported_before_step_1"] <= MOST_MODULES_IMPORTED_BEFORE_STEP_1
    assert measured["lines_imported_before_step_1"] <= MOST_LINES_IMPORTED_BEFORE_STEP_1
