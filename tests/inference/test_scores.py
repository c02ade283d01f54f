import json
import math
from dataclasses import replace

import pytest

from finetune.inference.evaluation_record import exceeded_margins, with_finite_numbers
from finetune.inference.scores import AnsweredRow, Evaluation, RowValues, Scores, show_evaluation, worse_first


@pytest.fixture
def render(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def shown(scores, answers=(), **counts):
        show_evaluation(Evaluation(scores=scores, answers=answers, **{"num_rows": 3, **counts}))
        return capsys.readouterr().out

    return shown


def answered(prompt, expected, **answers):
    return AnsweredRow(source="a:1", prompt=prompt, expected=expected, answers=answers)


def test_rows_that_got_worse_come_first():
    each = {"same": (1.0, 1.0), "better": (0.0, 1.0), "worse": (1.0, 0.0)}
    rows = [
        replace(answered(name, ""), metrics={"base": {"exact_match": base}, "tuned": {"exact_match": tuned}})
        for name, (base, tuned) in each.items()
    ]
    assert [row.prompt for row in worse_first(rows)] == ["worse", "same", "better"]


def test_the_table_shows_base_against_tuned_and_at_most_three_answers(render):
    answers = [answered(f"prompt {n} [bold]x[/bold] [/]", '{"a": 1}', base="no", tuned='{"a": 1}') for n in range(5)]
    base = Scores(loss=3.0, metrics={"exact_match": 0.0, "json_valid": 0.125})
    tuned = Scores(loss=0.25, metrics={"exact_match": 0.93, "json_valid": 0.995})
    text = render({"base": base, "tuned": tuned}, answers, num_rows=1200)
    rows = [" ".join(line.replace("│", " ").replace("┃", " ").split()) for line in text.splitlines()]
    assert "Test split, 1,200 rows" in text
    assert "base tuned" in rows
    assert "exact match 0.0% 93.0%" in rows
    assert "valid JSON 12.5% 99.5%" in rows
    assert "loss (nats per target token) 3.0000 0.2500" in rows
    assert "prompt prompt 2 [bold]x[/bold] [/]" in rows
    assert "prompt 3" not in text
    assert 'tuned {"a": 1}' in rows


def test_answers_that_did_not_end_are_counted_for_each_model(render):
    answers = [answered("p", "e", base="b", tuned="t")] * 3
    scores = {name: Scores(loss=0.25) for name in ("base", "tuned")}
    text = render(scores, answers, num_unended={"base": 4, "tuned": 0}, num_answers=9)
    assert "Did not end within testing.max_new_tokens: 4 of 9 answers of base." in text
    assert "Did not end" not in render(scores, answers, num_unended={"base": 0, "tuned": 0})


def test_rows_that_the_loss_leaves_out_are_counted(render):
    text = render({"tuned": Scores(loss=0.25)}, num_rows=1200, num_left_out=3)
    assert "Test split, 1,200 rows; the loss is over 1,197 of them (drop_last)" in text


def test_an_answer_cannot_steer_the_terminal(render):
    answer = answered("p\x1b[2J", "e\u202e", base="\x9b1m", tuned="\x1b]0;title\x07")
    text = render({"tuned": Scores(loss=0.25)}, [answer])
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert rows[-4:] == [
        "prompt p<U+001B>[2J",
        "expected e<U+202E>",
        "base <U+009B>1m",
        "tuned <U+001B>]0;title<U+0007>",
    ]


def test_evaluate_prints_the_same_table_with_perplexity_and_metrics_of_the_users_own(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    row = answered("p\x1b[2J", "e", tuned="t")
    scores = {"tuned": Scores(loss=0.0, metrics={"json_equal": 0.5, "own.length": 2.0})}
    evaluation = Evaluation(num_rows=3, split="validation", scores=scores, answers=[row, row])
    show_evaluation(evaluation, num_answers=1, with_perplexity=True)
    text = capsys.readouterr().out
    rows = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    assert "Validation split, 3 rows" in text
    assert rows[4:8] == [
        "equal JSON 50.0%",
        "own.length 2.0000",
        "loss (nats per target token) 0.0000",
        "perplexity 1.000",
    ]
    assert rows[-3:] == ["prompt p<U+001B>[2J", "expected e", "tuned t"]


@pytest.mark.parametrize("base", [math.nan, 6.0])
def test_a_row_whose_loss_is_not_finite_is_shown_and_does_not_pass(render, base):
    rows = {"base": RowValues([base, 2.0], [2, 2], {}), "tuned": RowValues([math.nan, 1.0], [2, 2], {})}
    scores = {name: Scores(loss=math.nan, standard_error=math.nan) for name in rows}
    text = " ".join(render(scores, num_rows=2, rows=rows).split())
    assert "loss: not comparable: 1 row better, 0 worse, 0 equal, 1 with a value that is not finite" in text
    evaluation = Evaluation(num_rows=2, scores=scores, rows=rows)
    (reason,) = exceeded_margins(evaluation, {"loss": 0.5})
    assert reason.startswith("loss does not pass --fail-if-worse (0.5): not comparable: ")
    record = with_finite_numbers({"verdict": [evaluation.verdicts["loss"].as_record()]})
    assert json.loads(json.dumps(record, allow_nan=False))["verdict"][0]["difference"] is None


def test_copies_of_one_row_give_no_verdict_and_a_sentence_says_so(render):
    values = RowValues([1.0] * 3, [2.0] * 3, {"token_f1": [0.5] * 3})
    scores = {name: Scores(loss=0.5) for name in ("base", "tuned")}
    known = {"rows": dict.fromkeys(scores, values), "contents": {"loss": "aaa", "token_f1": "aab"}}
    text = render(scores, **known)
    assert "loss: no verdict, because 3 rows are copies of one row" in text
    assert "token F1: no difference that 2 rows could show" in text
    assert list(Evaluation(num_rows=3, scores=scores, **known).verdicts) == ["token_f1"]


@pytest.mark.parametrize(("loss", "perplexity"), [(0.0, 1.0), (1000.0, math.inf), (math.nan, math.nan)])
def test_perplexity_of_a_loss(loss, perplexity):
    assert Scores(loss=loss).perplexity == pytest.approx(perplexity, nan_ok=True)


def test_context_is_above_the_prompt_and_an_empty_answer_is_said_to_be_empty(render):
    answer = replace(answered("p", "e", base="", tuned="t"), context="user: a\nassistant: b")
    text = render({"tuned": Scores(loss=0.25)}, [answer])
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert rows[-6:] == ["context user: a", "assistant: b", "prompt p", "expected e", "base (empty)", "tuned t"]
