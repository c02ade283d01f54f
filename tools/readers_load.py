"""Measure what a reader of one run meets: which modules and functions of the package run in it.

    python tools/readers_load.py

Trains three steps of the quickstart in this process, on the CPU and in a temporary folder, and prints the measures as
JSON. A module counts as run if one of its functions was called. All lines of an imported module count, those imported
before the first step once more on their own.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType

PACKAGE = Path(__file__).resolve().parents[1] / "finetune"
_RUN = (
    *("train", "quickstart", "training.max_steps=3", "data.max_rows=24", "training.batch_size=4"),
    *("optim.warmup_steps=0", "testing.num_samples=1", "testing.max_new_tokens=4", "training.device=cpu"),
)
_OF_SOME_MACHINES = PACKAGE / "training" / "reporting" / "energy.py"
_LIBRARIES = ("accelerate", "peft", "transformers.models.phi3.modeling_phi3", "transformers.generation.utils")
"""What the run imports of others. Imported before calls are watched, it takes a third of the time."""
_STEP = "train_step"
"""The function that computes one step."""


def functions_of_run() -> tuple[set[tuple[Path, int]], list[Path]]:
    """Train three steps.

    Returns:
        The file and the first line of each function of the package that was called, and the files of the package that
        were imported when the first step began.
    """
    from finetune.cli import main

    called: set[CodeType] = set()
    before_steps: list[Path] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code)
            if frame.f_code.co_name == _STEP and not before_steps:
                before_steps.extend(imported_files())

    for library in _LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            main([*_RUN, f"output_dir={folder}/run", f"data.cache_dir={folder}/cache"])
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    places = ((Path(code.co_filename), code.co_firstlineno) for code in called)
    return {(file, line) for file, line in places if file.is_relative_to(PACKAGE)}, before_steps


def imported_files() -> list[Path]:
    """Return the files of the package that this process has imported, on any machine.

    Only machines whose processors tell their energy import `energy.py`.
    """
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "finetune"]
    files = [Path(module.__file__) for module in modules if module.__file__]
    return [file for file in files if file != _OF_SOME_MACHINES]


def lines_of_functions(file: Path) -> Iterator[tuple[int, int]]:
    """Yield the first line, decorators included, and the number of lines of each function in a file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield first, (node.end_lineno or node.lineno) - node.lineno + 1


def names_defined_twice() -> list[str]:
    """Return the public functions and classes that have the name of one in another module."""
    names = Counter(
        node.name
        for file in PACKAGE.rglob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, count in names.items() if count > 1)


def number_of_lines(files: Iterable[Path]) -> int:
    """Return how many lines all files have together."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def measure() -> dict[str, object]:
    """Return all measures."""
    called, before_steps = functions_of_run()
    imported = imported_files()
    files = list(PACKAGE.rglob("*.py"))
    run = {
        file: [length for first, length in lines_of_functions(file) if (file, first) in called]
        for file in {file for file, _ in called}
    }
    run = {file: lengths for file, lengths in run.items() if lengths}
    return {
        "files": len(files),
        "lines": number_of_lines(files),
        "modules_run": len(run),
        "modules_imported": len(imported),
        "lines_imported": number_of_lines(imported),
        "modules_imported_before_step_1": len(before_steps),
        "lines_imported_before_step_1": number_of_lines(before_steps),
        "functions_run": sum(map(len, run.values())),
        "lines_of_functions_run": sum(map(sum, run.values())),
        "names_defined_twice": names_defined_twice(),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(PACKAGE.parent))
    print(json.dumps(measure(), indent=2))
