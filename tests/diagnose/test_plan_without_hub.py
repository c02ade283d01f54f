"""`finetune plan` for presets whose files are not here, and without rows."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import which_gpu
from finetune.config import hub
from finetune.config.compose import compose
from finetune.config.listing import list_configs
from finetune.config.schema import ModelSection
from finetune.diagnose.plan_devices import read_device
from finetune.diagnose.planner import Planner
from finetune.engine.supported import unsupported_reason
from finetune.logs import warn_once
from finetune.model.base import longrope_boundary
from finetune.model.published import published_sizes
from tests.in_process import run_finetune
from tests.model.phi_table import PAGE
from tests.readable_hub import point_to, running_hub

PARAMETERS = {
    "phi1": 1_418_270_720,
    "phi1_5": 1_418_270_720,
    "phi2": 2_779_683_840,
    "phi3_mini": 3_821_079_552,
    "phi3_mini_128k": 3_821_079_552,
    "phi3_5_mini": 3_821_079_552,
    "phi3_medium": 13_960_238_080,
    "phi3_medium_128k": 13_960_238_080,
    "phi3_5_moe": 41_873_153_344,
    "phi4": 14_659_507_200,
    "phi4_mini": 3_836_021_760,
    "phi4_mini_reasoning": 3_836_021_760,
    "phi4_reasoning": 14_659_507_200,
    "phi4_reasoning_plus": 14_659_507_200,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1_7b": 1_711_376_384,
    "smollm3_3b": 3_075_098_624,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_14b": 14_770_033_664,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_4b_instruct_2507": 4_022_468_096,
    "qwen3_4b_thinking_2507": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "llama3_1_8b": 8_030_261_248,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "llama3_3_70b": 70_553_706_496,
    "mistral_7b": 7_248_023_552,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "olmo3_7b": 7_298_011_136,
    "granite4_1b": 1_631_750_144,
    "granite4_micro": 3_402_836_480,
}
"""Of the weights that are published: the hub's pages show these numbers, rounded."""


NOT_OF_THE_ENGINE = {"phi3_5_moe", "gemma2_2b", "gemma2_9b", "granite4_1b", "granite4_micro"}


def presets() -> dict[str, ModelSection]:
    names = [name for name, _ in list_configs()["model"] if name != "phi_tiny"]
    return {name: compose([f"model={name}"], complete=False).model for name in names}


@pytest.mark.few(12)
@pytest.mark.parametrize("name", PARAMETERS)
def test_shipped_sizes_make_the_published_number_of_parameters(name):
    published = published_sizes(compose([f"model={name}"], complete=False).model)
    keys = published.as_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys))
    assert sum(weight.numel() for weight in model.parameters()) == PARAMETERS[name]
    assert (unsupported_reason(model) is None) is (name not in NOT_OF_THE_ENGINE)
    is_phi = name.startswith("phi")
    page = PAGE if is_phi else PAGE.with_name("models.md")
    (row,) = [line for line in page.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    _, billions, context, *others = [cell.strip() for cell in row.strip("|").split("|")]
    assert float(billions.split()[0]) == pytest.approx(PARAMETERS[name] / 1e9, rel=0.1)
    if is_phi:
        boundary, window, *_ = others
        assert boundary.replace(",", "") == str(longrope_boundary(model) or "")
        assert window.replace(",", "") == str(published.sizes.get("sliding_window", ""))
    if "here" not in context:
        assert context.replace(",", "") == str(model.config.max_position_embeddings)


@pytest.mark.slow
def test_a_preset_is_planned_without_hub_and_data_and_another_model_is_not():
    assert presets().keys() == PARAMETERS.keys()
    other = run_finetune("plan", "model.path=someone/else")
    assert (other.returncode, "HF_HUB_OFFLINE is set" in other.stdout) == (2, True)
    ended = run_finetune("plan", "model=phi4", "--device", "H100 80GB")
    assert ended.returncode == 0
    assert "phi3, 40 layers, 14,715,212,800 parameters\n" in ended.stdout
    assert "% fits (peak: " in ended.stdout.replace("%: fits", "% fits")
    assert "HF_HUB_OFFLINE is set, so the sizes of microsoft/phi-4 are those shipped with finetune " in ended.stdout


NOTHING_TO_CHOOSE = ["training.batch_size=1", "training.gradient_checkpointing=true"]
"""The search for what memory allows takes the most time of a plan."""


def findings_in(area, planner):
    return [finding.what for finding in planner.findings if finding.area == area]


@pytest.mark.slow
def test_rows_cannot_be_counted_without_a_tokenizer(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    for name, model, said in (
        ("rows", "phi1", "the tokenizer is not here either"),
        ("gone", "phi_tiny", "there is no such file or folder"),
    ):
        words = [f"model={model}", f"data.path={tmp_path / name}.jsonl", *NOTHING_TO_CHOOSE]
        (found,) = findings_in("Data", Planner(compose(words), read_device("H100 80GB")))
        assert said in found


@pytest.mark.slow
def test_the_hubs_own_config_counts_and_a_difference_is_told(tmp_path, monkeypatch):
    from huggingface_hub import constants

    keys = published_sizes(presets()["phi3_mini"]).as_config() | {"num_hidden_layers": 31, "sliding_window": 2047}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(keys))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "answers_heard", {})
    warn_once.cache_clear()
    with running_hub() as state:
        state.folders["microsoft/Phi-3-mini-4k-instruct"] = tmp_path / "model"
        point_to(monkeypatch, state.address)
        config = compose(["model=phi3_mini", *NOTHING_TO_CHOOSE], needs_data=False)
        planner = Planner(config, read_device("H100 80GB"))
    assert planner.model.config.num_hidden_layers == 31
    (found,) = findings_in("Model", planner)
    assert "num_hidden_layers is 31 in its config.json and 32 in the sizes shipped with" in found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi4_mini", "phi4"])
def test_the_table_of_gpus_is_what_the_plan_says(monkeypatch, name):
    task, length = "QLoRA", 2_048
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (row,) = [line for line in which_gpu.PAGE.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    cells = [found.strip() for found in row.strip("|").split("|")]
    columns = [(of, tokens) for of in which_gpu.TASKS for tokens in which_gpu.LENGTHS]
    cell = cells[1 + columns.index((task, length))]
    assert cell == which_gpu.cell(name, task, length)
    assert cell.endswith({"phi4_mini": " 8 GB", "phi4": " 12 GB"}[name])
