import io

import pytest
from rich.console import Console

from finetune.runs.view import RunView, curve
from tests.runs.made_runs import step_event


def view_of(losses, *, num_steps=None):
    view = RunView(num_steps)
    for step, loss in enumerate(losses, 1):
        view.take(step_event(step, loss))
    return view


def shown(view, width=100):
    screen = io.StringIO()
    Console(file=screen, width=width).print(view)
    return screen.getvalue()


def test_the_view_has_everything_in_one_place():
    view = view_of([3.0 - 0.02 * step for step in range(40)], num_steps=100)
    view.take({"event": "validation", "step": 20, "loss": 2.2})
    view.take({"event": "validation", "step": 40, "loss": 2.4})
    view.take({"event": "resources", "step": 40, "host_memory": 5 * 10**8, "device_memory": 2 * 10**9,
               "data_wait_share": 0.034, "slowest_rank_share": 0.21})  # fmt: skip
    view.take({"event": "warning", "step": 30, "kind": "flat", "text": "the loss [is] flat"})
    text = shown(view)
    for part in (
        "40/100 · epoch 1 · 6 s left", "2.2200 · falling, -14.2% over 20 steps  █",
        "2.4000 at step 40 · best 2.2000 at step 20",
        "learning rate 1.00e-04 · gradient norm 0.5", "1,000 tokens/s · 3% waiting for data · 21% for the slowest rank",
        "500 MB of the main process · 2 GB on its device, at most", "step 30: the loss [is] flat",
    ):  # fmt: skip
        assert part in text, text


def test_values_of_the_best_metric_before_a_resume_are_forgotten():
    view = view_of([2.0], num_steps=9)
    view.take({"event": "validation", "step": 1, "loss": 2.5})
    view.take({"event": "validation", "step": 2, "loss": 2.4, "exact_match": 0.5, "best_metric": "exact_match"})
    view.take({"event": "validation", "step": 3, "loss": 2.3, "exact_match": 0.1, "best_metric": "exact_match"})
    assert "best exact_match 0.500 at step 2" in shown(view)
    view.take({"event": "validation", "step": 4, "loss": 2.6})
    view.take({"event": "validation", "step": 5, "loss": 2.7})
    assert "best 2.6000 at step 4" in shown(view)


def test_a_validation_that_forgot_too_much_is_not_the_best():
    """Weights beyond `early_stopping.max_forgotten` are not published."""
    view = view_of([2.0], num_steps=9)
    view.max_forgotten = 0.1
    for step, loss, forgotten in ((1, 2.5, 0.05), (2, 2.4, 0.3), (3, 2.6, 0.08)):
        view.take({"event": "validation", "step": step, "loss": loss, "forgotten": forgotten})
    assert "forgotten 0.080 · best 2.5000 at step 1" in shown(view)


def test_a_wide_terminal_has_a_longer_curve_and_bar():
    view = view_of([3.0 - 0.01 * step for step in range(200)], num_steps=400)
    narrow, wide = shown(view, width=80), shown(view, width=160)
    assert [sum(map(text.count, "▁▂▃▄▅▆▇█")) for text in (narrow, wide)] == [24, 104]
    assert [text.count("━") + text.count("─") for text in (narrow, wide)] == [24, 104]
    assert max(map(len, (line.rstrip() for line in wide.splitlines()))) <= 160
    assert len(wide.splitlines()) == len(narrow.splitlines())


@pytest.mark.parametrize("step", ["NaN", float("inf"), -1, None])
def test_untrusted_text_and_steps_do_no_harm(step):
    view = RunView()
    view.headline = "run \x1b[2J"
    for kind in ("step", "validation"):
        view.take({"event": kind, "step": step, "loss": 1.5})
    view.take({"event": "warning", "step": step, "text": "a \x1b]0;title"})
    console = Console(file=io.StringIO(), width=80)
    console.print(view)
    assert "\x1b" not in console.file.getvalue()
    assert view.step == 0


def test_a_view_without_any_event_can_be_shown():
    assert shown(RunView()).split() == ["step", "0"]
    assert RunView(5).line() == "step 0/5 · loss –"


def test_what_a_run_says_at_its_worst_is_shown_too():
    view = view_of([2.0, "NaN", "Infinity"], num_steps=3)
    view.take({"event": "validation", "step": 3, "loss": "NaN"})
    assert "inf" in view.line()
    assert "nan at step 3" in shown(view)
    view.take({"event": "step"})
    view.take({"event": "of a later version", "step": "x"})
    assert view.line() == "step 0/3 · loss – · 0.3 s left"


@pytest.mark.parametrize(
    ("losses", "word"),
    [
        ([3 - 0.1 * n for n in range(20)], "falling"),
        ([1 + 0.1 * n for n in range(20)], "rising"),
        ([2, 3] * 10, "level"),
    ],
)
def test_a_trend_is_called_by_its_name(losses, word):
    assert view_of(losses).trend().startswith(word)


def test_there_is_no_trend_before_ten_steps():
    assert view_of([3.0] * 9).trend() == ""
    assert view_of([3.0] * 10).trend() == "level, +0.0% over 5 steps"


def test_a_curve_is_as_wide_as_it_may_be():
    assert curve([1.0], 8) == ""
    assert curve([2.0, 2.0], 8) == "▁▁"
    assert curve([float(n) for n in range(80)], 8) == "▁▂▃▄▅▆▇█"


def test_rewards_stand_beside_the_loss():
    view = RunView(4)
    view.take({"event": "step", "step": 2, "loss": 0.01, "reward": 0.625, "answer_length": 31.6, "truncated": 0.25})
    assert view.line() == "step 2/4 · loss 0.0100 · reward 0.625"
    assert ("reward", "0.625 · 32 tokens an answer · 25% truncated") in view._rows()
    of_functions = {"reward_f1": 0.5, "reward_std": 0.1, "reward_regex": 0.75, "reward_f1_by_turn": [0.5]}
    view.take(
        {
            "event": "step",
            "step": 3,
            "loss": 0.01,
            "reward": 1.25,
            "answer_length": 9.0,
            **of_functions,
            "failed_calls": 0.1,
        }
    )
    shown = "1.250 · f1 0.500 · regex 0.750 · 9 tokens an answer · – truncated · 10% of calls failed"
    assert ("reward", shown) in view._rows()
