"""What reward functions and environments get of the rows of prompts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from finetune.config.schema import DataSection, RewardSection
from finetune.data.encoded import EncodedExamples
from finetune.errors import DataError
from finetune.training.rewards.conversations import GeneratedConversation
from finetune.training.rewards.functions import built_in_functions
from finetune.training.rewards.prompt_rows import PromptRows, check_expected, read_rows_by_source
from tests.tiny import tiny_tokenizer

SUBSETS = """---
configs:
- {config_name: algebra, data_files: algebra/*.jsonl}
- {config_name: geometry, data_files: geometry/*.jsonl}
---
"""


def mixture_of(*sources, tmp_path):
    return DataSection(mixture=list(sources), cache_dir=str(tmp_path / "cache"), validation=None)


def test_two_subsets_of_a_data_set_keep_their_own_columns(tmp_path):
    for name in ("algebra", "geometry"):
        file = tmp_path / "problems" / name / "train-00000-of-00001.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text("".join(json.dumps({"prompt": f"{name} {n}", "solved": n}) + "\n" for n in (1, 2)))
    (tmp_path / "problems/README.md").write_text(SUBSETS)
    sources = [{"path": str(tmp_path / "problems"), "name": name} for name in ("algebra", "geometry")]
    rows = read_rows_by_source(mixture_of(*sources, tmp_path=tmp_path))
    prompts = {source.removeprefix(f"{tmp_path}/"): row.prompt for source, row in rows.items()}
    assert prompts == {
        f"problems {name} train row {n}": f"{name} {n}" for name in ("algebra", "geometry") for n in (1, 2)
    }


def test_a_file_is_in_a_mixture_twice_only_if_both_sources_read_it_alike(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"short": "a", "long": "aaa"}) + "\n")
    short, long = ({"path": str(file), "columns": {"prompt": name}} for name in ("short", "long"))
    assert len(read_rows_by_source(mixture_of(short, {**short, "weight": 2}, tmp_path=tmp_path))) == 1
    with pytest.raises(DataError, match=r"rows\.jsonl:1 is in two sources of data\.mixture"):
        read_rows_by_source(mixture_of(short, long, tmp_path=tmp_path))


def test_length_counts_what_the_model_generated_and_not_what_it_read():
    examples = EncodedExamples.from_rows([([5, 6, 7], [False, False, True])], end_id=7, row_type="messages")
    rows = PromptRows(examples, tiny_tokenizer(), None)
    answer = rows.answer(0, GeneratedConversation([5, 7, 9, 9, 9, 6, 7], lengths=[2, 3, 2]), [7])
    assert answer.ids == [5, 7, 9, 9, 9, 6, 7]
    assert built_in_functions(RewardSection(), longest=8)["length"](answer) == 1 - 4 / 8


@pytest.mark.parametrize(
    ("mixture", "way"),
    [
        (None, r"data\.columns\.completion\."),
        (["a"], r"`columns: \{completion: NAME\}` of its source in data\.mixture\."),
    ],
)
def test_a_row_without_an_expected_answer_is_refused_with_a_key_that_works(mixture, way):
    config = SimpleNamespace(data=SimpleNamespace(mixture=mixture), reward=SimpleNamespace(functions=["exact_match"]))
    prompts = SimpleNamespace(expected=["12", ""], sources=["a.jsonl:1", "a.jsonl:2"])
    with pytest.raises(DataError, match=rf"1 row has none; the first is a\.jsonl:2\. .* name the column in {way}$"):
        check_expected(config, SimpleNamespace(needing_expected=("exact_match",)), prompts)
