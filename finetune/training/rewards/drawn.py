"""Compare the log-probabilities with which tokens were drawn with those that the run computes of them.

Both are of the same tokens under the same weights, before temperature and filters, so they differ only by rounding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from finetune.model.base import evaluation_mode
from finetune.training.memory.choice import free_memory
from finetune.training.rewards.groups import nats_of_tokens

if TYPE_CHECKING:
    from finetune.data.encoded import EncodedExample
    from finetune.training.objective import Setup

LARGEST_DIFFERENCES = {"fp32": 0.1, "bf16": 1.0, "fp16": 1.0}
"""In nats, by the run's precision. In fp32, two computations of a token differ by less than a thousandth of that. bf16
rounds a logit of 20 by up to 0.06, and the errors of all layers add up."""
_MOST_NATS = 700.0
"""Its exponential is a float64."""
_MOST_SHOWN = 8
_TEMPERATURES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0)
_EXPLAINS = 1 / 3
"""The temperature is named if the differences fall to less than this part of their mean at another one."""
_ROUNDING = 4.0
"""Two computations in 16 bit differ from each other by up to about twice as much as one of them from fp32."""
_EQUAL = 1e-3
_BYTES_OF_A_WEIGHT = 6
"""Of a copy in fp32, and of the one in 16 bit that it is made of."""
_FEWEST_TOKENS = 16
"""Fewer tokens may all differ in one direction by chance."""


@dataclass(frozen=True)
class DrawnAnswer:
    """The tokens of an answer that the model generated, in order, and the row that training computes."""

    row: EncodedExample
    drawn: Sequence[float]
    """-log p with which each was drawn."""
    own: Sequence[float]
    """-log p as the run computes it."""
    turns: Sequence[int]
    """The turn of each token, counted from 0."""

    @property
    def largest(self) -> float:
        """The largest difference."""
        return max(_differences(self.drawn, self.own), default=0.0)


def drawn_metrics(answers: Sequence[DrawnAnswer], turns: int) -> dict[str, Any]:
    """Return the mean and the largest ratio of two probabilities of a token: as the run computes it, and as drawn.

    If answers may have several turns, the values of each turn follow as lists.
    """
    by_turn: list[list[float]] = [[] for _ in range(turns)]
    for answer in answers:
        for drawn, own, turn in zip(answer.drawn, answer.own, answer.turns, strict=False):
            by_turn[turn].append(math.exp(min(_MOST_NATS, drawn - own)))
    while by_turn and not by_turn[-1]:
        by_turn.pop()
    if not by_turn:
        return {}
    ratios = [ratio for of_turn in by_turn for ratio in of_turn]
    metrics: dict[str, Any] = {"drawn_ratio": math.fsum(ratios) / len(ratios), "largest_drawn_ratio": max(ratios)}
    if turns > 1:
        metrics["drawn_ratio_by_turn"] = [fmean(of_turn) if of_turn else None for of_turn in by_turn]
        metrics["largest_drawn_ratio_by_turn"] = [max(of_turn, default=None) for of_turn in by_turn]
    return metrics


def explain_difference(setup: Setup, answers: Sequence[DrawnAnswer]) -> str:
    """Return a warning about differences above `LARGEST_DIFFERENCES`, with their cause as far as it can be known.

    The answers with the largest differences are computed again in fp32, by this process alone.
    """
    worst = sorted(answers, key=lambda answer: answer.largest, reverse=True)[:_MOST_SHOWN]
    drawn = [nats for answer in worst for nats in answer.drawn]
    own = [nats for answer in worst for nats in answer.own]
    ids = [token for answer in worst for token in answer.row.input_ids[answer.row.is_target].tolist()]
    why_not = _why_no_copy(setup)
    again = None if why_not else _Again(setup, [answer.row for answer in worst])
    differences, exact = _differences(drawn, own), [math.nan] * len(own) if again is None else again.nats()
    largest = sorted(range(len(differences)), key=differences.__getitem__, reverse=True)[:_MOST_SHOWN]
    tokens = (f"{setup.tokenizer.decode([ids[n]])!r} {drawn[n]:.3f}, {own[n]:.3f}, {exact[n]:.3f}" for n in largest)
    bound, left_out = LARGEST_DIFFERENCES[setup.runtime.precision], f" (left out: {why_not})" if why_not else ""
    return (
        "the log-probabilities with which tokens were drawn differ from those that the run computes by up to "
        f"{max(differences):.3g} nats, and by {fmean(differences):.3g} on average in the worst answers; expected at "
        f"most {bound:g}. {_cause(drawn, own, again)}. -log p as drawn, by the run and in fp32{left_out}: "
        f"{'; '.join(tokens)}"
    )


def _why_no_copy(setup: Setup) -> str:
    """Return why there can be no copy of the model in fp32; empty if there can be one."""
    if setup.runtime.placement.shard_size is not None:
        return "the weights are sharded"
    if any(p.dtype not in (torch.float32, torch.bfloat16, torch.float16) for p in setup.model.parameters()):
        return "the weights are quantized"
    num_bytes = _BYTES_OF_A_WEIGHT * sum(p.numel() for p in setup.model.parameters())
    is_enough = num_bytes < free_memory(setup.runtime.device, num_sharing=setup.runtime.world_size)
    return "" if is_enough else "memory is too small for a copy of the weights"


class _Again:
    """Computes rows again with a copy of the model in fp32."""

    def __init__(self, setup: Setup, rows: Sequence[EncodedExample]) -> None:
        self._device, self._rows = setup.runtime.device, setup.collate(list(rows)).to(setup.runtime.device)
        self._model = copy.deepcopy(setup.model).float()

    def nats(self, temperature: float = 1.0, *, rounds: bool = False) -> list[float]:
        """Return -log p of the generated tokens. With `rounds`, products are rounded to bf16."""
        with evaluation_mode(self._model), torch.autocast(self._device.type, torch.bfloat16, enabled=rounds):
            nats: list[float] = nats_of_tokens(self._model, self._rows, temperature=temperature).tolist()
        return nats


def _cause(drawn: Sequence[float], own: Sequence[float], again: _Again | None) -> str:
    """Name the cause of the differences between `drawn` and `own`, which are of the worst answers."""
    if again is not None:
        by_temperature = {each: fmean(_differences(drawn, again.nats(each))) for each in _TEMPERATURES}
        best = min(by_temperature, key=by_temperature.__getitem__)
        if by_temperature[best] < _EXPLAINS * fmean(_differences(drawn, own)):
            return (
                f"Cause: the temperature. They are those at a temperature of about {best:g}, but must be those before "
                "temperature. Start a vLLM server with --logprobs-mode raw_logprobs"
            )
    if len(drawn) >= _FEWEST_TOKENS and all(a < b + _EQUAL for a, b in zip(drawn, own, strict=True)):
        return (
            "Cause: probably top_p or top_k, because all probabilities are higher: they are those among the tokens "
            "that a filter left. Start a vLLM server with --logprobs-mode raw_logprobs"
        )
    if again is not None:
        exact = again.nats()
        rounding = fmean(_differences(again.nats(rounds=True), exact))
        if fmean(_differences(drawn, own)) < _ROUNDING * rounding:
            of_run, of_sampler = fmean(_differences(own, exact)), fmean(_differences(drawn, exact))
            rounded = (
                "the run's own are further from fp32" if of_run > of_sampler else "those drawn are further from fp32"
            )
            return (
                f"Cause: the precision. Rounding to bf16 makes such differences, and {rounded}. Compute both in fp32 "
                "(training.precision=fp32), or weigh answers instead of tokens: "
                "grpo.importance_sampling_level=sequence"
            )
    return (
        "It is not the temperature, a filter or the precision: the sampler has other weights, or reads other tokens "
        "before the answers. Check that it has the step's adapter on the run's base model, and the run's chat template"
    )


def _differences(drawn: Sequence[float], own: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(drawn, own, strict=True)]
