"""A model of another family than Phi has one curve too: alone, on two ranks, and with its weights in parts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.curves import (
    FULL,
    REFERENCE_BATCH_SIZE,
    Case,
    assert_one_curve,
    assert_one_world,
    read_run,
    reporting_words,
    reports_of_run,
)
from tests.launches import LAUNCHERS, run_command
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


def train_all(launcher: str, folder: Path, cases: Mapping[str, Sequence[Case]]) -> Path:
    """Train these cases of each family in one launch; a run's folder is named after its family and case."""
    told = [reporting_words(folder, own, words_of(family), prefix=f"{family}_") for family, own in cases.items()]
    words = told[0] + [word for others in told[1:] for word in ("--", *others[2:])]
    done = run_command([*LAUNCHERS[launcher], *words], limit_seconds=480)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of one process. A new process for each family would spend more on its start."""
    cases = {family: ALONE if family == "qwen3" else ALONE[:2] for family in FAMILIES}
    return train_all("python", tmp_path_factory.mktemp("alone"), cases)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of two ranks."""
    cases = {family: TWO_RANKS if family == "qwen3" else TWO_RANKS[:1] for family in FAMILIES}
    return train_all("torchrun", tmp_path_factory.mktemp("two"), cases)


def test_qwen3_on_two_ranks_has_the_curve_of_one_process(alone: Path, two: Path) -> None:
    """Its queries and keys are normalized, and its first layer has a window that is shorter than the rows."""
    lora, own_forward, full = (read_run(alone / f"qwen3_{case.name}") for case in ALONE)
    assert lora.losses[3] < lora.losses[0] - 0.05, "a run that learns nothing proves nothing"
    assert_one_curve(own_forward, lora)
    for case in TWO_RANKS:
        assert_one_world(reports_of_run(two, f"qwen3_{case.name}"), 2)
        run = read_run(two / f"qwen3_{case.name}")
        assert run.record["fallbacks"] == []
        assert_one_curve(run, full if case.recipe == FULL else lora)
    plain, sharded = (two / f"qwen3_{case.name}" / "adapter" / "adapter_model.safetensors" for case in TWO_RANKS[:2])
    assert plain.read_bytes() == sharded.read_bytes()


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"qwen3"}))
def test_every_other_family_on_two_ranks_has_the_curve_of_one_process(family: str, alone: Path, two: Path) -> None:
    """The engine does not compute Gemma 2, so its runs use transformers' own forward and record this."""
    lora, own_forward = (read_run(alone / f"{family}_{case.name}") for case in ALONE[:2])
    of_two = read_run(two / f"{family}_{TWO_RANKS[0].name}")
    assert lora.losses[3] < lora.losses[0] - 0.05, "a run that learns nothing proves nothing"
    assert [fallback["what"] for fallback in of_two.record["fallbacks"]] == ["training.kernels"] * (family == "gemma2")
    assert_one_curve(own_forward, lora)
    assert_one_curve(of_two, lora)
    assert of_two.record["world_size"] == 2
