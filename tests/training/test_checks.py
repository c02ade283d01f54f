from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from finetune.config import load_config
from finetune.config.compose import compose
from finetune.errors import ConfigError, DataError, FinetuneError, ModelError
from finetune.training import train as training
from finetune.training.checks import check_inputs, check_objective, check_paths

NO_ROWS = "data.path is nowhere.jsonl, but there is no such file or folder. Correct the path."
NO_DEV = "data.validation is gone.csv.gz, but there is no such file. Correct the path."
NO_MODEL = "model.path is does/not/exist, but there is no such folder."


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["data.path=nowhere.jsonl", "model.path=org/model"], DataError, NO_ROWS),
        (["data.path=rows.jsonl", "model.path=does/not/exist"], ModelError, NO_MODEL),
        (
            ["data.path=nowhere.jsonl", "data.validation=gone.csv.gz", "model.path=does/not/exist"],
            DataError,
            f"the run has 3 problems:\n  {NO_ROWS}\n  {NO_DEV}\n  {NO_MODEL}",
        ),
        (
            [
                "data.mixture=[{path: nowhere.jsonl}, {path: rows.jsonl, validation: gone.csv.gz}]",
                "model.path=org/model",
                "testing.general_prompts=gone.jsonl",
            ],
            DataError,
            f"the run has 3 problems:\n  {NO_ROWS}\n  {NO_DEV}\n  testing.general_prompts is gone.jsonl, but that file",
        ),
    ],
)
def test_a_path_that_is_not_here_is_told_before_the_group_the_model_and_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], kind: type[FinetuneError], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("not looked at")
    monkeypatch.setattr(training, "launch", lambda _: pytest.fail("the world was joined first"))
    with pytest.raises(kind) as caught:
        training.train(load_config(["task=finetune_lora", "output_dir=run", *words]))
    assert str(caught.value).startswith(message)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_what_may_be_elsewhere_is_no_missing_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for data in ("org/rows", "s3://bucket/rows.jsonl", "shipped:orders"):
        words = ["task=finetune_lora", "model.path=does/not/exist", f"data.path={data}", "data.validation=0.05"]
        with pytest.raises(ModelError) as caught:
            check_paths(load_config([*words, "data.test=memory://dev.jsonl"]))
        assert str(caught.value).startswith(NO_MODEL), "the model is the only problem"


def test_a_run_that_was_trained_on_a_part_of_a_folder_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows/a.jsonl", "rows/more/b.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text('{"prompt": "a", "completion": "b"}\n')
    words = ["model=phi_tiny", "data=./rows", "output_dir=run"]
    with pytest.raises(DataError, match=r"1 file in it is not read: more/b\.jsonl"):
        check_inputs(load_config([*words, "resume=auto"]), needs_weights=True)
    Path("run").mkdir()
    Path("run/run.json").touch()
    check_inputs(load_config([*words, "resume=auto"]), needs_weights=True)
    with pytest.raises(DataError):
        check_inputs(load_config(words), needs_weights=True)


def test_a_server_for_rollouts_takes_adapters_only() -> None:
    words = ["model=phi_tiny", "data=orders", "grpo.beta=0", "rollout.server=http://localhost:1"]
    check_objective(load_config(words, task="finetune_grpo"))
    with pytest.raises(ConfigError, match=r"training\.method is full, but the server gets .* as a LoRA adapter"):
        check_objective(load_config([*words, "training.method=full"], task="finetune_grpo"))


def test_a_shipped_config_names_the_command_that_makes_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        check_paths(compose(["grpo_tools_quickstart"]))
    command = (
        "finetune train quickstart data=shipped:calls.jsonl training.method=full optim.learning_rate=2e-3 "
        "training.max_steps=100 output_dir=runs/calls"
    )
    assert str(caught.value).endswith(f"To make it, run first: {command}")
    assert compose(shlex.split(command)[2:]).output_dir == "runs/calls", "the command can be run"
    with pytest.raises(ModelError, match=r"hub id like microsoft/phi-4\.$"):
        check_paths(compose(["grpo_tools_quickstart", "model=runs/others/adapter"]))
