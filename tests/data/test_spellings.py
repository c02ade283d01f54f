"""Rows as the documentation of other tools shows them: which turns are read, which carry loss, and what is refused.

Each case is a row, what an objective reads of it, and the turns as `role: text`; `*` marks a turn that carries loss.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from finetune.data.examples import load_examples
from finetune.data.formats import Example, Reads
from finetune.data.preferences import encode_preferences
from finetune.errors import ConfigError, DataError
from finetune.fallbacks import Fallbacks
from tests.data.conftest import encode_train
from tests.tiny import tiny_tokenizer

Q, A, B = "Where is Porto?", "In Portugal.", "In Spain."
USER = {"role": "user", "content": Q}
GOOD, BAD = {"role": "assistant", "content": A}, {"role": "assistant", "content": B}
SYSTEM = {"role": "system", "content": "Be brief."}
HUMAN, GPT = {"from": "human", "value": Q}, {"from": "gpt", "value": A}
EARLIER = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
CALL = {"name": "track", "arguments": {"parcel": "A1"}}
CALLED = "assistant call track"
ASKED = f"user: {Q}"
ANSWER, BAD_ANSWER = [ASKED, f"*assistant: {A}"], [ASKED, f"*assistant: {B}"]
BRIEFLY = ["system: Be brief.", *ANSWER]
LATER = ["user: Hi", "assistant: Hello.", *ANSWER]
CONTEXT_THEN_LOSS = [ASKED, f"assistant: {B}", ASKED, f"*assistant: {A}"]


class Case(NamedTuple):
    row: dict[str, Any]
    turns: list[str] | str
    """The turns, or a part of the refusal."""
    reads: Reads = "answers"
    columns: dict[str, str] = {}  # noqa: RUF012 (never changed)


def transcript(*texts: str) -> str:
    return "".join(f"\n\n{'Assistant' if k % 2 else 'Human'}: {text}" for k, text in enumerate(texts))


CASES = {
    # prompts that stand twice (TRL's maybe_extract_prompt)
    "ultrafeedback_binarized": Case(
        {"prompt": Q, "messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 8.0},
        ANSWER,
        "chosen",
    ),
    "text prompt, whole completion": Case({"prompt": Q, "completion": [USER, GOOD]}, ANSWER),
    "turns of the prompt again": Case({"prompt": [SYSTEM, USER], "completion": [SYSTEM, USER, GOOD]}, BRIEFLY),
    "the last question of a conversation": Case(
        {"prompt": Q, "chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]}, LATER, "chosen"
    ),
    "another prompt": Case({"prompt": "Where is Lima?", "completion": [USER, GOOD]}, "completion begins with a turn"),
    "another system turn": Case(
        {"prompt": [SYSTEM, USER], "completion": [{**SYSTEM, "content": "Be long."}, USER, GOOD]},
        "completion begins with a turn of the system ('Be long.')",
    ),
    "prompts that differ": Case(
        {"prompt": Q, "chosen": [*EARLIER, USER, GOOD], "rejected": [USER, BAD]},
        "chosen and rejected answer prompts that differ",
        "chosen",
    ),
    # implicit prompts
    "TRL, texts without a prompt": Case(
        {"chosen": "The sky is blue.", "rejected": "The sky is black."}, ["text: The sky is| blue."], "chosen"
    ),
    "one text begins with the other": Case(
        {"chosen": "So it is", "rejected": "So it is not"}, ["text: So it| is"], "chosen"
    ),
    "texts without a prompt that begin differently": Case(
        {"chosen": "Blue.", "rejected": "Black."}, "the texts chosen and rejected begin differently", "chosen"
    ),
    "TRL, implicit prompt": Case({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, BAD_ANSWER, "rejected"),
    "nothing in common": Case(
        {"chosen": [USER, GOOD], "rejected": [{"role": "user", "content": "Hi"}, BAD]},
        "begin with turns that differ",
        "chosen",
    ),
    "equal sides": Case({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, ANSWER, "chosen"),
    "one side ends with the prompt": Case(
        {"chosen": [USER, GOOD], "rejected": [USER]}, "rejected has nothing after the prompt", "chosen"
    ),
    # Anthropic's texts
    "hh-rlhf": Case(
        {"chosen": transcript("Hi", "Hello.", Q, A), "rejected": transcript("Hi", "Hello.", Q, B)}, LATER, "chosen"
    ),
    "hh-rlhf with a prompt": Case({"prompt": transcript(Q, ""), "chosen": A, "rejected": B}, BAD_ANSWER, "rejected"),
    # preference formats of others
    "OpenAI, preference": Case(
        {
            "input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [GOOD],
            "non_preferred_output": [BAD],
        },
        ANSWER,
        "chosen",
    ),
    "LLaMA-Factory, ShareGPT pairs": Case(
        {"conversations": [HUMAN, GPT, HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": B}},
        [ASKED, f"assistant: {A}", ASKED, f"*assistant: {B}"],
        "rejected",
    ),
    "an answer in the context and in a column": Case(
        {"messages": [USER, GOOD], "chosen": A, "rejected": B}, "messages ends with a turn of the assistant", "chosen"
    ),
    "axolotl, chatml.argilla": Case(
        {"system": "Be brief.", "instruction": Q, "chosen_response": A, "rejected_response": B},
        ["system: Be brief.", ASKED, f"*assistant: {B}"],
        "rejected",
    ),
    "ms-swift, rejected_response": Case(
        {"messages": [SYSTEM, *EARLIER, USER, GOOD], "rejected_response": B},
        ["system: Be brief.", "user: Hi", "assistant: Hello.", ASKED, f"*assistant: {B}"],
        "rejected",
    ),
    "ms-swift, rejected_messages": Case(
        {"messages": [USER, GOOD], "rejected_messages": [USER, BAD]}, BAD_ANSWER, "rejected"
    ),
    # labels
    "TRL, KTO": Case({"prompt": [USER], "completion": [BAD], "label": False}, BAD_ANSWER, "labelled"),
    "LLaMA-Factory, kto_tag": Case({"messages": [*EARLIER, USER, GOOD], "kto_tag": True}, LATER, "labelled"),
    "axolotl, KTO argilla_chat": Case({"completion": [USER, GOOD], "label": True}, ANSWER, "labelled"),
    # columns of the prompt
    "ms-swift, query and response": Case(
        {"system": "Be brief.", "history": [["Hi", "Hello."]], "query": Q, "response": A},
        ["system: Be brief.", "user: Hi", "*assistant: Hello.", ASKED, f"*assistant: {A}"],
    ),
    "ms-swift, exchanges": Case(
        {"system": "Be brief.", "conversation": [{"human": "Hi", "assistant": "Hello."}, {"human": Q, "assistant": A}]},
        ["system: Be brief.", "user: Hi", "*assistant: Hello.", ASKED, f"*assistant: {A}"],
    ),
    "OpenOrca": Case(
        {"system_prompt": "Be brief.", "question": Q, "response": A, "id": "1"},
        BRIEFLY,
        "answers",
        {"prompt": "question"},
    ),
    "the same system turn twice": Case({"system": "Be brief.", "messages": [SYSTEM, USER, GOOD]}, BRIEFLY),
    "Dolly": Case(
        {"instruction": "Where is it?", "context": "Porto", "response": A, "category": "open_qa"},
        ["user: Where is it?\n\nPorto", f"*assistant: {A}"],
    ),
    "question in a context": Case(
        {"question": "Where is it?", "context": "Porto", "answer": A},
        [f"text: Where is it?\n\nPorto|{A}"],
        "answers",
        {"prompt": "question", "input": "context", "completion": "answer"},
    ),
    "Alpaca with the text of its prompt": Case({"instruction": Q, "output": A, "prompt": f"Below is ... {Q}"}, ANSWER),
    # roles, tools, parts
    "Vertex AI": Case({"messages": [{"role": "user", "content": Q}, {"role": "model", "content": A}]}, ANSWER),
    "roles in capitals": Case(
        {"messages": [{"role": "User", "content": Q}, {"role": "Assistant", "content": A}]}, ANSWER
    ),
    "human in role": Case({"messages": [{"role": "human", "content": Q}, {"role": "gpt", "content": A}]}, ANSWER),
    "OpenAI, Responses": Case(
        {
            "messages": [
                {"role": "user", "content": [{"type": "input_text", "text": Q}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": A}]},
            ]
        },
        ANSWER,
    ),
    "LLaMA-Factory, function_call": Case(
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "Porto"},
                GPT,
            ],
            "tools": json.dumps([{"name": "track"}]),
        },
        [ASKED, f'*{CALLED}{{"parcel": "A1"}}', "tool: Porto", f"*assistant: {A}"],
    ),
    "ms-swift, tool_call": Case(
        {
            "messages": [
                USER,
                {"role": "tool_call", "content": json.dumps(CALL)},
                {"role": "tool_call", "content": json.dumps({**CALL, "arguments": '{"parcel": "B2"}'})},
                {"role": "tool_response", "content": "Porto"},
                GOOD,
            ]
        },
        [ASKED, f'*{CALLED}{{"parcel": "A1"}} {CALLED}{{"parcel": "B2"}}', "tool: Porto", f"*assistant: {A}"],
    ),
    "text before a call": Case(
        {"messages": [USER, GOOD, {"role": "tool_call", "content": json.dumps(CALL)}]},
        [ASKED, f'*assistant: {A} {CALLED}{{"parcel": "A1"}}'],
    ),
    "a call that is no JSON": Case(
        {"messages": [USER, {"role": "tool_call", "content": "track A1"}]}, "expected a call as JSON"
    ),
    "OpenAI, functions": Case(
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": {**CALL, "arguments": '{"parcel": "A1"}'}},
                {"role": "function", "name": "track", "content": "Porto"},
                GOOD,
            ],
            "functions": [{"name": "track"}],
        },
        [ASKED, f'*{CALLED}{{"parcel": "A1"}}', "tool: Porto", f"*assistant: {A}"],
    ),
    # masks
    "OpenAI, weight": Case({"messages": [USER, {**BAD, "weight": 0}, USER, GOOD]}, CONTEXT_THEN_LOSS),
    "ms-swift, loss": Case(
        {"messages": [USER, {**BAD, "loss": False}, USER, {**GOOD, "loss": True}]}, CONTEXT_THEN_LOSS
    ),
    "axolotl, train": Case({"messages": [USER, {**BAD, "train": False}, USER, GOOD]}, CONTEXT_THEN_LOSS),
    "axolotl, training": Case(
        {"messages": [{**USER, "training": False}, {**BAD, "training": False}, USER, GOOD]}, CONTEXT_THEN_LOSS
    ),
    "axolotl, train_detail": Case(
        {"messages": [USER, {**GOOD, "train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]}]},
        "messages[1] has train_detail, which may mask parts of its text; expected turns that carry loss as a whole, or "
        "weight: 0",
    ),
    "masks that differ": Case({"messages": [USER, {**GOOD, "weight": 1, "loss": False}]}, "weight and loss that"),
    # rows for another objective
    "pairs in supervised training": Case({"prompt": Q, "chosen": A, "rejected": B}, "Set training.objective=dpo (or"),
    "OpenAI's pairs in supervised training": Case(
        {"input": {"messages": [USER]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
        "has preferred_output and non_preferred_output",
    ),
    "ms-swift's pairs in supervised training": Case(
        {"messages": [USER, GOOD], "rejected_response": B}, "has rejected_response: a pair"
    ),
    "the chosen answers alone": Case(
        {"prompt": Q, "chosen": A, "rejected": B},
        [f"text: {Q}|{A}"],
        "answers",
        {"completion": "chosen", "rejected": "none"},
    ),
    **{
        f"{name} in supervised training": Case({"messages": [USER, GOOD], name: True}, "Set training.objective=kto")
        for name in ("label", "kto_tag", "is_good", "is_bad", "good", "accepted", "desirable", "thumbs_up")
    },
}


def read(make_section: Any, write_jsonl: Any, case: Case) -> Example:
    section = make_section(path=write_jsonl([case.row]), columns=case.columns)
    (row,) = load_examples(section, case.reads).train.rows
    return row


def test_a_format_that_is_named_does_not_make_pairs_answers(make_section, write_jsonl):
    row = {"messages": [USER, GOOD], "rejected_response": B}
    with pytest.raises(DataError, match=r"Set training\.objective=dpo"):
        len(load_examples(make_section(path=write_jsonl([row]), format="messages")).train)


def shown(row: Example) -> list[str]:
    if row.row_type != "messages":
        return [f"text: {row.prompt}|{row.completion}"]
    lines = []
    for number, turn in enumerate(row.messages):
        calls = (
            f"assistant call {call['function']['name']}{json.dumps(call['function']['arguments'])}"
            for call in turn.get("tool_calls", ())
        )
        text = [f"{turn['role']}: {turn['content']}"] if turn["content"] else []
        lines.append(("*" if number in row.learnt else "") + " ".join([*text, *calls]))
    return lines


@pytest.mark.parametrize("name", CASES)
def test_a_row_of_another_tool_is_read_as_its_documentation_says_or_refused(make_section, write_jsonl, name):
    case = CASES[name]
    if isinstance(case.turns, list):
        assert shown(read(make_section, write_jsonl, case)) == case.turns
        return
    with pytest.raises(DataError) as caught:
        read(make_section, write_jsonl, case)
    assert case.turns in str(caught.value)


@pytest.mark.parametrize(
    ("name", "is_good"), [("label", False), ("kto_tag", False), ("is_bad", True), ("wanted", False)]
)
def test_a_label_of_any_name_is_read_and_is_bad_means_the_opposite(make_section, write_jsonl, name, is_good):
    columns = {"label": name} if name == "wanted" else {}
    case = Case({"messages": [USER, GOOD], name: False}, "", "labelled", columns)
    assert read(make_section, write_jsonl, case).is_good is is_good


def test_the_tools_of_other_formats_are_offered(make_section, write_jsonl):
    for name in ("LLaMA-Factory, function_call", "OpenAI, functions"):
        assert json.loads(read(make_section, write_jsonl, CASES[name]).tools) == [{"name": "track"}]


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        ({"messages": [USER, GOOD], "context": "Porto"}, "context"),
        ({"prompt": Q, "completion": A, "input": "Porto"}, "input"),
    ],
)
def test_a_part_of_the_prompt_that_is_not_read_is_a_fallback_also_from_the_cache(
    make_section, write_jsonl, row, unread
):
    section = make_section(path=write_jsonl([row]))
    for _ in ("encoded", "read from the cache"):
        fallbacks = Fallbacks()
        encode_train(section, fallbacks=fallbacks)
        assert f"the columns {unread} of" in fallbacks.as_records()[0]["wanted"]
        with pytest.raises(ConfigError, match=f"the columns {unread} of"):
            encode_train(section, fallbacks=Fallbacks(strict=True))
    quiet = Fallbacks(strict=True)
    encode_train(
        section.model_copy(update={"columns": {"system": "none"}, "path": write_jsonl([{**row, unread: None}])}),
        fallbacks=quiet,
    )
    assert quiet.as_records() == []


def test_columns_that_are_not_used_are_named_every_time(make_section, write_jsonl, logged):
    row = {"messages": [USER, GOOD], "id": 1, "parallel_tool_calls": False, "reviewed": True}
    section = make_section(path=write_jsonl([row]))
    for times in (1, 2):
        (read_as,) = encode_train(section).read_as
        named = "id, parallel_tool_calls, reviewed (true or false; data.columns.label=reviewed makes it the label)"
        assert read_as.endswith(f"; columns not used: {named}")
        assert sum(named in line for line in logged()) >= times


def test_texts_with_and_without_a_system_turn_stand_in_one_file(make_section, write_jsonl):
    rows = [{"prompt": Q, "completion": A}, {"prompt": Q, "completion": A, "system": "Be brief."}]
    examples = encode_train(make_section(path=write_jsonl(rows)))
    texts = [tiny_tokenizer().decode(examples[row].input_ids) for row in (0, 1)]
    assert texts[1] == f"<|system|>Be brief.<|end|>{texts[0]}"


@pytest.mark.parametrize(
    ("names", "proposal"),
    [
        (["question", "answer"], "data.columns.prompt=question data.columns.completion=answer"),
        (["id", "problem", "solution"], "data.columns.prompt=problem data.columns.completion=solution"),
        (
            ["context", "question", "answer"],
            "data.columns.prompt=question data.columns.completion=answer data.columns.input=context",
        ),
        (["source", "target"], "data.columns.prompt=source data.columns.completion=target"),
        (["source", "output"], ""),
        (["question", "instruction", "answer"], ""),
        (["a", "b"], ""),
    ],
)
def test_settings_are_proposed_only_if_they_use_every_column_with_a_meaning(make_section, write_jsonl, names, proposal):
    path = write_jsonl([{name: f"This is {name}." for name in names}])
    with pytest.raises(DataError) as caught:
        encode_train(make_section(path=path))
    way = f", for example {proposal}" if proposal else ": data.columns.prompt=COLUMN data.columns.completion=COLUMN"
    assert str(caught.value).endswith(f"or name them in data.columns{way}.")


def test_turns_in_an_unknown_column_are_to_be_named_messages(make_section, write_jsonl):
    with pytest.raises(DataError, match=r"in data\.columns: data\.columns\.messages=COLUMN\.$"):
        encode_train(make_section(path=write_jsonl([{"persona": "Be brief.", "dialog": [USER, GOOD]}])))


def test_columns_that_are_named_and_not_there_are_said(make_section, write_jsonl):
    path = write_jsonl([{"Frage": Q, "Antwort": A}])
    columns = {"prompt": "frage", "completion": "Antwort", "input": "none"}
    with pytest.raises(
        DataError, match=r"columns Frage, Antwort\. Here is no column for data\.columns\.prompt=frage\. Ex"
    ):
        encode_train(make_section(path=path, columns=columns))


def test_bad_rows_are_dropped_counted_by_reason_and_named(make_section, write_jsonl, logged):
    rows = [{"messages": [USER, GOOD]}] * 3
    rows += [
        {"messages": [USER, {**GOOD, "content": " "}]},
        {"messages": [{"role": "bot", "content": Q}, GOOD]},
        {"messages": 3},
    ]
    rows += [{"messages": [USER, {**GOOD, "content": "<|end|>"}]}]  # only the tokenizer knows that it cannot be used
    path = write_jsonl(rows)
    with pytest.raises(DataError, match="to leave them out"):
        encode_train(make_section(path=path))
    section = make_section(path=path, on_bad_row="drop", on_overlap="warn")
    for _ in ("encoded", "read from the cache"):
        examples = encode_train(section)
        assert (len(examples), examples.num_dropped) == (3, 4)
        (read_as,) = examples.read_as
        assert f"1 (expected text to learn; first {path}:4)" in read_as
        assert f"first {path}:5)" in read_as
        assert f"first {path}:7)" in read_as
    assert any("4 of 7 rows cannot be used and are left out" in line for line in logged())
    broken = write_jsonl([*rows, '{"messages": ['], "broken.jsonl")
    with pytest.raises(DataError, match=r"1 of 8 rows cannot be used:\n.*not JSON"):
        encode_train(section.model_copy(update={"path": broken}))
    with pytest.raises(DataError, match="1 of 1 rows cannot be used"):
        encode_train(section.model_copy(update={"path": write_jsonl([rows[-2]], "none.jsonl")}))


def test_both_sides_of_a_pair_lose_the_same_rows(make_section, write_jsonl):
    given = [B, "", B, 3, B, "<|end|>"]  # only the tokenizer refuses the last one, and only in this side
    pairs = [{"prompt": f"{Q} {k}", "chosen": A, "rejected": rejected} for k, rejected in enumerate(given)]
    path = write_jsonl(pairs)
    for _ in ("encoded", "read from the cache"):
        rows = encode_preferences(make_section(path=path, on_bad_row="drop"), tiny_tokenizer()).train
        assert rows.chosen.numbers.tolist() == rows.rejected.numbers.tolist() == [1, 3, 5]
        assert [rows.chosen.num_dropped, rows.rejected.num_dropped] == [2, 3]


def test_a_column_that_names_several_splits_is_a_fallback_also_from_the_cache(make_section, write_jsonl):
    rows = [{"prompt": Q, "completion": A, "split": split} for split in ("train", "Train", "dev", "test")]
    section = make_section(path=write_jsonl(rows))
    for _ in ("encoded", "read from the cache"):
        fallbacks = Fallbacks()
        encode_train(section, fallbacks=fallbacks)
        assert "the splits in the column split of" in fallbacks.as_records()[0]["wanted"]
    quiet = Fallbacks(strict=True)
    encode_train(section.model_copy(update={"columns": {"split": "none"}}), fallbacks=quiet)
    encode_train(section.model_copy(update={"path": write_jsonl(rows[2:3])}), fallbacks=quiet)
    assert quiet.as_records() == []
