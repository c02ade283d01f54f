"""Reward functions: the built-in ones, the user's own with TRL's signature, and what is refused about either."""

from __future__ import annotations

import math
import os
import sys
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest

from finetune import load_config
from finetune.config.compose import config_from_dict
from finetune.config.schema import RewardSection
from finetune.errors import ConfigError, DataError
from finetune.training.rewards import objective as objective_module
from finetune.training.rewards.functions import GeneratedAnswer, Rewards, built_in_functions
from finetune.training.rewards.objective import RewardedAnswers

MODULE = "rewards_of_mine.orders"
SOURCE = """
import os
import threading
seen, waits = [], threading.Event()

def shorter(prompts, completions, completion_ids, **columns):
    seen.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns})
    return [-len(ids) for ids in completion_ids]

def some(completions, **columns): return [None, *[1] * (len(completions) - 1)]
def truth(completions, **columns): return tuple(len(completion) > 1 for completion in completions)
def fails(completions, **columns): return [1 / 0 for _ in completions]
def leaves(completions, **columns): raise SystemExit(3)
def exits(completions, **columns):
    if child := os.fork():
        return [float(os.waitpid(child, 0)[1] >> 8)] * len(completions)
    os._exit(7)
def exits_itself(completions, **columns): os._exit(0)
def interrupts(completions, **columns): raise KeyboardInterrupt
def returns_nan(completions, **columns): return [0.5, float("nan"), 1.0][: len(completions)]
def returns_huge(completions, **columns): return [0, 10**400, 1][: len(completions)]
def returns_word(completions, **columns): return [0, "0.5", 1][: len(completions)]
def returns_fewer(completions, **columns): return [1.0] * (len(completions) - 1)
def returns_text(completions, **columns): return "x" * len(completions)
def returns_large(completions, **columns): return [1e300] * len(completions)
class Odd:
    def __repr__(self): return "Odd"
    def __float__(self): raise RuntimeError("odd")
    def tolist(self): raise NotImplementedError("no data")
def returns_odd_array(completions, **columns): return Odd()
def returns_odd_numbers(completions, **columns): return [Odd()] * len(completions)
def edits(prompts, completions, cases, **columns):
    for prompt in prompts: prompt[0]["content"] += "!"
    return [len(each.pop()) + len(each) for each in cases]
def returns_nothing(completions, **columns): return None
def needs_a_column(completions, cases, **columns): return [1.0] * len(completions)
def hangs(completions, **columns):
    waits.wait()
    return [0.0] * len(completions)
LIMIT = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """An installed module with reward functions."""
    package = tmp_path / "site" / "rewards_of_mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "orders.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(package.parent))
    yield MODULE
    for name in [name for name in sys.modules if name.startswith("rewards_of_mine")]:
        del sys.modules[name]


def config_of(*overrides):
    return load_config(["model=phi_tiny", "data.path=rows.jsonl", *overrides], task="finetune_grpo")


def rewards_of(*names, words=()):
    """The functions of a run; names that begin with a dot are the module's."""
    full = ",".join(f"{MODULE}{name}" if name.startswith(".") else name for name in names)
    allowed = [f"reward.functions_from={MODULE}"] if any(name.startswith(".") for name in names) else []
    return Rewards.of(config_of(f"reward.functions={full}", *allowed, *words))


def answer(text, *, expected="", whole=None, prompt="Say it.", columns=None, ids=(5, 6), number=1):
    return GeneratedAnswer(
        source=f"rows.jsonl:{number}",
        prompt=prompt,
        expected=expected,
        columns=columns or {},
        text=text,
        whole=text if whole is None else whole,
        marked=text if whole is None else whole,
        ids=ids,
    )


THREE = [answer(text, number=number) for number, text in enumerate(("a", "bb", "ccc"), 1)]

# --- built-in functions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "reward"),
    [
        ("exact_match", answer(" yes\n", expected="yes"), 1),
        ("json_equal", answer('{"a": 1, "b": 2}', expected='{"b":2,"a":1}'), 1),
        ("json_valid", answer("[1]"), 1),
        ("regex", answer(" 12\n34 "), 1),
        ("regex", answer("12 apples"), 0),
        ("regex", answer("12", whole="<think>a</think>12"), 1),
        ("format_think", answer("b", whole="<think>\na\n</think>\nb"), 1),
        ("format_think", answer("", whole="<think>a</think> \n"), 0),
        ("format_think", answer("b", whole="Well, <think>a</think>b"), 0),
        ("format_think", answer("b", whole="<think>a<think>c</think>b"), 0),
        ("format_think", answer("", whole="<think>a"), 0),
        ("format_think", answer("b"), 0),
        ("length", answer("a", ids=(1,) * 8), 0),
        ("length", answer("a", ids=(1, 2)), 0.75),
        ("length", answer("", ids=()), 1),
    ],
)
def test_the_functions_that_come_along(name, given, reward):
    functions = built_in_functions(RewardSection(pattern=r"\d+.?\d*"), longest=8)
    assert functions[name](given) == reward


def test_each_answer_gets_the_rewards_of_all_functions_in_their_order():
    rewards = rewards_of("length", "exact_match", words=["rollout.max_completion_length=4"])
    answers = [answer("yes", expected="yes", ids=(1,)), answer("no", expected="yes", ids=(1, 2, 3))]
    assert rewards(answers) == [[0.75, 1], [0.25, 0]]
    assert rewards.names == ("length", "exact_match")
    assert rewards.weights == (1, 1)
    assert rewards.metrics == {"length": "reward_length", "exact_match": "reward_exact_match"}
    assert rewards.needing_expected == ("exact_match",)
    assert not rewards.need_columns


# --- functions of one's own ---------------------------------------------------------------------------------------


def test_a_function_gets_turns_where_rows_have_turns_and_all_columns_by_name(own):
    rewards = rewards_of(".shorter")
    turns = [{"role": "user", "content": "How many?"}]
    answers = [
        answer("4", expected="4", whole="<think>a</think>4", prompt=turns, columns={"unit": "km"}, ids=(1, 2, 3)),
        answer("5", prompt="Text?", columns={"level": 2}, ids=(1,), number=2),
    ]
    assert rewards(answers) == [[-3], [-1]]
    (given,) = sys.modules[own].seen
    assert given == {
        "prompts": [turns, "Text?"],
        "completions": [[{"role": "assistant", "content": "<think>a</think>4"}], "5"],
        "completion_ids": [[1, 2, 3], [1]],
        "expected": ["4", ""],
        "unit": ["km", None],
        "level": [None, 2],
    }
    assert rewards.need_columns
    assert rewards.metrics == {f"{own}.shorter": "reward_shorter"}


def test_none_is_no_reward_and_truth_is_a_number(own):
    found = rewards_of(".some", ".truth")(THREE)
    assert math.isnan(found[0][0])
    assert [row[0] for row in found[1:]] == [1, 1]
    assert [row[1] for row in found] == [0, 1, 1]
    assert all(type(value) is float for row in found for value in row)


@pytest.mark.needs("trl")
def test_a_function_of_trl_is_called_as_trl_calls_it():
    words = ["reward.functions=trl.rewards.think_format_reward", "reward.functions_from=trl.rewards"]
    turns = [{"role": "user", "content": "?"}]
    answers = [answer("b", whole=whole, prompt=turns) for whole in ("<think>a</think>b", "b")]
    assert Rewards.of(config_of(*words))(answers) == [[1], [0]]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fails", r"failed on 3 answers, the first to rows.jsonl:1: ZeroDivisionError\('division by zero'\)"),
        ("leaves", r"failed on 3 answers, the first to rows.jsonl:1: SystemExit\(3\)"),
        ("interrupts", r"failed on 3 answers, .*: RuntimeError\('it raised KeyboardInterrupt'\)\. Correct it"),
        ("needs_a_column", "failed on 3 answers.*TypeError.*missing 1 required positional argument: 'cases'"),
        ("returns_nan", r"gave nan for the answer 'bb' to rows.jsonl:2; expected a number below 1e\+100 in size, or N"),
        ("returns_huge", "gave 10+… for the answer 'bb' to rows.jsonl:2"),
        ("returns_large", r"gave 1e\+300 for the answer 'a' to rows.jsonl:1"),
        ("returns_odd_array", r"failed on 3 answers, the first to rows.jsonl:1: NotImplementedError\('no data'\)"),
        ("returns_odd_numbers", "gave Odd for the answer 'a' to rows.jsonl:1"),
        ("returns_word", "gave '0.5' for the answer 'bb' to rows.jsonl:2"),
        ("returns_fewer", "returned 2 values for 3 answers; expected a list with one number, or None, for each"),
        ("returns_text", "returned 'xxx' for 3 answers"),
        ("returns_nothing", "returned None for 3 answers"),
    ],
)
def test_a_function_that_goes_wrong_is_named_with_the_row(own, name, why):
    with pytest.raises(DataError, match=rf"^the reward function {own}.{name} {why}"):
        rewards_of(f".{name}")(THREE)


def test_a_function_that_changes_its_arguments_changes_no_other_answer_s_and_no_row(own):
    prompt, columns = [{"role": "user", "content": "?"}], {"cases": ["a", "bc"]}
    answers = [answer("x", prompt=prompt, columns=columns) for _ in range(2)]
    for _ in range(2):
        assert rewards_of(".edits")(answers) == [[3], [3]]
    assert (prompt[0]["content"], columns) == ("?", {"cases": ["a", "bc"]})


def test_a_function_can_end_its_own_child_but_not_the_run(own, monkeypatch):
    assert rewards_of(".exits")(THREE) == [[7]] * 3
    monkeypatch.setattr(os, "_exit", lambda code: None)  # without a mend, pytest would end here
    with pytest.raises(DataError, match=r"exits_itself failed on 3 answers.*: RuntimeError\('it called os._exit\(0\)'"):
        rewards_of(".exits_itself")(THREE)


def test_a_function_may_not_take_longer_than_it_is_given(own):
    rewards = rewards_of(".hangs", words=["reward.timeout_seconds=0.01"])
    rewards.check()  # imports the function, as a run does before its first answers
    try:
        with pytest.raises(
            DataError,
            match=rf"^the reward function {own}.hangs has not returned after 0.01 s for 3 answers, the first to "
            "rows.jsonl:1. Make it faster, or raise reward.timeout_seconds",
        ):
            rewards(THREE)
        (left,) = [thread for thread in threading.enumerate() if thread.name == f"reward function {own}.hangs"]
        assert left.daemon, "it would keep the process from ending"
    finally:
        sys.modules[own].waits.set()
    left.join(60)
    assert rewards_of(".hangs")(THREE) == [[0], [0], [0]]


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "reward.functions is empty, but training.objective=grpo learns from rewards"),
        (
            ["reward.functions=json_eqal"],
            r"reward.functions is json_eqal; expected one of .*Did you mean json_equal\?$",
        ),
        (["reward.functions=os.system"], "os is not allowed: .* allow it with reward.functions_from=os"),
        (
            ["reward.functions=no_such_package.f", "reward.functions_from=no_such_package"],
            "reward.functions_from is no_such_package, but no_such_package is not installed",
        ),
        (["reward.functions=length,json_valid,length"], "names one twice: length, json_valid, length. Name each once"),
        (["reward.functions=length", "reward.weights=[1, 2]"], r"weights is \[1.0, 2.0\], but .* names 1: length"),
        (["reward.functions=length", "reward.weights=[0]"], "at least one of them not 0"),
        (["reward.functions=regex"], "names regex, but reward.pattern is not set"),
        (["reward.functions=length", "reward.pattern=a+"], "reward.pattern is set, but .* does not name regex"),
        (["reward.functions=regex", "reward.pattern='(a'"], r"is '\(a', which is no regular expression: missing \)"),
    ],
)
def test_settings_that_have_no_meaning_are_refused(words, why):
    with pytest.raises(ConfigError, match=why):
        Rewards.of(config_of(*words)).check()


@pytest.mark.parametrize("name", ["gone", "LIMIT"])
def test_what_is_no_function_is_refused(own, name):
    with pytest.raises(ConfigError, match=f"reward.functions is {own}.{name}, but {own} has no function {name}"):
        rewards_of(f".{name}").check()


def test_a_module_that_is_not_allowed_is_not_imported(own):
    with pytest.raises(ConfigError, match=f"allow it with reward.functions_from={own}"):
        Rewards.of(config_of(f"reward.functions={own}.shorter")).check()
    assert own not in sys.modules


def test_only_the_command_line_may_allow_a_module(own, tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text(f"reward:\n  functions: [{own}.shorter]\n  functions_from: [{own}]\n")
    with pytest.raises(ConfigError, match=rf"functions_from is {own} \(.*run.yaml:3\): reward functions would run"):
        config_of(f"run={run}")
    assert own not in sys.modules
    allowed = Rewards.of(config_of(f"run={run}", f"reward.functions_from={own}"))
    allowed.check()
    assert allowed.names == (f"{own}.shorter",)


def test_functions_with_one_last_name_have_metrics_of_their_own(own, tmp_path):
    (tmp_path / "site" / "rewards_of_mine" / "other.py").write_text("def shorter(completions, **columns): return []\n")
    other = "rewards_of_mine.other"
    words = [f"reward.functions={own}.shorter,{other}.shorter,length", f"reward.functions_from={own},{other}"]
    assert Rewards.of(config_of(*words)).metrics == {
        f"{own}.shorter": f"reward_{own}.shorter",
        f"{other}.shorter": f"reward_{other}.shorter",
        "length": "reward_length",
    }


def test_a_function_named_std_does_not_replace_the_spread_within_groups(own):
    rewards = Rewards.of(config_of(f"reward.functions={own}.std,length", f"reward.functions_from={own}"))
    assert rewards.metrics == {f"{own}.std": f"reward_{own}.std", "length": "reward_length"}


class Prompts:
    prompts: ClassVar = [[1], [2]]
    row = str

    def __len__(self):
        return 2


def test_a_validation_without_any_reward_names_the_functions(own, monkeypatch):
    words = [f"reward.functions={own}.some,length", f"reward.functions_from={own}", "reward.weights=[1,0]"]
    objective = RewardedAnswers(config_of(*words))
    objective._prompts["validation"] = Prompts()
    monkeypatch.setattr(objective._answering, "converse", lambda *given, **named: [])
    monkeypatch.setattr(objective_module, "stops_of", lambda setup: [2])
    monkeypatch.setattr(objective_module, "reward_on_main", lambda *given: [[math.nan, 0.5]] * 2)
    setup = SimpleNamespace(runtime=None, model=None)
    message = rf"^reward\.functions \({own}\.some, length\) gave no reward to any of 2 validation answers; expected a"
    with pytest.raises(DataError, match=message):
        objective.measure(setup, None)


def test_without_truncated_answers_a_step_without_a_gradient_names_their_key():
    masked = RewardedAnswers(config_of("reward.functions=length", "grpo.mask_truncated_completions=true"))
    assert masked.no_gradient.startswith(RewardedAnswers.no_gradient)
    assert "raise rollout.max_completion_length" in masked.no_gradient
    assert RewardedAnswers(config_of("reward.functions=length")).no_gradient == RewardedAnswers.no_gradient


# --- functions in one file ------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The file reward.py in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "reward.py"
    path.write_text("LIMIT = 2\ndef solves(completions, **columns): return [LIMIT] * len(completions)\n")
    return path


def test_the_command_line_names_a_function_in_a_file(file, tmp_path, monkeypatch):
    config = config_of("reward.functions=length,./reward.py:solves", "reward.weights=[0,1]")
    assert (config.reward.functions, config.reward.functions_from) == (["length", "reward.solves"], [str(file)])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    rewards = Rewards.of(config)
    assert rewards.metrics == {"length": "reward_length", "reward.solves": "reward_solves"}
    assert rewards([answer("a")])[0][1] == 2
    file.write_text(file.read_text().replace("2", "3"))
    assert Rewards.of(config)([answer("a")])[0][1] == 3, "the file is read again, not a compiled copy of it"
    assert not (tmp_path / "__pycache__").exists()
    assert "reward" not in sys.modules


def test_a_file_beside_a_package_and_a_recipes_own_code(own, file):
    words = [f"reward.functions=reward.py:solves,{own}.shorter", f"reward.functions_from={own}"]
    config = config_of(*words)
    assert config.reward.functions_from == [own, str(file)]
    Rewards.of(config).check()
    values = {"model": "phi_tiny", "data.path": "rows.jsonl", "training.objective": "grpo"}
    recipe = config_from_dict({**values, "reward.functions": ["./reward.py:solves"]}, "the recipe")
    assert recipe.reward.functions_from == [str(file)]


@pytest.mark.parametrize("key", ["functions", "functions_from"])
def test_no_file_allows_the_code_of_a_file(file, tmp_path, key):
    run = tmp_path / "run.yaml"
    texts = {
        "functions": "{functions: ['./reward.py:solves']}",
        "functions_from": f"{{functions: [reward.solves], functions_from: [{file}]}}",
    }
    run.write_text(f"reward: {texts[key]}\n")
    with pytest.raises(
        ConfigError, match=rf"reward.{key} is .*\(.*run.yaml:\d\): reward functions would run"
    ) as caught:
        config_of(f"run={run}")
    advised = str(caught.value).partition("add ")[2].removesuffix(" to the command.")
    config = config_of(f"run={run}", advised)
    assert Rewards.of(config)([answer("a")]) == [[2.0]]
    assert config.reward.functions_from == [str(file)]


def test_a_file_that_another_file_allows_is_not_allowed_beside_one_on_the_command_line(file, tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text("reward: {functions_from: [os]}\n")
    config = config_of(f"run={run}", "reward.functions=os.getpid,./reward.py:solves")
    with pytest.raises(ConfigError, match="os is not allowed"):
        Rewards.of(config).check()


@pytest.mark.parametrize(
    ("name", "source", "why"),
    [
        ("gone.py:solves", "", r"is ./gone.py:solves, but there is no Python file .*/gone.py. Correct the path."),
        ("reward.py", "", r"names no function of the file. Write ./reward.py:FUNCTION."),
        ("reward.py:solve", "def solves(): 1", r"/reward.py has no function solve. Did you mean solves\?"),
        ("reward.py:LIMIT", "LIMIT = 1", r"/reward.py has no function LIMIT."),
        (
            "reward.py:solves",
            "\nimport not_here",
            r"/reward.py:2: .*: ModuleNotFoundError: No module named 'not_here'.",
        ),
        ("reward.py:solves", "def f():\n  1 / 0\nf()", r"/reward.py:2: .*: ZeroDivisionError: division by zero. C"),
        ("reward.py:solves", "\n\ndef solves(:", r"/reward.py:3: the file fails when it is imported: SyntaxError"),
        ("reward.py:solves", "raise SystemExit('no')", r"/reward.py:1: the file fails .*: SystemExit: no. Correct it."),
        (
            "reward.py:a,./old/reward.py:b",
            "",
            r"functions of .*/reward.py and of .*/old/reward.py. Give one file anoth",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(file, tmp_path, name, source, why):
    (tmp_path / "old").mkdir()
    for each in (file, tmp_path / "old" / "reward.py"):
        each.write_text(source)
    with pytest.raises(ConfigError, match=why):
        Rewards.of(config_of(f"reward.functions=./{name}")).check()
