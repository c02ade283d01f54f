"""Rows in every format become the same turns; what is used and what is not is reported in one line."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset

from finetune.data.encoded import EncodedExamples
from finetune.errors import DataError
from tests.data.conftest import encode_train
from tests.tiny import tiny_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"}
MORE = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "no"}]
ONE_TURN = {
    "messages": {"messages": [USER, ANSWER]},
    "conversations": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "yes"}]},
    "prompt_completion": {"prompt": "Hi", "completion": "yes"},
    "prompt_completion of turns": {"prompt": [USER], "completion": [ANSWER]},
    "instruction": {"instruction": "Hi", "input": "", "output": "yes"},
}
"""One conversation, written down in every format that has turns."""


def shown(examples: EncodedExamples, index: int = 0) -> tuple[str, str]:
    """A row's text, and the part of it that carries loss."""
    tokenizer, row = tiny_tokenizer(), examples[index]
    return str(tokenizer.decode(row.input_ids)), str(tokenizer.decode(row.input_ids[row.is_target]))


@pytest.mark.parametrize("written", list(ONE_TURN))
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_conversation_is_the_same_tokens_in_every_format(make_section, write_jsonl, tmp_path, written, ending):
    path = write_jsonl([ONE_TURN[written]])
    if ending == "parquet":
        path = str(tmp_path / "rows.parquet")
        Dataset.from_list([ONE_TURN[written]]).to_parquet(path)
    examples = encode_train(make_section(path=path))
    assert shown(examples) == ("<|user|>Hi<|end|><|assistant|>yes<|end|><|endoftext|>", "yes<|end|>")


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_turns_of_either_spelling_may_stand_in_either_column(make_section, write_jsonl, column):
    rows = [{column: [USER, ANSWER]}, {column: ONE_TURN["conversations"]["conversations"]}]
    examples = encode_train(make_section(path=write_jsonl(rows)))
    assert shown(examples, 0) == shown(examples, 1)


TOOLS = [{"name": "weather", "parameters": {"city": {"type": "string"}}}, {"name": "clock", "parameters": {}}]
WITH_TOOLS = f"<|tool|>{json.dumps(TOOLS)}<|/tool|><|end|><|user|>Hi<|end|><|assistant|>yes<|end|><|endoftext|>"


@pytest.mark.parametrize(
    ("row", "system"),
    [
        ({"messages": [SYSTEM, USER, ANSWER]}, "Be brief."),
        ({"messages": [USER, ANSWER]}, ""),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, "Be brief."),
        ({"system": "Be brief.", **ONE_TURN["conversations"]}, "Be brief."),
    ],
)
@pytest.mark.parametrize("written", ["list", "text", "parquet"])
def test_the_tools_of_a_row_stand_in_its_system_turn(make_section, write_jsonl, tmp_path, row, system, written):
    row = {**row, "tools": json.dumps(TOOLS) if written == "text" else TOOLS}
    path = write_jsonl([row, {**row, "tools": []}])
    if written == "parquet":  # whose columns have the keys of all tools, empty where a tool lacks one
        path = str(tmp_path / "rows.parquet")
        Dataset.from_list([row]).to_parquet(path)
    examples = encode_train(make_section(path=path))
    assert shown(examples) == (f"<|system|>{system}{WITH_TOOLS}", "yes<|end|>")
    assert written == "parquet" or "<|tool|>" not in shown(examples, 1)[0]


@pytest.mark.parametrize("style", ["phi3", "phi4"])
def test_a_template_that_knows_no_tools_refuses_rows_that_have_some(make_section, write_jsonl, style):
    path = write_jsonl([{**ONE_TURN["messages"], "tools": TOOLS}])
    with pytest.raises(DataError, match=r"does not render tools \(rows that have it: 1, the first is .*:1"):
        encode_train(make_section(path=path), style)
    unread = encode_train(make_section(path=path, columns={"tools": "none"}), style)
    assert len(unread) == 1


def test_answers_within_a_prompt_of_turns_carry_no_loss(make_section, write_jsonl):
    row = {"prompt": [SYSTEM, USER, ANSWER, MORE[0]], "completion": [MORE[1]]}
    text, learnt = shown(encode_train(make_section(path=write_jsonl([row]))))
    assert "yes<|end|>" in text
    assert learnt == "no<|end|>"


def test_the_template_that_the_message_names_works_with_any_tokenizer(make_section, write_jsonl):
    path = write_jsonl([{"messages": [SYSTEM, USER, ANSWER, *MORE]}])
    with pytest.raises(DataError, match=r"no chat template\. Set data\.chat_template=plain ") as caught:
        encode_train(make_section(path=path), "none")
    assert "model.chat_template" not in str(caught.value)
    text, learnt = shown(encode_train(make_section(path=path, chat_template="plain"), "none"))
    assert text.count("Instruct: ") == text.count("\nOutput: ") == 2
    assert learnt == " yes<|endoftext|> no<|endoftext|>"


def test_columns_can_be_called_anything(make_section, write_jsonl, logged):
    path = write_jsonl([{"question": "Hi", "reply": "yes", "id": 3}])
    examples = encode_train(make_section(path=path, columns={"prompt": "question", "completion": "reply"}))
    assert shown(examples)[1] == "yes<|end|>"
    assert (
        f"{path}: 1 row of prompt and completion (format prompt_completion, columns question as prompt, reply as "
        "completion); columns not used: id"
    ) in logged()


@pytest.mark.parametrize("column", ["messages", "talk"])
def test_in_csv_a_conversation_is_json_in_a_cell(make_section, tmp_path, column):
    path = tmp_path / "rows.csv"
    Dataset.from_list([{column: json.dumps([USER, ANSWER])}]).to_csv(path)
    columns = {} if column == "messages" else {"messages": column}
    assert shown(encode_train(make_section(path=str(path), columns=columns)))[1] == "yes<|end|>"


REFUSED_ROWS = [
    ({"conversations": [{"from": "bot", "value": "a"}]}, "conversations[0].from is 'bot'; expected system, human,"),
    ({"conversations": [{"from": "human", "value": "a", "weight": 1}]}, "conversations[0].weight is 1, but its"),
    (
        {"system": "a", "conversations": [{"from": "system", "value": "b"}, {"from": "gpt", "value": "c"}]},
        "there is a column system and a system turn too",
    ),
    ({"instruction": " ", "output": "a"}, "instruction and input are blank"),
    ({"instruction": "a", "output": "b", "history": "c"}, "history is 'c'; expected a list of earlier"),
    ({"messages": [USER, ANSWER], "tools": {"name": "f"}}, "tools is {'name': 'f'}; expected a list of objects"),
    (
        {"messages": [{**SYSTEM, "tools": "[{}]"}, {**USER, "tools": [{"name": "f"}]}, ANSWER]},
        "messages has turns with tools that differ; expected one list of tools",
    ),
    (
        {"conversations": [{"from": "human", "value": "Hi", "content": "Bye"}, {"from": "gpt", "value": "yes"}]},
        "conversations[0] has from, value and content too; expected one pair of keys",
    ),
    ({"instruction": "a", "output": "b", "history": ["c"]}, "history[0] is 'c'; expected a list with a question"),
    ({"prompt": [USER], "completion": [{**ANSWER, "tools": [{}]}], "tools": TOOLS}, "prompt and completion offer"),
    (
        {"messages": [{**SYSTEM, "tools": "[{}]"}, USER, ANSWER], "tools": "[{}]"},
        "there is a column tools and a turn",
    ),
    ({"messages": [USER, ANSWER], "tools": "{"}, "tools is '{'; expected a list of objects"),
]
"""Rows that cannot be used, and why."""


@pytest.mark.parametrize(("row", "problem"), REFUSED_ROWS)
def test_a_row_that_cannot_be_used_says_why(make_section, write_jsonl, row, problem):
    with pytest.raises(DataError) as caught:
        encode_train(make_section(path=write_jsonl([row])))
    assert f"train.jsonl:1: {problem}" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "learnt"),
    [
        ({"messages": [SYSTEM, USER, ANSWER, *MORE, USER]}, "no<|end|>"),
        ({"prompt": "Hi", "completion": "yes"}, "yes<|end|>"),
        ({"instruction": "a", "output": "no", "history": [["Hi", "yes"]]}, "no<|end|>"),
    ],
)
def test_loss_on_the_last_answer_alone(make_section, write_jsonl, row, learnt):
    path = write_jsonl([row])
    everything = encode_train(make_section(path=path))
    last = encode_train(make_section(path=path, train_on="last"))
    assert shown(last) == (shown(everything)[0], learnt)
    assert everything.prompt_and_answer(0) == last.prompt_and_answer(0)


def test_text_and_turns_are_not_mixed_in_one_column(make_section, write_jsonl):
    rows = [ONE_TURN["prompt_completion"], ONE_TURN["prompt_completion of turns"]]
    with pytest.raises(DataError, match=r"train.jsonl:2: prompt or completion is a list of turns, while .*:1 has it"):
        encode_train(make_section(path=write_jsonl(rows)))
