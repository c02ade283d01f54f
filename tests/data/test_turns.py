"""Rows as OpenAI's files have them: tool calls, thinking, parts of text, weights; and what becomes of each key."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from finetune.data import turns
from finetune.data.chat_template import ChatTemplate, use_chat_template
from finetune.data.encoded import EncodedExamples
from finetune.data.turns import Turn, parse_turns
from finetune.data.values import BadRowError
from finetune.errors import ConfigError, DataError
from tests.data.conftest import encode_train
from tests.tiny import CHAT_TEMPLATES, tiny_tokenizer

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Porto", "days": null}'}}
QUESTION = {"role": "user", "content": [{"type": "text", "text": "Is it "}, {"type": "text", "text": "warm?"}]}
TURNS: list[Turn] = [
    {"role": "developer", "content": "Be brief."},
    QUESTION,
    {"role": "assistant", "content": None, "reasoning_content": "I must look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": '{"degrees": 31}'},
    {"role": "assistant", "content": "Yes.", "thinking": "31 is warm."},
]
SERVED = (
    '<|system|>Be brief.<|tool|>[{"name": "weather", "parameters": {"city": {"type": "string"}}}]<|/tool|><|end|>'
    "<|user|>Is it warm?<|end|><|assistant|><think>\nI must look.\n</think>\n\n"
    '<|tool_call|>[{"name": "weather", "arguments": {"city": "Porto", "days": null}}]<|/tool_call|><|end|>'
    '<|tool_response|>{"degrees": 31}<|end|><|assistant|><think>\n31 is warm.\n</think>\n\nYes.<|end|><|endoftext|>'
)
LEARNT = [
    "<think>\nI must look.\n</think>\n\n"
    '<|tool_call|>[{"name": "weather", "arguments": {"city": "Porto", "days": null}}]<|/tool_call|><|end|>',
    "<think>\n31 is warm.\n</think>\n\nYes.<|end|>",
]


def with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def learnt(examples: EncodedExamples, index: int = 0) -> str:
    row = examples[index]
    return str(tiny_tokenizer().decode(row.input_ids[row.is_target]))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_row_of_openai_is_rendered_whole(make_section, write_jsonl, tmp_path, ending):
    plain = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"}]}
    turns = [{**turn, "content": "Is it warm?"} if turn is QUESTION else turn for turn in TURNS]
    rows = [{"messages": turns, "tools": TOOLS}, {**plain, "tools": None}]
    path = write_jsonl(rows)
    if ending == "parquet":  # every turn has every key, with null for those that are absent
        path = str(tmp_path / "rows.parquet")
        Dataset.from_list(rows).to_parquet(path)
        assert Dataset.from_parquet(path)[1]["messages"][1]["tool_calls"] is None
    examples = encode_train(make_section(path=path, chat_template="phi4_mini"))
    assert tiny_tokenizer().decode(examples[0].input_ids) == SERVED
    assert learnt(examples) == "".join(LEARNT)
    assert learnt(examples, 1) == "yes<|end|>"


def test_parts_of_text_and_arguments_of_either_form_are_the_same_turns():
    as_object = {**CALL, "function": {"name": "weather", "arguments": json.loads(CALL["function"]["arguments"])}}  # type: ignore[index]
    text = {"role": "user", "content": "Is it warm?"}
    parts, objects = (
        parse_turns([question, {"role": "assistant", "content": "", "tool_calls": [call]}], "messages").turns
        for question, call in ((QUESTION, CALL), (text, {**as_object, "id": None}))
    )
    assert parts[0] == objects[0] == text
    assert parts[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Porto", "days": None}
    # A table has a null for each absent key of an object, so a null that is meant takes JSON text.
    assert objects[1]["tool_calls"][0] == {
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Porto"}},
    }


def test_a_turn_of_role_and_content_alone_is_read_the_short_way_with_the_same_result(monkeypatch):
    plain = [{"role": role, "content": "a"} for role in ("system", "user", "assistant")]
    long_way = parse_turns([{**turn, "name": None} for turn in plain], "messages")
    blank = [{"role": "user", "content": ""}, {"role": "assistant", "content": " "}]
    messages = []
    for rows in (blank, [{**turn, "name": None} for turn in blank]):
        with pytest.raises(BadRowError) as caught:
            parse_turns(rows, "messages")
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    monkeypatch.setattr(turns, "_take_weight", None)
    assert parse_turns(plain, "messages") == long_way


def test_an_answer_of_weight_0_is_context(make_section, write_jsonl):
    turns = [
        TURNS[1],
        {"role": "assistant", "content": "no", "weight": 0},
        {"role": "user", "content": "Hi", "weight": 0},
    ]
    path = write_jsonl([{"messages": [*turns, {"role": "assistant", "content": "yes", "weight": 1}]}])
    examples = encode_train(make_section(path=path))
    assert "<|assistant|>no<|end|>" in tiny_tokenizer().decode(examples[0].input_ids)
    assert learnt(examples) == "yes<|end|>"
    assert learnt(encode_train(make_section(path=path, train_on="last"))) == "yes<|end|>"


REFUSED_TURNS = [
    ({"content": "a", "weight": 0}, "every assistant turn has weight 0, so nothing to learn"),
    ({"role": "user", "content": "a", "weight": 1}, "messages[1].weight is 1, but its role is user"),
    ({"content": [{"type": "image_url", "image_url": "a.png"}]}, "messages[1].content[0] is {'type': 'image_url'"),
    ({"role": "user", "content": "a", "thinking": "b"}, "messages[1] has reasoning_content, but its role is user"),
    ({"tool_calls": []}, "messages[1] has no content; expected text"),
    ({"tool_calls": {"name": "f"}}, "messages[1].tool_calls is {'name': 'f'}; expected a list of calls"),
    ({"tool_calls": [{"name": "f"}]}, "messages[1].tool_calls[0] is {'name': 'f'}; expected"),
    (
        {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        "messages[1].tool_calls[0].function.arguments is '{'; expected an object",
    ),
    ({"content": "\ud800", "tool_calls": [CALL]}, "messages[1].content has half a surrogate pair"),
    ({"content": "a", "weight": 2}, "messages[1].weight is 2; expected 0 (context without loss) or 1"),
    ({"content": "a", "extra": {"b": "\ud800"}}, "messages[1].extra has half a surrogate pair"),
]
"""Turns that cannot be used, and why."""


@pytest.mark.parametrize(("turn", "problem"), REFUSED_TURNS)
def test_a_turn_that_cannot_be_used_says_why(make_section, write_jsonl, turn, problem):
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", **turn}]}
    with pytest.raises(DataError) as caught:
        encode_train(make_section(path=write_jsonl([row])))
    assert problem in str(caught.value)


def test_what_a_turn_of_calls_has_is_not_lost_when_it_is_joined_to_the_answer_before_it():
    call = {"role": "function_call", "content": '{"name": "weather", "arguments": {}}'}

    def answer(before, last):
        turns = [QUESTION, {"role": "assistant", "content": "One moment.", **before}, {**call, **last}]
        return parse_turns(turns, "messages").turns[-1]

    thinking = {"reasoning_content": "I must look."}
    usual = answer(thinking, {})
    assert (usual["content"], usual["reasoning_content"]) == ("One moment.", "I must look.")
    assert answer(thinking, {"thinking": "I must look."}) == usual
    assert answer({"a": 1}, {"a": 2, "b": 3}).items() >= {"a": 1, "b": 3}.items()
    for before in ({}, {"thinking": "Hm."}):
        with pytest.raises(BadRowError, match=r"messages\[2\] has reasoning_content.*in the turn before it"):
            answer(before, thinking)


def test_a_result_of_no_call_is_refused(make_section, write_jsonl):
    turns = [{**turn, "tool_call_id": "c2"} if turn["role"] == "tool" else turn for turn in TURNS]
    with pytest.raises(DataError, match=r"messages\[3\].tool_call_id is 'c2'; expected the id of a call before it: c1"):
        encode_train(make_section(path=write_jsonl([{"messages": turns}])))


def test_a_key_that_the_template_does_not_render_is_refused_or_named(make_section, write_jsonl, logged):
    row = {"messages": [{"role": "user", "content": "Hi", "name": "Ann"}, {"role": "assistant", "content": "yes"}]}
    path = write_jsonl([{"messages": TURNS[1:2] + TURNS[-1:]}, row, row])
    section = make_section(path=path, chat_template="phi4_mini")
    for _ in ("encoded", "read from the cache"):
        with pytest.raises(DataError) as caught:
            encode_train(section)
        assert str(caught.value) == (
            f"{path}: the chat template of phi4_mini does not render name (role user) (rows that have it: 2, the "
            f"first is {path}:2): the model would not see it. Use a template that renders it (data.chat_template), "
            "or remove the key, or set data.on_ignored_key=warn to train without it."
        )
    assert len(encode_train(section.model_copy(update={"on_ignored_key": "warn"}))) == 3
    assert any("does not render name (role user) (rows that have it: 2" in line for line in logged())


def test_an_answer_of_which_the_template_renders_nothing_is_refused(make_section, write_jsonl):
    path = write_jsonl([{"messages": [QUESTION, *TURNS[2:]]}])
    with pytest.raises(DataError, match=r"does not render reasoning_content .*, and messages\[1\] has no other text"):
        encode_train(make_section(path=path))


def test_the_added_tokens_are_listed_once_for_all_rows(make_section, write_jsonl, monkeypatch):
    counted = []
    listed = PreTrainedTokenizerFast.get_added_vocab
    monkeypatch.setattr(PreTrainedTokenizerFast, "get_added_vocab", lambda self: counted.append(1) or listed(self))
    few, many = ([{"prompt": f"Hi {n}", "completion": "a"} for n in range(count)] for count in (1, 9))
    calls = []
    for rows in (few, many):
        before = len(counted)
        encode_train(make_section(path=write_jsonl(rows)))
        calls.append(len(counted) - before)
    assert calls[0] == calls[1]


def test_a_role_that_is_no_token_is_refused(make_section, write_jsonl):
    with pytest.raises(DataError, match=r"writes <\|developer\|> for the role of messages\[0\], which is no token"):
        encode_train(make_section(path=write_jsonl([{"messages": [TURNS[0], TURNS[1], TURNS[4]]}])))


def test_thinking_that_a_template_drops_cannot_be_learnt_from_the_whole(make_section, write_jsonl):
    more = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "no", "thinking": "It is not."}]
    section = make_section(path=write_jsonl([{"messages": [TURNS[1], TURNS[4], *more]}]), chat_template="phi4_mini")
    with pytest.raises(DataError, match=r"leaves out messages\[1\].reasoning_content \(role assistant\); expected a"):
        encode_train(section)
    last = encode_train(section.model_copy(update={"train_on": "last"}))
    assert learnt(last) == "<think>\nIt is not.\n</think>\n\nno<|end|>"


THINKS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m.get('thinking', '') + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
REFUSES = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + CHAT_TEMPLATES["phi3"]


@pytest.mark.parametrize(
    ("template", "ignored"),
    [
        (CHAT_TEMPLATES["phi4_mini"], {("assistant", "reasoning_content"), ("assistant", "tool_calls")}),
        (THINKS, {("assistant", "tool_calls"), ("", "tools")}),
        (REFUSES, {("assistant", "reasoning_content"), ("assistant", "tool_calls"), ("", "tools")}),
    ],
)
def test_keys_are_tried_and_thinking_has_the_name_that_the_template_reads(template, ignored):
    reader = ChatTemplate(with_template(template))
    dialogue = parse_turns(TURNS[1:], "messages", TOOLS)
    assert reader.ignored(dialogue) == ignored
    (text,) = reader.render([dialogue])
    assert isinstance(text, str)
    assert ("31 is warm." in text) is (("assistant", "reasoning_content") not in ignored)
    assert ("weather" in text) is (("", "tools") not in ignored)


def test_a_template_may_be_a_file_and_one_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(THINKS)
    tokenizer = tiny_tokenizer()
    use_chat_template(tokenizer, str(path))
    assert tokenizer.chat_template == THINKS
    use_chat_template(tokenizer, None)
    assert tokenizer.chat_template == THINKS
    with pytest.raises(
        ConfigError,
        match=r"data.chat_template is qwen, which is neither a shipped template \(alpaca, chatml, gemma",
    ):
        use_chat_template(tokenizer, "qwen")
