"""Precedence, choices, origins, and every problem said at once in plain words."""

import re
from pathlib import Path

import pytest

from finetune.config import load_config
from finetune.config.compose import compose
from finetune.config.schema import Config
from finetune.errors import ConfigError

pytestmark = pytest.mark.usefixtures("write")

MODEL_AND_DATA = ["model=phi_tiny", "data=orders"]


def problems_of(*words: str, run: str | None = None, complete: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(words, run=run, complete=complete)
    first, *lines = re.split("\n(?! {4})", str(caught.value))  # the list of models belongs to its problem
    assert "pydantic" not in str(caught.value)
    assert "[type=" not in str(caught.value)
    if not lines:
        return [first]
    assert first == f"the configuration has {len(lines)} problems:"
    return [line.removeprefix("  ") for line in lines]


def one_problem(*words: str, run: str | None = None, complete: bool = False) -> str:
    (problem,) = problems_of(*words, run=run, complete=complete)
    return problem


# --- precedence ---------------------------------------------------------------------------------------------------


def test_defaults_then_run_file_then_group_files_then_words(write):
    write("configs/mine.yaml", "optim: {learning_rate: 1.0, weight_decay: 1.0, warmup_steps: 1}\n")
    write("configs/task/slow.yaml", "optim: {learning_rate: 2.0, weight_decay: 2.0}\n")
    config = compose(["task=slow", "optim.learning_rate=3.0"], run="mine", complete=False)
    assert config.optim.max_grad_norm == 1.0
    assert config.optim.warmup_steps == 1
    assert config.optim.weight_decay == 2.0
    assert config.optim.learning_rate == 3.0


def test_a_run_file_overrides_the_groups_that_it_chooses(write):
    write("configs/task/slow.yaml", "optim: {learning_rate: 2.0, weight_decay: 2.0}\n")
    write("configs/mine.yaml", "optim: {learning_rate: 1.0}\ntask: slow\n")
    config = compose(["run=mine"], complete=False)
    assert (config.optim.learning_rate, config.optim.weight_decay) == (1.0, 2.0)


def test_a_group_word_replaces_the_choice_of_the_run_file_and_wins_over_its_keys(write):
    write("configs/task/slow.yaml", "optim: {weight_decay: 2.0}\n")
    write("configs/task/fast.yaml", "optim: {learning_rate: 5.0}\n")
    write("configs/mine.yaml", "task: slow\noptim: {learning_rate: 1.0, warmup_steps: 3}\n")
    config = compose(["run=mine", "task=fast"], complete=False)
    assert config.optim.weight_decay == Config().optim.weight_decay
    assert config.optim.learning_rate == 5.0
    assert config.optim.warmup_steps == 3


def test_the_callers_choice_gives_way_to_run_file_and_words(write):
    for name, rate in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        write(f"configs/task/{name}.yaml", f"optim.learning_rate: {rate}\n")
    write("r.yaml", "task: b\n")
    chosen = [
        load_config(MODEL_AND_DATA, task="a"),
        load_config(MODEL_AND_DATA, run="r.yaml", task="a"),
        load_config([*MODEL_AND_DATA, "task=c"], run="r.yaml", task="a"),
    ]
    assert [config.optim.learning_rate for config in chosen] == [1.0, 2.0, 3.0]
    by_caller = load_config(model="phi_tiny", data="orders", task="debug")
    assert (by_caller.model.path, by_caller.data.path) == ("shipped:phi_tiny", "shipped:orders")


def test_a_script_may_give_a_dict_and_what_is_no_override_is_named():
    in_dict = load_config({"model": "phi_tiny", "data": "orders", "lora.r": 4})
    assert in_dict == load_config([*MODEL_AND_DATA, "lora.r=4"])
    for wrong in (None, [5], [*MODEL_AND_DATA, 5]):
        with pytest.raises(ConfigError, match=r"overrides has (None|5); expected texts such as lora\.r=8, or a dict"):
            load_config(wrong)
    with pytest.raises(ConfigError, match="not set"):
        load_config("model=phi_tiny")


def test_among_group_files_the_later_kind_wins_whatever_the_order_of_words(write):
    for group, rate in (("model", 1.0), ("data", 2.0), ("task", 3.0), ("parallel", 4.0)):
        write(f"configs/{group}/x.yaml", f"optim.learning_rate: {rate}\n")
    assert compose(["parallel=x", "task=x", "model=x"], complete=False).optim.learning_rate == 4.0
    assert compose(["task=x", "data=x", "model=x"], complete=False).optim.learning_rate == 3.0


def test_files_here_win_over_shipped_ones(write):
    write("configs/task/debug.yaml", "seed: 77\n")
    config = compose(["task=debug"], complete=False)
    assert (config.seed, config.training.debug) == (77, False)


def test_mappings_merge_lists_are_replaced_and_braces_empty(write):
    write("r.yaml", "optim: {args: {eps: 1e-6, betas: [0.1, 0.2]}}\nlora.target_modules: [a, b]\n")
    merged = compose(["optim.args.betas=[0.5, 0.6]", "lora.target_modules=[c]"], run="r.yaml", complete=False)
    assert merged.optim.args == {"eps": 1e-6, "betas": [0.5, 0.6]}
    assert merged.lora.target_modules == ["c"]
    emptied = compose(["optim.args={}", "optim.args.momentum=0.9"], run="r.yaml", complete=False)
    assert emptied.optim.args == {"momentum": 0.9}


# --- choosing files -----------------------------------------------------------------------------------------------


def test_a_section_with_nothing_in_it_changes_nothing(write):
    write("r.yaml", "model: null\noptim: {learning_rate: 1.0}\n")
    write("configs/task/t.yaml", "optim:\ndata: {}\n")
    assert compose(["task=t"], run="r.yaml", complete=False).optim.learning_rate == 1.0


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("model=phi5", ["there is no configs/model/phi5.yaml", "phi_tiny", "Did you mean phi"]),
        ("task=../secret", ["there is no configs/task/../secret.yaml"]),
        ("run=quickstrat", ["there is no configs/quickstrat.yaml", "Did you mean quickstart?"]),
        ("run=none.yaml", ["the file does not exist"]),
    ],
)
def test_a_file_that_is_not_there(word, parts):
    problem = one_problem(word)
    assert problem.startswith(f"command line: {word}: ")
    assert all(part in problem for part in parts), problem


def test_a_folder_in_place_of_a_run_file(write):
    write("runs/old/config.yaml", "seed: 1\n")
    assert compose(["run=runs/old"], complete=False).seed == 1
    assert compose(["run=quickstart"]).seed == 0  # a name in configs/ wins
    write("folder.yaml/x", "")
    assert "is not a file" in one_problem("run=folder.yaml")
    write("run.yaml/config.yaml", "seed: 2\n")
    assert compose(["run=run.yaml"], complete=False).seed == 2


def test_two_run_files_are_one_too_many():
    assert "the run file is already quickstart" in one_problem("run=other", run="quickstart")
    assert compose(["run=quickstart"], run="quickstart") == compose([], run="quickstart")


def test_tasks_have_the_names_that_people_know():
    for words, objective in {
        "task=dpo": "dpo",
        "task=finetune_dpo": "dpo",
        "task=kto": "kto",
        "task=sft": "sft",
        "task=lora": "sft",
    }.items():
        assert compose([words], complete=False).training.objective == objective
    assert compose(["task=pt"], complete=False) == compose(["task=continue_pretraining"], complete=False)
    assert compose(["--resume", "--seed", "3"], complete=False).resume == "auto"
    assert compose(["--resume", "never"], complete=False).resume == "never"


def test_a_group_file_chooses_no_other(write):
    write("configs/task/t.yaml", "model: phi4\ntask: debug\n")
    problems = problems_of("task=t")
    assert problems[0].startswith("configs/task/t.yaml:1: model: is a section with keys (model.path,")
    assert problems[0].endswith("got 'phi4'.")
    assert problems[1].startswith("configs/task/t.yaml:2: task: task is not a section")


# --- words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("orders", "expected key=value"),
        ("--seed", "seed: has no value. Write seed=VALUE. It takes a whole number"),
        ("seed=", "seed: has no value. Write seed=VALUE. It takes a whole number of at least 0"),
        ("optim.args=[1", "not valid YAML"),
        ("-seed=3", "there is no such option. A key is set by seed=VALUE or --seed VALUE"),
    ],
)
def test_words_that_are_none(word, part):
    problem = one_problem(word)
    assert problem.startswith("command line: ")
    assert part in problem


@pytest.mark.parametrize("text", ["12e7", "007", "true", "*.jsonl", "a: b", "x=y", "{{ m }}", "'1e5'"])
def test_a_key_of_text_takes_the_word_as_it_is(text):
    assert compose([f"data.path={text}"], complete=False).data.path == text.strip("'")


# --- problems -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("training.max_steps=eight", "training.max_steps: expected a whole number above 0 or null, got 'eight'"),
        ("optim.learning_rate=.nan", "optim.learning_rate: expected a number of at least 0, got .nan"),
        ("parallel.master_port=99999", "parallel.master_port: expected a whole number from 1 to 65535 or null, got"),
        ("resume=true", "resume: expected one of never, auto, got 'true'"),
        ("testing.metrics=[bleu]", "testing.metrics: expected a list ([a, b]), each one of exact_match, json_valid"),
        ("lora.layers=30,x", "lora.layers: expected a list ([a, b]), each a whole number of at least 0 or null, got"),
        ("lora.layers=true", "lora.layers: expected a list ([a, b]), each a whole number of at least 0 or null, got"),
        ("reward.weights=1,NaN", "reward.weights: expected a list ([a, b]), each a number or null, got '1,NaN'"),
        ("lora.new_tokens=<a>,<b>", "lora.new_tokens: expected a list ([a, b]), each text, got '<a>,<b>'"),
        ("training.device=xpu:0", "training.device: finetune does not compute on xpu. Use cuda (NVIDIA, or AMD with"),
        ("training.prefetch_factor=2", "training.prefetch_factor: 2 needs num_workers of at least 1 in the same"),
        ("training.device=gpu", "training.device: expected auto, cpu, cuda, cuda:N, mps or a whole number, got 'gpu'"),
    ],
)
def test_values_of_another_kind(word, problem):
    assert one_problem(word).startswith(f"command line: {problem}")


@pytest.mark.parametrize(("word", "device"), [("0", "cuda:0"), ("CPU", "cpu"), ("null", "auto")])
def test_devices_are_normalised(word, device):
    assert compose([f"training.device={word}"], complete=False).training.device == device


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("optim.learning_rat=1", "Did you mean optim.learning_rate?"),
        ("lora.rank=1", "Did you mean lora.r?"),
        ("batch_size=1", "Did you mean training.batch_size or rollout.batch_size or validation.batch_size"),
        ("resume.allow=optim.learning_rat", "no key or section optim.learning_rat. Did you mean optim.learning_rate?"),
        ("lora={r: {a: 1}}", "lora.r has no keys of its own: it takes a whole number above 0."),
        ("task.name=x", "the command line or a run file chooses configs/task/NAME.yaml with it"),
    ],
)
def test_keys_that_do_not_exist(word, part):
    assert part in one_problem(word)


def test_every_problem_at_once(write):
    write("r.yaml", "seed: 1\nseed: 2\ntraining:\n  max_stepz: 3\n  num_epochs: many\nlora: {r: 0}\n")
    write("configs/data/bad.yaml", "data: [\n")
    problems = problems_of(
        "data=bad", "optim.schedule=sine", "foo", "optim.optimizer=!pyobject os.system", run="r.yaml", complete=True
    )
    starts = [
        "command line: foo: ",
        "r.yaml:2: seed: given twice",
        "configs/data/bad.yaml:2: not valid YAML",
        "r.yaml:4: training.max_stepz: there is no such key. Did you mean training.max_steps?",
        "command line: optim.optimizer: os.system",
        "r.yaml:6: lora.r: expected a whole number above 0, got 0",
        "command line: optim.schedule: expected one of linear, cosine, constant, wsd, got 'sine'",
        "r.yaml:5: training.num_epochs: expected a number above 0, got 'many'",
    ]
    assert len(problems) == len(starts)
    assert [p for p, start in zip(problems, starts, strict=True) if not p.startswith(start)] == []


def test_what_a_run_cannot_do_without():
    problems = problems_of(complete=True)
    assert [p.partition(":")[0] for p in problems] == ["model.path", "data.path"]
    assert "model=phi_tiny" in problems[0]
    assert "data=orders" in problems[1]
    assert problems_of("training.max_steps=x", complete=True)[:2] == problems
    assert compose([], complete=False).model.path is None
    assert compose(["data.train=x.jsonl", "model=phi_tiny"]).data.train == "x.jsonl"
    assert load_config(["data=phi4", "data.path=rows.jsonl", "model=phi4"]).data.max_length == 4096
    assert "data.path: not set" in one_problem("data=phi4", "model=phi4", complete=True)


def test_a_configuration_without_weights():
    problems = problems_of("model.config={model_type: phi3}", "data=orders", complete=True)
    assert problems[0].startswith("command line: model.config: has no pretrained weights. Add model.init=random.")
    assert problems[1].startswith("model.tokenizer: not set")
    words = ["model.config={model_type: phi3}", "model.init=random", "model.tokenizer=shipped:phi_tiny", "data=orders"]
    assert compose(words).model.config == {"model_type": "phi3"}


def test_a_name_outside_the_allow_list_is_never_imported(write):
    write("evil_module.py", "open('imported', 'w')\n")
    write("r.yaml", "optim:\n  args:\n    x: [!pyobject evil_module.Thing]\n")
    problem = one_problem(run="r.yaml")
    assert problem.startswith("r.yaml:3: optim.args.x: evil_module.Thing is not directly in a module")
    assert problem.endswith("Nothing was imported.")
    assert not Path("imported").exists()


# --- origins ------------------------------------------------------------------------------------------------------


def test_overrides_are_of_the_command_line_if_all_of_them_are(monkeypatch):
    typed = ["model=phi_tiny", "data=orders", "seed=1"]
    monkeypatch.setattr("sys.argv", ["recipe.py", *typed])
    assert load_config(typed).origin("seed") == "command line"
    assert load_config([*typed, "lora.r=4"]).origin("seed") == "overrides"


def test_where_each_value_came_from(write):
    write("configs/mine.yaml", "\nlora:\n  r: 4\noptim.args:\n  eps: 1\n")
    outside = write("../elsewhere.yaml", "lora:\n  alpha: 4\n")
    config = compose(["run=mine", f"parallel={outside.resolve()}", "task=debug", "seed=3"], complete=False)
    assert config.origin("lora.r") == "configs/mine.yaml:3"
    assert config.origin("optim.args.eps") == "configs/mine.yaml:5"
    assert config.origin("lora.alpha") == f"{outside.resolve()}:2"
    assert config.origin("training.debug") == "shipped configs/task/debug.yaml:10"
    assert config.origin("seed") == "command line"
    assert config.origin("lora.dropout") == "default"
    assert config.origin("output_dir") == "default"


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["run=quickstart"], "runs/quickstart"),
        (["task=debug", "model=phi4_mini"], "runs/phi4_mini"),
        (["data=some/chats.jsonl.gz", "model=microsoft/Phi-4-mini-instruct"], "runs/chats-Phi-4-mini-instruct"),
        (["data.mixture=[{path: a.jsonl}]", "model=phi4"], "runs/mixture-phi4"),
        ([], "runs/run"),
        (["task=debug", "output_dir=x"], "x"),
    ],
)
def test_the_folder_of_a_run_that_was_not_told_one(write, words, folder):
    write("some/where.yaml", "seed: 1\n")
    assert compose(words, complete=False).output_dir == folder


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", r"run/config\.yaml: the file of this run is empty or cut short"),
        (
            "model:\n  path: a\noptim:\n  learning_rate: 1",
            r"run/config\.yaml: the file of this run is empty or cut short",
        ),
        (None, r"run=run: this run has no config\.yaml any more"),
    ],
)
def test_a_run_that_lost_its_configuration_does_not_get_the_defaults(content, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    if content is not None:
        (tmp_path / "run" / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match=why):
        compose([], run="run", complete=False)


@pytest.mark.parametrize("task", ["finetune_new_tokens", "new_tokens"])
def test_the_task_of_new_tokens_without_tokens_is_refused(task):
    """It would train a plain adapter."""
    arguments = ["model=phi_tiny", "data=orders", f"task={task}"]
    with pytest.raises(ConfigError, match=f"task={task} .*name the tokens, for example .lora.new_tokens="):
        load_config(arguments)
    assert load_config([*arguments, "lora.new_tokens=['<order>']"]).lora.new_tokens == ["<order>"]
