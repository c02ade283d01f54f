import os
import sys

import pytest

from finetune.config.own_functions import resolve_functions
from finetune.errors import ConfigError, DataError
from finetune.inference.answers import METRICS, measure


@pytest.mark.parametrize(
    ("name", "answer", "expected", "figure"),
    [
        ("exact_match", " a b\n", "a b", 1),
        ("exact_match", "a  b", "a b", 0),
        ("json_valid", '{"a": 1}', "x", 1),
        ("json_valid", "3", "x", 0),
        ("json_equal", '{"a": 1, "b": [2]}', '{"b":[2],"a":1}', 1),
        ("json_equal", '{"a": [1, true]}', '{"a": [1, true]}', 1),
        ("json_equal", '{"a": [true]}', '{"a": [1]}', 0),
        ("json_equal", '{"a": 0}', '{"a": false}', 0),
        ("json_equal", '{"a": 1}', '{"a": 1.0}', 1),
        ("json_equal", '{"a": Infinity}', '{"a": Infinity}', 0),
        ("json_valid", '{"a": NaN}', "x", 0),
        ("json_equal", '{"a": 2, "a": 1}', '{"a": 1}', 0),
        ("json_valid", 'I look.[{"name": "a", "arguments": {}}]', "x", 1),
        ("json_equal", 'I look.[{"name": "a", "arguments": {}}]', '[{"arguments": {}, "name": "a"}]', 1),
        ("json_equal", '[{"name": "a", "arguments": {}}]', 'I look.[{"name": "a", "arguments": {}}]', 1),
        ("json_equal", 'I look.[{"name": "a", "arguments": {}}] Done.', '[{"name": "a", "arguments": {}}]', 0),
        (
            "json_equal",
            'I look.[{"name": "a", "arguments": {"b": 1, "b": 2}}]',
            '[{"name": "a", "arguments": {"b": 2}}]',
            0,
        ),
        ("json_valid", 'The list: [{"name": "a", "age": 3}]', "x", 0),
        ("json_valid", '[{"name": "a", "arguments": {}}, 3] [{"name": 1}]', "x", 0),
        ("token_f1", "the red fox", "The fox", 0.8),
        ("token_f1", "", "", 1),
        ("token_f1", "", "a", 0),
    ],
)
def test_the_metrics_that_come_along(name, answer, expected, figure):
    assert measure(name, METRICS[name], answer, expected) == pytest.approx(figure)


def resolve(names, allowed_modules=()):
    return resolve_functions(names, METRICS, allowed_modules, asked_by="--metric")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """An installed package with metrics, and a folder that one stands in with a module of its own."""
    installed, here = tmp_path / "site", tmp_path / "here"
    (installed / "scores_of_mine").mkdir(parents=True)
    (installed / "scores_of_mine" / "__init__.py").write_text("")
    (installed / "scores_of_mine" / "orders.py").write_text(
        "def length(answer, expected): return len(answer)\ndef bad(answer, expected): return float('nan')\n"
        "def fails(answer, expected): return 1 / 0\nLIMIT = 3\n"
    )
    here.mkdir()
    (here / "downloaded_scores.py").write_text("raise SystemExit('code of a stranger was run')\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(here), str(installed), *sys.path])
    yield "scores_of_mine.orders"
    for name in [name for name in sys.modules if name.startswith("scores_of_mine")]:
        del sys.modules[name]


def test_a_metric_of_ones_own_needs_its_module_allowed(packages):
    with pytest.raises(ConfigError, match=f"--metrics-from {packages}"):
        resolve([f"{packages}.length"])
    assert "scores_of_mine" not in sys.modules
    with pytest.raises(ConfigError, match="is not allowed: a function is code"):
        resolve([f"{packages}.length"], ["scores_of_mine"])
    found = resolve(["exact_match", f"{packages}.length"], [packages])
    assert list(found) == ["exact_match", f"{packages}.length"]
    assert measure("length", found[f"{packages}.length"], "four", "x") == 4


def test_what_lies_in_the_current_folder_is_not_imported(packages):
    path = list(sys.path)
    with pytest.raises(ConfigError, match=r"downloaded_scores is not installed.*current folder"):
        resolve(["downloaded_scores.metric"], ["downloaded_scores"])
    assert sys.path == path


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("exactmatch", "expected one of exact_match"),
        ("os.system", "is not allowed: a function is code"),
        ("{own}.gone", "no function gone"),
    ],
)
def test_other_names_are_refused(packages, name, why):
    with pytest.raises(ConfigError, match=why):
        resolve([name.format(own=packages)], [packages])


@pytest.mark.parametrize("value", ["0.5", 1.7e308, -1e200, float("inf"), 10**200])
def test_a_metric_returns_a_number_whose_sum_is_finite(value):
    with pytest.raises(DataError, match=r"the metric mine gave .* for 'a'; expected a number below 1e100\.$"):
        measure("mine", lambda *_: value, "a", "b")


@pytest.mark.parametrize(("name", "why"), [("bad", "gave nan"), ("fails", "ZeroDivisionError")])
def test_a_metric_that_goes_wrong_is_named(packages, name, why):
    (metric,) = resolve([f"{packages}.{name}"], [packages]).values()
    with pytest.raises(DataError, match=why):
        measure(name, metric, "a", "b")


def test_a_metric_that_ends_the_program_fails_instead(monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda code: None)  # without a mend, pytest would end here
    with pytest.raises(DataError, match=r"mine failed on the answer 'a': RuntimeError\('it called os._exit\(0\)'\)"):
        measure("mine", lambda *_: os._exit(0), "a", "b")
