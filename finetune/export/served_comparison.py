"""Compare a served model with the test vectors of its run: stop ids, rendered chats, logits and greedy answers.

The result has a check for each row of `CHECKS` that needs the runtime; the digests of files make the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from finetune.data.values import quote
from finetune.errors import first_line
from finetune.export.checks import CHECKS, Check
from finetune.export.logits import LogitDifference, centred, compare_logits, relative_by_position
from finetune.export.served_model import ServedModel
from finetune.export.system_turn import describe_system
from finetune.export.vectors import SYSTEM_PROMPT, Vector, Vectors

_SHOWN_CHARACTERS = 20
"""Characters shown of two texts from where they differ."""
_TIE = 4.0
"""Two tokens count as equally likely if their logits are this many bounds apart, in standard deviations of all logits.
It is twice the bound for each of the two tokens, because the error of a single logit may exceed the average error."""
_WIDE = 0.25
"""At this bound two tokens whose logits are one standard deviation apart count as equally likely (`_TIE`), so answers
that differ at near ties say little. ONNX models in int4 have a wider bound."""


@dataclass(frozen=True, kw_only=True)
class ServedComparison:
    """The answers of a runtime, compared with the test vectors."""

    runtime: str
    """The name and the version of the runtime."""
    bound: float
    """The largest relative difference of a position's logits that counts as equal."""
    checks: Mapping[str, Check]
    """The results by the names in `CHECKS`. A greedy answer that differs at a near tie counts as equal."""
    logits: LogitDifference
    """How far the logits are from the recorded ones."""
    near_ties: int
    """The number of answers that differ where the runtime finds two tokens about equally likely."""
    most_tokens: int | None = None
    """See `ServedModel`."""
    without_system: str = ""
    """What happens without the system turn of the training rows; empty if there is nothing to say."""

    @property
    def mismatches(self) -> tuple[str, ...]:
        """Return the differences of all checks, one sentence each."""
        return tuple(line for name in CHECKS if name in self.checks for line in self.checks[name].mismatches)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what the comparison does not show, and what a server does not add, one sentence each."""
        wide = (
            f"with a bound of {self.bound:.3g}, the comparison shows that the model loads and answers, and not that it "
            "answers as the run does; measure it on rows of your own"
        )
        few = (
            f"at each position only the {self.most_tokens} most likely tokens were compared: the server gives no others"
        )
        said = (wide if self.bound >= _WIDE else "", few if self.most_tokens else "", self.without_system)
        return tuple(filter(None, said))

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for certificate.json."""
        return {
            "runtime": self.runtime,
            "bound": self.bound,
            **{name: self.checks.get(name, Check()).as_record() for name in CHECKS},
            "near_ties": self.near_ties,
            "relative": self.logits.most_relative,
            "max_abs": self.logits.max_abs,
            "same_greedy": self.logits.same_greedy,
        }


def compare(served: ServedModel, vectors: Vectors, *, bound: float) -> ServedComparison:
    """Ask a runtime for everything in the test vectors, and compare its answers.

    Texts, tokens and stop ids must be equal. Logits may differ by `bound`: the norm of a position's differences over
    the norm of its logits, after the mean of each is taken off. The bound must fit the type of the served weights and
    the runtime's arithmetic. Greedy answers must be equal up to a token where the runtime finds both tokens about
    equally likely.
    """
    is_same_stop = set(served.stop_ids) == set(vectors.stop_ids)
    other_stops = f"it stops at {sorted(served.stop_ids)}, expected {sorted(vectors.stop_ids)}"
    conversations = [vector for vector in vectors.vectors if vector.turns is not None and vectors.has_template]
    found, wanted = list[torch.Tensor](), list[torch.Tensor]()
    differences, answers, near_ties = [], [], 0
    for vector, expected in vectors.with_logits():
        logits = served.logits(vector.token_ids, vector.positions).float().cpu()
        shape = (len(vector.positions), expected.shape[1])
        if logits.shape != shape:
            differences.append(_of(vector, f"logits are {list(logits.shape)}, expected {list(shape)}"))
            continue
        tokens = None
        if served.most_tokens is not None:
            logits, tokens = logits.topk(min(served.most_tokens, logits.shape[1]))
            expected = expected.log_softmax(-1).gather(-1, tokens)
        found.append(logits)
        wanted.append(expected)
        differences.append(_of(vector, _compare_logits(logits, expected, vector.positions, bound, tokens)))
        if vector.answer is not None:
            difference, is_near_tie = _compare_answer(served, vector, vectors.max_new_tokens, bound)
            answers.append(_of(vector, difference))
            near_ties += is_near_tie
    served_logits, known_logits = (torch.cat(part) if part else vectors.logits[:0] for part in (found, wanted))
    of_logits = compare_logits(served_logits, known_logits)
    num_within = int((relative_by_position(served_logits, known_logits) <= bound).sum())
    return ServedComparison(
        runtime=served.runtime,
        bound=bound,
        checks={
            "stop_ids": Check.of(["" if is_same_stop else other_stops]),
            "rendered": Check.of(_of(vector, _compare_rendering(served, vector)) for vector in conversations),
            "positions": replace(Check.of(differences), compared=of_logits.num_positions, equal=num_within),
            "answers": Check.of(answers),
        },
        logits=of_logits,
        near_ties=near_ties,
        most_tokens=served.most_tokens,
        without_system=_ask_without_system(served, vectors),
    )


def _ask_without_system(served: ServedModel, vectors: Vectors) -> str:
    """Ask a prompt without the system turn of the training rows, as a client that does not know it would."""
    asked = next((vector for vector in vectors.vectors if vector.name == SYSTEM_PROMPT), None)
    if vectors.system is None or asked is None or not asked.turns:
        return ""
    without = asked.turns[1:]
    described = describe_system(vectors.system)
    try:
        prompt = served.render(without).token_ids
    except Exception as error:  # a template is a program: it can fail in any way
        return f"{described}. Without it, the chat template refuses a conversation: {first_line(error)}"
    same = "the same answer" if served.answer(prompt, vectors.max_new_tokens) == asked.answer else "another answer"
    return f"{described}. Without it, the model gives {same} to {quote(without[0]['content'])}"


def _of(vector: Vector, difference: str) -> str:
    """Name the prompt of a difference; an empty difference stays empty."""
    return f'prompt "{vector.name}": {difference}' if difference else ""


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the first index at which two sequences differ: the shorter length if one begins with the other."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _compare_logits(
    found: torch.Tensor, expected: torch.Tensor, positions: Sequence[int], bound: float, tokens: torch.Tensor | None
) -> str:
    """Return the first difference above the bound, or an empty string. `tokens` are set if `found` has only some."""
    relative = relative_by_position(found, expected)
    far = (relative > bound).nonzero().flatten().tolist()
    if not far:
        return ""
    first = far[0]
    place = int((centred(found[first]) - centred(expected[first])).abs().argmax())
    token = place if tokens is None else int(tokens[first, place])
    return (
        f"logits at position {positions[first]} differ by {float(relative[first]):.3g} of their norm, expected at most "
        f"{bound:.3g}; the most at token {token}: {float(found[first, place]):.4g}, expected "
        f"{float(expected[first, place]):.4g}"
    )


def _compare_rendering(served: ServedModel, vector: Vector) -> str:
    """Return the first difference in the text or the tokens of a conversation, or an empty string."""
    try:
        text, token_ids = served.render(vector.turns or [])
    except Exception as error:  # a template is a program: it can fail in any way
        return f"its chat template refuses the conversation: {first_line(error)}"
    wanted = str(vector.text)
    if text != wanted:
        at = first_difference(text, wanted)
        here, there = (repr(one[at : at + _SHOWN_CHARACTERS]) for one in (text, wanted))
        return f"the rendered text differs from character {at} on: {here}, expected {there}"
    if token_ids != vector.token_ids:
        at = first_difference(token_ids, vector.token_ids)
        found, expected = (ids[at : at + 1] or "the end" for ids in (token_ids, vector.token_ids))
        return f"token {at} of the prompt is {found}, expected {expected}"
    return ""


def _compare_answer(served: ServedModel, vector: Vector, max_new_tokens: int, bound: float) -> tuple[str, bool]:
    """Compare a greedy answer with the expected one.

    Returns:
        The first difference, empty if none counts, and whether the answers differ at a near tie.
    """
    expected = vector.answer or []
    found = served.answer(vector.token_ids, max_new_tokens)
    if found == expected:
        return "", False
    at = first_difference(found, expected)
    if at == min(len(found), len(expected)):
        return f"the answer has {len(found)} tokens, expected {len(expected)}", False
    prompt = [*vector.token_ids, *expected[:at]]
    logits = served.logits(prompt, [len(prompt) - 1])[0].double().cpu()
    gap = float(logits[found[at]] - logits[expected[at]])
    most = _TIE * bound * float(logits[logits > -torch.inf].std())
    if abs(gap) <= most:
        return "", True
    difference = (
        f"token {at} of the answer is {found[at]}, expected {expected[at]}; their logits are {gap:.3g} apart, and at "
        f"most {most:.3g} would be a near tie"
    )
    return difference, False
