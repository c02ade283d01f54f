"""What reward functions and environments get of the rows of prompts."""

from __future__ import annotations

import json

import pytest

from finetune.config.schema import DataSection
from finetune.errors import DataError
from finetune.training.rewards.prompt_rows import read_rows_by_source

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
