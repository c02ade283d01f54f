"""Functions of the user's own: how their files and modules are imported, and how a change is noticed."""

from __future__ import annotations

import math
import sys

import pytest

from finetune.config.own_functions import METRIC_PARAMETERS, fingerprint_functions, refuse_uncallable, resolve_functions
from finetune.errors import ConfigError

CART = """
CART = []

def add(item): CART.append(item)
def show(): return CART
"""


def test_the_functions_of_a_file_share_its_globals_and_two_keys_share_none(tmp_path):
    file = tmp_path / "cart.py"
    file.write_text(CART)
    names = ["cart.add", "cart.show"]
    one, other = (resolve_functions(names, {}, [str(file)], asked_by="rollout.tools") for _ in range(2))
    one["cart.add"]("rice")
    assert (one["cart.show"](), other["cart.show"]()) == (["rice"], [])


def test_a_function_that_returns_a_coroutine_is_refused_before_it_is_called(tmp_path):
    file = tmp_path / "judge.py"
    file.write_text("import asyncio\nasync def ask(completions): return [1.0]\n")
    named = (["judge.ask"], {}, [str(file)])
    with pytest.raises(
        ConfigError, match=r"judge\.ask, which is an async def: .* return asyncio\.run\(ask\(\.\.\.\)\)"
    ):
        resolve_functions(*named, asked_by="reward.functions")
    file.write_text(f"{file.read_text()}def judge(completions): return asyncio.run(ask(completions))\n")
    assert resolve_functions(["judge.judge"], *named[1:], asked_by="x")["judge.judge"]([""]) == [1.0]


class Scorer:
    def __call__(self, answer, expected, *, case=False):
        """A metric with a setting of its own."""


REWARD_PARAMETERS = "prompts, completions, **columns"


@pytest.mark.parametrize(
    "function",
    [Scorer(), lambda answer, expected, limit=3: 1.0, lambda *both: 1.0, max, math.dist, str.startswith],
)
def test_a_metric_takes_an_answer_and_what_is_expected(function):
    refuse_uncallable(function, "it", METRIC_PARAMETERS)


def test_a_reward_function_may_require_a_column_of_the_rows():
    refuse_uncallable(lambda completions, limit, **columns: [], "it", REWARD_PARAMETERS)
    refuse_uncallable(lambda prompts, completions: [], "it", REWARD_PARAMETERS)


def test_a_function_with_other_parameters_is_refused_and_told_which(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def short(answer): return 1.0\nclass Odd:\n    def __call__(self): return 1.0\nodd = Odd()\n")
    message = (
        r"^--metric is own\.short, which takes \(answer\), but it is called with \(answer, expected\): too many "
        r"positional arguments\. Define it as def short\(answer, expected\)\.$"
    )
    with pytest.raises(ConfigError, match=message):
        resolve_functions(["own.short"], {}, [str(file)], asked_by="--metric", parameters=METRIC_PARAMETERS)
    with pytest.raises(ConfigError, match=r"own\.odd, which takes \(\), .* Define it as def Odd\("):
        resolve_functions(["own.odd"], {}, [str(file)], asked_by="x", parameters=METRIC_PARAMETERS)
    with pytest.raises(
        ConfigError, match=r"unexpected keyword argument 'prompts'\. Define it as def <lambda>\(prompts"
    ):
        refuse_uncallable(lambda completions: [], "it", REWARD_PARAMETERS)


def test_a_changed_module_is_noticed_where_it_is_not_imported(tmp_path, monkeypatch):
    """Only the process of the tools imports it."""
    package = tmp_path / "site/things_of_mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(package.parent))
    named = (["things_of_mine.cart.show"], ["things_of_mine.cart"])
    prints = []
    for number in (1, 2):
        (package / "cart.py").write_text(f"def show(): return {number}")
        prints.append(fingerprint_functions(*named))
    assert prints[0].startswith("cart.py ")
    assert prints[0] != prints[1]
    assert "things_of_mine" not in sys.modules
    for missing in ("things_of_mine.cart.show", "things_of_mine.not_here", "not_here.cart"):
        assert fingerprint_functions([f"{missing}.f"], [missing]) == ""
