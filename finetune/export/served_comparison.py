"""Compare a served model with the test vectors of its run, check by check.

`CHECKS` is the table of checks. certificate.json holds the counts of each check, and the terminal and the model card
show the rows of `rows_of_checks`. A runtime is asked through the interface `ServedModel`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from finetune.data.values import quote
from finetune.errors import DataError, first_line
from finetune.export.system_turn import describe_system
from finetune.export.vectors import (
    SYSTEM_PROMPT,
    Digests,
    LogitDifference,
    Vector,
    Vectors,
    centred,
    compare_logits,
    digest_files,
    digest_weight_files,
    relative_by_position,
)
from finetune.runs.comparison import loss_difference

CHECKS = {
    "tensors": "tensors",
    "files": "other files",
    "stop_ids": "stop ids",
    "rendered": "conversations as text and tokens",
    "positions": "logits at positions",
    "answers": "greedy answers",
}
"""The title of each check, by its field in certificate.json. Differences are listed in this order: the bytes first,
because changed bytes explain changed answers."""
DEPEND_ON_BOUND = ("positions", "answers")
"""The checks that may find a difference only because the bound is narrow."""
_SHOWN_CHARACTERS = 20
"""Characters shown of two texts from where they differ."""
_TIE = 4.0
"""Two tokens count as equally likely if their logits are this many bounds apart, in standard deviations of all logits.
It is twice the bound for each of the two tokens, because the error of a single logit may exceed the average error."""
_WIDE = 0.25
"""At this bound two tokens whose logits are one standard deviation apart count as equally likely (`_TIE`), so answers
that differ at near ties say little. ONNX models in int4 have a wider bound."""

Turns = Sequence[Mapping[str, str]]
"""A conversation: each turn has a role and a content."""


class Rendered(NamedTuple):
    """A conversation as a runtime gives it to its model, with the header of the next answer."""

    text: str
    token_ids: list[int]


class ServedModel(Protocol):
    """A model that one runtime has loaded. No method may use another runtime's tokenizer, template or weights."""

    runtime: str
    """The name and the version of the runtime, for example `transformers 5.23.0`."""
    stop_ids: list[int]
    """The tokens at which the runtime ends an answer."""
    most_tokens: int | None
    """The runtime gives logits of so many of the most likely tokens only, and the others are -inf; None: of all."""

    def render(self, turns: Turns) -> Rendered:
        """Render a conversation with the runtime's chat template, and encode the text with its tokenizer."""
        ...

    def logits(self, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Compute logits at some positions of a prompt, fp32, shape (positions, vocabulary).

        The logits of a position may be off by one constant: the comparison takes off their mean.
        """
        ...

    def answer(self, token_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Answer a prompt greedily. Returns the new tokens, including the stop token if there was one."""
        ...


@dataclass(frozen=True)
class Check:
    """The result of one check: the number of items, how many are equal, and a sentence for each difference."""

    compared: int = 0
    equal: int = 0
    mismatches: tuple[str, ...] = ()

    @classmethod
    def of(cls, differences: Iterable[str]) -> Check:
        """Count items by their differences; an empty string means that the item is equal."""
        items = list(differences)
        mismatches = tuple(filter(None, items))
        return cls(len(items), len(items) - len(mismatches), mismatches)


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
    """The runtime gave the logits of so many of the most likely tokens only; None: of all."""
    without_system: str = ""
    """What happens without the system turn of the training rows; empty if there is nothing to say."""

    @property
    def mismatches(self) -> tuple[str, ...]:
        """Return the differences of all checks, one sentence each."""
        return tuple(line for name in CHECKS if name in self.checks for line in self.checks[name].mismatches)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what the comparison does not show, and what a server does not add, one sentence each."""
        notes = []
        if self.bound >= _WIDE:
            notes.append(
                f"with a bound of {self.bound:.3g}, the comparison shows that the model loads and answers, and not "
                "that it answers as the run does; measure it on rows of your own"
            )
        if self.most_tokens:
            notes.append(
                f"at each position only the {self.most_tokens} most likely tokens were compared: the server gives no "
                "others"
            )
        return (*notes, self.without_system) if self.without_system else tuple(notes)

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for certificate.json."""
        checks = {name: self.checks.get(name, Check()) for name in CHECKS}
        return {
            "runtime": self.runtime,
            "bound": self.bound,
            **{name: {"compared": check.compared, "equal": check.equal} for name, check in checks.items()},
            "near_ties": self.near_ties,
            "relative": self.logits.most_relative,
            "max_abs": self.logits.max_abs,
            "same_greedy": self.logits.same_greedy,
        }


def rows_of_checks(content: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the title of each check, the number of equal items, and how far items are apart.

    The verdict counts answers that differ at a near tie as equal. Here they are shown apart from the equal answers.
    In a certificate, numbers that are not finite are texts. Earlier versions did not write `stop_ids`.

    Raises:
        KeyError, TypeError: it is not the content of a certificate.
    """
    near_ties = content["near_ties"]
    details = {
        "positions": f"{float(content['relative']):.3g} (bound {content['bound']:.3g})",
        "answers": f"{near_ties} differ at a near tie" if near_ties else "",
    }
    for name, title in CHECKS.items():
        counts = content[name] if name != "stop_ids" else content.get(name, {"compared": 0})
        equal = counts["equal"] - near_ties if name == "answers" else counts.get("equal")
        if counts["compared"]:
            yield title, f"{equal} of {counts['compared']}", details.get(name, "")
    if replay := content["replay"]:
        differences = [loss_difference(step["recorded"], float(step["computed"])) for step in replay["steps"]]
        equal = sum(difference <= replay["bound"] for difference in differences)
        bound = f"(bound {replay['bound']:.3g}, {replay['precision']})"
        yield "losses of steps", f"{equal} of {len(differences)}", f"{max(differences):.3g} {bound}"


def compare(served: ServedModel, vectors: Vectors, *, bound: float) -> ServedComparison:
    """Ask a runtime for everything in the test vectors, and compare its answers.

    Texts, tokens and stop ids must be equal. Logits may differ by `bound`: the norm of a position's differences over
    the norm of its logits, after the mean of each is taken off. The bound must fit the type of the served weights and
    the runtime's arithmetic. Greedy answers must be equal up to a token where the runtime finds both tokens about
    equally likely.
    """
    stops, expected_stops = sorted(served.stop_ids), sorted(vectors.stop_ids)
    other_stops = "" if set(stops) == set(expected_stops) else f"it stops at {stops}, expected {expected_stops}"
    conversations = [vector for vector in vectors.vectors if vector.turns is not None and vectors.has_template]
    served_rows, known_rows = list[torch.Tensor](), list[torch.Tensor]()
    differences, answers, near_ties = [], [], 0
    known_by_vector = torch.split(vectors.logits, [len(vector.positions) for vector in vectors.vectors])
    for vector, expected in zip(vectors.vectors, known_by_vector, strict=True):
        logits, tokens = served.logits(vector.token_ids, vector.positions).float().cpu(), None
        shape = [len(vector.positions), expected.shape[1]]
        if list(logits.shape) != shape:
            differences.append(_of(vector, f"logits are {list(logits.shape)}, expected {shape}"))
            continue
        if served.most_tokens is not None:
            logits, tokens = logits.topk(min(served.most_tokens, logits.shape[1]))
            expected = expected.log_softmax(-1).gather(-1, tokens)
        served_rows.append(logits)
        known_rows.append(expected)
        differences.append(_of(vector, _compare_logits(logits, expected, vector.positions, bound, tokens)))
        if vector.answer is not None:
            difference, is_near_tie = _compare_answer(served, vector, vector.answer, vectors.max_new_tokens, bound)
            answers.append(_of(vector, difference))
            near_ties += is_near_tie
    served_logits, known_logits = (
        torch.cat(rows) if rows else vectors.logits[:0] for rows in (served_rows, known_rows)
    )
    num_within = int((relative_by_position(served_logits, known_logits) <= bound).sum())
    return ServedComparison(
        runtime=served.runtime,
        bound=bound,
        checks={
            "stop_ids": Check.of([other_stops]),
            "rendered": Check.of(_compare_renderings(served, conversations)),
            "positions": Check(len(known_logits), num_within, Check.of(differences).mismatches),
            "answers": Check.of(answers),
        },
        logits=compare_logits(served_logits, known_logits),
        near_ties=near_ties,
        most_tokens=served.most_tokens,
        without_system=_ask_without_system(served, vectors),
    )


def served_vectors(served: ServedModel, vectors: Vectors) -> Vectors:
    """Return the test vectors with the logits and answers that a runtime gives, to compare it with another one."""
    answers = [
        None if vector.answer is None else served.answer(vector.token_ids, vectors.max_new_tokens)
        for vector in vectors.vectors
    ]
    logits = [served.logits(vector.token_ids, vector.positions).float().cpu() for vector in vectors.vectors]
    answered = (replace(vector, answer=answer) for vector, answer in zip(vectors.vectors, answers, strict=True))
    return replace(vectors, vectors=tuple(answered), logits=torch.cat(logits))


def check_digests(folder: Path, recorded: Digests) -> dict[str, Check]:
    """Compare a folder's tensors and other files with recorded digests. Files that were not recorded do not count.

    Raises:
        CheckpointError: a file is not a safetensors file.
    """
    tensors = digest_weight_files(folder) if recorded.tensors else {}
    files = digest_files(folder) if recorded.files else {}
    files = {name: digest for name, digest in files.items() if name in recorded.files}
    return {
        "tensors": _compare_digests(tensors, recorded.tensors, "tensor"),
        "files": _compare_digests(files, recorded.files, "file"),
    }


def _ask_without_system(served: ServedModel, vectors: Vectors) -> str:
    """Ask a prompt without the system turn of the training rows, as a client that does not know it would."""
    vector = next((vector for vector in vectors.vectors if vector.name == SYSTEM_PROMPT), None)
    if vectors.system is None or vector is None or not vector.turns:
        return ""
    without = vector.turns[1:]
    described = describe_system(vectors.system)
    try:
        prompt = served.render(without).token_ids
    except Exception as error:  # a template is a program: it can fail in any way
        return f"{described}. Without it, the chat template refuses a conversation: {first_line(error)}"
    same = "the same answer" if served.answer(prompt, vectors.max_new_tokens) == vector.answer else "another answer"
    return f"{described}. Without it, the model gives {same} to {quote(without[0]['content'])}"


def _of(vector: Vector, difference: str) -> str:
    """Name the prompt of a difference; an empty difference stays empty."""
    return f'prompt "{vector.name}": {difference}' if difference else ""


def first_difference(sequence: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the first index at which two sequences differ: the shorter length if one begins with the other."""
    pairs = enumerate(zip(sequence, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(sequence), len(other)))


def _compare_logits(
    served: torch.Tensor, expected: torch.Tensor, positions: Sequence[int], bound: float, tokens: torch.Tensor | None
) -> str:
    """Return the first difference above the bound, or an empty string. `tokens` are set if `served` has only some."""
    relative = relative_by_position(served, expected)
    row = next((row for row, distance in enumerate(relative.tolist()) if distance > bound), None)
    if row is None:
        return ""
    column = int((centred(served[row]) - centred(expected[row])).abs().argmax())
    token = column if tokens is None else int(tokens[row, column])
    return (
        f"logits at position {positions[row]} differ by {float(relative[row]):.3g} of their norm, expected at most "
        f"{bound:.3g}; the most at token {token}: {float(served[row, column]):.4g}, expected "
        f"{float(expected[row, column]):.4g}"
    )


def _compare_renderings(served: ServedModel, conversations: Iterable[Vector]) -> Iterator[str]:
    """Yield the difference of each conversation. A template that exceeds a limit is not rendered again."""
    beyond_limit = ""
    for vector in conversations:
        difference = beyond_limit
        if not beyond_limit:
            try:
                difference = _compare_rendering(served.render(vector.turns or []), vector)
            except Exception as error:  # a template is a program: it can fail in any way
                difference = f"its chat template refuses the conversation: {first_line(error)}"
                beyond_limit = difference if isinstance(error, DataError) else ""
        yield _of(vector, difference)


def _compare_rendering(rendered: Rendered, vector: Vector) -> str:
    """Return the first difference in the text or the tokens of a conversation, or an empty string."""
    text, token_ids = rendered
    expected = str(vector.text)
    if text != expected:
        index = first_difference(text, expected)
        here, there = (repr(each[index : index + _SHOWN_CHARACTERS]) for each in (text, expected))
        return f"the rendered text differs from character {index} on: {here}, expected {there}"
    if token_ids != vector.token_ids:
        index = first_difference(token_ids, vector.token_ids)
        token, other = (ids[index : index + 1] or "the end" for ids in (token_ids, vector.token_ids))
        return f"token {index} of the prompt is {token}, expected {other}"
    return ""


def _compare_answer(
    served: ServedModel, vector: Vector, expected: list[int], max_new_tokens: int, bound: float
) -> tuple[str, bool]:
    """Return the first difference of a greedy answer, empty if none counts, and whether it differs at a near tie."""
    answer = served.answer(vector.token_ids, max_new_tokens)
    if answer == expected:
        return "", False
    index = first_difference(answer, expected)
    if index == min(len(answer), len(expected)):
        return f"the answer has {len(answer)} tokens, expected {len(expected)}", False
    prompt = [*vector.token_ids, *expected[:index]]
    logits = served.logits(prompt, [len(prompt) - 1])[0].double().cpu()
    gap = float(logits[answer[index]] - logits[expected[index]])
    largest_tie = _TIE * bound * float(logits[logits > -torch.inf].std())
    if abs(gap) <= largest_tie:
        return "", True
    difference = (
        f"token {index} of the answer is {answer[index]}, expected {expected[index]}; their logits are {gap:.3g} "
        f"apart, and at most {largest_tie:.3g} would be a near tie"
    )
    return difference, False


def _compare_digests(actual: Mapping[str, str], expected: Mapping[str, str], noun: str) -> Check:
    equal = {name for name, digest in expected.items() if actual.get(name) == digest}
    changed = sorted((actual.keys() & expected.keys()) - equal)
    mismatches = (
        *(
            f"{noun} {name} is not the one that was written ({_short(actual[name])}, expected {_short(expected[name])})"
            for name in changed
        ),
        *(f"{noun} {name} is missing" for name in sorted(expected.keys() - actual.keys())),
        *(f"{noun} {name} was not written by finetune" for name in sorted(actual.keys() - expected.keys())),
    )
    return Check(len(expected), len(equal), mismatches)


def _short(digest: str) -> str:
    """Shorten the SHA-256 of a digest to 12 characters."""
    head, _, value = digest.rpartition(":")
    return f"{head}:{value[:12]}" if head else value[:12]
