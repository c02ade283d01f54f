import json

import pytest

from finetune.inference.visible_text import escape_controls, json_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext, ümläut 日本 🙂", "plain\n\ttext, ümläut 日本 🙂"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("over\rwritten\x08", r"over\rwritten\x08"),
        ("\x9b2J\x7f", r"\x9b2J\x7f"),
        ("abc\u202edef\u2066", r"abc\u202edef\u2066"),
        ("half \ud800", r"half \ud800"),
        ("", ""),
    ],
)
def test_what_would_steer_a_terminal_is_spelled_out(text, shown):
    assert escape_controls(text) == shown


def test_json_says_the_text_exactly_and_holds_no_control_character():
    value = {"answer": "\x1b[2J\x9b\x7f\u202e\u2028 ü \\u009b 🙂\n"}
    line = json_line(value)
    assert json.loads(line) == value
    assert "ü" in line
    assert "🙂" in line
    assert escape_controls(line) == line
    assert "\n" not in line
