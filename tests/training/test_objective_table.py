"""docs/methods.md has a row for each objective, with what the code knows of it.

FINETUNE_WRITE_TABLES=1 pytest tests/training/test_objective_table.py
"""

from __future__ import annotations

import os
import re
from typing import get_args

from finetune.config.objectives import OBJECTIVES, ObjectiveFacts
from finetune.config.schema import PreferenceSection, TrainingSection
from finetune.training.preferences.losses import _LOSSES
from tests.launches import REPOSITORY

PAGE = REPOSITORY / "docs" / "methods.md"
BEGIN, END = "<!-- table of objectives: written by the tests -->\n", "<!-- end of table -->"
ROWS = {"answers": "answers", "pairs": "pairs", "labelled": "answers with a `label`", "prompts": "prompts"}


def row_of(objective: ObjectiveFacts) -> str:
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
    assert read == {
        *(f"preference.{key}" for key in PreferenceSection.model_fields),
        "grpo",
        "rollout",
        "reward",
        "data.keep",
        "data.keep_prompts",
    }


def test_other_modules_ask_an_objective_and_do_not_compare_its_name_or_its_rows() -> None:
    """The homes are the table, the schema, the base class and the folders of the objectives."""
    homes = (
        "config/objectives.py",
        "config/schema.py",
        "training/objective.py",
        "training/preferences",
        "training/rewards",
    )
    compared = re.compile(
        r"objective(\.name)? *(==|!=)|objective(\.name)? (not )?in [(\[{]|facts\.rows|objective\.rows *(==|!=|in )"
        r"|objective\]\.rows\b|isinstance\([^)]*Encoded(Pairs|Labelled)\)"
    )
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path in sorted((REPOSITORY / "finetune").rglob("*.py"))
        if not str(path.relative_to(REPOSITORY / "finetune")).startswith(homes)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if compared.search(line)
    ]
    assert len(found) <= 4, "\n".join(found)
