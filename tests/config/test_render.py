"""A resolved config reads back equal; what is shown names origins; the schema for editors fits the files."""

import json
from pathlib import Path

import pytest

from finetune.config.compose import compose
from finetune.config.keys import fields
from finetune.config.render import json_schema, resolved_yaml
from finetune.config.schema import Config
from tests.in_process import run_finetune

AWKWARD = [
    *("1e-4", ".5e3", "0o17", "007", "yes", "null", "~", "", " x ", "2025-01-15", "1:30", "a: b", "# a", "*.x", "!x"),
    *("{{ a }}\n{% b %}\n", "'quoted'", '"', "\\", "ünï ☃ \U0001f600", "=", "<<", "- a", "tab\t", "\x07", "\u2028"),
    "x" * 500,
]


def read_back(tmp_path: Path, config: Config) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(config), encoding="utf-8")
    return compose([], run=str(path), complete=False)


@pytest.mark.parametrize("words", [["run=quickstart"], ["model=phi2", "data=orders", "task=debug"], ["data=phi4"]])
def test_a_resolved_config_composes_to_an_equal_one(tmp_path, words):
    config = compose([*words, "optim.learning_rate=1e-05"], complete=False)
    again = read_back(tmp_path, config)
    assert again == config
    assert resolved_yaml(again) == resolved_yaml(config)


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_reads_back(tmp_path, text):
    values = {"model": {"path": text, "config": {"a": text, text or "b": [text, {"c": text}]}}, "output_dir": text}
    config = Config.model_validate(values)
    assert read_back(tmp_path, config) == config


def test_awkward_values_read_back(tmp_path):
    args = {"a": None, "b": [], "c": {}, "d": 1e-300, "e": 1e22, "f": float("inf"), "g": True, "h": [[1], {"x": 2.0}]}
    config = Config.model_validate({"optim": {"args": args}})
    again = read_back(tmp_path, config)
    assert again == config
    assert json.dumps(again.model_dump()) == json.dumps(config.model_dump())


def test_a_dotted_name_below_a_free_key_reads_back(tmp_path):
    config = compose(["optim.args.base=!pyobject torch.optim.SGD"], complete=False)
    assert "base: !pyobject" in resolved_yaml(config)
    assert read_back(tmp_path, config) == config


def test_show_aligns_a_comment_with_each_origin(tmp_path):
    run = tmp_path / "r.yaml"
    run.write_text("lora:\n  r: 4\nmodel.tokenizer: " + "x" * 200 + "\n")
    lines = run_finetune("config", "show", run, "seed=3", "optim.args.eps=1", code=0).stdout.splitlines()
    by_key = {line.split(":")[0].strip(): line for line in lines}
    assert by_key["seed"].endswith("  # command line")
    assert by_key["r"].endswith(f"  # {run}:2")
    assert by_key["eps"].endswith("  # command line")
    assert by_key["dropout"].endswith("  # default")
    assert by_key["tokenizer"].endswith(f"x  # {run}:3")
    assert by_key["optim"] == "optim:"
    columns = {line.index("  # ") for line in lines if "  # " in line and len(line) < 150 and "# /" not in line}
    assert len({line.index("# ") for line in lines if "# default" in line}) == 1
    assert columns


def test_the_schema_describes_fragments():
    schema = json_schema()
    json.dumps(schema)
    assert '"required"' not in json.dumps(schema)
    assert schema["$id"].startswith("urn:finetune:")
    assert schema["properties"]["warmup_ratio"] == schema["properties"]["optim.warmup_steps"]
    assert schema["properties"]["resume.allow"] == schema["properties"]["resume_allow"]
    assert schema["additionalProperties"] is False
    for group in ("model", "data", "task", "parallel"):
        kinds = schema["properties"][group].get("anyOf", [schema["properties"][group]])
        assert kinds[0]["type"] == "string"
    assert set(fields()) - set(schema["properties"]) == set()
    ranks = schema["$defs"]["LoraSection"]["properties"]["r"]
    assert ranks["exclusiveMinimum"] == 0
    assert ranks["description"] == "Rank of each update."
    for dotted in ("data.max_length", "lora.r"):
        _, _, definition, _, key = schema["properties"][dotted]["$ref"].split("/")
        assert key in schema["$defs"][definition]["properties"]
    without_description = [
        f"{name}.{key}"
        for name, definition in schema["$defs"].items()
        for key, value in definition["properties"].items()
        if "description" not in value
    ]
    assert without_description == []
