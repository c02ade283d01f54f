"""Which tests may see a GPU, and that those which need one are right: most of what a CPU can run runs here."""

from __future__ import annotations

import ctypes.util
import os
import re
import subprocess
import sys

import pytest

from benchmarks.gpu.recovery import run_gpu_tests
from benchmarks.gpu.session import Session
from tests.launches import run_command

pytestmark = pytest.mark.process

FEW = (
    "not bf16 and not fp16 and not dora and not pissa and not rslora and not neftune and not workers"
    " and not (answers and phi-3) and not (prefixes and full) and not (peak and False)"
    " and not ends_close and not (on_the_cpu and not checkpointing) and not (outputs and heads4)"
    " and not (graphs and dropout) and not (answers and greedy) and not (products and 1024)"
    " and not (outputs and dtype1 and not heads0) and not (two_steps and checkpointing)"
    " and not (prefixes and not gemma-3 and not phi-4-mini)"
)
"""A CPU is slow in 16 bits. tests/model, training, inference and engine run what is left out here."""
PRINTS = "import os; print('sees', repr(os.environ.get('CUDA_VISIBLE_DEVICES')))"


def test_no_gpu_is_seen_here_nor_in_a_process_that_a_test_starts() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert "sees ''" in run_command([sys.executable, "-c", PRINTS]).stdout
    with pytest.raises(AssertionError, match="would see this machine's GPUs"):
        subprocess.run([sys.executable, "-c", PRINTS], env={"PATH": os.environ["PATH"]}, check=True)


def test_a_library_may_be_looked_up() -> None:
    """As torch for CUDA does when it is imported, in an environment of its own."""
    ctypes.util.find_library("c")


@pytest.mark.slow
@pytest.mark.warm
def test_on_the_cpu_they_pass_but_for_those_of_cuda(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a session of benchmarks/gpu_session.py runs them."""
    # A process that is forked off has imported what pytest would rewrite.
    options = f"-q -W ignore::pytest.PytestAssertRewriteWarning -k '{FEW}'"
    variables = {"FINETUNE_TEST_DEVICE": "cpu", "PYTEST_ADDOPTS": options, "PYTHONWARNINGS": ""}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    figures = run_gpu_tests(Session(device="cpu", is_tiny=True))
    printed = capsys.readouterr().out
    assert (figures["is_right"], figures["failed"], figures["error"]) == (True, 0, 0), printed
    assert figures["passed"] > 9
    reasons = set(re.findall(r"^SKIPPED \[\d+\] .*?:\d+: (.*)$", printed, flags=re.MULTILINE))
    assert reasons
    assert all(reason.startswith(("only CUDA", "bitsandbytes")) for reason in reasons), reasons
