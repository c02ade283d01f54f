"""Rows of prompts, for answers that are generated and rewarded: what they may look like, and what is refused."""

from __future__ import annotations

from typing import get_args

import pytest
from datasets import Dataset

from finetune.config.schema import DataSection
from finetune.data.encoded import EncodedExamples
from finetune.data.examples import load_examples
from finetune.data.formats import Example
from finetune.errors import DataError
from finetune.inference.evaluation import Dialogues
from finetune.training.rewards.conversations import GeneratedConversation
from finetune.training.rewards.prompt_rows import PromptRows, read_rows_by_source
from tests.data.conftest import encode_train
from tests.data.test_formats import ANSWER, MORE, ONE_TURN, SYSTEM, USER
from tests.tiny import Style, tiny_tokenizer

HEADER = "<|user|>Hi<|end|><|assistant|>"


def read(section: DataSection) -> list[Example]:
    (part,) = load_examples(section, "prompts").train.parts
    return list(part.whole.read())


def encode(section: DataSection, style: Style = "phi4_mini") -> EncodedExamples:
    return encode_train(section, style, reads="prompts")


def prompts_of(examples: EncodedExamples) -> list[tuple[str, str]]:
    """Each prompt as generation starts from it, and the expected answer."""
    tokenizer = tiny_tokenizer()
    dialogues = Dialogues(examples, tokenizer)
    texts = [str(tokenizer.decode(prompt)) for prompt in dialogues.prompts]
    return list(zip(texts, dialogues.expected, strict=True))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER]}, (HEADER, "")),
        ({"prompt": [SYSTEM, USER]}, (f"<|system|>Be brief.<|end|>{HEADER}", "")),
        ({"prompt": [USER, ANSWER, MORE[0]]}, (f"{HEADER}yes<|end|><|user|>And?<|end|><|assistant|>", "")),
        ({"messages": [USER, ANSWER, *MORE]}, (f"{HEADER}yes<|end|><|user|>And?<|end|><|assistant|>", "no")),
        (
            {"conversations": [{"from": "human", "value": "Hi"}], "system": "Be brief."},
            (f"<|system|>Be brief.<|end|>{HEADER}", ""),
        ),
        *[(row, (HEADER, "yes")) for name, row in ONE_TURN.items() if name != "prompt_completion"],
        ({"prompt": [USER], "completion": "yes"}, (HEADER, "yes")),
    ],
    ids=str,
)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_generation_starts_after_the_prompt_and_the_last_answer_is_the_expected_one(
    make_section, write_jsonl, tmp_path, row, expected, ending
):
    path = write_jsonl([row])
    if ending == "parquet":
        path = str(tmp_path / "rows.parquet")
        Dataset.from_list([row]).to_parquet(path)
    assert prompts_of(encode(make_section(path=path))) == [expected]


@pytest.mark.parametrize(
    "row",
    [
        *[row for name, row in ONE_TURN.items() if name != "prompt_completion"],
        {"prompt": [USER]},
        {"messages": [USER]},
        {"conversations": [{"from": "human", "value": "Hi"}]},
        {"messages": [USER, ANSWER, MORE[0], {**MORE[1], "weight": 0}]},
        {"prompt": [USER], "completion": [ANSWER, MORE[0]]},
    ],
    ids=str,
)
def test_a_reward_function_sees_the_turns_that_were_answered(make_section, write_jsonl, row):
    """Never the expected answer, nor turns after it."""
    section = make_section(path=write_jsonl([{**row, "unit": "km"}]))
    rows = PromptRows(encode(section), tiny_tokenizer(), read_rows_by_source(section))
    assert tiny_tokenizer().decode(rows.prompts[0]) == HEADER
    answer = GeneratedConversation()
    answer.add(tiny_tokenizer()("no<|end|>")["input_ids"])
    found = rows.answer(0, answer, [tiny_tokenizer().convert_tokens_to_ids("<|end|>")])
    assert found.prompt == [USER]
    assert found.columns["unit"] == "km"
    assert not found.columns.keys() & {"prompt", "completion", "messages", "conversations"}
    assert (found.text, found.whole, tiny_tokenizer().decode(found.ids)) == ("no", "no", "no<|end|>")


def test_an_example_keeps_the_whole_row_for_reward_functions(make_section, write_jsonl):
    rows = [{"prompt": "Hi", "solution": "4", "level": 2, "tests": [{"in": 1}]}, {"prompt": "And?", "solution": None}]
    section = make_section(path=write_jsonl(rows))
    examples = read(section)
    assert [example.columns for example in examples] == rows
    assert [example.source for example in examples] == [f"{section.path}:1", f"{section.path}:2"]
    assert [(example.prompt, example.completion) for example in examples] == [("Hi", ""), ("And?", "")]
    other = load_examples(make_section(path=write_jsonl([{**ONE_TURN["messages"], "id": 3}], "other.jsonl")))
    assert other.train[0].columns is None


REFUSED_PROMPTS = [
    ({"prompt": [USER, ANSWER]}, "prompt ends with a turn of the assistant, so there is nothing to answer"),
    ({"prompt": " \n"}, "prompt is blank (' \\n')"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [USER, {**ANSWER, "weight": 0}]}, "every assistant turn has weight 0"),
    (["Hi"], "a list; expected an object"),
]
"""Rows that hold no prompt, and why."""


@pytest.mark.parametrize(("row", "problem"), REFUSED_PROMPTS, ids=str)
def test_a_row_that_is_no_prompt_says_why(make_section, write_jsonl, row, problem):
    with pytest.raises(DataError) as caught:
        read(make_section(path=write_jsonl([row])))
    assert f"train.jsonl:1: {problem}" in str(caught.value)


@pytest.mark.parametrize("style", get_args(Style))
def test_a_prompt_alone_begins_as_with_its_answer_under_every_template(make_section, write_jsonl, style):
    rows = [{"prompt": "Hi"}, ONE_TURN["prompt_completion"]]
    dialogues = Dialogues(encode(make_section(path=write_jsonl(rows)), style), tiny_tokenizer(style))
    assert dialogues.prompts[0] == dialogues.prompts[1] != []
    assert dialogues.expected == ["", "yes"]
