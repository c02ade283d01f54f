"""The paths of a run: recorded absolutely, found from any folder, and never taken for something else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from finetune.config.compose import compose
from finetune.config.render import resolved_yaml
from finetune.config.run_paths import recorded_paths, resolved_paths
from finetune.config.saved import is_same_path
from finetune.config.schema import Config

PATHS = {
    "model.path": "models/x",
    "model.tokenizer": "../shared/tokens",
    "data.path": "rows",
    "data.validation": "more/valid.jsonl",
    "data.chat_template": "own.jinja",
    "lora.start_from": "./earlier",
}
NO_PATHS = ["data.test=5", "data.train=train", "model.chat_template={{ messages }}"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a run was started, with all that `PATHS` names; a new run is in `run`."""
    folder = tmp_path / "project"
    for path in PATHS.values():
        place = folder / path
        if place.suffix:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        else:
            place.mkdir(parents=True)
    # A split and a number are no paths, whatever lies here.
    (folder / "train").mkdir()
    (folder / "5").mkdir()
    (tmp_path / "far" / "elsewhere").mkdir(parents=True)
    monkeypatch.chdir(folder)
    save(start(), folder / "run")
    return folder


def start(*words: str) -> Config:
    return compose([*(f"{key}={path}" for key, path in PATHS.items()), *NO_PATHS, "output_dir=run", *words])


def save(config: Config, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(resolved_yaml(config))
    (folder / "run.json").write_text(json.dumps({"resolved_paths": resolved_paths(config)}))


def found(config: Config) -> dict[str, Any]:
    return {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in PATHS}


def test_every_path_that_exists_is_recorded_and_no_name_is(project):
    absolute = {key: str((project / path).resolve()) for key, path in PATHS.items()}
    assert recorded_paths(project / "run") == {"output_dir": str(project / "run"), **absolute}
    names = ["model=microsoft/phi-4", "data=shipped:orders", "output_dir=/runs/a"]
    assert resolved_paths(compose(names)) == {"output_dir": "/runs/a"}


def test_where_the_run_was_started_the_configuration_stays_as_it_was(project):
    assert found(compose([], run="run/config.yaml")) == PATHS


def test_from_another_folder_the_recorded_paths_are_used(project, monkeypatch):
    monkeypatch.chdir(project.parent / "far" / "elsewhere")
    # What has the same name here is something else.
    Path("models/x").mkdir(parents=True)
    Path("rows").mkdir()
    config = compose([], run=str(project / "run" / "config.yaml"))
    assert found(config) == {key: str((project / path).resolve()) for key, path in PATHS.items()}
    assert (config.data.test, config.data.train, config.output_dir) == ("5", "train", str(project / "run"))


def test_a_source_of_a_mixture_is_found_too(project, monkeypatch):
    words = ["model=phi_tiny", "data.mixture=[{path: rows, weight: 2}, {path: org/rows, test: more/valid.jsonl}]"]
    save(compose(words), project / "run")
    monkeypatch.chdir(project.parent / "far" / "elsewhere")
    (first, second) = compose([], run=str(project / "run" / "config.yaml")).data.mixture
    assert first == {"path": str(project / "rows"), "weight": 2}
    assert second == {"path": "org/rows", "test": str(project / "more" / "valid.jsonl")}


@pytest.mark.parametrize("written", ["[more/valid.jsonl, more/*.jsonl]", "more/*.jsonl"])
def test_the_files_of_a_list_and_of_a_pattern_are_found_too(project, monkeypatch, written):
    save(compose(["model=phi_tiny", f"data.path={written}"]), project / "run")
    monkeypatch.chdir(project.parent / "far" / "elsewhere")
    found = compose([], run=str(project / "run" / "config.yaml")).data.path
    each = [str(project / "more" / name) for name in ("valid.jsonl", "*.jsonl")]
    assert found == (each if written.startswith("[") else each[1])


def test_a_path_that_is_gone_is_named_and_another_of_the_same_name_is_told(project, monkeypatch, caplog):
    (project / "models" / "x").rename(project / "moved")
    recorded = str(project / "models" / "x")
    assert compose([], run="run/config.yaml").model.path == recorded, "never the name of a repository at the hub"
    monkeypatch.chdir(project.parent / "far" / "elsewhere")
    file = str(project / "run" / "config.yaml")
    assert compose([], run=file).model.path == recorded
    assert caplog.messages == []
    Path("models/x").mkdir(parents=True)
    assert compose([], run=file).model.path == "models/x"
    assert caplog.messages == [f"model.path: {recorded}, which the run used, is gone; models/x in {Path.cwd()} is used"]


def test_a_run_is_resumed_from_another_folder_by_the_words_that_started_it(project, monkeypatch):
    monkeypatch.chdir(project.parent / "far" / "elsewhere")
    resumed = start("resume=auto", f"output_dir={project / 'run'}")
    assert found(resumed) == {key: str((project / path).resolve()) for key, path in PATHS.items()}
    other = start("resume=auto", f"output_dir={project / 'run'}", "model.path=org/name")
    assert other.model.path == "org/name"
    assert found(start("output_dir=new")) == PATHS, "it is another run"


def test_a_path_here_that_a_resumed_run_does_not_take_is_named(project, monkeypatch, caplog):
    copy = shutil.copytree(project, project.parent / "copy")
    monkeypatch.chdir(copy)
    (copy / "more" / "valid.jsonl").unlink()
    resumed = start("resume=auto", "model.path=./models/x")
    assert resumed.data.path == str(project / "rows")
    assert resumed.model.path == "./models/x"
    (said,) = [text for text in caplog.messages if text.startswith("data.path: ")]
    assert said.startswith(f"data.path: the run goes on with {project / 'rows'}, from which it was started, and not ")
    assert f" with rows in {copy}. " in said
    assert not any(text.startswith(("data.validation", "model.path")) for text in caplog.messages)


def test_a_copied_run_is_not_the_folder_that_it_was(project, monkeypatch):
    (project / "run").rename(project.parent / "copy")
    monkeypatch.chdir(project.parent)
    assert compose([], run="copy/config.yaml").output_dir == "run"


@pytest.mark.parametrize("content", [b"", b"[]", b'{"resolved_paths": 3}', b'{"resolved_paths": {"model.path": [1]}}'])
def test_a_record_without_paths_changes_nothing(project, monkeypatch, content):
    (project / "run" / "run.json").write_bytes(content)
    monkeypatch.chdir(project.parent / "far" / "elsewhere")
    assert found(compose([], run=str(project / "run" / "config.yaml"))) == PATHS


def test_two_spellings_of_one_place_are_the_same(project):
    recorded = recorded_paths(project / "run")
    assert is_same_path("model.path", ["models/x", "./models/../models/x"], recorded)
    assert is_same_path("model.path", [str(project / "models" / "x"), "models/x"], {})
    assert not is_same_path("model.path", ["models/x", "models/y"], recorded)
    assert not is_same_path("model.path", ["models/x", None], recorded)
    assert not is_same_path("model.revision", ["main", str(project)], {"model.revision": str(project)})
