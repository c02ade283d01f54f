import pytest

from finetune.cli.evaluate import _show
from finetune.inference.evaluation import AnsweredRow, Evaluation, Scores
from finetune.inference.scores import ComparedAnswer, ModelComparison, ModelScores, show_comparison


@pytest.fixture
def render(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def shown(comparison):
        show_comparison(comparison)
        return capsys.readouterr().out

    return shown


def test_the_table_shows_base_against_tuned_and_at_most_three_answers(render):
    answers = tuple(
        ComparedAnswer(prompt=f"prompt {n} [bold]x[/bold] [/]", expected='{"a": 1}', base="no", tuned='{"a": 1}')
        for n in range(5)
    )
    base = ModelScores(loss=3.0, exact_match=0.0, json_valid=0.125)
    tuned = ModelScores(loss=0.25, exact_match=0.93, json_valid=0.995)
    text = render(ModelComparison(tuned=tuned, base=base, num_rows=1200, answers=answers))
    rows = [" ".join(line.replace("│", " ").replace("┃", " ").split()) for line in text.splitlines()]
    assert "Test split, 1,200 rows" in text
    assert "base tuned" in rows
    assert "exact match 0.0% 93.0%" in rows
    assert "valid JSON 12.5% 99.5%" in rows
    assert "loss (nats per target token) 3.0000 0.2500" in rows
    assert "prompt prompt 2 [bold]x[/bold] [/]" in rows
    assert "prompt 3" not in text
    assert 'tuned {"a": 1}' in rows


def test_rows_that_the_loss_leaves_out_are_counted(render):
    text = render(ModelComparison(tuned=ModelScores(loss=0.25), num_rows=1200, num_left_out=3))
    assert "Test split, 1,200 rows; the loss is over 1,197 of them (drop_last)" in text


def test_what_was_not_measured_is_not_shown(render):
    answer = ComparedAnswer(prompt="p", expected="e", tuned="t")
    text = render(ModelComparison(tuned=ModelScores(loss=0.25), answers=(answer,)))
    assert "base" not in text
    assert "exact match" not in text
    assert "0.2500" in text


def test_an_answer_cannot_steer_the_terminal(render):
    answer = ComparedAnswer(prompt="p\x1b[2J", expected="e\u202e", tuned="\x1b]0;title\x07", base="\x9b1m")
    text = render(ModelComparison(tuned=ModelScores(loss=0.25), answers=(answer,)))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert rows[-4:] == [
        "prompt p<U+001B>[2J",
        "expected e<U+202E>",
        "base <U+009B>1m",
        "tuned <U+001B>]0;title<U+0007>",
    ]


def test_evaluate_prints_the_same_table_with_perplexity_and_metrics_of_the_users_own(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    row = AnsweredRow(source="a:1", prompt="p\x1b[2J", expected="e", answers={"tuned": "t"}, metrics={"tuned": {}})
    scores = {"tuned": Scores(loss=0.0, standard_error=0.0, metrics={"json_equal": 0.5, "own.length": 2.0})}
    _show("validation", Evaluation(num_rows=3, num_targets=9, scores=scores, answered=[row, row]), num_samples=1)
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
