"""Which tests may see a GPU, and that those which need one are right: most of what a CPU can run runs here."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.launches import REPOSITORY, run_command

pytestmark = pytest.mark.process

FEW = "not bf16 and not fp16 and not dora and not pissa and not rslora and not workers"
"""A CPU is slow in 16 bits, and runs the methods that are left out here in tests/methods."""
PRINTS = "import os; print('sees', repr(os.environ.get('CUDA_VISIBLE_DEVICES')))"


def test_no_gpu_is_seen_here_nor_in_a_process_that_a_test_starts() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert "sees ''" in run_command([sys.executable, "-c", PRINTS]).stdout
    with pytest.raises(AssertionError, match="would see this machine's GPUs"):
        subprocess.run([sys.executable, "-c", PRINTS], env={"PATH": os.environ["PATH"]}, check=True)


@pytest.mark.slow
def test_on_the_cpu_they_pass_but_for_those_of_cuda() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu", "-k", FEW]
    variables = {"PYTHONWARNINGS": "", "FINETUNE_TEST_DEVICE": "cpu"}
    done = run_command(command, cwd=REPOSITORY, variables=variables, limit_seconds=600)
    assert done.returncode == 0, done.stdout
    reasons = set(re.findall(r"^SKIPPED \[\d+\] .*?:\d+: (.*)$", done.stdout, flags=re.MULTILINE))
    assert all(reason.startswith(("only CUDA", "bitsandbytes")) for reason in reasons), reasons
    assert re.search(r"^\d{2,} passed, ", done.stdout, flags=re.MULTILINE), done.stdout
