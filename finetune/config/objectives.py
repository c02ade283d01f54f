"""The losses that a run may minimise: the rows that each needs, what it is compared with, its formula and paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SECTIONS = ("preference", "grpo", "rollout", "reward")
"""Sections with keys that only some objectives read."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A value of `training.objective`.

    Attributes:
        name: the value.
        title: its name in text.
        rows: answers to learn, pairs of a chosen and a rejected answer, answers labelled good or bad, or prompts.
        has_reference: whether the loss also needs the log-probabilities of the base, so that a step computes it too.
        keys: the keys and sections that it reads, of those that not every objective does.
        formula: the loss of a row in words of mathematics, see docs/methods.md.
        paper: arXiv id.
    """

    name: str
    title: str
    rows: Literal["answers", "pairs", "labelled", "prompts"]
    has_reference: bool = False
    keys: tuple[str, ...] = ()
    formula: str
    paper: str = ""

    @property
    def reads(self) -> Literal["answers", "chosen", "labelled", "prompts"]:
        """Return what is read of a row first. The rejected side of a pair is read after the chosen one."""
        return "chosen" if self.rows == "pairs" else self.rows

    def reads_key(self, key: str) -> bool:
        """Return whether the objective reads a key, for example `preference.beta`."""
        is_of_some = key.partition(".")[0] in SECTIONS
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


OBJECTIVES: Mapping[str, Objective] = {
    objective.name: objective
    for objective in (
        Objective(name="sft", title="supervised fine-tuning", rows="answers", formula="−log p(y)"),
        Objective(
            name="dpo",
            title="DPO",
            rows="pairs",
            has_reference=True,
            keys=("preference.beta",),
            formula="−log σ(β·(r(y⁺) − r(y⁻)))",
            paper="2305.18290",
        ),
        Objective(
            name="kto",
            title="KTO",
            rows="labelled",
            has_reference=True,
            keys=("preference.beta", "preference.desirable_weight", "preference.undesirable_weight"),
            formula="good: λ⁺·(1 − σ(β·(r(y) − KL))); bad: λ⁻·(1 − σ(β·(KL − r(y))))",
            paper="2402.01306",
        ),
        Objective(
            name="orpo",
            title="ORPO",
            rows="pairs",
            keys=("preference.beta",),
            formula="−mean log p(x, y⁺) − β·log σ(log odds(y⁺) − log odds(y⁻))",
            paper="2403.07691",
        ),
        Objective(
            name="simpo",
            title="SimPO",
            rows="pairs",
            keys=("preference.beta", "preference.gamma"),
            formula="−log σ(β·(mean log p(y⁺) − mean log p(y⁻)) − γ)",
            paper="2405.14734",
        ),
        Objective(
            name="grpo",
            title="GRPO",
            rows="prompts",
            keys=("grpo", "rollout", "reward"),
            formula="−min(ρ·A, clip(ρ, 1−ε, 1+ε)·A) + β·KL",
            paper="2402.03300",
        ),
    )
}
"""By the value of `training.objective`."""
