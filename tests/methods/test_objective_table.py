"""docs/methods.md has a row for each objective, with what the code knows of it.

FINETUNE_WRITE_TABLES=1 pytest tests/methods/test_objective_table.py
"""

from __future__ import annotations

import os
from typing import get_args

from finetune.config.objectives import OBJECTIVES, Objective
from finetune.config.schema import PreferenceSection, TrainingSection
from finetune.training.preferences.losses import _LOSSES
from tests.launches import REPOSITORY

PAGE = REPOSITORY / "docs" / "methods.md"
BEGIN, END = "<!-- table of objectives: written by the tests -->\n", "<!-- end of table -->"
ROWS = {"answers": "answers", "pairs": "pairs", "labelled": "answers with a `label`", "prompts": "prompts"}


def row_of(objective: Objective) -> str:
    paper = f"[arXiv:{objective.paper}](https://arxiv.org/abs/{objective.paper})" if objective.paper else "–"
    reference = "the base" if objective.has_reference else "none"
    cells = (f"`{objective.name}`", objective.title, ROWS[objective.rows], reference, objective.formula, paper)
    return f"| {' | '.join(cells)} |"


def test_the_page_has_the_table_of_the_code() -> None:
    head = ["| `training.objective` | name | rows | reference | loss of a row or pair | paper |", f"|{'---|' * 6}"]
    table = "\n".join(["", *head, *map(row_of, OBJECTIVES.values()), "", ""])
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    there, _, after = rest.partition(END)
    if os.environ.get("FINETUNE_WRITE_TABLES"):
        PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")
        return
    assert there == table


def test_every_objective_is_a_value_of_its_key_and_has_a_loss() -> None:
    assert get_args(TrainingSection.model_fields["objective"].annotation) == tuple(OBJECTIVES)
    assert OBJECTIVES.keys() - {"sft", "grpo"} == _LOSSES.keys()
    read = {key for objective in OBJECTIVES.values() for key in objective.keys}
    assert read == {*(f"preference.{key}" for key in PreferenceSection.model_fields), "grpo", "rollout", "reward"}
