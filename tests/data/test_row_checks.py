"""Each check finds the rows that it is for, says where they are, and does what its key says."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.config.schema import DataSection
from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedExamples, EncodedSplits
from finetune.data.examples import load_examples
from finetune.data.preferences import encode_preferences
from finetune.data.row_checks import (
    count_by_file,
    describe_counts,
    describe_rows,
    keys_of_rows,
    learns_nothing_or_everything,
    repeated_rows,
)
from finetune.errors import DataError
from tests.tiny import CHAT_TEMPLATES, tiny_tokenizer

SHORT = {"prompt": "Hi", "completion": "yes"}  # 9 tokens: <|user|> H i <|end|> <|assistant|> y es <|end|> and eos
LONG_ANSWER = {"prompt": "Hi", "completion": "yes or no the the the"}
LONG_PROMPT = {"prompt": "x" * 40, "completion": "yes"}
ODD = ("without_end_of_turn", "truncated", "few_targets", "most_targets", "repeated", "empty_question")
TWO_TURNS = {"messages": [{"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "yes"))] * 2}


def encode(section: DataSection, **keys: Any) -> EncodedSplits:
    section = section.model_copy(update=keys)
    return encode_examples(load_examples(section), tiny_tokenizer(), section)


def refusal(section: DataSection, **keys: Any) -> str:
    with pytest.raises(DataError) as caught:
        encode(section, **keys)
    return str(caught.value)


def test_an_answer_that_is_cut_before_its_end_is_refused_and_named(make_section, write_jsonl):
    section = make_section(path=write_jsonl([SHORT, LONG_ANSWER, SHORT]), max_length=10)
    message = refusal(section)
    assert message.startswith("train: 1 of 3 rows have an answer that data.max_length=10 cuts before its end of turn: ")
    assert "train.jsonl:2 (15 tokens): the model would learn answers that break off." in message
    assert message.endswith(
        "Raise data.max_length (the longest has 15 tokens), or set data.on_truncated_answer=drop to leave these rows "
        "out, or data.on_truncated_answer=warn to keep them."
    )
    assert not encode(section, max_length=15).train.is_truncated.any()


def test_rows_can_be_left_out_or_kept(make_section, write_jsonl, logged):
    section = make_section(path=write_jsonl([SHORT, LONG_ANSWER, SHORT]), max_length=10)
    left = encode(section, on_truncated_answer="drop").train
    assert [left.source(row)[-1] for row in range(len(left))] == ["1", "3"]
    assert any("They are left out (data.on_truncated_answer=drop)" in line for line in logged())
    kept = encode(section, on_truncated_answer="warn").train
    assert kept.lengths.tolist() == [9, 10, 9]
    assert any("or set data.on_truncated_answer=drop" in line for line in logged())


@pytest.mark.parametrize(("action", "rows"), [("warn", 2), ("drop", 1)])
def test_long_rows_are_the_users_business(make_section, write_jsonl, logged, action, rows):
    section = make_section(path=write_jsonl([TWO_TURNS, TWO_TURNS | {"messages": TWO_TURNS["messages"][:2]}]))
    assert len(encode(section, max_length=10, on_long_row=action).train) == rows
    assert any("train: 1 of 2 rows are longer than data.max_length=10: " in line for line in logged())
    assert refusal(section, max_length=10, on_long_row="refuse").startswith("train: 1 of 2 rows are longer")


def test_rows_without_a_target(make_section, write_jsonl):
    section = make_section(path=write_jsonl([SHORT, LONG_PROMPT]), max_length=20)
    message = refusal(section)
    assert "train: 1 of 2 rows have no token that carries loss within data.max_length=20: " in message
    assert "train.jsonl:2 (47 tokens)" in message
    assert len(encode(section, on_no_target="drop").train) == 1
    assert encode(section, on_no_target="warn").train.num_targets.tolist() == [3, 0]


@pytest.mark.parametrize(("row", "key"), [(LONG_PROMPT, "on_no_target"), (LONG_ANSWER, "on_truncated_answer")])
def test_prompts_that_are_cut_can_only_be_left_out(make_section, write_jsonl, logged, row, key):
    """`PromptRows` refuses them, so no advice may say to keep them."""
    section = make_section(path=write_jsonl([SHORT, row]), max_length=10)
    with pytest.raises(DataError, match=r"Raise data\.max_length") as caught:
        encode_examples(load_examples(section, "prompts"), tiny_tokenizer(), section)
    assert str(caught.value).endswith(f", or set data.{key}=drop to leave these rows out.")
    assert str(caught.value).count(": prompts and expected answers must be whole. ") == 1, "not cut off"
    assert not [line for line in logged() if "longer than" in line], "they are named once"
    left = section.model_copy(update={key: "drop"})
    assert len(encode_examples(load_examples(left, "prompts"), tiny_tokenizer(), left).train) == 1


def test_nothing_that_teaches_the_end_of_turn(make_section, write_jsonl, logged):
    section = make_section(path=write_jsonl([LONG_ANSWER] * 2), max_length=10, on_truncated_answer="warn")
    message = refusal(section)
    assert message.startswith("train: none of 2 rows has the token that ends an answer (id 321) among those that carry")
    assert "or set data.on_untrained_end=warn" in message
    assert len(encode(section, on_untrained_end="warn").train) == 2
    assert any("would not learn to stop" in line for line in logged())


def test_a_doubled_beginning_of_sequence(make_section, write_jsonl):
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|system|>"
    tokenizer.chat_template = "{{ bos_token }}{{ bos_token }}" + CHAT_TEMPLATES["phi4_mini"]
    section = make_section(path=write_jsonl([SHORT] * 5))
    with pytest.raises(DataError) as caught:
        encode_examples(load_examples(section), tokenizer, section)
    assert "train: 5 of 5 rows begin with the beginning-of-sequence token twice: " in str(caught.value)
    assert "train.jsonl:3 and others: at generation the model sees it once" in str(caught.value)
    section = section.model_copy(update={"on_doubled_bos": "warn"})
    assert len(encode_examples(load_examples(section), tokenizer, section).train) == 5
    tokenizer.chat_template = "{{ bos_token }}" + CHAT_TEMPLATES["phi4_mini"]
    section = section.model_copy(update={"on_doubled_bos": "refuse"})
    assert len(encode_examples(load_examples(section), tokenizer, section).train) == 5


def distinct(count: int, start: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"Hi {number}", "completion": "yes"} for number in range(start, start + count)]


def test_rows_in_training_and_test(make_section, write_jsonl):
    train = write_jsonl([*distinct(30), SHORT, *distinct(1)])
    test = write_jsonl([*distinct(9, start=40), SHORT, *distinct(1)], "test.jsonl")
    section = make_section(path=train, test=test)
    message = refusal(section)
    assert message.startswith(
        f"test: 2 of 11 rows are training rows too: {test}:10 is {train}:31, {test}:11 is {train}:1"
    )
    left = encode(section, on_overlap="drop")
    assert (len(left.train), len(left.test or ())) == (29, 11)
    assert all("Hi 0<" not in str(tiny_tokenizer().decode(row.input_ids)) for row in left.train)
    assert len(encode(section, on_overlap="warn").train) == 32


def test_training_rows_that_are_in_either_other_split_are_left_out_of_training(make_section, write_jsonl):
    rows = [SHORT | {"prompt": prompt} for prompt in ("Hi", "Ho", "Ha")]
    files = {"path": write_jsonl(rows), "validation": write_jsonl(rows[:1], "v.jsonl")}
    splits = encode(make_section(**files, test=write_jsonl(rows[1:2], "t.jsonl")), on_overlap="drop")
    assert splits.train.numbers.tolist() == [3]


def test_plain_text_may_be_cut_anywhere(make_section, write_jsonl, logged):
    section = make_section(path=write_jsonl([{"text": "yes and no " * n} for n in (20, 30)]), max_length=10)
    splits = encode(section, on_truncated_answer="error", on_untrained_end="error")
    assert splits.train.is_truncated.tolist() == [True, True]
    assert any("the token that ends a text" in line for line in logged())


def test_a_pair_and_its_opposite_are_different_rows(make_section, write_jsonl):
    pair = {"prompt": "Hi", "chosen": "yes", "rejected": "no"}
    pairs = [pair, pair | {"chosen": "no", "rejected": "yes"}, pair]
    rows = encode_preferences(make_section(path=write_jsonl(pairs)), tiny_tokenizer()).train
    assert repeated_rows(rows, keys_of_rows([side.digest_rows() for side in rows.sides])) == [2]


def test_all_refusals_come_at_once(make_section, write_jsonl):
    section = make_section(path=write_jsonl([SHORT, LONG_ANSWER, LONG_PROMPT]), max_length=10)
    section = section.model_copy(update={"validation": write_jsonl([SHORT], "validation.jsonl")})
    lines = refusal(section).splitlines()
    assert lines[0] == "the data has 3 problems:"
    assert [line.split(": ")[0].strip() for line in lines[1:]] == ["train", "train", "validation"]


def test_the_advice_where_nothing_is_left_is_for_the_check(make_section, write_jsonl):
    path = write_jsonl([SHORT])
    section = make_section(path=path, validation=write_jsonl([SHORT], "validation.jsonl"), on_overlap="drop")
    assert refusal(section).startswith(
        "train: data.on_overlap=drop leaves no row. Take the training rows out of the validation split, or give"
    )


def test_tokens_with_loss_are_counted_by_file_and_by_what_they_are(make_section, write_jsonl):
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "yes"}}}
    thinking, calls = (
        "<think>\nor no\n</think>\n\n",
        '<|tool_call|>[{"name": "look", "arguments": {"at": "yes"}}]<|/tool_call|>',
    )
    answers = [
        ({"content": "yes", "reasoning_content": "or no"}, thinking, ""),
        ({"content": "<think>or no</think>\n\nyes"}, "<think>or no</think>\n\n", ""),
        ({"content": "yes", "tool_calls": [call]}, "", calls),
        ({"content": "", "reasoning_content": "or no", "tool_calls": [call]}, thinking, calls),
        ({"content": "yes or no <think>"}, "", ""),
    ]
    chats = [_asked("Hi", answer) for answer, *_ in answers]
    long_answer = _asked("Hi", {"content": "yes or no " * 60})
    odd = [chats[4], chats[4], _asked("x" * 400, {"content": "y"}), _asked(" ", {"content": "no " * 300}), long_answer]
    paths = [write_jsonl(chats, "chats.jsonl"), write_jsonl(odd, "odd.jsonl")]
    keys = {"chat_template": "phi4_mini", "max_length": 450, "on_truncated_answer": "warn"}
    splits = encode(make_section(path=paths, **keys))
    tokenizer = tiny_tokenizer()
    reasoning, tool_call = (
        sum(len(tokenizer.encode(row[part], add_special_tokens=False)) for row in answers) for part in (1, 2)
    )
    of_chats, of_odd = count_by_file(splits.train, repeated_rows(splits.train, _keys(splits.train)))
    assert (of_chats["reasoning"], of_chats["tool_call"], of_chats["end_of_turn"]) == (reasoning, tool_call, 5)
    assert of_chats["target_tokens"] == of_chats["answer"] + reasoning + tool_call + 5
    assert 0 < of_chats["answer"] < 5 * 8
    assert {name: of_chats[name] for name in ODD} == dict.fromkeys(ODD, 0)
    assert of_odd["rows"] == 5
    assert {name: of_odd[name] for name in ODD} == {**dict.fromkeys(ODD, 1), "repeated": 2}
    assert of_odd["file"] == paths[1]
    assert describe_counts(of_odd).endswith(
        "; rows whose end of turn carries no loss or was cut: 1; rows with loss on less than 1 % of their tokens: 1; "
        "rows with loss on more than 99 % of them: 1; rows that repeat an earlier one: 2; "
        "rows with an empty question: 1"
    )
    assert learns_nothing_or_everything(of_odd) == "", "some of its rows are usual"
    [files, lines, tokens, *_], names = describe_rows(splits.train, _keys(splits.train))
    assert (names, files.tolist(), lines.tolist()) == (paths, [0] * 5 + [1] * 5, [1, 2, 3, 4, 5] * 2)
    assert tokens.tolist() == splits.train.lengths.tolist()
    only = encode(make_section(path=write_jsonl(odd[3:4]), **keys, on_untrained_end="warn")).train
    [counts] = count_by_file(only, [])
    assert "more than 99 % of the tokens of every row carry loss" in learns_nothing_or_everything(counts)
    [of_prompts] = count_by_file(only, [], are_prompts=True)
    assert (of_prompts["target_tokens"], of_prompts["answer"], of_prompts["most_targets"]) == (0, 0, 0)


def _asked(question: str, answer: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", **answer}]}


def _keys(rows: EncodedExamples) -> Any:
    return keys_of_rows([rows.digest_rows()])


@pytest.mark.parametrize(
    ("reads", "ids", "names", "count"),
    [
        ("", ("c1", "c2"), None, 0),
        ("", ("c2", "c1"), None, 1),
        ("", ("c2", "c2"), None, 0),
        ("", ("c2", "c1"), ("look", "find"), 1),
        ("tool_call_id", ("c2", "c1"), None, 0),
        ("name", ("c2", "c1"), None, 1),
        ("name", ("c2", "c1"), ("look", "find"), 0),
        ("name", ("c2", "c1"), ("look", "look"), 1),
    ],
)
def test_results_in_another_order_than_their_calls_are_counted(
    make_section, write_jsonl, tmp_path, reads, ids, names, count
):
    """A template that writes neither ids nor names of results writes them in the order of the file."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}"
        f"{{% endfor %}}{f'{{{{ m.{reads} }}}}' if reads else ''}<|end|>{{% endfor %}}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (tmp_path / "own.jinja").write_text(template)
    calls = [
        {"type": "function", "id": each, "function": {"name": name, "arguments": {}}}
        for each, name in (("c1", "find"), ("c2", "look"))
    ]
    results = [{"role": "tool", "tool_call_id": each, "content": "no"} for each in ids]
    results = (
        [{**turn, "name": name} for turn, name in zip(results, names or ("", ""), strict=True)] if names else results
    )
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *results,
        {"role": "assistant", "content": "yes"},
    ]
    keys = {"chat_template": str(tmp_path / "own.jinja"), "on_ignored_key": "warn"}
    splits = encode(make_section(path=write_jsonl([{"messages": turns}]), **keys))
    (counts,) = count_by_file(splits.train, [])
    assert (counts["reordered_results"], counts["empty_question"]) == (count, 0)
