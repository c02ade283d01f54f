"""Several sources, each row as often as its weight says: the same rows every time, named by their own places."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from pathlib import Path

import pytest
from torch.overrides import TorchFunctionMode

from finetune.config.compose import compose, config_from_dict
from finetune.data.encoded import EncodedExamples
from finetune.data.examples import load_examples
from finetune.data.mixture import unique_names
from finetune.errors import ConfigError, DataError
from finetune.inference.evaluation import Dialogues
from tests.data.conftest import encode
from tests.tiny import tiny_tokenizer

CHATS = [{"prompt": f"Hi {number}", "completion": "yes"} for number in range(10)]
TEXTS = [{"text": f"the answer {number}"} for number in range(4)]


class CallsOfTorch(TorchFunctionMode):
    """Counts the calls of torch in a block."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def files(write_jsonl):
    return write_jsonl(CHATS, "chats.jsonl"), write_jsonl(TEXTS, "texts.jsonl")


def times(examples: EncodedExamples | None) -> Counter[str]:
    """Count how often each row of a split is in an epoch."""
    return Counter(Path(examples.source(row)).name for row in range(len(examples)))


@pytest.mark.parametrize(
    ("weight", "each", "more"), [(1, 1, 0), (2, 2, 0), (0.5, 0, 5), (2.3, 2, 3), (0.04, 0, 0), (0.05, 0, 1)]
)
def test_a_weight_says_how_often_each_row_comes(make_section, files, weight, each, more):
    section = make_section(mixture=[{"path": files[0], "weight": weight}, {"path": files[1]}])
    if not each and not more:
        with pytest.raises(DataError, match=r"chats.jsonl: a weight of 0.04 selects none of its 10 rows"):
            encode(section)
        return
    found = times(encode(section).train)
    assert sum(found[f"chats.jsonl:{line}"] == each + 1 for line in range(1, 11)) == more
    assert sum(found[f"chats.jsonl:{line}"] == each for line in range(1, 11)) == 10 - more
    assert all(found[f"texts.jsonl:{line}"] == 1 for line in range(1, 5))


def test_the_same_mixture_is_the_same_rows_and_another_seed_other_ones(make_section, files):
    section = make_section(mixture=[{"path": files[0], "weight": 0.5}, {"path": files[1], "weight": 2}])
    first = encode(section).train
    again = encode(section.model_copy(update={"cache_dir": section.cache_dir + "-2"})).train
    assert again.fingerprint == first.fingerprint
    assert encode(section.model_copy(update={"split_seed": 7})).train.fingerprint != first.fingerprint


def test_the_digests_of_rows_take_as_many_calls_of_torch_whatever_the_number_of_rows(make_section, files):
    rows = encode(make_section(mixture=[{"path": files[0]}, {"path": files[1]}])).train
    num_calls = []
    for chosen in (rows.select([13]), rows.select([*reversed(range(14))] * 20)):
        with CallsOfTorch() as calls:
            digests = chosen.digest_rows()
        num_calls.append(calls.count)
        for row, (of_tokens, of_both) in enumerate(digests):
            tokens, targets = chosen.tokens(row).tobytes(), chosen[row].is_target.numpy().tobytes()
            assert of_tokens.tobytes() == blake2b(tokens, digest_size=16).digest()
            assert of_both.tobytes() == blake2b(tokens + targets, digest_size=16).digest()
    assert num_calls[0] == num_calls[1]


def test_a_source_is_encoded_once_whatever_its_weight(make_section, files, logged):
    encode(make_section(mixture=[{"path": files[0]}, {"path": files[1]}]))
    encode(make_section(mixture=[{"path": files[0], "weight": 3}, {"path": files[1], "weight": 0.5}]))
    assert sum("encoded before" in line for line in logged()) == 2
    assert f"train: 30 rows an epoch from the 10 of {files[0]} (weight 3)" in logged()
    assert f"train: 2 rows an epoch from the 4 of {files[1]} (weight 0.5)" in logged()


def test_a_share_is_taken_of_every_source_and_is_not_weighted(make_section, files):
    section = make_section(mixture=[{"path": files[0], "weight": 2}, {"path": files[1]}], validation="0.5")
    splits = encode(section)
    assert sorted(times(splits.validation).values()) == [1] * 7
    assert len(splits.train) == 2 * 5 + 2
    assert not set(times(splits.train)) & set(times(splits.validation))


def test_splits_that_sources_have_are_joined(make_section, write_jsonl, tmp_path):
    for name in ("a", "b"):
        write_jsonl([{"prompt": name, "completion": "yes"}], f"{name}/train.jsonl")
        write_jsonl([{"prompt": f"{name}!", "completion": "yes"}], f"{name}/test.jsonl")
    splits = encode(make_section(mixture=[{"path": str(tmp_path / name)} for name in ("a", "b")]))
    assert [splits.test.source(row) for row in range(2)] == [f"{tmp_path}/{name}/test.jsonl:1" for name in ("a", "b")]
    assert len(load_examples(make_section(mixture=[{"path": str(tmp_path / "a")}])).train) == 1


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{weight: 2}", "[0] has no path; expected a file"),
        ("{path: a, wait: 2}", "[0] has the key wait; expected path, name"),
        ("{path: a, weight: .nan}", "[0].weight is nan; expected a number above 0"),
        ("{path: a, columns: {b: c}}", "[0].columns: there is no column b to rename; expected messages,"),
    ],
)
def test_a_source_that_cannot_be_is_a_config_error(source, problem):
    with pytest.raises(ConfigError) as caught:
        compose(["model=phi_tiny", f"data.mixture=[{source}]"])
    assert "data.mixture: " in str(caught.value)
    assert problem in str(caught.value)


def test_a_mixture_in_words_or_a_dict_takes_the_place_of_a_path():
    named = compose(["model=phi_tiny", "data=orders", "data.columns.prompt=0", "data.columns.completion=1"])
    assert named.data.columns == {"prompt": "0", "completion": "1"}
    config = compose(["model=phi_tiny", "data.mixture=[{path: a.jsonl, weight: 0.5}, {path: b.jsonl}]"])
    assert config.data.mixture == [{"path": "a.jsonl", "weight": 0.5}, {"path": "b.jsonl"}]
    from_dict = config_from_dict({"model": "phi_tiny", "data": {"mixture": config.data.mixture}}, "here")
    assert from_dict.data.mixture == config.data.mixture
    with pytest.raises(ConfigError, match=r"data.mixture: data.path is set too"):
        compose(["model=phi_tiny", "data=orders", "data.mixture=[{path: a.jsonl}]"])


def test_rows_of_plain_text_have_no_answer_in_a_split_that_also_has_conversations(make_section, files):
    chats, texts = files
    train = encode(make_section(mixture=[{"path": texts}, {"path": chats, "max_rows": 2}])).train
    assert train.has_answer.tolist() == [False] * 4 + [True] * 2
    assert Dialogues(train, tiny_tokenizer()).expected == ["yes", "yes"]


ASKED = [{"question": "Hi", "completion": "yes", "context": "x"}]
LABELLED = [{"prompt": f"Hi {number}", "completion": "yes", "label": number > 1} for number in range(4)]


@pytest.mark.parametrize(
    ("rows", "says", "columns"),
    [
        (ASKED, "for example {} in the source of_one of data.mixture.", {"prompt": "question", "input": "context"}),
        (LABELLED, "or set {} in the source of_one of data.mixture to use every row", {"label": "none"}),
    ],
)
def test_advice_on_the_columns_of_one_source_is_about_that_source(
    make_section, files, write_jsonl, rows, says, columns
):
    of_one = {"path": write_jsonl(rows, "of_one.jsonl")}
    written = "{" + ", ".join(f"{ours}: {name}" for ours, name in columns.items()) + "}"
    with pytest.raises(DataError) as refused:
        encode(make_section(mixture=[{"path": files[0]}, of_one], validation="10%"))
    assert says.format(f"columns: {written}") in str(refused.value)
    assert "data.columns." not in str(refused.value)
    assert len(encode(make_section(mixture=[{"path": files[0]}, of_one | {"columns": columns}])).train) == 10 + len(
        rows
    )


def test_a_name_has_the_parts_that_tell_it_from_the_others_and_no_two_are_equal():
    assert unique_names([["x", "a", "train"], ["x", "b", "train"], ["x", "b", "test"]]) == [
        "a-train",
        "b-train",
        "test",
    ]
    assert unique_names([["a b"], ["a/b"], ["a?b"]]) == ["a_b", "a_b-2", "a_b-3"]
