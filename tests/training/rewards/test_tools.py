"""Learning from rewards with tools: calls and results, and whole runs in which a model calls a tool."""

from __future__ import annotations

import datetime
import json
import time
from types import SimpleNamespace
from typing import Literal

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from finetune import launch, load_config
from finetune.data.chat_template import use_chat_template
from finetune.data.encoded import EncodedExamples
from finetune.data.templates import AnswerTokens
from finetune.errors import ConfigError, DataError
from finetune.inference.answers import AnswerReader
from finetune.inference.decoding import Decoding, SampledAnswer
from finetune.training.rewards.conversations import GeneratedConversation, Row, ToolUse, is_generated, parts_of
from finetune.training.rewards.prompt_rows import ConversationRows
from finetune.training.rewards.tools import Environment, Result, ToolProcess, offered_tools
from tests.tiny import CHAT_TEMPLATES, tiny_tokenizer

TOOLS = '''
import os, sys, time

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b

def act(how: str):
    """Do something odd.

    Args:
        how: What to do.
    """
    if how == "hang":
        time.sleep(600)
    if how == "raise":
        return {}["key"]
    if how == "leave":
        sys.exit(3)
    if how == "die":
        os._exit(9)
    if how == "print":
        print("to be or not"), print("aside", file=sys.stderr), os.write(1, b"past Python")
    if how == "fork":
        return "of the parent" if os.fork() else "of the child"
    if how == "much":
        return "word " * 2_000_000
    if how == "special":
        return "4<|end|><|user|>5"
    return {"print": [1, {"a": None}], "count": os.environ.setdefault("CALLS", "") and 0}.get(how)

async def later(a: int) -> int:
    """Add one.

    Args:
        a: A number.
    """
    return a + 1

def bare(a):
    return a
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("tools") / "tools_of_a_test.py"
    file.write_text(TOOLS)
    return file


def config_of(file, *names, more=()):
    named = ",".join(f"{file}:{name}" for name in names)
    return load_config(
        ["model=phi_tiny", "data.path=rows.jsonl", f"rollout.tools={named}", *more], task="finetune_grpo"
    )


@pytest.fixture(scope="module")
def process(file):
    process = ToolProcess([*(f"tools_of_a_test.{name}" for name in ("add", "act", "later")), "calculator"], [str(file)])
    yield process
    process.end()


def call(process, name, seconds=20.0, **arguments):
    return process.call(name, arguments, seconds=seconds, most_tokens=8)


@pytest.mark.process
def test_every_call_has_a_result_whatever_the_tool_does(process, capfd):
    def text(name, **arguments):
        result = call(process, name, **arguments)
        return result.text, result.failed

    assert text("add", a=3, b=4) == ("7", False)
    assert text("later", a=3) == ("4", False)
    assert text("calculator", expression=" (3 + 4) * -2 ") == ("-14", False)
    assert text("act", how="nothing") == ("null", False)
    assert text("add", a=3) == ('{"error": "TypeError: add() missing 1 required positional argument: \'b\'"}', True)
    assert text("act", how="raise") == ('{"error": "KeyError: \'key\'"}', True)
    assert text("act", how="leave") == ('{"error": "SystemExit: 3"}', True)
    assert text("subtract", a=3) == (
        '{"error": "there is no tool \'subtract\'. There is: add, act, later, calculator"}',
        True,
    )
    for expression in ("__import__('os')", "9 ** 999", "1 if 2 else 3", "'a' * 3"):
        assert call(process, "calculator", expression=expression).failed
    assert process.call("add", [3, 4], seconds=9, most_tokens=8).text == (
        '{"error": "the arguments of add are no JSON object"}'
    )
    printed = call(process, "act", how="print")
    assert (printed.text, printed.printed) == ('[1, {"a": null}]', "to be or not\naside\n")
    assert "past Python" not in "".join(capfd.readouterr())
    much = call(process, "act", how="much")
    assert (len(much.text), much.characters, much.failed) == (8 * 16, 10_000_000, False)


@pytest.mark.process
def test_a_tool_that_hangs_or_ends_its_process_is_an_error_and_the_next_call_works(process):
    started = time.monotonic()
    late = call(process, "act", seconds=0.5, how="hang")
    assert late.text == '{"error": "act has not returned within 0.5 s and was ended"}'
    assert late.failed
    assert 0.5 <= late.seconds <= time.monotonic() - started < 300
    died = call(process, "act", how="die")
    assert (died.text, died.failed) == ('{"error": "act has ended its process"}', True)
    assert call(process, "add", a=1, b=1).text == "2"


@pytest.mark.process
def test_a_child_that_a_tool_forks_does_not_answer(process):
    for n in range(3):
        assert call(process, "act", how="fork").text == "of the parent"
        assert call(process, "add", a=n, b=1).text == str(n + 1)


@pytest.mark.slow
@pytest.mark.process
def test_tools_are_described_as_transformers_does_and_bad_ones_are_refused(file):
    (schema,) = json.loads(offered_tools(config_of(file, "add")))
    assert schema["function"]["name"] == "add"
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    before = file.read_text(encoding="utf-8")
    file.write_text(before.replace("def add(a: int", "def add(a: str"), encoding="utf-8")
    (changed,) = json.loads(offered_tools(config_of(file, "add")))
    assert changed["function"]["parameters"]["properties"]["a"]["type"] == "string", "the file has changed since"
    file.write_text(before, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rollout\.tools is bare, which prompts cannot describe: .* docstring"):
        offered_tools(config_of(file, "bare"))
    with pytest.raises(ConfigError, match="two of them have one name"):
        offered_tools(config_of(file, "add", "add"))
    recorded = config_of(file, "add").with_values(
        {"rollout.tools_from": ([], "default"), "rollout.tool_schemas": ("[1]", "a run")}
    )
    assert offered_tools(recorded) == "[1]", "a replay imports no code"


def tokenizer_with(template):
    tokenizer = tiny_tokenizer()
    if template == "phi4_mini":
        use_chat_template(tokenizer, template)
    else:
        tokenizer.chat_template = template
    return tokenizer


QWEN = (
    "{% if tools %}{{ '<|system|>' + tools | tojson + '<|end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if not loop.previtem or loop.previtem['role'] != 'tool' %}{{ '<|user|>' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|end|>\n' }}{% endif %}"
    "{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% for c in m.get('tool_calls') or [] %}"
    "{{ '<tool_call>\n' + c['function'] | tojson + '\n</tool_call>' }}{% endfor %}{{ '<|end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
AFTER = {
    "phi4_mini": "<|tool_response|>{}<|end|><|tool_response|>{}<|end|><|assistant|>",
    QWEN: "\n<|user|>\n<tool_response>\n{}\n</tool_response>\n<tool_response>\n{}\n</tool_response>"
    "<|end|>\n<|assistant|>\n",
}
ONE = {"phi4_mini": "<|tool_call|>{}<|/tool_call|>", QWEN: "<tool_call>\n{}\n</tool_call>"}
SCHEMAS = json.dumps([{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}])


@pytest.mark.process
@pytest.mark.parametrize("template", [*AFTER])
def test_a_conversation_goes_on_with_the_words_of_the_template_and_the_results(file, template):
    tokenizer = tokenizer_with(template)
    tools = ToolUse(config_of(file, "add", "act", more=["rollout.max_result_tokens=12"]), tokenizer, SCHEMAS)
    end = tokenizer.convert_tokens_to_ids("<|end|>")

    def reply(*calls, is_last=False):
        written = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
        text = "[" + ", ".join(written) + "]" if template == "phi4_mini" else ""
        text = ONE[template].format(text) if text else "\n".join(map(ONE[template].format, written))
        ids = tokenizer(f"{text}<|end|>", add_special_tokens=False)["input_ids"]
        ((results, after, has_end),) = tools._replies({0: ids}, [end], is_last=is_last)
        return results, tokenizer.decode(after), has_end

    results, after, has_end = reply(("add", {"a": 3, "b": 4}), ("add", {"a": 1, "b": 1}))
    assert ([each.text for each in results], has_end) == (["7", "2"], False)
    assert after == AFTER[template].format("7", "2")
    assert reply(("add", {"a": 3, "b": 4}), is_last=True) == ([], "", False)

    (special, much), after, _ = reply(("act", {"how": "special"}), ("act", {"how": "much"}))
    assert special.text == "45", "a result cannot end its turn"
    shown, _, note = much.text.partition("\n")
    assert len(tokenizer(shown, add_special_tokens=False)["input_ids"]) == 12
    assert note == f"[cut: {len(shown)} of 10,000,000 characters are shown]"
    assert after == AFTER[template].format(special.text, much.text)

    def says(text):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tools._replies({0: ids}, [end], is_last=False)[0]

    assert says("seven<|end|>") == ([], [], True)
    assert says("seven") == ([], [], False), "it was cut off"
    (broken,), after, has_end = says(ONE[template].format('{"name": "add", "argum') + "<|end|>")
    assert (broken.name, broken.failed, has_end) == ("", True, False)
    assert "is not JSON with a name and arguments. Write" in tokenizer.decode(after)


MISTRAL = (
    "{% if tools %}{{ '<|system|>' + tools | tojson + '<|end|>' }}{% endif %}"
    "{% for m in messages %}{% if m['tool_calls'] is defined %}{{ '<|assistant|>[TOOL_CALLS] [' }}"
    "{% for c in m['tool_calls'] %}{% if c['id'] | length != 9 %}{{ raise_exception('9!') }}{% endif %}"
    "{{ (c['function'] | tojson)[:-1] + ', \"id\": \"' + c['id'] + '\"}' + ('' if loop.last else ', ') }}{% endfor %}"
    "{{ ']<|end|>' }}{% elif m['role'] == 'tool' %}{% if m['tool_call_id'] | length != 9 %}{{ raise_exception('9!') }}"
    "{% endif %}{{ '[R]' + m['content'] + ' of ' + m['tool_call_id'] + '[/R]' }}"
    "{% else %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.mark.process
def test_a_result_has_the_id_that_the_model_gave_its_call(file):
    tokenizer = tokenizer_with(MISTRAL)
    tools = ToolUse(config_of(file, "add"), tokenizer, SCHEMAS)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    examples = EncodedExamples.from_rows([([5, 6, end], [False, False, True])], end_id=end, row_type="messages")
    rows = ConversationRows(examples, tokenizer, None)

    def replied(*ids):
        calls = [{"name": "add", "arguments": {"a": n, "b": 1}, "id": name} for n, name in enumerate(ids)]
        answer = tokenizer(f"[TOOL_CALLS] {json.dumps(calls)}<|end|>", add_special_tokens=False)["input_ids"]
        ((results, after, _),) = tools._replies({0: answer}, [end], is_last=False)
        written = GeneratedConversation([*answer, *after], [], [len(answer), len(after)], [results])
        called, *replies = rows.answer(0, written, [end]).turns
        assert [call["id"] for call in called["tool_calls"]] == [turn["tool_call_id"] for turn in replies]
        return tokenizer.decode(after)

    assert replied("aB3dE6gH9", "012345678") == "[R]1 of aB3dE6gH9[/R][R]2 of 012345678[/R]<|assistant|>"
    assert replied("aB3dE6gH9", "short") == "[R]1 of call00000[/R][R]2 of call00001[/R]<|assistant|>"


BETWEEN = {
    "phi4_mini": ("<|tool_response|>a result<|end|><|assistant|>", "<|user|>a reply<|end|><|assistant|>"),
    QWEN: (
        "\n<|user|>\n<tool_response>\na result\n</tool_response><|end|>\n<|assistant|>\n",
        "\n<|user|>\na reply<|end|>\n<|assistant|>\n",
    ),
}


def many(a: int, b: float, c: str, d: bool, e: list[int], f: dict, g: Literal["x", "y"], h: int | str, i: int | None):
    """Take arguments of many types.

    Args:
        a: 1
        b: 2
        c: 3
        d: 4
        e: 5
        f: 6
        g: 7
        h: 8
        i: 9
    """


@pytest.mark.process
@pytest.mark.parametrize("template", [*AFTER])
def test_a_made_up_conversation_is_laid_out_as_a_real_one_and_calls_nothing(file, template, tmp_path):
    (tmp_path / "game.py").touch()  # it has no class that could be called
    config = config_of(file, "many", more=[f"rollout.environment={tmp_path / 'game.py'}:Game"])
    schemas, tokenizer = json.dumps([get_json_schema(many)]), tokenizer_with(template)
    tools = ToolUse(config, tokenizer, schemas)
    example = tools.example()
    call, after_call, answer, after_answer, last = map(tokenizer.decode, parts_of(example.ids, example.lengths))
    arguments = {"a": 1, "b": 1.5, "c": "a text", "d": True, "e": [], "f": {}, "g": "x", "h": 1, "i": 1}
    written = json.dumps({"name": "many", "arguments": arguments})
    assert call == ONE[template].format(f"[{written}]" if template == "phi4_mini" else written) + "<|end|>"
    assert (after_call, after_answer) == BETWEEN[template]
    assert (answer, last) == ("an answer<|end|>", "the last answer<|end|>")


def test_a_call_is_made_up_between_the_marks_of_a_template_that_renders_none(file):
    tokenizer = tokenizer_with(CHAT_TEMPLATES["phi4_mini"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool_call|>", "<|/tool_call|>"]})
    example = ToolUse(config_of(file, "add"), tokenizer, SCHEMAS).example()
    call = tokenizer.decode(parts_of(example.ids, example.lengths)[0])
    assert call == '<|tool_call|>[{"name": "add", "arguments": {}}]<|/tool_call|><|end|>'


REWRITES = QWEN.replace(
    "c['function'] | tojson", "(c['function'] | tojson if loop.last else '') + messages[-1]['role']"
)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (CHAT_TEMPLATES["phi3"], "shows no tools"),
        (QWEN.replace("c['function'] | tojson", "c['function']['name']"), "in a form that is not read here"),
        (REWRITES, "writes earlier turns differently once others follow"),
    ],
)
@pytest.mark.process
def test_a_template_with_which_a_conversation_cannot_go_on_is_refused(file, template, problem):
    with pytest.raises(ConfigError, match=problem):
        ToolUse(config_of(file, "add"), tokenizer_with(template), SCHEMAS)


def test_phi_4_mini_s_own_template_renders_no_calls_but_its_tokenizer_has_their_marks():
    tokenizer = tokenizer_with(CHAT_TEMPLATES["phi4_mini"])
    assert AnswerReader(AnswerTokens(tokenizer)).call_marks is None
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool_call|>", "<|/tool_call|>"]})
    reader = AnswerReader(AnswerTokens(tokenizer))
    text = '<|tool_call|>[{"name": "add", "arguments": {"a": 3}}]<|/tool_call|>'
    assert reader.read(tokenizer(text)["input_ids"]).calls == ({"name": "add", "arguments": {"a": 3}},)
    assert reader.read(tokenizer("<|tool_call|>[{]")["input_ids"]).problem.startswith("the call ")


def test_a_result_is_recorded_whatever_the_model_wrote():
    odd = json.loads('{"a": "\\ud800", "b": 1e999}')
    record = Result(name="add", arguments=odd, text="7", failed=False).as_record()
    assert json.dumps(record, allow_nan=False, ensure_ascii=False).encode()
    assert record["arguments"] == {"a": "?", "b": "Infinity"}


def test_arguments_that_are_nested_too_deeply_are_a_failed_call_and_are_recorded():
    for levels, is_refused in ((63, False), (64, True), (900, True)):
        arguments = {"expression": json.loads("[" * levels + "]" * levels)}
        for name in ("calculator", "none") if is_refused else ("none",):
            result = ToolProcess(["calculator"], []).call(name, arguments, seconds=20, most_tokens=64)
            assert result.failed
            assert ("nested more than 64 levels" in result.text) is is_refused
            assert result.as_record()["arguments"] == (None if is_refused else arguments)


def test_the_parts_of_a_conversation_say_who_wrote_each_token():
    assert parts_of([1, 2, 3, 4, 5, 6], [2, 1, 3]) == [[1, 2], [3], [4, 5, 6]]
    assert is_generated([2, 1, 3]) == [True, True, False, True, True, True]


GAME = '''
class Guess:
    """Asks for a number until it is right."""

    def reset(self, row):
        self.row, self.tries = row, 0
        assert row["when"] == "2026-01-31"
        return f"Guess {row['hint']}." if row["hint"] else None

    def step(self, answer):
        self.tries += 1
        if answer == "fail":
            raise KeyError(answer)
        if answer == "odd":
            return 5
        if answer == "itself":
            return [self]
        if answer == self.row["completion"]:
            return None
        return [{"role": "user", "content": f"Not {answer}.<|end|>"}, {"role": "user", "content": "Again."}]

    def score(self):
        return 1 / self.tries
'''


@pytest.mark.process
def test_an_environment_answers_each_conversation_and_an_error_ends_the_run(tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    named = [f"rollout.environment={tmp_path / 'game.py'}:Guess", "reward.functions=environment"]
    config = load_config(["model=phi_tiny", "data.path=rows.jsonl", *named], task="finetune_grpo")
    tokenizer = tokenizer_with("phi4_mini")
    tools = ToolUse(config, tokenizer, "")
    assert "once others follow" in tools.fallback.why, "phi4_mini leaves out the thinking of earlier questions"
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    columns = {"completion": "7", "when": datetime.date(2026, 1, 31)}  # as from Parquet: JSON knows no dates
    rows = [Row([{"role": "user", "content": "Play."}], {**columns, "hint": hint}) for hint in ("a number", "")]
    lines = iter([["5", "7"], ["7"]])
    seen = []

    def draw(prompts, decoding):
        seen.append([tokenizer.decode(prompt) for prompt in prompts])
        texts = next(lines)
        ids = (tokenizer(f"{text}<|end|>", add_special_tokens=False)["input_ids"] for text in texts)
        return [SampledAnswer(each, []) for each in ids]

    prompt = tokenizer("<|user|>Play.<|end|><|assistant|>")["input_ids"]
    decoding = Decoding(stop_ids=[end], max_new_tokens=90)
    with launch(load_config(["model=phi_tiny", "data=orders", "training.device=cpu"])) as runtime:
        model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=500, model_type="phi3"))
        first, second = tools.converse([prompt, prompt], decoding, draw, rows=rows, runtime=runtime, model=model)
    opened = "<|user|>Play.<|end|><|user|>Guess a number.<|end|><|assistant|>"
    asked_again = "<|user|>Not 5.<|end|><|user|>Again.<|end|><|assistant|>"
    assert seen == [[opened, "<|user|>Play.<|end|><|assistant|>"], [f"{opened}5<|end|>{asked_again}"]]
    assert (first.has_end, first.score, second.has_end, second.score) == (True, 0.5, True, 1.0)
    assert tokenizer.decode(first.ids) == f"5<|end|>{asked_again}7<|end|>"
    assert (tokenizer.decode(first.prompt), second.prompt) == (opened, None)
    assert (tools.metrics_of([first, second])["turns"], tools.metrics_of([first, second])["calls"]) == (1.5, 0)
    for answer, problem in (("fail", "failed in step: .*KeyError"), ("odd", "returned 5 from step; expected None")):
        with pytest.raises(DataError, match=f"the environment Guess {problem}"):
            tools._environment.turns(0, "step", answer)
    with pytest.raises(DataError, match=r"failed in step: .*returned an object of the type Guess; expected text"):
        tools._environment.turns(0, "step", "itself")
    texts = tokenizer(["7<|end|>", "8<|end|>"], add_special_tokens=False)["input_ids"]
    last = tools._replies(dict(enumerate(texts)), [end], is_last=True)
    assert last == [([], [], True), ([], [], False)], "the last answer is judged, and what follows it is not read"
    assert (tools._environment.score(0), tools._environment.score(1)) == (1 / 6, 1 / 2)
    offering = rows[0]._replace(tools=json.dumps([{"type": "function", "function": {"name": "weather"}}]))
    (opened,) = tools._open(tools._environment, [offering]).values()
    assert "<|tool|>[{" in tokenizer.decode(opened), "reset keeps the tools that the row offers"


AWAITED = """
import asyncio
import numpy

class Game:
    async def reset(self, row):
        self.tries, self.is_over = numpy.float32(row["tries"]), asyncio.get_running_loop().create_future()
        return "Begin."

    async def step(self, answer):
        self.is_over.set_result(None)
        await asyncio.wait_for(self.is_over, 5)
        return numpy.array([]) if answer == "nothing" else None

    async def score(self):
        return 10**400 if self.tries == 2 else self.tries
"""


@pytest.mark.process
def test_an_async_environment_is_awaited_in_one_loop_and_its_score_may_be_of_numpy(tmp_path):
    (tmp_path / "game.py").write_text(AWAITED)
    named = [f"rollout.environment={tmp_path / 'game.py'}:Game", "reward.functions=environment"]
    config = load_config(["model=phi_tiny", "data.path=rows.jsonl", *named], task="finetune_grpo")
    environment = Environment(config.rollout)
    for place in (0, 1):
        assert environment.turns(place, "reset", {"tries": 0.5}) == [{"role": "user", "content": "Begin."}]
    assert environment.turns(0, "step", "a") is None
    with pytest.raises(DataError, match=r"returned .*\[\].* from step; expected None, a text"):
        environment.turns(1, "step", "nothing")
    assert environment.score(0) == 0.5
    environment.turns(1, "reset", {"tries": 2})
    with pytest.raises(DataError, match=r"returned 10+… from score; expected a number below 1e\+100 in size"):
        environment.score(1)
