"""Single faults are planted in copies of a run. `finetune bisect` names each, and calls runs without a fault equal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.in_process import run_finetune
from tests.replay.scene import (
    CHANGED,
    OTHER_TEMPLATE,
    Scene,
    change_losses,
    change_tensor,
    copied,
    edit_json,
    edit_lines,
    make_scene,
)

CONFIGURATION = {"seed": "1", "optim.optimizer": "torch.optim.RMSprop", "lora.alpha": "8"}
BESIDE = ["data.split_seed=5", "training.num_epochs=3"]
"""Keys that change nothing in these runs, and must not be blamed."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("bisect"))


@pytest.fixture
def scene(original: Scene, tmp_path: Path) -> Scene:
    return copied(original, tmp_path)


def changed_row(rows: list[Any]) -> list[Any]:
    row = json.loads(json.dumps(rows[6]))
    row["messages"][1]["content"] += " oranges"
    return [*rows[:6], row, *rows[7:]]


ROWS = {
    "order": (lambda rows: rows[::-1], ["same 18 rows", "from row 1 on"]),
    "less": (lambda rows: rows[:4] + rows[5:], ["row 5", "train.jsonl:5", "14 of 18 rows"]),
}


def assert_named(found: tuple[int, dict[str, Any]], cause_type: str, *parts: str) -> dict[str, Any]:
    code, answer = found
    assert (code, answer["cause"] and answer["cause"]["type"]) == (3, cause_type), answer
    for part in parts:
        assert part in f"{answer['cause']['name']} {answer['cause']['text']}", answer
    assert answer["commands"]
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("key", CONFIGURATION)
def test_a_key_of_the_configuration(scene, key):
    scene.train("b", *BESIDE, f"{key}={CONFIGURATION[key]}")
    found = assert_named(scene.bisect_both(), "key", key)
    assert found["cause"]["name"] == key
    assert found["commands"][1].startswith(found["commands"][0])


@pytest.mark.slow
def test_rows_elsewhere(scene):
    rows = scene.copy_of("rows")
    for name, (change, parts) in ROWS.items():
        shutil.copy(scene.place / "rows/train.jsonl", rows)
        edit_lines(rows / "train.jsonl", change)
        scene.train(name, *BESIDE, f"data.path={rows}")
        assert_named(scene.bisect(str(scene.place / "a"), str(scene.place / name)), "row", "data.path is ", *parts)
    compared = run_finetune("diff", str(scene.place / "a"), str(scene.place / "less"))
    assert "train.jsonl line 5: the row itself differs: " in compared.answer
    assert "Rendered again: " in compared.answer
    assert "differ in token " in compared.answer


@pytest.mark.slow
def test_rows_that_were_changed_in_place(scene):
    edit_lines(scene.place / "rows/train.jsonl", changed_row)
    scene.train("b")
    assert_named(scene.bisect_both(), "row", "row 7 ", "token ", "oranges")  # from the cache of encoded rows
    scene.train("c", *BESIDE)
    found = assert_named(scene.bisect(str(scene.place / "a"), str(scene.place / "c")), "row", "row 7 ")
    assert any("a recorded other losses than it computes now" in note for note in found["notes"])
    shutil.rmtree(scene.place / "cache")
    assert_named(scene.bisect_both(), "row", "train.jsonl line 7: the row itself differs: ", "1 of 18 rows differ")
    (scene.place / "b/rows.safetensors").unlink()
    assert_named(scene.bisect_both(), "row", "are no longer on this machine")


@pytest.mark.slow
def test_another_base_and_one_that_was_changed_in_place(scene):
    base = scene.copy_of("base")
    change_tensor(base / "model.safetensors", CHANGED)
    scene.train("b", *BESIDE, f"model.path={base}")
    assert_named(scene.bisect_both(), "tensor", f"the first is {CHANGED}", "model.path is ")
    (scene.place / "base/chat_template.jinja").write_text(OTHER_TEMPLATE)
    scene.train("c", *BESIDE)
    runs = (str(scene.place / "a"), str(scene.place / "c"))
    assert_named(scene.bisect(*runs), "row", "the chat template differs", "differ in token 2: ")
    shutil.rmtree(scene.place / "rows")
    first_row = json.loads(run_finetune("diff", *runs, "--json").answer)["first_row"]
    a, b = first_row["tokens"]
    assert (first_row["line"], first_row["is_same_row"], first_row["text"]) == (1, True, "")
    assert (b > a, first_row["num_differing"], first_row["num_common"]) == (True, 18, 18)


@pytest.mark.slow
def test_the_adapter_to_start_from(scene):
    first, second = (shutil.copytree(scene.place / "a/adapter", scene.place / name) for name in ("one", "two"))
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
    change_tensor(second / "adapter_model.safetensors", name)
    shutil.rmtree(scene.place / "a")
    for run, adapter in (("a", first), ("b", second)):
        scene.train(run, f"lora.start_from={adapter}", "lora.start_from_any_base=true")
    found = assert_named(scene.bisect_both(), "tensor", "lora.start_from", "1 of ")
    assert found["cause"]["name"] == "model.layers.0.mlp.down_proj.lora_B.default.weight"


@pytest.mark.slow
def test_what_only_the_record_says(scene):
    scene.train("b", "training.batch_size=1", "checkpoint.save_every=3", "validation.validate_every=2")
    record = json.loads((scene.place / "b/run.json").read_text())
    changes = {
        "package": {"versions": {**record["versions"], "torch": "2.12.0"}},
        "computation": {"versions": record["versions"], "device": "cuda"},
    }
    losses = (scene.place / "b/metrics.jsonl").read_text()
    for cause_type, change in changes.items():
        edit_json(scene.place / "b/run.json", **change)
        assert scene.bisect_both()[0] == 0  # a fact alone is no difference
        change_losses(scene.place / "b")
        assert_named(scene.bisect_both(), cause_type, *(["torch", "2.12.0"] if cause_type == "package" else ["cuda"]))
        (scene.place / "b/metrics.jsonl").write_text(losses)
    edit_json(scene.place / "b/run.json", device=record["device"])
    change_losses(scene.place / "b")
    found = assert_named(scene.bisect_both(), "computation", "loss of step 2")
    assert "b recorded other losses than it computes now" in found["notes"][0]
