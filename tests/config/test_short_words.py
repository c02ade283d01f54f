"""`model=` and `data=` take names of configs, paths and hub ids; a file of rows needs no key at all."""

import pwd
from pathlib import Path

import pytest

from finetune.config import load_config
from finetune.config.compose import compose, config_from_dict
from finetune.config.config_files import local_path, path_exists
from finetune.config.python_values import overrides_of
from finetune.errors import ConfigError

pytestmark = pytest.mark.usefixtures("write")


def problem_of(*words: str, run: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(words, run=run, complete=False)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["chats.jsonl", "rows", "rows/", "./gone.jsonl", "../up", "/abs/gone.jsonl", "~/rows", "org/set", "shipped:orders"],
)
def test_data_takes_a_path_or_a_hub_id(write, name):
    write("chats.jsonl")
    write("rows/train.jsonl")
    config = compose([f"data={name}", "model=phi_tiny"])
    assert config == compose([f"data.path={name}", "model=phi_tiny"])
    assert config.data.path == name
    assert config.origin("data.path") == f"command line: data={name}"


@pytest.mark.parametrize("name", ["./my-phi", "my-phi", "microsoft/phi-4", "shipped:phi_tiny"])
def test_model_takes_a_folder_or_a_hub_id(write, name):
    write("my-phi/config.json", "{}")
    config = compose([f"model={name}", "data=orders"])
    assert config.model.path == name
    assert config.origin("model.path") == f"command line: model={name}"


def test_a_name_in_configs_wins_over_a_file_and_a_dot_makes_a_path(write):
    write("orders")
    write("phi4/config.json", "{}")
    by_name = compose(["data=orders", "model=phi4"])
    assert (by_name.data.path, by_name.model.path) == ("shipped:orders", "microsoft/phi-4")
    by_path = compose(["data=./orders", "model=./phi4"])
    assert (by_path.data.path, by_path.model.path) == ("./orders", "./phi4")


def test_neither_a_config_nor_a_path_is_told_how_to_write_both(write):
    write("chats.jsonl")
    problem = problem_of("data=chat.jsonl")
    assert problem.startswith("command line: data=chat.jsonl: there is no configs/data/chat.jsonl.yaml")
    assert f"no file or folder of this name (looked in {Path.cwd()})" in problem
    assert "There is: orders, phi4, sums. Did you mean chats.jsonl?" in problem
    assert "data=FILE, data=./FOLDER, data=ORG/NAME or data.path=HUB_ID" in problem
    assert "Did you mean phi4_mini? For a model of your own write model=./FOLDER" in problem_of("model=phi4_minni")
    assert "For rows write data=chats.jsonl, for a model model=chats.jsonl." in problem_of("run=chats.jsonl")
    for pipe in ("-", "/dev/stdin"):
        assert "A run file is not read from a pipe" in problem_of(f"run={pipe}")


def test_a_path_wins_over_group_files_and_gives_way_to_the_key(write):
    write("chats.jsonl")
    write("configs/task/mine.yaml", "data: {path: of-the-task, max_length: 9}\n")
    write("r.yaml", "data: orders\ndata.path: of-the-run-file\n")
    config = compose(["data=chats.jsonl", "task=mine"], run="r.yaml", complete=False)
    assert (config.data.path, config.data.max_length) == ("chats.jsonl", 9)
    assert compose(["data=chats.jsonl", "data.path=b"], complete=False).data.path == "b"
    assert compose(["data=chats.jsonl", "data=orders"], complete=False).data.path == "shipped:orders"


def test_a_path_replaces_the_group_of_a_run_file():
    """The format of the group does not stay behind, the keys of the run file do."""
    config = compose(["data=org/chats", "model=./my-phi"], run="quickstart")
    assert (config.data.path, config.data.format, config.data.max_length) == ("org/chats", "auto", 256)
    assert config.model.path == "./my-phi"


def test_run_files_dicts_and_callers_choose_paths_too(write):
    write("chats.jsonl")
    write("r.yaml", "seed: 0\nmodel: microsoft/phi-4\ndata: chats.jsonl\ntask: finetune_lora\n")
    from_file = load_config(run="r.yaml")
    assert from_file.origin("data.path") == "r.yaml:3: data=chats.jsonl"
    values = {"model": "microsoft/phi-4", "data": "chats.jsonl", "output_dir": "runs/r"}
    by_dict = config_from_dict(values, "mine")
    by_caller = load_config(["output_dir=runs/r"], model="microsoft/phi-4", data="chats.jsonl", task="finetune_lora")
    assert from_file == by_dict == by_caller
    replaced = load_config(["data=orders", "model=./x"], run="r.yaml")
    assert (replaced.data.path, replaced.model.path) == ("shipped:orders", "./x")


def test_a_file_of_rows_needs_no_key(write):
    write("chats.jsonl")
    for words in (["chats.jsonl", "model=phi_tiny"], ["model=phi_tiny", "chats.jsonl"]):
        assert compose(words) == compose(["data=chats.jsonl", "model=phi_tiny"])
    assert compose(["chats.jsonl"], run="quickstart").data.path == "chats.jsonl"


def test_several_files_are_separated_by_commas(write):
    write("a.jsonl")
    write("b.csv")
    config = compose(["data=a.jsonl,b.csv", "model=phi_tiny"])
    assert config == compose(["a.jsonl,b.csv", "model=phi_tiny"]) == compose(["a.jsonl", "b.csv", "model=phi_tiny"])
    assert config.data.path == ["a.jsonl", "b.csv"]
    write("r.yaml", "data: a.jsonl,b.csv\n")
    assert compose([], run="r.yaml", complete=False).data.path == ["a.jsonl", "b.csv"]
    assert compose(["data=a.jsonl,gone.csv", "model=phi_tiny"]).data.path == [
        "a.jsonl",
        "gone.csv",
    ]  # refused when read
    assert "there is no configs/data/c.csv,d.csv.yaml" in problem_of("data=c.csv,d.csv")
    write("a.jsonl,b.csv")  # a file's own name wins
    assert compose(["data=a.jsonl,b.csv", "model=phi_tiny"]).data.path == "a.jsonl,b.csv"


@pytest.mark.parametrize(
    ("typed", "name"),
    [("phi4-mini", "phi4_mini"), ("Phi4-mini", "phi4_mini"), ("qwen2.5-7b", "qwen2_5_7b"), ("phi-tiny", "phi_tiny")],
)
def test_dashes_and_dots_in_the_name_of_a_config_are_underscores(write, typed, name):
    assert compose([f"model={typed}", "data=orders"]).model == compose([f"model={name}", "data=orders"]).model
    write(f"{typed}/config.json", "{}")
    assert compose([f"model={typed}", "data=orders"]).model.path == typed
    assert compose(["task=finetune-lora"], complete=False) == compose(["task=finetune_lora"], complete=False)


def test_the_data_is_chosen_once(write):
    write("a.jsonl")
    write("b.jsonl")
    assert "command line: a.jsonl and b.jsonl and data=orders: choose" in problem_of(
        "a.jsonl", "b.jsonl", "data=orders"
    )
    assert "command line: a.jsonl and data=orders: choose the data once" in problem_of("data=orders", "a.jsonl")


def test_a_signed_address_is_refused_like_a_password():
    signed = "https://host/rows.jsonl?X-Amz-Date=1&X-Amz-Signature=5ecret"
    problem = problem_of(f"data.path={signed}")
    assert "rows.jsonl?X-Amz-Date=…&X-Amz-Signature=… contains a user name, a password or a parameter" in problem
    in_mixture = problem_of(f"data.mixture=[{{path: '{signed}'}}]")
    assert "5ecret" not in problem + in_mixture
    assert "X-Amz-Signature=… contains" not in problem_of("data.path=https://host/rows.txt?download=1", "seed=x")


def test_a_text_that_is_no_address_may_have_one_with_a_parameter(write):
    pattern, schemas = r"https?://\S+\?id=\d+", '[{"description": "https://e.org/s?q=cats"}]'
    grpo = "training.objective=grpo"
    assert compose([grpo, f"reward.pattern={pattern}"], complete=False).reward.pattern == pattern
    # The run itself writes this key, from the docstrings of its tools.
    write("recorded.yaml", f"rollout: {{tool_schemas: '{schemas}'}}\n")
    assert compose([grpo], run="recorded.yaml", complete=False).rollout.tool_schemas == schemas


@pytest.mark.parametrize(
    "text", ["runs/lora #2", '"name"', "'a' or 'b'", " a ", "two\nlines\n", "😀 #1", "a", "# a", "*.x", "{{ x }}"]
)
def test_text_from_python_arrives_as_it_is(text):
    values = {"output_dir": text, "reward.pattern": text, "lora.new_tokens": [text], "optim.args": {"a": text}}
    config = compose(overrides_of(values), complete=False)
    assert (config.output_dir, config.reward.pattern) == (text, text)
    assert (config.lora.new_tokens, config.optim.args) == ([text], {"a": text})
    if text == text.strip("\"' \n"):  # on a command line, quotes and white space around a value are no part of it
        assert compose([f"output_dir={text}"], complete=False).output_dir == text


@pytest.mark.parametrize("text", ["it\x92s", "a\x85b", "a\x7f", "a\u2028b"])
def test_lists_from_python_keep_characters_that_yaml_refuses_or_folds(text):
    assert compose(overrides_of({"lora.new_tokens": [text]}), complete=False).lora.new_tokens == [text]


def test_the_home_of_a_user_who_is_not_there_is_a_path_like_any_other(monkeypatch):
    assert "model=~no-such-user/a.yaml: the file does not exist" in problem_of("model=~no-such-user/a.yaml")
    assert "there is no configs/~no-such-user/a.yaml" in problem_of("run=~no-such-user/a")
    assert compose(["data=~no-such-user/a.jsonl"], complete=False).data.path == "~no-such-user/a.jsonl"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container with a user of its own
    assert str(local_path("~/.cache")) == "~/.cache"
    for path in ("~no-such-user/a", "file://~no-such-user/a"):
        assert str(local_path(path)) == "~no-such-user/a"


def test_signs_in_the_name_of_the_current_folder_are_no_pattern(write, monkeypatch):
    folder = write("[v2]/rows/a.jsonl").parents[1]
    monkeypatch.chdir(folder)
    assert path_exists("rows/*.jsonl")
    assert not path_exists("rows/*.csv")


def test_a_model_that_is_missing_is_listed_and_the_command_completed():
    with pytest.raises(ConfigError) as caught:
        compose(["data=org/set"], typed="finetune train data=org/set")
    first, *models = str(caught.value).splitlines()
    assert first == "model.path: not set. Choose a model, for example: finetune train data=org/set model=phi4_mini"
    assert "  model=phi_tiny        A phi3-class model" in "\n".join(models)
    assert models[-1].startswith("  model=PATH")
    with pytest.raises(ConfigError, match=r"for example: finetune plan model=phi4 data=chats\.jsonl"):
        compose(["model=phi4"], typed="finetune plan model=phi4")
    with pytest.raises(ConfigError, match=r"for example: finetune plan model=phi4 data=phi4 data\.path=chats\.jsonl"):
        compose(["model=phi4", "data=phi4"], typed="finetune plan model=phi4 data=phi4")
