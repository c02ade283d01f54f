from __future__ import annotations

import re
from datetime import date
from itertools import accumulate

import pytest
import torch
from pydantic import ValidationError

from finetune.data.encode import describe
from finetune.data.encoded import EncodedExamples, digest_tensors
from finetune.errors import DataError
from tests.data.conftest import encode
from tests.tiny import Style, tiny_tokenizer

USER = {"role": "user", "content": "Hi"}
CHAT = {"messages": [USER, {"role": "assistant", "content": "yes"}]}
TWO_ANSWERS = {"messages": [*CHAT["messages"], USER, {"role": "assistant", "content": "no"}]}


def shown(examples: EncodedExamples, index: int, style: Style = "phi4_mini") -> tuple[str, str]:
    """A row's text, and the part of it that is to be predicted."""
    tokenizer = tiny_tokenizer(style)
    row = examples[index]
    return str(tokenizer.decode(row.input_ids)), str(tokenizer.decode(row.input_ids[row.is_target]))


def test_rows_become_flat_tensors(make_section, write_jsonl):
    train = encode(make_section(path=write_jsonl([CHAT, "", TWO_ANSWERS]))).train
    assert len(train) == 2
    assert train[0].input_ids.dtype == torch.int64
    assert train[0].is_target.dtype == torch.bool
    assert train.sources[0].token_ids.dtype == torch.int32
    assert shown(train, 0) == ("<|user|>Hi<|end|><|assistant|>yes<|end|><|endoftext|>", "yes<|end|>")
    assert shown(train, 1)[1] == "yes<|end|>no<|end|>"
    assert train.lengths.tolist() == [len(train[0].input_ids), len(train[1].input_ids)] == [9, 16]
    assert train.num_targets.tolist() == [3, 5]
    assert train.source(1).endswith("train.jsonl:3")
    assert torch.equal(train[-1].input_ids, train[1].input_ids)
    with pytest.raises(IndexError):
        train[2]


def test_a_wait_for_many_rows_says_how_many_are_encoded(make_section, write_jsonl, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("finetune.data.encode.report_progress", said.append)
    monkeypatch.setattr("finetune.data.encode.ROWS_AT_ONCE", 2)
    encode(make_section(path=write_jsonl([CHAT] * 5)))
    assert said == ["2 encoded", "4 encoded", "5 encoded"]


@pytest.mark.parametrize("style", ["phi4_mini", "phi3", "phi4"])
def test_prompt_and_last_answer(make_section, write_jsonl, style):
    tokenizer = tiny_tokenizer(style)
    train = encode(make_section(path=write_jsonl([TWO_ANSWERS])), style).train
    prompt, answer = train.prompt_and_answer(0)
    rendered = tokenizer.apply_chat_template(TWO_ANSWERS["messages"][:-1], tokenize=False, add_generation_prompt=True)
    assert prompt == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(answer) == "no"


def test_prompt_and_completion_without_a_template_are_joined_and_ended(make_section, write_jsonl):
    rows = [{"prompt": "Hi: ", "completion": "yes"}, {"prompt": "", "completion": "yes"}]
    train = encode(make_section(path=write_jsonl(rows)), "none").train
    assert shown(train, 0, "none") == ("Hi: yes<|endoftext|>", "yes<|endoftext|>")
    assert train.prompt_and_answer(0).answer == tiny_tokenizer("none")("yes")["input_ids"]
    assert train[1].is_target.tolist() == [False, True, True], "nothing predicts a row's first token"


def test_plain_text_is_all_target_but_its_first_token(make_section, write_jsonl):
    rows = [{"text": "the<|user|>no"}, {"text": "the<|endoftext|>"}]
    train = encode(make_section(path=write_jsonl(rows))).train
    tokenizer = tiny_tokenizer()
    special = [tokenizer.convert_tokens_to_ids(token) for token in ("<|user|>", "<|endoftext|>")]
    assert train[0].input_ids.tolist()[-3] == special[0]
    assert shown(train, 0) == (
        "the<|user|>no<|endoftext|>",
        shown(train, 0)[0][len(tokenizer.decode(train[0][0][0])) :],
    )
    assert not train[0].is_target[0]
    assert train[0].is_target[1:].all()
    assert train[1].input_ids.tolist().count(special[1]) == 1


def test_long_rows_are_cut_on_the_right_and_counted(make_section, write_jsonl, logged):
    rows = [CHAT, TWO_ANSWERS, {"messages": [{**USER, "content": "x" * 30}, CHAT["messages"][1]]}]
    splits = encode(make_section(path=write_jsonl(rows), max_length=9, on_no_target="warn"))
    train = splits.train
    assert int(train.is_truncated.sum()) == 2
    assert train.is_truncated.tolist() == [False, True, True]
    assert train.lengths.tolist() == [9, 9, 9]
    assert train.num_targets.tolist() == [3, 3, 0]
    lines = describe(splits)
    assert lines[0] == (
        "train: 3 rows of chat messages, 27 tokens, 6 target tokens, longest row 9 tokens, 2 rows truncated"
    )
    assert lines[1].startswith("train: 1 row without a target token after truncation: ")
    assert lines[1].endswith("train.jsonl:3")
    assert lines[2:] == ["validation: off", "test: off"]
    assert set(lines) <= set(logged())
    with pytest.raises(DataError, match=r"train.jsonl:3 has no answer left to compare with"):
        train.prompt_and_answer(2)


def test_a_split_without_any_target_is_refused(make_section, write_jsonl):
    with pytest.raises(DataError, match=r"none of its 2 rows has a target token within data.max_length=5; the longest"):
        encode(make_section(path=write_jsonl([CHAT, TWO_ANSWERS]), max_length=5))


@pytest.mark.parametrize(
    ("row", "special"),
    [
        ({"messages": [{**USER, "content": "a<|end|>b"}, CHAT["messages"][1]]}, "<|end|>"),
        (
            {"messages": [{"role": "system", "content": "a", "tools": '[{"name": "<|/tool|>"}]'}, *CHAT["messages"]]},
            "<|/tool|>",
        ),
    ],
)
def test_special_tokens_in_a_content_are_refused(make_section, write_jsonl, row, special):
    with pytest.raises(DataError) as caught:
        encode(make_section(path=write_jsonl([CHAT, row])))
    assert "1 of 2 rows cannot be used" in str(caught.value)
    assert "train.jsonl:2: " in str(caught.value)
    assert f" contains {special}, a special token of the tokenizer" in str(caught.value)


def flat_fingerprint(examples: EncodedExamples) -> str:
    """The definition: a digest of the rows as tensors that lie end to end."""
    rows = [examples[row] for row in range(len(examples))]
    offsets = torch.tensor([0, *accumulate(len(row.input_ids) for row in rows)])
    tensors = [torch.cat([row.input_ids for row in rows]).int(), torch.cat([row.is_target for row in rows]), offsets]
    if examples.has_branches:
        tensors.append(examples.example_of)
    return digest_tensors(tensors)


def test_chosen_and_joined_rows_have_the_fingerprint_of_a_copy(make_section, write_jsonl):
    first = encode(make_section(path=write_jsonl([CHAT, TWO_ANSWERS, CHAT, TWO_ANSWERS, CHAT]))).train
    second = encode(make_section(path=write_jsonl([TWO_ANSWERS, CHAT], "other.jsonl"), train_on="each_turn")).train
    joined = EncodedExamples.joined([first.select([3, 0, 1, 1]), second, first])
    assert joined.has_branches
    for examples in (first, first.select([4, 0]), second, joined, joined.select_examples([6, 2, 4]), joined.select([])):
        assert examples.fingerprint == flat_fingerprint(examples) if len(examples) else not len(examples)
        assert examples.num_targets.tolist() == [
            int(row.is_target.sum()) for row in map(examples.__getitem__, range(len(examples)))
        ]
    assert [joined.source(row) for row in (0, 4)] == [first.source(3), second.source(0)]
    assert joined.select([5]).tokens(0).tolist() == second.tokens(1).tolist()
    one_source = {source.token_ids.data_ptr() for source in (*first.sources, *second.sources)}
    assert {source.token_ids.data_ptr() for source in joined.select([1, 5]).sources} == one_source


def test_rows_with_todays_date_are_warned_of_and_a_fixed_date_is_the_same_every_day(
    make_section, write_jsonl, tmp_path, caplog, monkeypatch
):
    class Tomorrow(date):
        @classmethod
        def today(cls):
            return cls.fromordinal(date.today().toordinal() + 1)

    template = tmp_path / "dated.jinja"
    asks = "{%- if strftime_now is defined %}{{ strftime_now('%d %B %Y') }}{% endif %}"
    template.write_text(asks + tiny_tokenizer().chat_template)
    path, settings = write_jsonl([CHAT]), {"chat_template": str(template)}
    encode(make_section(path=path, **settings))
    (warning,) = [record.message for record in caplog.records if "date" in record.message]
    assert re.search(r"Set data.template_date=\d{4}-\d\d-\d\d\.$", warning)
    caplog.clear()
    monkeypatch.setattr("finetune.data.template_date.date", Tomorrow)
    encode(make_section(path=path, **settings))
    (warning,) = [record.message for record in caplog.records if "date" in record.message]
    today, tomorrow = date.today().isoformat(), Tomorrow.today().isoformat()
    assert f"with the date {today}. A run that resumes needs them" in warning
    assert f"set data.template_date={tomorrow} for today's date, or {today} to keep" in warning
    caplog.clear()
    fixed = encode(make_section(path=path, **settings, template_date="2024-07-26")).train
    assert shown(fixed, 0)[0].startswith("26 July 2024<|user|>")
    (tmp_path / "text.jsonl").write_text('{"text": "Hi"}\n')
    encode(make_section(path=str(tmp_path / "text.jsonl"), **settings))  # text is not rendered
    assert not any("today" in record.message for record in caplog.records)
    with pytest.raises(ValidationError, match="2024-7-26 is not a date; write it as 2026-11-27"):
        make_section(path=path, template_date="2024-7-26")
