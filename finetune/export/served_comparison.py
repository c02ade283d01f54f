"""Compare a served model with the test vectors of its run: stop ids, rendered chats, logits and greedy answers.

The result is a table of checks, which `finetune verify` prints and certificate.json holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from finetune.errors import first_line
from finetune.export.logits import centred, relative_by_position
from finetune.export.served_model import ServedModel
from finetune.export.vectors import Vector, Vectors

_SHOWN_CHARACTERS = 20
"""Characters shown of two texts from where they differ."""
_TIE = 4.0
"""Two tokens count as equally likely if their logits are this many bounds apart, in standard deviations of all logits.
It is twice the bound for each of the two tokens, because the error of a single logit may exceed the average error."""


@dataclass(frozen=True)
class Check:
    """The result of comparing items of one kind.

    Attributes:
        compared: number of items.
        equal: number of equal items.
        mismatches: the differences, one sentence each.
    """

    compared: int = 0
    equal: int = 0
    mismatches: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.equal} of {self.compared}"

    def as_record(self) -> dict[str, int]:
        """Convert the counts to plain values."""
        return {"compared": self.compared, "equal": self.equal}

    @classmethod
    def of_prompts(cls, differences: Iterable[tuple[Vector, str]]) -> Check:
        """Count prompts by their differences; an empty difference means that the prompt's item is equal."""
        found = list(differences)
        mismatches = tuple(f'prompt "{vector.name}": {what}' for vector, what in found if what)
        return cls(len(found), len(found) - len(mismatches), mismatches)


@dataclass(frozen=True, kw_only=True)
class ServedComparison:
    """What a runtime answered, compared with the test vectors.

    Attributes:
        runtime: its name and version.
        bound: the largest relative difference of a position's logits that counts as equal.
        tensors: the bytes of the tensors.
        files: the bytes of the other files.
        stop_ids: the tokens that end an answer.
        rendered: text and tokens of each conversation.
        positions: the logits of each position.
        answers: greedy answers. An answer that differs at a near tie counts as equal.
        near_ties: number of answers that differ where the runtime finds two tokens about equally likely.
        relative: the largest relative difference of a position's logits.
        max_abs: the largest difference of a logit.
        same_greedy: the fraction of positions with the same most likely token.
    """

    runtime: str
    bound: float
    tensors: Check = Check()
    files: Check = Check()
    stop_ids: Check
    rendered: Check
    positions: Check
    answers: Check
    near_ties: int
    relative: float
    max_abs: float
    same_greedy: float

    @property
    def mismatches(self) -> tuple[str, ...]:
        """Return the differences of all checks, one sentence each."""
        checks = (self.tensors, self.files, self.stop_ids, self.rendered, self.positions, self.answers)
        return tuple(itertools.chain.from_iterable(check.mismatches for check in checks))

    @property
    def is_same(self) -> bool:
        """Tell whether no check found a difference."""
        return not self.mismatches

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for certificate.json."""
        return {
            "runtime": self.runtime,
            "bound": self.bound,
            "rendered": self.rendered.as_record(),
            "answers": self.answers.as_record(),
            "near_ties": self.near_ties,
            "tensors": self.tensors.as_record(),
            "files": self.files.as_record(),
            "positions": self.positions.as_record(),
            "relative": self.relative,
            "max_abs": self.max_abs,
            "same_greedy": self.same_greedy,
        }


def compare(served: ServedModel, vectors: Vectors, *, bound: float) -> ServedComparison:
    """Ask a runtime for everything in the test vectors, and compare its answers.

    Texts, tokens and stop ids must be equal. Logits may differ by `bound`: the norm of a position's differences over
    the norm of its logits, after the mean of each is taken off. Greedy answers must be equal up to a token where the
    runtime finds both tokens about equally likely.

    Args:
        served: the model in its runtime.
        vectors: made from base and adapter as trained.
        bound: what fits the type of the served weights and the runtime's arithmetic.
    """
    is_same_stop = set(served.stop_ids) == set(vectors.stop_ids)
    other_stops = f"it stops at {sorted(served.stop_ids)}, expected {sorted(vectors.stop_ids)}"
    conversations = [vector for vector in vectors.vectors if vector.turns is not None and vectors.has_template]
    differences, answers = [], []
    theirs, ours = [vectors.logits[:0]], [vectors.logits[:0]]
    for vector, expected in vectors.with_logits():
        logits = served.logits(vector.token_ids).float().cpu()
        shape = (len(vector.token_ids), expected.shape[1])
        if logits.shape != shape:
            differences.append((vector, f"logits are {list(logits.shape)}, expected {list(shape)}"))
            continue
        theirs.append(logits[vector.positions])
        ours.append(expected)
        differences.append((vector, _compare_logits(theirs[-1], expected, vector.positions, bound)))
        if vector.answer is not None:
            answers.append((vector, *_compare_answer(served, vector, vectors.max_new_tokens, bound)))
    found, expected = torch.cat(theirs), torch.cat(ours)
    relative = relative_by_position(found, expected)
    has_logits = len(relative) > 0
    return ServedComparison(
        runtime=served.runtime,
        bound=bound,
        stop_ids=Check(1, int(is_same_stop), () if is_same_stop else (other_stops,)),
        rendered=Check.of_prompts((vector, _compare_rendering(served, vector)) for vector in conversations),
        positions=Check(len(relative), int((relative <= bound).sum()), Check.of_prompts(differences).mismatches),
        answers=Check.of_prompts((vector, difference) for vector, difference, _ in answers),
        near_ties=sum(is_near_tie for *_, is_near_tie in answers),
        relative=float(relative.max()) if has_logits else math.inf,
        max_abs=float((found - expected).abs().max()) if has_logits else math.inf,
        same_greedy=float((found.argmax(-1) == expected.argmax(-1)).double().mean()) if has_logits else 0.0,
    )


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the first index at which two sequences differ: the shorter length if one begins with the other."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _compare_logits(found: torch.Tensor, expected: torch.Tensor, positions: Sequence[int], bound: float) -> str:
    """Return the first difference above the bound, or an empty string."""
    relative = relative_by_position(found, expected)
    far = (relative > bound).nonzero().flatten().tolist()
    if not far:
        return ""
    first = far[0]
    token = int((centred(found[first]) - centred(expected[first])).abs().argmax())
    return (
        f"logits at position {positions[first]} differ by {float(relative[first]):.3g} of their norm, expected at most "
        f"{bound:.3g}; the most at token {token}: {float(found[first, token]):.4g}, expected "
        f"{float(expected[first, token]):.4g}"
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
        The first difference, empty where none counts, and whether the answers differ at a near tie.
    """
    expected = vector.answer or []
    found = served.answer(vector.token_ids, max_new_tokens)
    if found == expected:
        return "", False
    at = first_difference(found, expected)
    if at == min(len(found), len(expected)):
        return f"the answer has {len(found)} tokens, expected {len(expected)}", False
    logits = served.logits([*vector.token_ids, *expected[:at]])[-1].double().cpu()
    gap = float(logits[found[at]] - logits[expected[at]])
    most = _TIE * bound * float(logits.std())
    if abs(gap) <= most:
        return "", True
    difference = (
        f"token {at} of the answer is {found[at]}, expected {expected[at]}; their logits are {gap:.3g} apart, and at "
        f"most {most:.3g} would be a near tie"
    )
    return difference, False
