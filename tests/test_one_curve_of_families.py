"""A model of another family than Phi has one curve too: alone, on two ranks, and with its weights in parts."""

import json
from pathlib import Path

import pytest

from tests.curves import (
    FULL,
    REFERENCE_BATCH_SIZE,
    Case,
    assert_one_curve,
    assert_one_world,
    read_run,
    reports_of_run,
    run_and_report,
)
from tests.launches import LAUNCHERS
from tests.tiny_models import LLAMA_KIN, VARIANTS, tiny_gemma2_config
from tests.tiny_runs import MODEL_VOCABULARY

pytestmark = [pytest.mark.slow, pytest.mark.warm]

FSDP2 = "parallel.sharding=fsdp2"
REFERENCE = "training.kernels=reference"
ALONE = (
    Case(REFERENCE_BATCH_SIZE),
    Case(REFERENCE_BATCH_SIZE, words=(REFERENCE,)),
    Case(REFERENCE_BATCH_SIZE, recipe=FULL),
)
TWO_RANKS = (Case(2), Case(2, words=(FSDP2,)), Case(2, recipe=FULL), Case(2, recipe=FULL, words=(FSDP2,)))


FAMILIES = {**LLAMA_KIN, "gemma2": tiny_gemma2_config(), "gemma3_text": VARIANTS["gemma3_text"]}


def words_of(family: str) -> str:
    """The word for a random model of this family."""
    config = FAMILIES[family].to_dict() | {"vocab_size": MODEL_VOCABULARY, "initializer_range": 0.05}
    return f"model.config={json.dumps(config)}"


def test_qwen3_on_two_ranks_has_the_curve_of_one_process(tmp_path: Path) -> None:
    """Its queries and keys are normalized, and its first layer has a window that is shorter than the rows."""
    word = words_of("qwen3")
    run_and_report(LAUNCHERS["python"], tmp_path / "alone", ALONE, word)
    run_and_report(LAUNCHERS["torchrun"], tmp_path / "two", TWO_RANKS, word)
    lora, own_forward, full = (read_run(tmp_path / "alone" / case.name) for case in ALONE)
    assert lora.losses[3] < lora.losses[0] - 0.05, "a run that learns nothing proves nothing"
    assert_one_curve(own_forward, lora)
    for case in TWO_RANKS:
        assert_one_world(reports_of_run(tmp_path / "two", case.name), 2)
        run = read_run(tmp_path / "two" / case.name)
        assert run.record["fallbacks"] == []
        assert_one_curve(run, full if case.recipe == FULL else lora)
    plain, sharded = (tmp_path / "two" / case.name / "adapter" / "adapter_model.safetensors" for case in TWO_RANKS[:2])
    assert plain.read_bytes() == sharded.read_bytes()


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"qwen3"}))
def test_every_other_family_on_two_ranks_has_the_curve_of_one_process(family: str, tmp_path: Path) -> None:
    """The engine does not compute Gemma 2, so its runs use transformers' own forward and record this."""
    word = words_of(family)
    run_and_report(LAUNCHERS["python"], tmp_path / "alone", ALONE[:2], word)
    run_and_report(LAUNCHERS["torchrun"], tmp_path / "two", TWO_RANKS[:1], word)
    lora, own_forward = (read_run(tmp_path / "alone" / case.name) for case in ALONE[:2])
    two = read_run(tmp_path / "two" / TWO_RANKS[0].name)
    assert lora.losses[3] < lora.losses[0] - 0.05, "a run that learns nothing proves nothing"
    assert [fallback["what"] for fallback in two.record["fallbacks"]] == ["training.kernels"] * (family == "gemma2")
    assert_one_curve(own_forward, lora)
    assert_one_curve(two, lora)
