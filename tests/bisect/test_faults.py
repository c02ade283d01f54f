"""Single faults are planted in copies of a run. `finetune bisect` names each, and calls runs without a fault equal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.bisect.scene import (
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

pytestmark = pytest.mark.trains
CONFIGURATION = {
    "seed": "1",
    "optim.learning_rate": "2e-2",
    "optim.weight_decay": "0.1",
    "optim.args": "{betas: [0.5, 0.9]}",
    "optim.schedule": "cosine",
    "optim.warmup_steps": "2",
    "optim.max_grad_norm": "0.1",
    "optim.optimizer": "torch.optim.RMSprop",
    "optim.lora_plus_ratio": "4",
    "lora.r": "4",
    "lora.alpha": "8",
    "lora.dropout": "0.1",
    "lora.rslora": "true",
    "lora.dora": "true",
    "lora.init": "pissa",
    "lora.target_modules": "[o_proj]",
    "training.precision": "bf16",
    "training.max_steps": "7",
    "training.method": "full",
    "training.global_batch_size": "6",
    "training.drop_last": "true",
    "training.neftune_alpha": "5",
}
BESIDE = ["data.split_seed=5", "training.num_epochs=3"]
"""Keys that change nothing in these runs, and must not be blamed."""
HARMLESS = {
    "the same settings": [],
    "keys without an effect here": BESIDE,
    "smaller micro-batches": ["training.batch_size=1"],
    "rows with padding": ["training.packing=false"],
    "transformers' own kernels": ["training.kernels=reference"],
    "AdamW without decay is Adam": ["optim.optimizer=torch.optim.Adam"],
    "other saves and validations": ["checkpoint.save_every=3", "validation.validate_every=2", "testing.batch_size=1"],
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("bisect"))


@pytest.fixture
def scene(original: Scene, tmp_path: Path) -> Scene:
    return copied(original, tmp_path)


def changed_row(rows: list[Any], turn: int) -> list[Any]:
    rows[6]["messages"][turn]["content"] += " oranges"
    return rows


ROWS = {
    "an answer": (lambda rows: changed_row(rows, 1), "rows", ["row 7", "train.jsonl:7", "messages[1].content"]),
    "a question": (lambda rows: changed_row(rows, 0), "rows", ["row 7", "messages[0].content", "1 of 18 rows differs"]),
    "the order": (lambda rows: rows[::-1], "order of rows", ["same 18 rows", "from row 1 on"]),
    "two rows swapped": (lambda rows: [rows[9], *rows[1:9], rows[0], *rows[10:]], "order of rows", ["from row 1 on"]),
    "a row less": (lambda rows: rows[:4] + rows[5:], "rows", ["has no row equal to", "train.jsonl:5"]),
    "a row more": (lambda rows: [*rows[:4], changed_row(rows[:], 0)[6], *rows[4:6], *rows[6:]], "rows", ["row"]),
}


def assert_named(found: tuple[int, dict[str, Any]], what: str, *parts: str) -> dict[str, Any]:
    code, answer = found
    assert (code, answer["cause"] and answer["cause"]["what"]) == (3, what), answer
    for part in parts:
        assert part in f"{answer['cause']['name']} {answer['cause']['text']}", answer
    assert len(answer["cause"]["commands"]) == 2
    cause: dict[str, Any] = answer["cause"]
    return cause


@pytest.mark.sweep
@pytest.mark.sampled(4)
@pytest.mark.parametrize("key", CONFIGURATION)
def test_a_key_of_the_configuration(scene, key):
    scene.train("b", *BESIDE, f"{key}={CONFIGURATION[key]}")
    cause = assert_named(scene.bisect_both(), "configuration", key)
    assert cause["name"] == key
    assert cause["commands"][1].startswith(cause["commands"][0])


@pytest.mark.sweep
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", HARMLESS)
def test_runs_without_a_fault_are_equal(scene, name):
    scene.train("b", *HARMLESS[name])
    code, found = scene.bisect_both()
    assert (code, found["step"], found["cause"], found["num_steps"]) == (0, None, None, 6), found


@pytest.mark.sweep
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ROWS)
def test_rows_elsewhere(scene, name):
    change, what, parts = ROWS[name]
    rows = scene.copy_of("rows")
    edit_lines(rows / "train.jsonl", change)
    scene.train("b", *BESIDE, f"data.path={rows}")
    assert_named(scene.bisect_both(), what, *parts)


@pytest.mark.sweep
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["an answer", "the order", "a row less"])
def test_rows_that_were_changed_in_place_come_from_the_cache(scene, name):
    change, what, _ = ROWS[name]
    edit_lines(scene.place / "rows/train.jsonl", change)
    scene.train("b", *BESIDE)
    code, found = scene.bisect_both()
    assert_named((code, found), what, *(["row 7 ", "token ", "oranges"] if name == "an answer" else []))
    assert any("a recorded other losses than it computes now" in note for note in found["notes"])


@pytest.mark.slow
def test_rows_that_are_gone_are_named_by_their_fingerprints(scene):
    edit_lines(scene.place / "rows/train.jsonl", ROWS["an answer"][0])
    shutil.rmtree(scene.place / "cache")
    scene.train("b")
    assert_named(scene.bisect_both(), "rows", "those of ", "are no longer on this machine")


@pytest.mark.sweep
@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["elsewhere", "in place"])
@pytest.mark.parametrize("what", ["base weights", "chat template", "tokenizer"])
def test_the_base(scene, what, place):
    base = scene.copy_of("base") if place == "elsewhere" else scene.place / "base"
    if what == "base weights":
        change_tensor(base / "model.safetensors", CHANGED)
    elif what == "chat template":
        (base / "chat_template.jinja").write_text(OTHER_TEMPLATE)
    else:
        tokenizer = json.loads((base / "tokenizer.json").read_text())
        tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-20]
        (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    scene.train("b", *BESIDE, f"model.path={base}")
    if place == "elsewhere":
        cause = assert_named(scene.bisect_both(), what, "model.path")
        assert what != "base weights" or cause["name"] == CHANGED
    elif what == "base weights":
        assert_named(scene.bisect_both(), what, "bases with other weights")
    elif what == "tokenizer":
        assert_named(scene.bisect_both(), "rows", "token")  # what else would change tokens is not recorded
    else:
        assert_named(scene.bisect_both(), what)


@pytest.mark.sweep
def test_the_template_of_the_data(scene):
    (scene.place / "other.jinja").write_text(OTHER_TEMPLATE)
    scene.train("b", f"data.chat_template={scene.place / 'other.jinja'}")
    assert_named(scene.bisect_both(), "chat template", "data.chat_template")


@pytest.mark.sweep
def test_the_adapter_to_start_from(scene):
    first, second = (shutil.copytree(scene.place / "a/adapter", scene.place / name) for name in ("one", "two"))
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
    change_tensor(second / "adapter_model.safetensors", name)
    shutil.rmtree(scene.place / "a")
    scene.train("a", f"lora.start_from={first}", "lora.start_from_any_base=true")
    scene.train("b", f"lora.start_from={second}", "lora.start_from_any_base=true")
    cause = assert_named(scene.bisect_both(), "starting weights", "lora.start_from", "1 of ")
    assert cause["name"] == "model.layers.0.mlp.down_proj.lora_B.default.weight"


@pytest.mark.sweep
def test_published_weights(scene):
    scene.train("b")
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
    change_tensor(scene.place / "b/adapter/adapter_model.safetensors", name)
    code, found = scene.bisect_both()
    assert (code, found["step"], found["cause"]["what"], found["cause"]["name"]) == (3, None, "published weights", name)


RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "package": ({"versions": {"torch": "2.12.0"}}, "torch"),
    "device": ({"device": "cuda"}, "cuda"),
    "threads": ({"threads": {"count": 64}}, "64"),
}


@pytest.mark.sweep
@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", RECORDS)
def test_what_only_the_record_says(scene, what):
    scene.train("b")
    change, part = RECORDS[what]
    record = json.loads((scene.place / "b/run.json").read_text())
    edit_json(
        scene.place / "b/run.json", **{k: {**record[k], **v} if isinstance(v, dict) else v for k, v in change.items()}
    )
    assert scene.bisect_both()[0] == 0  # a fact alone is no difference
    change_losses(scene.place / "b")
    assert_named(scene.bisect_both(), what, part)
