"""A chat template has a budget of time, memory and output, and the error names the template."""

from __future__ import annotations

import os
import signal
from unittest.mock import DEFAULT, Mock

import psutil
import pytest

from finetune.data import rendering
from finetune.data.chat_template import ChatTemplate
from finetune.data.turns import dialogue_of, text_turn
from finetune.data.values import BadRowError
from finetune.errors import DataError, ModelError
from finetune.export.ollama import modelfile
from tests.tiny import tiny_tokenizer

DIALOGUE = dialogue_of([text_turn("user", "a\ud800"), text_turn("assistant", "é🍊")])
DOUBLING = "{% set ns = namespace(s='x') %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
MEMORY, TIME, TEXT = "needs too much memory", "took longer than 5 s", "makes too much text"
REFUSED = {
    "a string times a number": ("{{ 'a' * 10**10 }}", MEMORY),
    "much text": ("{% for m in messages %}{{ 'abcdefghij' * 100000 }}{% endfor %}", TEXT),
    "much text after many rows": ("{{ 'abcdefghij' * 20000 }}", TEXT),
}
SLOWLY_REFUSED = {
    # The interpreter is not asked between two steps of it, as it would be in loops.
    "a power": ("{{ (messages | length + 2) ** (10**9) % 7 }}", TIME),
    "a doubled string": (DOUBLING, MEMORY),
}


def refused(template: str, words: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=rf"the chat template of theirs {words}.* Set another template: data\."):
        ChatTemplate(tokenizer, "theirs").render([DIALOGUE] * 8)
    if words != TIME:  # which would pass a second time
        with pytest.raises((DataError, ModelError)):
            modelfile(tokenizer, "model.gguf", [])
    assert ChatTemplate(tiny_tokenizer()).render([DIALOGUE])[0] == expected(), "the next template is rendered"


def expected() -> str:
    tokenizer = tiny_tokenizer()
    return str(tokenizer.apply_chat_template(list(DIALOGUE.turns), tokenize=False))


@pytest.mark.parametrize("what", REFUSED)
def test_a_template_that_takes_too_much_is_stopped(what: str) -> None:
    refused(*REFUSED[what])


@pytest.mark.slow
@pytest.mark.parametrize("what", SLOWLY_REFUSED)
def test_a_template_that_takes_too_long_is_stopped(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ChatTemplate(tiny_tokenizer()).render([DIALOGUE])[0] == expected()  # by a process that goes on
    start = Mock(wraps=rendering.start_child)
    monkeypatch.setattr(rendering, "start_child", start)
    refused(*SLOWLY_REFUSED[what])
    assert start.call_count <= 1, "it is not tried again, and the next template may need a new process"


@pytest.mark.slow
def test_each_request_has_the_whole_time_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process answers all of them. Together they take more than one of them may."""
    monkeypatch.setattr(rendering, "MATCH_SECONDS", 0.5)
    names = [f"model.layers.{number}.self_attn.o_proj" for number in range(20_000)]
    for _ in range(100):
        assert all(rendering.match_patterns([r".*\.o_proj"], names, name="lora.target_modules")[0])


def test_a_refusal_is_of_one_row() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if messages[0].content == 'no' %}{{ raise_exception('why') }}{% endif %}yes"
    rows = [dialogue_of([text_turn("user", content)]) for content in ("no", "a")]
    bad, good = ChatTemplate(tokenizer).render(rows)
    assert isinstance(bad, BadRowError)
    assert str(bad) == "the chat template refuses the row: why"
    assert good == "yes"


@pytest.mark.process
def test_another_process_takes_the_place_of_one_that_was_killed() -> None:
    def child() -> int:
        (found,) = (each for each in psutil.Process().children() if "finetune.data.rendering_process" in each.cmdline())
        return found.pid

    template = ChatTemplate(tiny_tokenizer())
    assert template.render([DIALOGUE])[0] == expected()
    before = child()
    os.kill(before, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(before)], timeout=10)
    assert template.render([DIALOGUE])[0] == expected()
    assert child() != before


def test_a_process_that_is_gone_before_it_answers_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ensure = Mock(wraps=rendering._Renderer._ensure, side_effect=[EOFError, DEFAULT])
    monkeypatch.setattr(rendering._Renderer, "_ensure", ensure)
    assert ChatTemplate(tiny_tokenizer()).render([DIALOGUE])[0] == expected()
    assert ensure.call_count == 2


def test_a_signal_while_it_renders_leaves_no_answer_for_the_next_text(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(tiny_tokenizer())
    assert template.render([DIALOGUE])[0] == expected()

    def interrupted(_: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rendering.json, "loads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        template.render([dialogue_of([text_turn("user", "other")])])
    monkeypatch.undo()
    assert template.render([DIALOGUE])[0] == expected()
