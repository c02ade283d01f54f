import io
import json
import logging
from dataclasses import replace

import pytest

from finetune.cli.run_options import read_tools_option
from finetune.config.schema import DataSection
from finetune.data.examples import Opening, read_opening
from finetune.data.templates import AnswerTokens
from finetune.errors import DataError
from finetune.inference.opening import usual_opening, with_system_turn
from finetune.inference.prompts import (
    Prompt,
    encode_prompts,
    read_json_lines,
    read_prompts_file,
    user_prompt,
)
from tests.tiny import add_default_bos, tiny_tokenizer

USER = {"role": "user", "content": "three crates"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "oranges"}


def encode_prompt(tokens, prompt):
    (ids,) = encode_prompts(tokens, [prompt])
    return ids


def lines(*rows):
    return [json.dumps(row) for row in rows]


def text_of(prompt, *, style="phi4_mini", system=None):
    tokens = AnswerTokens(tiny_tokenizer(style))
    prompt = replace(prompt, messages=tuple(with_system_turn(prompt.messages, system)))
    return tokens.tokenizer.decode(encode_prompt(tokens, prompt))


def test_every_kind_of_row_can_be_asked_and_its_answer_is_what_is_expected():
    rows = lines(
        {"prompt": "a"},
        {"prompt": "b", "completion": "c"},
        {"messages": [SYSTEM, USER]},
        {"messages": [SYSTEM, USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "d"}, {"from": "gpt", "value": "e"}]},
        {"instruction": "f", "input": "g", "output": "h"},
        {"text": "once upon"},
        "just text",
    )
    prompts = read_json_lines([*rows[:2], "\n", *rows[2:]], "asked")
    assert [prompt.expected for prompt in prompts] == [None, "c", None, "oranges", "e", "h", None, None]
    assert [prompt.shown for prompt in prompts] == [
        *("a", "b", "three crates", "three crates", "d", "f\n\ng", "once upon", "just text")
    ]
    assert [len(prompt.messages) for prompt in prompts] == [1, 1, 2, 2, 1, 1, 0, 1]
    assert [prompt.is_open for prompt in prompts] == [True, True, False, False, False, False, False, True]
    assert prompts[2].source == "asked:4"


def test_a_prompt_that_no_template_renders_begins_as_rows_do():
    tokenizer = tiny_tokenizer("none")
    add_default_bos(tokenizer)
    for text in ("once upon", "<s>once upon"):
        for prompt in (Prompt(source="a", text=text), user_prompt(text, "a")):
            ids = encode_prompt(AnswerTokens(tokenizer), prompt)
            assert ids == tokenizer("once upon")["input_ids"]
            assert ids[0] == tokenizer.bos_token_id
    with pytest.raises(DataError, match="is empty"):
        encode_prompt(AnswerTokens(tokenizer), Prompt(source="a"))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    assert tokenizer.bos_token_id not in encode_prompt(AnswerTokens(tokenizer), user_prompt("Hi", "a"))


def test_rows_of_a_file_name_their_line(tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "a"}\n{"messages": []}\n{"prompt": 3}\nnot json\n{"question": "q"}\n')
    with pytest.raises(DataError, match=r"4 of 5 rows") as caught:
        read_prompts_file(path)
    for part in (":2: messages", ":3: prompt is 3 (int)", ":4:", ":5: no column prompt", "it has question"):
        assert part in str(caught.value)
    with pytest.raises(DataError, match="that file does not exist"):
        read_prompts_file(tmp_path / "gone.jsonl")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"ends in \.txt"):
        read_prompts_file(tmp_path / "a.txt")
    with pytest.raises(DataError, match="has no rows"):
        read_json_lines(io.StringIO(""), "standard input")


@pytest.mark.parametrize("bad", [[USER, "x"], [{"role": "user"}, ANSWER], [ANSWER]])
def test_turns_that_are_none_are_refused(bad):
    with pytest.raises(DataError, match=r"1 of 1 rows"):
        read_json_lines(lines({"messages": bad}), "asked")


def test_a_prompt_is_rendered_by_the_template_with_the_answers_header():
    prompt = user_prompt("three crates", "prompt 1")
    assert text_of(prompt) == "<|user|>three crates<|end|><|assistant|>"
    assert text_of(prompt, system="Be brief.") == "<|system|>Be brief.<|end|><|user|>three crates<|end|><|assistant|>"
    own = Prompt(source="row", messages=(SYSTEM, USER))
    assert text_of(own, system="Another.") == text_of(prompt, system="Be brief."), "a system turn of its own stays"
    assert text_of(Prompt(source="row", text="<|user|>as it stands")) == "<|user|>as it stands"
    assert text_of(prompt, style="none") == "three crates"


def test_a_system_turn_replaces_another_only_if_it_is_to():
    developer = {"role": "developer", "content": "Be brief."}
    assert with_system_turn([developer, USER], "Be nice.") == [developer, USER]
    assert with_system_turn([developer, USER], "Be nice.", replaces=True) == [developer | {"content": "Be nice."}, USER]
    assert with_system_turn([developer, USER], "", replaces=True) == [USER]
    assert with_system_turn([USER], "", replaces=True) == [USER]


@pytest.mark.parametrize("answered", [[], [ANSWER]])
def test_the_tools_of_a_row_are_offered(answered):
    tools = [{"name": "weather"}]
    (prompt,) = read_json_lines(lines({"messages": [USER, *answered], "tools": tools}), "asked")
    offered = '<|tool|>[{"name": "weather"}]<|/tool|><|end|><|user|>three crates<|end|><|assistant|>'
    assert text_of(prompt) == f"<|system|>{offered}"
    assert text_of(prompt, system="Be brief.") == f"<|system|>Be brief.{offered}"
    with pytest.raises(DataError, match="asked:1 offers tools, which this model's chat template leaves out"):
        text_of(prompt, style="phi4")


@pytest.mark.parametrize(
    ("prompt", "style", "why"),
    [
        (Prompt(source="row 1", messages=({"role": "user", "content": "a<|end|>b"},)), "phi4_mini", "special token"),
        (Prompt(source="row 1", text=""), "phi4_mini", "empty"),
        (
            Prompt(source="row 1", messages=(USER, ANSWER, USER)),
            "none",
            "no chat template, .* Set data.chat_template=plain",
        ),
    ],
)
def test_what_cannot_be_asked_says_why(prompt, style, why):
    with pytest.raises(DataError, match=f"row 1.*{why}"):
        text_of(prompt, style=style)


def test_a_template_that_refuses_the_turns_is_told():
    tokenizer = tiny_tokenizer()
    tokens = AnswerTokens(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="row: the chat template refuses the row: roles must alternate"):
        encode_prompt(tokens, Prompt(source="row", messages=(USER,)))


def test_many_prompts_are_rendered_in_one_request_and_keep_their_order(monkeypatch):
    tokens = AnswerTokens(tiny_tokenizer())
    tools = '[{"name": "weather"}]'
    questions = [user_prompt(f"{number} crates", f"prompt {number}") for number in range(6)]
    prompts = [*questions[:2], Prompt(source="text", text="three"), replace(questions[2], tools=tools), *questions[3:]]
    alone = [encode_prompt(tokens, prompt) for prompt in prompts]
    sizes, call = [], tokens.template._call
    monkeypatch.setattr(tokens.template, "_call", lambda rows, *rest: sizes.append(len(rows)) or call(rows, *rest))
    assert encode_prompts(tokens, prompts) == alone
    assert sizes == [2, 1, 3], "one request for each run of prompts with the same tools"
    bad = user_prompt("a<|end|>b", "prompt 7")
    with pytest.raises(DataError, match=r"^prompt 7: .*special token"):
        encode_prompts(tokens, [*prompts, bad])


def test_the_usual_opening_is_what_most_training_rows_open_with(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    with_one, without = {"messages": [SYSTEM, USER, ANSWER]}, {"messages": [USER, ANSWER]}
    path.write_text("\n".join(lines(without, with_one, with_one)))
    assert usual_opening(DataSection(path=str(path)))[:2] == ("Be brief.", "")
    path.write_text("\n".join(lines(without, with_one, without)))
    assert usual_opening(DataSection(path=str(path)))[:2] == (None, "")
    assert usual_opening(DataSection(path=str(tmp_path / "gone.jsonl")))[:2] == (None, "")
    assert "no system turn is used" in caplog.text


@pytest.mark.parametrize(("num_with_tools", "is_offered"), [(9, False), (10, True)])
def test_tools_that_a_tenth_of_the_rows_has_are_offered_and_recorded(num_with_tools, is_offered, tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    often, seldom = [{"name": "weather"}], [{"name": "track"}]
    with_tools = [
        {"messages": [SYSTEM, USER, ANSWER], "tools": seldom if number == 0 else often}
        for number in range(num_with_tools)
    ]
    without = [{"messages": [USER, ANSWER]}] * (100 - num_with_tools)
    path.write_text("\n".join(lines(*with_tools, *without)))
    section = DataSection(path=str(path))
    opening = read_opening(section)
    assert (opening.system, opening.tools) == (("Be brief.", json.dumps(often)) if is_offered else (None, ""))
    assert (opening.num_with_tools, opening.num_rows) == (num_with_tools, 100)
    path.unlink()
    assert usual_opening(section, recorded=json.loads(json.dumps(opening._asdict()))) == opening
    assert usual_opening(section, recorded={"tools": "[]"}) == Opening(), "an incomplete record is not used"


def test_the_usual_opening_of_a_mixture_is_found_whatever_its_sources_put_aside(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines(*[{"messages": [SYSTEM, USER, ANSWER]}] * 3)))
    source = {"path": str(path), "validation": "200", "test": "0.5", "max_rows": 9999}
    assert usual_opening(DataSection(mixture=[source]))[:2] == ("Be brief.", "")


def test_the_usual_opening_is_that_of_rows_that_the_run_reads(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines(*[{"messages": [USER, ANSWER]}, *[{"messages": [SYSTEM, USER, ANSWER]}] * 2])))
    opening = read_opening(DataSection(path=str(path), max_rows=1))
    assert (opening.system, opening.num_rows) == (None, 1)


def test_the_tools_of_a_file_are_offered(tmp_path):
    tools, file = [{"type": "function", "function": {"name": "weather"}}], tmp_path / "tools.json"
    file.write_text(json.dumps(tools))
    assert json.loads(read_tools_option(str(file))) == tools
    tokens = AnswerTokens(tiny_tokenizer())
    prompt = replace(user_prompt("three crates", "prompt 1"), tools=read_tools_option(str(file)))
    offered = encode_prompt(tokens, prompt)
    assert tokens.tokenizer.decode(offered).startswith("<|system|><|tool|>[{")
    file.write_text("[1]")
    with pytest.raises(DataError, match="expected a list of objects"):
        read_tools_option(str(file))
    with pytest.raises(DataError, match=r"--tools is .* which cannot be read"):
        read_tools_option(str(tmp_path / "gone.json"))


def test_a_row_that_ends_in_a_call_expects_its_json():
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Porto"}'}}
    (prompt,) = read_json_lines(lines({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}), "asked")
    assert json.loads(prompt.expected) == [{"name": "weather", "arguments": {"city": "Porto"}}]


def test_keys_that_the_template_leaves_out_of_a_prompt_are_named(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("finetune"), "propagate", True)
    (prompt,) = read_json_lines(lines({"messages": [{**USER, "name": "Ann"}]}), "asked")
    assert text_of(prompt) == "<|user|>three crates<|end|><|assistant|>"
    assert "asked:1: the chat template of" in caplog.text
    assert "does not render name (role user)" in caplog.text
