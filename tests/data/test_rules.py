"""The rules by which rows are read: a text is a text, and every column is accounted for. See docs/data.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset

from finetune.data.encode import encode_examples
from finetune.data.examples import load_examples
from finetune.errors import DataError
from finetune.fallbacks import Fallbacks
from finetune.inference.prompts import read_prompts_file
from tests.data.advice import Rows, encode, follow, learnt, proposals, refusal, section_of, write
from tests.data.conftest import encode_train
from tests.data.test_formats import REFUSED_ROWS
from tests.data.test_prompts import REFUSED_PROMPTS
from tests.data.test_spellings import CASES
from tests.data.test_turns import REFUSED_TURNS
from tests.tiny import tiny_tokenizer

Q, A, B = "Is it open?", "Until six.", "In Spain."
ASK, GOOD = {"role": "user", "content": Q}, {"role": "assistant", "content": A}
PAIR = {"chosen": A, "rejected": B}
OTHER_PAIR = {"chosen": "It closes at six.", "rejected": "It depends. WRONG"}
LONG = "Is it open? " * 60
TEXTS = [
    '[{"name": "Ines", "kind": "person"}]',
    "[]",
    '["Rui"]',
    "{}",
    '{"role": "assistant", "content": "See you."}',
    '[{"role": "assistant", "content": "See you."}]',
    "[1, 2",
    "['Rui']",
    "{'name': 'Rui'}",
]
"""Answers that look like JSON or Python."""
PYTHON = [
    "[{'role': 'assistant', 'content': 'Until six.'}]",
    "[{'from': 'gpt', 'value': 'Until six.'}\n {'from': 'human', 'value': 'Thanks'}]",
    " [{'content': \"It's six.\", 'role': 'assistant'}]",
    "{'role': 'assistant', 'content': 'Until six.'}",
    "array([{'role': 'assistant', 'content': 'Until six.'}], dtype=object)",
]
"""Turns as `str` writes them, for example in a data frame that became a CSV file."""

ROWS = {
    # rows without a prompt that is read
    "pairs, question": Rows([{"question": Q, **PAIR}, {"question": "When?", **OTHER_PAIR}], "dpo"),
    "pairs, context": Rows([{"context": Q, **PAIR}], "simpo"),
    "pairs, text": Rows([{"text": Q, **PAIR}], "orpo"),
    "pairs, unknown name": Rows([{"frage": Q, "chosen": f"So {A}", "rejected": f"So {B}"}], "dpo"),
    "pairs, question and input": Rows([{"question": Q, "input": "A shop?", **PAIR}], "dpo"),
    "pairs, name with a blank": Rows([{"my question": Q, **PAIR}], "dpo"),
    "pairs as rows of answers": Rows([{"question": Q, **PAIR}]),
    "answers as pairs": Rows([{"prompt": Q, "completion": A}], "dpo"),
    "questions and answers as labelled rows": Rows([{"question": Q, "answer": A}] * 2, "kto"),
    "input and output": Rows([{"input": Q, "output": A}]),
    "input, output, source": Rows([{"input": Q, "output": A, "source": "WRONG"}]),
    "input, question, answer": Rows([{"input": "A shop?", "question": Q, "answer": A}]),
    "capitals": Rows([{"Question": Q, "Answer": A}]),
    "xlam": Rows([{"query": Q, "answers": '[{"name": "open"}]', "tools": "[]"}]),
    "prompts alone": Rows([{"messages": [ASK], "target": 10}, {"messages": [ASK], "target": 7}]),
    "prompts in a column": Rows([{"prompt": Q}]),
    "prompts in a column of another name": Rows([{"question": Q}], "grpo"),
    "a turn in each row": Rows([{"role": "user", "text": Q, "parent_id": None}, {"role": "assistant", "text": A}]),
    # a text beside a part of a row
    "prompt and text": Rows([{"prompt": Q, "text": A}]),
    "text and completion": Rows([{"text": Q, "completion": A}]),
    "text and response": Rows([{"text": Q, "response": A}]),
    "question and text": Rows([{"question": Q, "text": A}]),
    "text and summary": Rows([{"text": Q, "summary": A}]),
    # columns that are not read
    "two answers": Rows([{"prompt": Q, "completion": A, "answer": "At six."}]),
    "two answers in a later row": Rows(
        [{"prompt": Q, "completion": A}, {"prompt": "Is it far?", "completion": A, "response": "At six."}]
    ),
    "response and output": Rows([{"prompt": Q, "response": A, "output": "At six."}]),
    "two prompts": Rows([{"prompt": Q, "question": "Is it far?", "completion": A}]),
    "another prompt beside turns": Rows([{"messages": [ASK, GOOD], "prompt": "Is it far?"}]),
    "history beside turns": Rows([{"messages": [ASK, GOOD], "history": [["Is it far?", "Two miles."]]}]),
    "history of another name": Rows([{"prompt": Q, "completion": A, "chat_history": [["Hi?", "Hello."]]}]),
    "system turn of another name": Rows([{"prompt": Q, "completion": A, "system_message": "Be brief."}]),
    "turns that go on in another row": Rows([{"messages": [ASK, GOOD], "parent_id": "a1"}]),
    "loss_weight of a row": Rows([{"prompt": Q, "completion": "Six.", "loss_weight": 0.0}]),
    "a weight below 1": Rows([{"prompt": Q, "completion": "Six.", "sample_weight": 0.3}]),
    "a mask for each turn": Rows([{"messages": [ASK, GOOD], "loss_mask": [0, 0]}]),
    "a mask of another name": Rows([{"messages": [ASK, {**GOOD, "ignore": True}]}, {"messages": [ASK, GOOD]}]),
    "masked rows": Rows([{"prompt": Q, "completion": "Six.", "masked": True}, {"prompt": Q, "completion": A}]),
    "context beside turns": Rows([{"messages": [ASK, GOOD], "context": "A shop?"}]),
    "chat_template_kwargs": Rows([{"messages": [ASK, GOOD], "chat_template_kwargs": {"enable_thinking": False}}]),
    "another conversation": Rows([{"prompt": Q, "completion": A, "messages": [ASK, {**GOOD, "content": "Six."}]}]),
    # labels
    "good and bad": Rows([{"prompt": Q, "completion": A, "label": x} for x in ("good", "good")]),
    "true labels of questions": Rows(
        [{"question": Q, "answer": A, "label": True}] * 2,
        settings={"columns": {"prompt": "question", "completion": "answer"}},
    ),
    "1 and -1": Rows([{"prompt": Q, "completion": A, "label": 1}, {"prompt": Q, "completion": "Six.", "label": -1}]),
    # rows that a check refuses
    "no target, one side": Rows(
        [{"prompt": Q, **PAIR}, {"prompt": Q, "chosen": A, "rejected": "x" * 200}, {"prompt": LONG, **PAIR}],
        "dpo",
        {"max_length": 40},
    ),
    "no target, one side, orpo": Rows([{"prompt": Q, **PAIR}, {"prompt": LONG, **PAIR}], "orpo", {"max_length": 40}),
    "no target, labels": Rows(
        [{"prompt": p, "completion": A, "label": True} for p in (Q, LONG, "Is it far?")], "kto", {"max_length": 40}
    ),
    "no target": Rows([{"prompt": Q, "completion": A}, {"prompt": LONG, "completion": A}], settings={"max_length": 40}),
    "truncated answer": Rows(
        [{"prompt": Q, "completion": A}, {"prompt": Q, "completion": A * 20}], settings={"max_length": 40}
    ),
    "every answer truncated": Rows([{"prompt": Q, "completion": A * 20}], settings={"max_length": 40}),
    "a blank answer": Rows([{"prompt": Q, "completion": A}, {"prompt": Q, "completion": " "}]),
    "a blank answer of a pair": Rows([{"prompt": Q, **PAIR}, {"prompt": Q, "chosen": A, "rejected": ""}], "dpo"),
    "a blank labelled answer": Rows([{"prompt": Q, "completion": c, "label": True} for c in (A, " ", A)], "kto"),
    "every answer blank": Rows([{"prompt": Q, "completion": " "}]),
    "a special token": Rows([{"prompt": Q, **PAIR}, {"prompt": Q, "chosen": "<|end|>", "rejected": B}], "dpo"),
    "a key that no template has": Rows([{"messages": [{**ASK, "mood": "good"}, GOOD]}]),
    # text of Python objects
    **{f"Python {k}": Rows([{"prompt": Q, "completion": text}], suffix="csv") for k, text in enumerate(PYTHON)},
}
"""Rows that are refused by themselves or under `strict`."""
REFUSED = {
    **ROWS,
    **{
        name: Rows(
            [case.row] * 2,
            {"answers": "sft", "chosen": "dpo", "rejected": "dpo", "labelled": "kto", "prompts": "grpo"}[case.reads],
            {"columns": case.columns},
        )
        for name, case in CASES.items()
        if isinstance(case.turns, str)
    },
    **{f"{problem}, in a row": Rows([row]) for row, problem in REFUSED_ROWS},
    **{
        f"{problem}, among others": Rows([row, {"messages": [ASK, GOOD]}])
        for row, problem in REFUSED_ROWS
        if "messages" in row
    },
    **{
        f"{problem}, in a turn": Rows([{"messages": [ASK, {"role": "assistant", **turn}]}, {"messages": [ASK, GOOD]}])
        for turn, problem in REFUSED_TURNS
    },
    **{f"{problem}, in a prompt": Rows([row], "grpo") for row, problem in REFUSED_PROMPTS},
}


@pytest.mark.few(60)
@pytest.mark.parametrize("name", REFUSED)
def test_advice_that_is_followed_leads_out(tmp_path, name):
    case = REFUSED[name]
    message = refusal(tmp_path, case)
    assert message, "the rows are read"
    follow(tmp_path, case, message)


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        (
            "input, output, source",
            "Set data.columns.prompt=source data.columns.completion=output.",
        ),  # the source is no prompt
        ("two answers", "Set data.columns.completion=none."),  # no format is left
        ("every answer blank", "Correct them, or set data.on_bad_row=drop to leave them out."),  # it refuses again
        ("pairs as rows of answers", "Set data.columns.prompt=question data.columns.completion=rejected."),
    ],
)
def test_wrong_advice_is_found(tmp_path, name, planted):
    assert proposals(planted)
    with pytest.raises(AssertionError):
        follow(tmp_path, REFUSED[name], planted)


PROPOSED = {
    "pairs, question": "data.columns.prompt=question",
    "pairs, question and input": "data.columns.prompt=question data.columns.input=input",
    "pairs, name with a blank": "'data.columns.prompt=my question'",
    "pairs, unknown name": "data.columns.prompt=frage or data.columns.prompt=none if the answers begin with it",
    "pairs as rows of answers": "training.objective=dpo data.columns.prompt=question (or",
    "answers as pairs": "or set training.objective=sft",
    "input and output": "data.columns.prompt=input data.columns.completion=output",
    "input, output, source": "data.columns.prompt=input data.columns.completion=output",
    "xlam": "data.columns.completion=answers",
    "prompts alone": "training.objective=grpo to learn from rewards",
    "prompts in a column": "training.objective=grpo",
    "prompts in a column of another name": "data.columns.prompt=question",
    "a turn in each row": "as a list in a column messages",
    "prompt and text": "data.columns.completion=text, or set data.format=text",
    "text and completion": "data.columns.prompt=text, or set data.format=text",
    "two answers": "Set data.columns.completion=answer to read it, or data.columns.completion=completion if",
    "two answers in a later row": "Correct the rows, or set data.columns.completion=completion if",
    "two prompts": "Set data.columns.prompt=question to read it, or data.columns.prompt=prompt if",
    "history beside turns": "Correct the rows, or set data.columns.history=none if it is not meant to be read",
    "history of another name": "data.columns.history=chat_history to read it",
    "loss_weight of a row": "the column loss_weight is what carries loss, but",
    "masked rows": "data.columns.mask=none",
    "a weight below 1": "data.columns.mask=none",
    "a mask of another name": "messages[1] has ignore, which may mask parts of its text; expected",
    "chat_template_kwargs": "data.columns.chat_template_kwargs=none",
    "good and bad": "the column label is good in 2 of 2 rows",
    "true labels of questions": "Set training.objective=kto to learn",
    "1 and -1": "data.columns.label=none",
    "no target, one side": "1 of 3 pairs have no token that carries loss",
    "a special token": "data.on_bad_row=drop",
}


@pytest.mark.parametrize("name", PROPOSED)
def test_a_refusal_names_what_can_be_set(tmp_path, name):
    assert PROPOSED[name] in refusal(tmp_path, ROWS[name])


@pytest.mark.few(4)
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("column", ["completion", "output", "chosen"])
def test_a_text_is_learnt_as_it_is_written(tmp_path, suffix, column):
    """In a CSV file, a cell may hold turns, but only as a list of objects with a role."""
    texts = [text for text in TEXTS if suffix != "csv" or not text.startswith('[{"role"')]
    others = {"completion": "prompt", "output": "instruction", "chosen": "prompt"}
    rows = [{others[column]: f"{Q} {k}", column: text} for k, text in enumerate(texts)]
    rows = [{**row, "rejected": B} for row in rows] if column == "chosen" else rows
    if suffix == "parquet":
        path = str(tmp_path / "rows.parquet")
        Dataset.from_list(rows).to_parquet(path)
    else:
        path = write(tmp_path, Rows(rows, suffix=suffix))
    (first, *_) = encode(section_of(tmp_path, path, {}), "dpo" if column == "chosen" else "sft")
    assert learnt(first) == texts


def test_prompts_and_expected_answers_are_texts_too(tmp_path, make_section):
    path = write(tmp_path, Rows([{"prompt": text, "completion": text} for text in TEXTS]))
    (examples,) = encode(section_of(tmp_path, path, {}), "grpo")
    expected = [examples.prompt_and_answer(row).answer for row in range(len(examples))]
    assert [tiny_tokenizer().decode(ids) for ids in expected] == TEXTS
    assert [prompt.shown for prompt in read_prompts_file(Path(path))] == TEXTS


def test_a_cell_of_a_csv_file_may_hold_turns(tmp_path):
    row = {"prompt": json.dumps([ASK]), "completion": json.dumps([GOOD])}
    (examples,) = encode(section_of(tmp_path, write(tmp_path, Rows([row], suffix="csv")), {}), "sft")
    assert learnt(examples) == [A]


@pytest.mark.few(10)
@pytest.mark.parametrize("text", PYTHON)
@pytest.mark.parametrize("column", ["completion", "prompt", "messages", "text", "chosen"])
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_the_text_of_a_python_object_is_refused_with_its_cause(tmp_path, text, column, suffix):
    rest = {"completion": {"prompt": Q}, "prompt": {"completion": A}, "chosen": {"prompt": Q, "rejected": B}}
    case = Rows([{**rest.get(column, {}), column: text}], "dpo" if column == "chosen" else "sft", suffix=suffix)
    message = refusal(tmp_path, case)
    assert f"{column} is " in message
    assert "the text of a Python object; expected JSON, as json.dumps writes it, or a JSONL file" in message


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASK, GOOD], "tools": "[{'name': 'track'}]"},
        {"prompt": Q, "completion": A, "history": "[['Hi?', 'Hello.']]"},
        {
            "messages": [
                ASK,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{'a': 1}"}}]},
            ]
        },
    ],
)
def test_python_text_is_named_in_columns_that_are_never_text(tmp_path, row):
    assert "the text of a Python object" in refusal(tmp_path, Rows([row]))


KNOWN = {
    "ultrachat": Rows([{"prompt": Q, "prompt_id": "a1", "messages": [ASK, GOOD]}]),
    "alpaca with its text": Rows(
        [{"instruction": Q, "input": "", "output": A, "text": f"Below is an instruction.\n{Q}\n### Response:\n{A}"}]
    ),
    "alpaca with and without input": Rows(
        [{"instruction": Q, "input": "A shop.", "output": A}, {"instruction": Q, "output": A}]
    ),
    "ultrafeedback": Rows(
        [
            {
                "prompt": Q,
                "messages": [ASK, GOOD],
                "chosen": [ASK, GOOD],
                "rejected": [ASK, {**GOOD, "content": B}],
                "score_chosen": 8.0,
            }
        ],
        "dpo",
    ),
    "a question twice": Rows([{"source": "web", "prompt": Q, "question": Q, **PAIR}], "dpo"),
    "system and input of pairs": Rows(
        [{"system": "Be brief.", "input": Q, **PAIR}, {"input": "When?", **OTHER_PAIR}], "dpo"
    ),
    "pairs after a conversation": Rows([{"messages": [ASK], "input": "", **PAIR}], "dpo"),
    "instructions with their answers in turns": Rows([{"instruction": Q, "response": A, "conversations": [ASK, GOOD]}]),
    "no mask at all": Rows([{"prompt": Q, "completion": A, "masked": False, "loss_weight": 1.0, "weight": None}]),
    "empty columns": Rows([{"messages": [ASK, GOOD], "system_message": None, "history": [], "answer": ""}]),
    "other columns": Rows([{"messages": [ASK, GOOD], "id": 3, "origin": "web", "split": "train", "notes": "long"}]),
    "exchanges": Rows([{"conversation": [{"input": Q, "output": A}]}]),
    "a refusal": Rows([{"messages": [ASK, {"role": "assistant", "content": None, "refusal": A}]}]),
    "masked turns": Rows(
        [{"messages": [ASK, {**GOOD, "content": "WRONG", "loss_weight": 0.0}, ASK, {**GOOD, "loss_weight": 1.0}]}]
    ),
    "metadata that looks like a mask": Rows([{"prompt": Q, "completion": A, "train_loss": 0.35, "loss": 2.1}]),
    "turns with masked": Rows([{"messages": [ASK, {**GOOD, "content": "WRONG", "masked": True}, ASK, GOOD]}]),
    "a text that the user names": Rows([{"prompt": Q, "body": A}], settings={"columns": {"text": "body"}}),
    "columns that are not meant": Rows(
        [{"prompt": Q, "completion": A, "answer": "WRONG", "history": [["Is it far?", "WRONG"]], "loss_weight": 0.5}],
        settings={"columns": {"completion": "completion", "history": "none", "mask": "none"}},
    ),
    "good and bad for KTO": Rows(
        [{"prompt": Q, "completion": A, "label": "good"}, {"prompt": Q, "completion": "WRONG", "label": -1}], "kto"
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_columns_that_repeat_what_is_read_or_say_nothing_are_accounted_for(tmp_path, name):
    case = KNOWN[name]
    (first, *_) = encode(section_of(tmp_path, write(tmp_path, case), case.settings), case.objective)
    texts = learnt(first)
    assert A[1:] in texts[0]  # nothing precedes the first token of a plain text
    assert "WRONG" not in "".join(texts)


def test_input_is_the_prompt_of_a_pair_after_its_system_turn(tmp_path):
    case = KNOWN["system and input of pairs"]
    chosen, _ = encode(section_of(tmp_path, write(tmp_path, case), {}), "dpo")
    texts = [tiny_tokenizer().decode(chosen[row].input_ids) for row in (0, 1)]
    assert texts[0].startswith(f"<|system|>Be brief.<|end|><|user|>{Q}<|end|>")
    assert texts[1].startswith("<|user|>When?<|end|>")


def test_a_column_that_comes_in_a_later_row_is_accounted_for(tmp_path):
    rows = [{"prompt": Q, "completion": A}, {"prompt": Q, "completion": A, "answer": "At six."}]
    assert "the first is" in (message := refusal(tmp_path, Rows(rows)))
    assert "rows.jsonl:2" in message


def test_what_may_be_meant_is_a_fallback_that_is_recorded_also_from_the_cache(make_section, write_jsonl):
    section = make_section(path=write_jsonl([{"prompt": Q, "completion": A, "label": 1}]))
    for _ in ("encoded", "read from the cache"):
        fallbacks = Fallbacks()
        (read_as,) = encode_train(section, fallbacks=fallbacks).read_as
        assert "label (label is 1, which is not read as bad or good: every row is used)" in read_as
        assert "the columns label of" in fallbacks.as_records()[0]["wanted"]


@pytest.mark.parametrize(("name", "value"), [("images", ["a.png"]), ("image", {"bytes": "aa"}), ("audio", "a.wav")])
def test_images_and_sound_that_no_model_sees_are_a_fallback(make_section, write_jsonl, name, value):
    row = {"messages": [{**ASK, "content": f"<image>{Q}"}, GOOD]}
    fallbacks = Fallbacks()
    section = make_section(path=write_jsonl([{**row, name: value}]))
    encode_train(section, fallbacks=fallbacks)
    (taken,) = fallbacks.as_records()
    assert taken["wanted"].startswith(f"the columns {name} of ")
    assert "data.columns.images=none says that this is meant" in taken["why"]
    other = Fallbacks()
    encode_train(section.model_copy(update={"columns": {"images": "none"}}), fallbacks=other)
    encode_train(make_section(path=write_jsonl([{**row, name: type(value)()}], "empty.jsonl")), fallbacks=other)
    assert other.as_records() == []


def test_names_of_columns_are_shown_with_their_invisible_characters(make_section, write_jsonl):
    section = make_section(path=write_jsonl([{"\u200bprompt": Q, "completion ": A}]))
    with pytest.raises(DataError, match=r"has the columns <U\+200B>prompt, 'completion '\."):
        encode_train(section)


@pytest.mark.parametrize("separator", [None, ";", ","])
@pytest.mark.parametrize("first_line", ["sep=;\n", ""])
def test_a_csv_file_is_read_as_excel_writes_it(make_section, tmp_path, first_line, separator):
    path = tmp_path / "rows.csv"
    sign = ";" if first_line or separator == ";" else ","
    path.write_text(f"\ufeff{first_line}\u200bprompt {sign} completion\n{Q}{sign}{A}\n", encoding="utf-8")
    assert learnt(encode_train(make_section(path=str(path), separator=separator))) == [A]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.json", json.dumps({"prompt": [Q, Q], "completion": [A, A]})),
        ("rows.json", json.dumps({"prompt": {"0": Q}, "completion": {"0": A}}, indent=2)),
        ("rows.jsonl", json.dumps({"messages": {"0": [ASK, GOOD], "1": [ASK, GOOD]}})),
        ("rows.jsonl", json.dumps({"messages": [[ASK, GOOD], [ASK, GOOD]]})),
    ],
)
def test_a_file_that_is_written_by_columns_is_named_as_that(make_section, tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=r"is written by columns: each of .* holds the values of all rows\. Write rows"):
        encode_train(make_section(path=str(path)))


def test_turns_with_other_keys_are_shown_with_their_keys(tmp_path):
    case = Rows([{"messages": [{"speaker": "user", "words": Q, "role": None}]}])
    assert "messages[0] has the keys speaker, words; expected role and content" in refusal(tmp_path, case)


def test_pairs_with_equal_answers_are_named(make_section, write_jsonl, logged):
    rows = [{"prompt": f"{k}?", "chosen": A, "rejected": A if k else B} for k in range(3)]
    encode(make_section(path=write_jsonl(rows)), "dpo")
    assert any("train: 2 of 3 pairs have the same answer twice: " in line for line in logged())


def test_rows_without_a_target_are_kept_on_request(make_section, write_jsonl):
    rows = [{"prompt": p, "chosen": A, "rejected": B} for p in (Q, LONG)]
    section = make_section(path=write_jsonl(rows), max_length=40, on_no_target="warn")
    chosen, rejected = encode(section, "dpo")
    assert chosen.num_targets.tolist()[1] == rejected.num_targets.tolist()[1] == 0


def test_a_text_format_that_is_named_reads_the_text_alone(make_section, write_jsonl):
    section = make_section(path=write_jsonl([{"prompt": Q, "text": A}]), format="text")
    examples = encode_examples(load_examples(section), tiny_tokenizer(), section, fallbacks=Fallbacks(strict=True))
    assert "".join(learnt(examples.train)) == A[1:]  # nothing precedes the first token
