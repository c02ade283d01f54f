"""Compare what a runtime serves with the test vectors of the run, and write the result as certificate.json.

docs/test-vectors.md describes the file, and says what it proves.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from finetune.errors import CheckpointError, first_line
from finetune.export.comparison import centred, relative_by_position
from finetune.export.served_model import ServedModel, Turns
from finetune.export.vectors import CERTIFICATE, Vector, Vectors
from finetune.runs.durable import MANIFEST, describe_os_error, disk_failures_end_the_run, replace_file
from finetune.runs.metrics import as_json

CERTIFICATE_HEAD = "## Certificate\n\nCompared by `finetune verify` with the run as it was trained.\n"
"""How the section of a model card begins. A section of that name that you wrote yourself begins otherwise."""
_SCHEMA = 1
_AROUND = 20
"""Characters shown of two texts from where they differ."""
_TIE = 4.0
"""Two tokens count as equally likely if their logits are this many bounds apart, in standard deviations of all logits:
twice the bound for each of the two, since a single logit may be further off than all of them are on average."""


@dataclass(frozen=True)
class Count:
    """How many were compared, and how many of them are equal."""

    compared: int = 0
    equal: int = 0

    def __str__(self) -> str:
        return f"{self.equal} of {self.compared}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a runtime answered, against the test vectors.

    Attributes:
        runtime: its name and version.
        bound: the largest relative difference of the logits of a position.
        rendered: conversations whose text and tokens were compared.
        answers: greedy answers.
        near_ties: answers that part where the runtime finds two tokens about equally likely; they count as equal.
        tensors: tensors whose bytes were compared.
        files: other files whose bytes were compared.
        positions: positions whose logits were compared; those within the bound count as equal.
        relative: the largest relative difference of the logits of a position.
        max_abs: the largest difference of a logit.
        same_greedy: share of positions with the same most likely token.
        mismatches: what differs, one sentence each; empty if nothing does.
    """

    runtime: str
    bound: float
    rendered: Count
    answers: Count
    near_ties: int
    tensors: Count = Count()
    files: Count = Count()
    positions: Count
    relative: float
    max_abs: float
    same_greedy: float
    mismatches: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not self.mismatches


def compare(served: ServedModel, vectors: Vectors, *, bound: float) -> Comparison:
    """Ask a runtime for everything in the test vectors, and compare its answers.

    Texts, tokens and stop ids must be equal. Logits may differ by `bound`: the norm of a position's differences over
    the norm of its logits, after the mean of each is taken off. Greedy answers must be equal up to a token where the
    runtime finds both tokens about equally likely.

    Args:
        served: the model in its runtime.
        vectors: made from base and adapter as trained.
        bound: what fits the type of the served weights and the runtime's arithmetic.
    """
    problems: dict[str, list[str]] = {"stop ids": [], "text": [], "logits": [], "answer": []}
    rendered = answers = ties = 0
    theirs, ours = [], []
    if set(served.stop_ids) != set(vectors.stop_ids):
        problems["stop ids"].append(f"it stops at {sorted(served.stop_ids)}, expected {sorted(vectors.stop_ids)}")
    for vector, expected in vectors.with_logits():

        def note(kind: str, found: str | None, name: str = vector.name) -> None:
            problems[kind] += [f'prompt "{name}": {found}'] if found else []

        if vector.turns is not None and vectors.has_template:
            rendered += 1
            note("text", _other_rendering(served, vector, vector.turns))
        logits = served.logits(vector.token_ids).float().cpu()
        shape = (len(vector.token_ids), expected.shape[1])
        if logits.shape != shape:
            note("logits", f"logits are {list(logits.shape)}, expected {list(shape)}")
            continue
        theirs.append(logits[vector.positions])
        ours.append(expected)
        note("logits", _other_logits(theirs[-1], expected, vector.positions, bound))
        if vector.answer is not None:
            answers += 1
            parting = _parting(served, vector, vectors.max_new_tokens, bound)
            ties += parting == ""
            note("answer", parting)
    figures = _figures(theirs, ours, bound)
    return Comparison(
        runtime=served.runtime,
        bound=bound,
        rendered=Count(rendered, rendered - len(problems["text"])),
        answers=Count(answers, answers - len(problems["answer"])),
        near_ties=ties,
        positions=figures.positions,
        relative=figures.relative,
        max_abs=figures.max_abs,
        same_greedy=figures.same_greedy,
        mismatches=tuple(itertools.chain(*problems.values())),
    )


def other_digests(found: Mapping[str, str], expected: Mapping[str, str], what: str) -> list[str]:
    """Compare the digests of tensors or files with those that were recorded; one sentence for each that differs.

    Args:
        found: digests by name.
        expected: as recorded.
        what: `tensor` or `file`.
    """
    changed = [
        f"{what} {name} is not the one that was written ({_apart(found[name], expected[name])})"
        for name in sorted(found.keys() & expected.keys())
        if found[name] != expected[name]
    ]
    return [
        *changed,
        *(f"{what} {name} is missing" for name in sorted(expected.keys() - found.keys())),
        *(f"{what} {name} was not written by finetune" for name in sorted(found.keys() - expected.keys())),
    ]


def write_certificate(
    file: Path, folder: Path, figures: Mapping[str, Any], mismatches: Sequence[str]
) -> dict[str, Any]:
    """Write certificate.json, also where something differs; an earlier one is replaced. Returns its content.

    Args:
        file: to write.
        folder: what was verified; the certificate names the digest of its list of checksums.
        figures: what was compared, by name.
        mismatches: what differs, one sentence each.

    Raises:
        RunFailedError: the disk refused.
    """
    figures = {
        "schema_version": _SCHEMA,
        "verdict": "differs" if mismatches else "same",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "manifest_sha256": _digest_manifest(folder),
        **figures,
        "mismatches": list(mismatches),
    }
    content = {name: as_json(value) for name, value in figures.items()}
    with disk_failures_end_the_run("Writing", file, then="run the command again"):
        replace_file(file, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
    return content


def read_certificate(folder: Path) -> str | None:
    """Read a folder's certificate as a section of its model card; None if it has none.

    Raises:
        CheckpointError: it is damaged, says that something differs, or is of other files than those in the folder, or
            the folder has no list of checksums from which that could be seen.
    """
    file = folder / CERTIFICATE
    if not file.is_file():
        return None
    again = f"Make it again with finetune verify {folder}."
    try:
        content = json.loads(file.read_bytes())
        if content["verdict"] != "same":
            raise CheckpointError(
                f"{file} says that this model is not the one that was trained: {content['mismatches'][0]}. Write the "
                "model again, or remove the certificate."
            )
        if (manifest := _digest_manifest(folder)) is None:
            raise CheckpointError(
                f"{file} cannot be compared with the files in the folder, which has no {MANIFEST}. Push the folder "
                f"that finetune merge wrote, or remove {CERTIFICATE}."
            )
        if content["manifest_sha256"] != manifest:
            raise CheckpointError(f"{file} is of other files than those in the folder. {again}")
        return _as_markdown(content)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {describe_os_error(error)}.") from error
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a certificate: {error}. {again}") from error


def _as_markdown(content: Mapping[str, Any]) -> str:
    figures = {
        "runtime": content["runtime"],
        "rendered conversations": Count(**content["rendered"]),
        "positions with logits": f"{Count(**content['positions'])}, relative difference at most "
        f"{content['relative']:.3g} (bound {content['bound']:.3g})",
        "greedy answers": f"{Count(**content['answers'])}, {content['near_ties']} of them up to a near tie",
        "tensors": Count(**content["tensors"]),
        "other files": Count(**content["files"]),
        "test vectors": f"SHA-256 {content['vectors_sha256']}" if content["vectors_sha256"] else "made by the run",
        "made": content["made"],
    }
    if replay := content["replay"]:
        figures["losses computed again"] = f"{len(replay['steps'])} steps, within {replay['bound']:.3g} x max(1, loss)"
    rows = "\n".join(f"| {name} | {value} |" for name, value in figures.items())
    return f"{CERTIFICATE_HEAD}\n| | |\n|---|---|\n{rows}\n"


class _Figures(NamedTuple):
    positions: Count
    relative: float
    max_abs: float
    same_greedy: float


def _figures(theirs: Sequence[torch.Tensor], ours: Sequence[torch.Tensor], bound: float) -> _Figures:
    if not ours:
        return _Figures(Count(), math.inf, math.inf, 0.0)
    found, expected = torch.cat(list(theirs)), torch.cat(list(ours))
    relative = relative_by_position(found, expected)
    return _Figures(
        Count(len(expected), int((relative <= bound).sum())),
        float(relative.max()),
        float((found - expected).abs().max()),
        float((found.argmax(-1) == expected.argmax(-1)).double().mean()),
    )


def _other_logits(found: torch.Tensor, expected: torch.Tensor, positions: Sequence[int], bound: float) -> str:
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


def _other_rendering(served: ServedModel, vector: Vector, turns: Turns) -> str:
    try:
        text, token_ids = served.render(turns)
    except Exception as error:  # a template is a program: it can fail in any way
        return f"its chat template refuses the conversation: {first_line(error)}"
    return _other_text(text, str(vector.text)) or _other_ids(token_ids, vector.token_ids)


def _other_text(found: str, expected: str) -> str:
    if found == expected:
        return ""
    at = _first_difference(found, expected)
    shown, wanted = (repr(text[at : at + _AROUND]) for text in (found, expected))
    return f"the rendered text differs from character {at} on: {shown}, expected {wanted}"


def _other_ids(found: Sequence[int], expected: Sequence[int]) -> str:
    if list(found) == list(expected):
        return ""
    at = _first_difference(found, expected)
    shown, wanted = (list(ids[at : at + 1]) or "the end" for ids in (found, expected))
    return f"token {at} of the prompt is {shown}, expected {wanted}"


def _parting(served: ServedModel, vector: Vector, max_new_tokens: int, bound: float) -> str | None:
    """Where a greedy answer leaves the expected one. None: nowhere; an empty text: at a near tie."""
    expected = vector.answer or []
    found = served.answer(vector.token_ids, max_new_tokens)
    if found == expected:
        return None
    at = _first_difference(found, expected)
    if at == min(len(found), len(expected)):
        return f"the answer has {len(found)} tokens, expected {len(expected)}"
    logits = served.logits([*vector.token_ids, *expected[:at]])[-1].double().cpu()
    gap = float(logits[found[at]] - logits[expected[at]])
    most = _TIE * bound * float(logits.std())
    if abs(gap) <= most:
        return ""
    return (
        f"token {at} of the answer is {found[at]}, expected {expected[at]}; their logits are {gap:.3g} apart, and at "
        f"most {most:.3g} would be a near tie"
    )


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _apart(found: str, expected: str) -> str:
    """The parts of two digests that differ, the last one cut short."""
    return f"{_short(found)}, expected {_short(expected)}"


def _short(digest: str) -> str:
    head, _, value = digest.rpartition(":")
    return f"{head}:{value[:12]}" if head else value[:12]


def _digest_manifest(folder: Path) -> str | None:
    file = folder / MANIFEST
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
