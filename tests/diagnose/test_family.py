"""`finetune doctor --model`: what is proven for a family, what is refused, and what a wrong family looks like."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from finetune.diagnose import family
from finetune.diagnose.family import PROMISES, FamilyProof, find_family
from finetune.engine import adapted
from finetune.engine.decoder import FAMILIES
from finetune.engine.layout import pack
from finetune.errors import ModelError
from tests.in_process import run_finetune


def outcomes(record: dict[str, Any]) -> dict[str, str]:
    return {promise["name"]: promise["outcome"] for promise in record["promises"]}


def norm_with_one_plus_weight(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return (1 + norm.weight) * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)


def write_longrope(folder: Path) -> str:
    """Write a config.json like Phi-4-mini's: LongRoPE, a partial rotation, fused layers and a tied head."""
    factors = {"short_factor": [1.0] * 30 + [1.5] * 18, "long_factor": [2.0] * 30 + [4.0] * 18}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **factors}
    sizes = {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True}
    contexts = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    keys = {"model_type": "phi3", **sizes, **contexts, "rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(keys))
    return str(folder / "config.json")


def test_a_norm_of_transformers_that_differs_from_the_engines_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_with_one_plus_weight)
    monkeypatch.setattr(adapted, "_PACKAGES", (*adapted._PACKAGES, "tests."))  # as if transformers had written it
    record = json.loads(run_finetune("doctor", "--model", "llama", "--json", code=3).answer)
    first, *others = record["promises"]
    assert (first["name"], first["outcome"], record["computed_by"]) == ("loss and gradients", "failed", "engine")
    assert "(at most 1e-06)" in first["what"]
    assert {promise["outcome"] for promise in others} == {"not run"}


def test_a_record_of_the_engine_without_the_norms_of_heads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "qwen3", replace(FAMILIES["qwen3"], head_norms=()))
    ended = run_finetune("doctor", "--model", "qwen3_0_6b", code=3)
    assert "computed by the engine" in ended.answer
    assert "Broken for this family: loss and gradients." in ended.answer


@pytest.mark.slow
def test_wrong_answers_and_a_wrong_plan_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = FamilyProof(find_family(write_longrope(tmp_path))[0], tmp_path, print)
    names = ("loss and gradients", "shared prefixes", "generation", "memory")
    monkeypatch.setattr(family, "PROMISES", {name: PROMISES[name] for name in names})
    proof.run()
    assert [result.outcome for result in proof.results] == ["ok"] * 4, proof.results
    monkeypatch.setattr(family, "generate_answers", lambda *_, **__: [[11, 12]])
    monkeypatch.setattr(family, "measure_peak", lambda step: step() or 10**9)
    monkeypatch.setattr(family, "pack", lambda rows, share_prefixes: pack(rows, share_prefixes=False))
    proof.results.clear()
    proof.run()
    assert [result.outcome for result in proof.results] == ["ok", "failed", "failed", "failed"]


def test_a_family_is_found_by_preset_model_type_file_and_folder(tmp_path: Path) -> None:
    keys = {"model_type": "qwen3", "head_dim": 64, "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(keys))
    for name in (str(file), str(tmp_path)):
        assert find_family(name)[0].head_dim == 64
    assert find_family("qwen3")[0].head_dim == 128
    assert find_family("qwen3_0_6b")[0].hidden_size == 1024


@pytest.mark.parametrize(
    ("preset", "layers", "keys"),
    [
        ("olmo3_7b", "full_attention", {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836}),
        ("llama3_2_1b", None, {"rope_type": "llama3", "factor": 32.0, "rope_theta": 5e5}),
        ("phi4_mini", None, {"rope_type": "longrope", "original_max_position_embeddings": 16}),
    ],
)
def test_a_preset_is_proven_with_its_scaled_positions(
    preset: str, layers: str | None, keys: dict[str, Any], tmp_path: Path
) -> None:
    """And the proof sees them: without them, the same weights have another loss."""
    proof = FamilyProof(find_family(preset)[0], tmp_path, print)
    rope = proof._config.rope_parameters
    rope = rope if layers is None else rope[layers]
    assert keys.items() <= rope.items()
    assert rope.get("short_factor", 0) != rope.get("long_factor", 1)
    rows = family._rows()
    assert proof.errors(proof._model, rows, shares=False)
    plain = type(proof._config)(**{**proof._config.to_dict(), "rope_parameters": None})
    with torch.no_grad():
        scaled, unscaled = (
            float(family._loss_in_float64(family._in_float64(model), rows))
            for model in (proof._model, family.random_model(plain))
        )
    assert abs(scaled / unscaled - 1) > 10 * family.LOSS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3_4bb", r"neither a preset .* Did you mean qwen3_4b\?"),
        ("olmo33", r"Did you mean olmo3\?"),
        ("some/where", "some/where is neither a file or folder here, nor in the hub's cache, and a proof asks no hub"),
        ("siglip", r"does not know its text model \(siglip_text_model\) as a causal language model"),
        ("bert", "bert is no causal language model: its layers let a token see later tokens"),
        ("phi4_multimodal", "it takes images and sound"),
    ],
)
def test_what_is_no_family_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        FamilyProof(find_family(name)[0], tmp_path, print)


def test_a_file_that_is_no_configuration_and_other_arguments_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[1")
    assert "is not a config.json" in run_finetune("doctor", "--model", file, code=2).errors
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 5000}))
    assert "num_hidden_layers is 5,000" in run_finetune("doctor", "--model", file, code=2).errors
    assert "takes no OVERRIDES" in run_finetune("doctor", "--model", "llama", "seed=1", code=2).errors


@pytest.mark.slow
@pytest.mark.warm
def test_all_promises_hold_for_a_family(tmp_path: Path) -> None:
    record = json.loads(run_finetune("doctor", "--model", write_longrope(tmp_path), "--json", code=0).answer)
    assert (record["computed_by"], record["exit_code"]) == ("engine", 0)
    assert outcomes(record) == dict.fromkeys(PROMISES, "ok"), record
