"""The objectives of a run: the rows that each needs, its reference, formula and paper, and the class that computes it.

Nothing here imports torch. The classes are subclasses of `finetune.training.objective.Objective`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SECTIONS = ("preference", "grpo", "rollout", "reward")
"""Sections with keys that only some objectives read."""
_KEYS = ("data.keep", "data.keep_prompts")


@dataclass(frozen=True, kw_only=True)
class ObjectiveFacts:
    """What is known about a value of `training.objective` without torch.

    Attributes:
        name: the value.
        computed_by: its class, as `module:class`. A run imports the one that it uses.
        title: its name in text.
        rows: answers to learn, pairs of a chosen and a rejected answer, answers labelled good or bad, or prompts.
        rows_per_example: the rows of a micro-batch that belong to one row of the data.
        has_reference: whether the loss also needs the log-probabilities of the base, so that a step computes it too.
        keys: the keys and sections that it reads, of those that not every objective does.
        formula: the loss of a row in words of mathematics, see docs/methods.md.
        paper: arXiv id.
    """

    name: str
    computed_by: str
    title: str
    rows: Literal["answers", "pairs", "labelled", "prompts"]
    rows_per_example: int = 1
    has_reference: bool = False
    keys: tuple[str, ...] = ()
    formula: str
    paper: str = ""

    @property
    def learns_answers(self) -> bool:
        """Return whether it learns the one answer of each row, which a validation can expect of the model."""
        return self.rows == "answers"

    @property
    def compares_answers(self) -> bool:
        """Return whether it prefers some answers of the data to others."""
        return self.compares_pairs or self.reads_labels

    @property
    def compares_pairs(self) -> bool:
        """Return whether a row has a chosen and a rejected answer."""
        return self.rows == "pairs"

    @property
    def reads_labels(self) -> bool:
        """Return whether the answers of the rows are labelled good or bad."""
        return self.rows == "labelled"

    @property
    def generates_answers(self) -> bool:
        """Return whether it learns from the model's own answers to the prompts of the rows."""
        return self.rows == "prompts"

    @property
    def reads(self) -> Literal["answers", "chosen", "labelled", "prompts"]:
        """Return what is read of a row first. The rejected side of a pair is read after the chosen one."""
        return "chosen" if self.rows == "pairs" else self.rows

    @property
    def sides(self) -> int:
        """Return the number of answers that are read of a row."""
        return 2 if self.rows == "pairs" else 1

    def reads_key(self, key: str) -> bool:
        """Return whether the objective reads a key, for example `preference.beta`."""
        is_of_some = key.partition(".")[0] in SECTIONS or key in _KEYS
        return not is_of_some or any(key == own or key.startswith(f"{own}.") for own in self.keys)

    @property
    def example_name(self) -> str:
        """Return the name of an example in text: `row`, `pair` or `prompt`."""
        return {"pairs": "pair", "prompts": "prompt"}.get(self.rows, "row")

    @property
    def unit(self) -> str:
        """Return the unit of the loss, in words."""
        units = {"pairs": "nats per pair", "labelled": "mean over rows, without a unit", "prompts": "without a unit"}
        return units.get(self.rows, "nats per target token")


OBJECTIVES: Mapping[str, ObjectiveFacts] = {
    objective.name: objective
    for objective in (
        ObjectiveFacts(
            name="sft",
            computed_by="finetune.training.supervised:Supervised",
            title="supervised fine-tuning",
            rows="answers",
            keys=_KEYS,
            formula="−log p(y)",
        ),
        ObjectiveFacts(
            name="dpo",
            computed_by="finetune.training.preferences.objectives:Pairs",
            title="DPO",
            rows="pairs",
            rows_per_example=2,
            has_reference=True,
            keys=("preference.beta",),
            formula="−log σ(β·(r(y⁺) − r(y⁻)))",
            paper="2305.18290",
        ),
        ObjectiveFacts(
            name="kto",
            computed_by="finetune.training.preferences.objectives:LabelledAnswers",
            title="KTO",
            rows="labelled",
            has_reference=True,
            keys=("preference.beta", "preference.desirable_weight", "preference.undesirable_weight"),
            formula="good: λ⁺·(1 − σ(β·(r(y) − KL))); bad: λ⁻·(1 − σ(β·(KL − r(y))))",
            paper="2402.01306",
        ),
        ObjectiveFacts(
            name="orpo",
            computed_by="finetune.training.preferences.objectives:PairsAndPrompts",
            title="ORPO",
            rows="pairs",
            rows_per_example=3,  # the third learns the prompt
            keys=("preference.beta",),
            formula="−mean log p(x, y⁺) − β·log σ(log odds(y⁺) − log odds(y⁻))",
            paper="2403.07691",
        ),
        ObjectiveFacts(
            name="simpo",
            computed_by="finetune.training.preferences.objectives:Pairs",
            title="SimPO",
            rows="pairs",
            rows_per_example=2,
            keys=("preference.beta", "preference.gamma"),
            formula="−log σ(β·(mean log p(y⁺) − mean log p(y⁻)) − γ)",
            paper="2405.14734",
        ),
        ObjectiveFacts(
            name="grpo",
            computed_by="finetune.training.rewards.objective:RewardedAnswers",
            title="GRPO",
            rows="prompts",
            keys=("grpo", "rollout", "reward"),
            formula="−min(ρ·A, clip(ρ, 1−ε, 1+ε)·A) + β·KL",
            paper="2402.03300",
        ),
    )
}
"""By the value of `training.objective`."""
