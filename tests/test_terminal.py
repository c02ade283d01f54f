import json
import logging
import sys

import pytest

from finetune.distributed.guardian.faults import line_of_fault
from finetune.errors import Fault
from finetune.logs import is_for_a_person, log_to_file, stop_logging_to
from finetune.terminal import _show_exception, json_text, print_table, say, screen_width, visible, without_passwords


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext, ümläut 日本 🙂", "plain\n\ttext, ümläut 日本 🙂"),
        ("\x1b[31mred\x1b[0m", "<U+001B>[31mred<U+001B>[0m"),
        ("over\rwritten\x08", "over<U+000D>written<U+0008>"),
        ("\x9b2J\x7f", "<U+009B>2J<U+007F>"),
        ("abc\u202edef\u2066", "abc<U+202E>def<U+2066>"),
        ("half \ud800", "half <U+D800>"),
        ("", ""),
    ],
)
def test_what_would_steer_a_terminal_is_written_as_its_number(text, shown):
    assert visible(text) == shown
    assert visible(text, also_unseen=True) == shown


def test_a_stream_of_a_script_that_can_only_be_written_to_is_no_terminal():
    class Written:
        def write(self, text):
            return len(text)

    assert screen_width(Written()) is None
    assert not is_for_a_person(Written())


def test_what_cannot_be_seen_stays_unless_it_is_asked_for():
    text = "5\u00a0kg 👩\u200d💻"
    assert visible(text) == text
    assert visible(text, also_unseen=True) == "5<U+00A0>kg 👩<U+200D>💻"


@pytest.mark.parametrize("indent", [None, 2])
def test_json_says_the_text_exactly_and_holds_no_control_character(indent):
    value = {"answer": "\x1b[2J\x9b\x7f\u202e\u2028\ud800 ü \\u009b 🙂\n"}
    text = json_text(value, indent=indent)
    assert json.loads(text) == value
    assert "ü" in text
    assert "🙂" in text
    assert visible(text) == text
    assert ("\n" in text) == (indent is not None)


def test_no_cell_of_a_table_is_markup_or_steers_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_table(["na\x1bme", "n"], [["[bold]a\x1b[2J", ("[red]", "green")]], right=["n"], title="[b]\x9b")
    text = capsys.readouterr().out
    for part in ("na<U+001B>me", "[bold]a<U+001B>[2J", "[red]", "[b]<U+009B>"):
        assert part in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("of https://anna:p@ssw@rd@host/rows: gone", "of https://…@host/rows: gone"),
        ("https://host/x?auth=q1&page=2&user_pass=q3", "https://host/x?auth=…&page=2&user_pass=…"),
        ("https://host/x?passwd=q1&bearer=q2&otp=q3", "https://host/x?passwd=…&bearer=…&otp=…"),
        ("https://host/x;token=q1#token=q2", "https://host/x;token=…#token=…"),
        ("https://host/x%3Ftoken%3Dq1", "https://host/x?token=…"),
        ("https://host/x?to%6Ben=q1&page=2%26hmac=q2", "https://host/x?token=…&page=…"),
        ("https://host/x?q1 and https://host/x?q1==", "https://host/x?… and https://host/x?…"),
        ("https://host/x?ref=https://host/y?ticket=q1", "https://host/x?ref=https://host/y?ticket=…"),
        ("https://host/R&D/a;b#1?page=2&versionId=3", "https://host/R&D/a;b#1?page=2&versionId=3"),
        ("https://host/me@home? See https://host/docs#data", "https://host/me@home? See https://host/docs#data"),
    ],
)
def test_no_part_of_a_password_in_an_address_is_shown(text, shown):
    assert without_passwords(text) == shown


def test_messages_tracebacks_and_logs_have_no_control_sequences(tmp_path, capsys, caplog):
    steering = "a\x1b[2Jb"
    say(steering)
    fault = Fault(rank=0, summary="rank 0 failed", error=steering)
    sys.stderr.write(line_of_fault(fault))
    handler = log_to_file(tmp_path / "log.txt")
    logging.getLogger("finetune").error("a server said %s", steering)
    stop_logging_to(handler)
    try:
        raise ValueError(steering)
    except ValueError as error:
        _show_exception(ValueError, error, error.__traceback__)
    said = capsys.readouterr()
    texts = [said.out, *said.err.splitlines()[:1], said.err.splitlines()[-1], (tmp_path / "log.txt").read_text()]
    assert all("a<U+001B>[2Jb" in text and "\x1b" not in text for text in texts), texts
