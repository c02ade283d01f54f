"""The statements of docs/peers.md hold for the installed peers, and the README compares with the same figures."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.gpu.figures import Figures
from tests.docs.pages import DOCS, README, REPOSITORY

_FIRST_OF_TWO_TASKS = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
_ITS_WORLD = """
from transformers import TrainingArguments
arguments = TrainingArguments(output_dir="run", use_cpu=True)
print(arguments.world_size, arguments.process_index)
"""


PAGE = (DOCS / "peers.md").read_text(encoding="utf-8")


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of each row of the only table in a text, without its head."""
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def trainer_defaults() -> dict[str, object]:
    from transformers import TrainingArguments

    return {field.name: field.default for field in fields(TrainingArguments)}


def test_the_versions_are_those_that_are_installed():
    transformers, trl = re.findall(r"transformers (\d+\.\d+) and TRL (\d+\.\d+)", PAGE)[0]
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    assert f"\ntransformers=={transformers}." in pins
    assert f"\ntrl=={trl}." in pins
    assert version("transformers").startswith(f"{transformers}.")


RECORDED = Figures(REPOSITORY / "benchmarks" / "results-gpu.jsonl")
RATES = {
    record["task"]: record["figures"]["median_tokens_per_second"]
    for record in RECORDED.records
    if "median_tokens_per_second" in record.get("figures", {})
}


def test_every_row_has_a_proof_that_is_there():
    rows = rows_of(PAGE.partition("## Shared prefixes")[0])
    assert len(rows) >= 13
    for name, _, _, proof in rows:
        tests, pages = re.findall(r"`(tests/[\w/.]+)`", proof), re.findall(r"\]\(([\w-]+\.md)\)", proof)
        assert tests or pages, f"the row '{name}' names no proof"
        assert all("def test_" in (REPOSITORY / test).read_text(encoding="utf-8") for test in tests), name
        assert set(pages) <= {"one-curve.md", "benchmarks.md"}, name


def test_the_readme_compares_with_figures_that_were_recorded():
    text = README.read_text(encoding="utf-8")
    compared = " ".join(text.partition("## How it compares\n")[2].partition("\n## ")[0].split())
    times = f"{RATES['peers/mini/ours'] / RATES['peers/mini/trl-1x16-liger']:.1f} times"
    *others, fastest = sorted(rate for task, rate in RATES.items() if task.startswith("peers/chat/trl"))
    assert len(others) >= 3
    times_with_chats = f"{RATES['peers/chat/ours'] / fastest:.1f} times"
    for part in (f"on chat rows {times_with_chats} as fast as the fastest", f"rows of 4,096 tokens {times}."):
        assert part in compared
    for part in (f"on one H200: chat rows {times_with_chats} the", f"rows of 4,096 tokens {times} those of TRL"):
        assert part in PAGE
    for_owners_of_gpus = text.partition("## Your data")[0]
    low, high = sorted(f"{round(RATES[f'phi4/{name}'], -2):,.0f}" for name in ("plain", "defaults"))
    assert f"phi-4 trains {low} to {high} tokens" in for_owners_of_gpus
    plan = RECORDED.last("phi4/defaults") or {}
    assert abs(plan["figures"]["peak_over_plan"] - 1) < 0.01
    speed = r"\d\.\d to \d\.\d times"
    assert re.findall(speed, compared) == re.findall(speed, PAGE) != []


def test_the_trainer_weighs_by_tokens_hides_losses_that_are_not_finite_and_takes_broken_checkpoints(tmp_path):
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.trainer_utils import get_last_checkpoint

    defaults = trainer_defaults()
    assert defaults["average_tokens_across_devices"] is defaults["logging_nan_inf_filter"] is True
    assert {"fsdp", "deepspeed", "report_to"} <= defaults.keys()
    assert {"tensorboard", "wandb", "trackio", "mlflow"} < INTEGRATION_TO_CALLBACK.keys()
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text("{}", encoding="utf-8")
    (tmp_path / "checkpoint-10").mkdir()  # a save that was killed at once
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")


@pytest.mark.process
@pytest.mark.slow
def test_a_task_of_srun_is_a_world_of_its_own_for_the_trainer(tmp_path):
    environment = {**os.environ, **_FIRST_OF_TWO_TASKS}
    done = subprocess.run(
        [sys.executable, "-c", _ITS_WORLD], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.split() == ["1", "0"], done.stderr


@pytest.mark.needs("trl")
def test_trl_trains_on_the_whole_conversation_by_default_has_more_methods_and_packs_shared_prefixes():
    trl = importlib.import_module("trl")
    assert {field.name: field.default for field in fields(trl.SFTConfig)}["assistant_only_loss"] is False
    for name in ("DPOTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer", "RewardTrainer"):
        assert hasattr(trl, name)
    (folder,) = importlib.util.find_spec("trl").submodule_search_locations
    trainer = (Path(folder) / "experimental/async_grpo/async_grpo_trainer.py").read_text(encoding="utf-8")
    assert "rows = [TreeRow() for _ in range(self.num_processes)]" in trainer
    assert "attn_implementation=TREE_ATTENTION" in trainer
