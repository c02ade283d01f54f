"""`finetune evaluate` and `finetune generate` with a sharded model print what one process prints."""

import json

import pytest

from tests.launches import LAUNCHERS, run_command

pytestmark = [pytest.mark.slow, pytest.mark.warm]

SHARDED = "parallel.sharding=fsdp2"
PROMPTS = ["Please send 3 crates of oranges to Marta Ruiz in Porto by Friday", "Two pens.", "330 notebooks to Tamara"]


def finetune(launcher, *words):
    """What the command wrote, on all ranks."""
    done = run_command([*LAUNCHERS[launcher], "-m", "finetune", *words], limit_seconds=120)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_run_is_measured_alike(adapter_run, tmp_path):
    for launcher, words in (("python", ()), ("torchrun", (SHARDED, "strict=true"))):
        output = tmp_path / f"{launcher}.json"
        finetune(launcher, "evaluate", adapter_run, *words, "--metric", "exact_match", "--output", output)
    alone, shared = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("python", "torchrun"))
    assert alone == shared
    assert {"base", "tuned"} <= shared.keys()
    assert shared["rows"]


@pytest.mark.parametrize("how", [["--compare"], ["--temperature", "1.5", "--seed", "7"]], ids=["greedy", "drawn"])
def test_a_run_answers_alike(adapter_run, how):
    """One of the ranks has no prompt in the second round, and answers end at places of their own."""
    words = ["generate", adapter_run, *PROMPTS, "--json", "--batch-size", "1", "--max-new-tokens", "64"]
    alone, shared = (
        [line for line in finetune(launcher, *words, *how, *more).splitlines() if line.startswith("{")]
        for launcher, more in (("python", ()), ("torchrun", ("--set", SHARDED)))
    )
    assert len(alone) == len(PROMPTS)
    assert alone == shared
    assert len({json.loads(line)["num_tokens"] for line in alone}) > 1
