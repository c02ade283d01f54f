import io
import json
import os
import re
import sys
import time

import pytest

from finetune.cli.chat import ChatSession, Conversation, chat
from finetune.cli.generate import generate_command as generate
from finetune.errors import ConfigError
from finetune.inference.answers import Answer
from tests.test_outlives_shell import Terminal

ORDER = "Please send 3 crates of oranges to Marta Ruiz in Porto by Friday"
CTRL_C, CTRL_D = "\x03", "\x04"
LIMIT_SECONDS = 180.0


def test_a_conversation_remembers_turns_and_takes_back_what_had_no_answer():
    talk = Conversation("Be brief.")
    talk.add("user", "a")
    talk.answer(Answer("b", content="b"))
    talk.add("user", "c")
    assert [turn["content"] for turn in talk.as_prompt().messages] == ["Be brief.", "a", "b", "c"]
    talk.answer(Answer(""))
    talk.forget_unanswered()
    assert [turn["content"] for turn in talk.turns] == ["a", "b"]
    talk.add("user", "d")
    talk.forget_unanswered()
    assert len(talk.turns) == 2


def test_a_call_waits_for_its_result():
    talk = Conversation("Be brief.", tools='[{"name": "weather"}]')
    talk.add("user", "a")
    assert not talk.waiting_calls
    talk.answer(Answer("[…]", "I must look.", "", ({"name": "weather", "arguments": {}},)))
    assert talk.waiting_calls
    talk.add("tool", "31")
    assert not talk.waiting_calls
    prompt = talk.as_prompt()
    assert prompt.tools == talk.tools
    assert [turn["role"] for turn in prompt.messages] == ["system", "user", "assistant", "tool"]
    assert prompt.messages[2]["reasoning_content"] == "I must look."
    call = {"type": "function", "id": "call00000", "function": {"name": "weather", "arguments": {}}}
    assert prompt.messages[2]["tool_calls"] == [call]
    assert prompt.messages[3] == {"role": "tool", "content": "31", "tool_call_id": "call00000"}
    talk.forget_unanswered()
    assert talk.waiting_calls == [call]


def test_each_of_several_calls_gets_a_result_with_its_own_id():
    talk = Conversation()
    both = tuple({"name": name, "arguments": {}} for name in ("first", "second"))
    for _ in range(2):
        talk.add("user", "a")
        talk.answer(Answer("[…]", calls=both))
        talk.add("tool", "1")
        assert [call["function"]["name"] for call in talk.waiting_calls] == ["second"]
        talk.add("tool", "2")
        assert not talk.waiting_calls
        talk.answer(Answer("b", content="b"))
        assert not talk.waiting_calls
    ids = [turn["tool_call_id"] for turn in talk.turns if turn["role"] == "tool"]
    assert ids == [call["id"] for turn in talk.turns for call in turn.get("tool_calls", ())]
    assert len(set(ids)) == 4


def test_a_result_without_a_text_is_asked_for_again(capsys):
    session = ChatSession.__new__(ChatSession)
    session._conversation = talk = Conversation()
    talk.add("user", "a")
    talk.answer(Answer("[…]", calls=({"name": "weather", "arguments": {}},)))
    session._obey("/tool", "")
    assert talk.waiting_calls
    assert "the call of weather waits for its result: /tool TEXT." in capsys.readouterr().err


@pytest.fixture
def piped(capsys, monkeypatch):
    """Send lines to a chat as through a pipe: what it answers, without white space at the end of lines, and notes."""

    def send(run, *lines, **options):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
        chat(run, **{"max_new_tokens": 12, **options})
        shown, notes = capsys.readouterr()
        return re.sub(r"\s+\n", "\n", shown), notes

    return send


@pytest.fixture
def answers(adapter_run, capsys):
    """The answers of both models to the order, with a system turn, as `finetune generate` shows them."""

    def ask(system=None):
        generate(adapter_run, [ORDER], max_new_tokens=12, system=system, compare=True, as_json=True)
        record = json.loads(capsys.readouterr().out)
        return record["base"]["answer"].strip(), record["answer"].strip()

    return ask


@pytest.mark.slow
def test_lines_of_a_pipe_are_answered_one_after_the_other(piped, adapter_run, answers):
    shown, notes = piped(
        adapter_run,
        *(ORDER, ORDER, "/reset", ORDER, "/system Be nice.", ORDER, "/system -", ORDER),
        *("/reset", "/compare", ORDER, "/nonsense", " \n", "a <|end|> b", "//etc", " /exit ", "never read"),
    )
    (_, usual), (_, nice), (base, bare) = answers(), answers("Be nice."), answers("")
    assert len({usual, nice, base, bare}) == 4
    end = f"\n{usual}\n{nice}\n{bare}\nbase: {base}\ntuned: {bare}\n"
    assert shown.startswith(f"{usual}\n")
    second, end, literal = shown.removeprefix(f"{usual}\n").partition(end)
    assert end
    assert literal.startswith("base: "), "//etc is said to the model"
    assert second not in ("", usual), "the turns before take part"
    for part in (
        "system: Extract the order as JSON. /help",
        "/nonsense is not a command",
        "not sent: the conversation: ",
    ):
        assert part in notes
    assert "never read" not in notes


def test_a_system_turn_of_the_command_line_can_be_removed(piped, adapter_run, answers):
    shown, notes = piped(adapter_run, ORDER, "/system -", ORDER, system="Be nice.")
    assert shown == f"{answers('Be nice.')[1]}\n{answers('')[1]}\n"
    assert "system: none." in notes


def test_a_full_run_cannot_compare_and_says_so(piped, full_run):
    shown, notes = piped(full_run, "/compare", ORDER, "/help")
    assert shown.strip()
    assert "base: " not in shown
    assert "no adapter to switch off" in notes
    assert "/system TEXT" in notes
    assert notes.count("the answer did not end within 12 tokens (--max-new-tokens).") == 1
    with pytest.raises(ConfigError, match="--compare switches the adapter off"):
        piped(full_run, compare=True)


def test_a_conversation_that_outgrows_the_context_can_begin_anew(piped, adapter_run):
    shown, notes = piped(adapter_run, "pens " * 3000, ORDER)
    assert re.search(r"not sent: prompt 1 of 1 has [\d,]+ tokens, and the model's context of 2,048 .*/reset", notes)
    assert len(shown.splitlines()) >= 1


def test_a_line_that_is_not_text_is_not_sent_and_the_chat_goes_on(piped, adapter_run, answers):
    shown, notes = piped(adapter_run, "caf\udce9", "/system caf\udce9", ORDER)
    assert notes.count("not sent: the line has bytes that are not text; expected UTF-8.") == 2
    assert shown == f"{answers()[1]}\n"


class Screen(Terminal):
    """A terminal that is waited for."""

    def wait_for(self, text: str, *, times: int = 1) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while self.screen.decode(errors="replace").count(text) < times:
            assert time.monotonic() < end, f"no {text!r} on the screen:\n{self.screen.decode(errors='replace')}"
            time.sleep(0.02)

    def wait_for_more(self, num_bytes: int) -> None:
        end, before = time.monotonic() + LIMIT_SECONDS, len(self.screen)
        while len(self.screen) < before + num_bytes:
            time.sleep(0.02)
            assert self.process.poll() is None, self.screen.decode(errors="replace")
            assert time.monotonic() < end, self.screen.decode(errors="replace")

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())


@pytest.fixture
def screen(adapter_run):
    """A chat in a pseudo-terminal whose answers are long: at this temperature hardly a token ends one."""
    words = ["chat", str(adapter_run), "--temperature", "9", "--max-new-tokens", "1500"]
    terminal = Screen([sys.executable, "-m", "finetune", *words])
    yield terminal
    if terminal.process.poll() is None:
        terminal.process.kill()
    terminal.process.wait()
    terminal.hang_up()


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_not_the_program(screen):
    screen.wait_for("/help lists commands")
    screen.wait_for("> ")
    assert b"\x1b[?2004h" in screen.screen, "the terminal marks pasted lines, which are then one question"
    screen.type(ORDER)
    screen.wait_for(ORDER)
    screen.wait_for_more(300)  # the answer has begun, and comes piece by piece
    assert b"stopped." not in screen.screen
    screen.press(CTRL_C)
    screen.wait_for("stopped.")
    assert screen.process.poll() is None
    screen.press(CTRL_C)  # at the prompt too
    screen.wait_for("Ctrl-D or /exit leaves.")
    screen.type("/system")
    screen.wait_for("system: Extract the order as JSON.", times=2)
    screen.type("/compare")
    screen.wait_for("the base answers too.")
    screen.type("Two pens.")
    for number, name in enumerate(("base: ", "tuned: "), start=2):
        screen.wait_for(name)
        screen.wait_for_more(20)  # a time would do less well: the faster the machine, the more of an answer is over
        screen.press(CTRL_C)
        screen.wait_for("stopped.", times=number)
    screen.press(CTRL_D)
    assert screen.process.wait(LIMIT_SECONDS) == 0
    assert b"Traceback" not in screen.screen
    # Random tokens hold all kinds of characters; those that steer a terminal are spelled out.
    talk = screen.screen[screen.screen.index(b"/help lists commands") :]  # what waiting for the model drew is before it
    shown = re.sub(rb"\x1b\[\?2004[hl]", b"", talk)  # what the line editor itself sends
    assert b"\x1b" not in shown
