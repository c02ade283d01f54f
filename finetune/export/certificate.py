"""Compare what a runtime serves with the test vectors of the run, and write the result as certificate.json.

docs/test-vectors.md describes the file, and says what it proves.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from finetune.errors import CheckpointError
from finetune.export.comparison import centred
from finetune.export.served_model import ServedModel
from finetune.export.vectors import Vector, Vectors
from finetune.runs.durable import MANIFEST, disk_failures_end_the_run, replace_file

CERTIFICATE = "certificate.json"
_SCHEMA = 1
_AROUND = 20
"""Characters shown of two texts from where they differ."""
_TIE = 4.0
"""Two tokens count as equally likely if their logits are this many bounds apart, in standard deviations of all logits:
twice the bound for each of the two, since a single logit may be further off than all of them are on average."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a runtime answered, against the test vectors.

    Attributes:
        runtime: its name and version.
        bound: the largest relative difference of the logits of a position.
        num_rendered: conversations whose text and tokens were compared.
        num_positions: positions whose logits were compared.
        num_answers: greedy answers compared.
        num_near_ties: answers that part where two tokens are about equally likely.
        num_tensors: tensors whose bytes were compared.
        num_files: other files whose bytes were compared.
        relative: the largest relative difference of the logits of a position.
        max_abs: the largest difference of a logit.
        same_greedy: share of positions with the same most likely token.
        mismatches: what differs, one sentence each; empty if nothing does.
    """

    runtime: str
    bound: float
    num_rendered: int
    num_positions: int
    num_answers: int
    num_near_ties: int
    relative: float
    max_abs: float
    same_greedy: float
    mismatches: tuple[str, ...]
    num_tensors: int = 0
    num_files: int = 0

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
    problems: list[str] = []
    texts = answers = ties = 0
    theirs, ours = [], []
    if set(served.stop_ids) != set(vectors.stop_ids):
        problems.append(f"it stops at {sorted(served.stop_ids)}, expected {sorted(vectors.stop_ids)}")
    for vector, expected in vectors.with_logits():
        where = f'prompt "{vector.name}"'
        if vector.turns is not None and vectors.has_template:
            texts += 1
            rendered = served.render(vector.turns)
            found = _other_text(rendered.text, str(vector.text)) or _other_ids(rendered.token_ids, vector.token_ids)
            problems += [f"{where}: {found}"] if found else []
        logits = served.logits(vector.token_ids).float().cpu()
        if logits.shape != (len(vector.token_ids), expected.shape[1]):
            got = [*logits.shape]
            problems.append(f"{where}: logits are {got}, expected {[len(vector.token_ids), expected.shape[1]]}")
            continue
        logits = logits[vector.positions]
        theirs.append(logits)
        ours.append(expected)
        found = _other_logits(logits, expected, vector.positions, bound)
        problems += [f"{where}: {found}"] if found else []
        if vector.answer is not None:
            answers += 1
            parting = _parting(served, vector, vectors.max_new_tokens, bound)
            ties += parting == ""
            problems += [f"{where}: {parting}"] if parting else []
    relative, max_abs, same_greedy = _figures(theirs, ours)
    return Comparison(
        runtime=served.runtime,
        bound=bound,
        num_rendered=texts,
        num_positions=sum(map(len, ours)),
        num_answers=answers,
        num_near_ties=ties,
        relative=relative,
        max_abs=max_abs,
        same_greedy=same_greedy,
        mismatches=tuple(problems),
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


def write_certificate(file: Path, folder: Path, comparison: Comparison, vectors: Vectors) -> dict[str, Any]:
    """Write certificate.json, also where something differs. Returns its content.

    Args:
        file: to write, replaced in one step.
        folder: what was verified; the certificate names the digest of its list of checksums.
        comparison: the result.
        vectors: what was compared with.

    Raises:
        RunFailedError: the disk refused.
    """
    content = {
        "schema_version": _SCHEMA,
        "verdict": "same" if comparison.is_same else "differs",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "vectors_sha256": vectors.sha256 or None,
        "manifest_sha256": _digest_manifest(folder),
        **asdict(comparison),
    }
    with disk_failures_end_the_run("Writing", file):
        replace_file(file, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
    return content


def read_certificate(folder: Path) -> dict[str, Any] | None:
    """Read a folder's certificate; None if it has none.

    Raises:
        CheckpointError: it is damaged, says that something differs, or is of other files than those in the folder.
    """
    file = folder / CERTIFICATE
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
        verdict, manifest, differences = (content[name] for name in ("verdict", "manifest_sha256", "mismatches"))
        read_as_markdown(content)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is not a certificate: {error}. Make it again with finetune verify {folder}."
        ) from error
    if verdict != "same":
        raise CheckpointError(
            f"{file} says that this model is not the one that was trained: {'; '.join(differences[:1])}. "
            "Write the model again, or remove the certificate."
        )
    if manifest != _digest_manifest(folder):
        raise CheckpointError(
            f"{file} is of other files than those in the folder. Make it again with finetune verify {folder}."
        )
    return dict(content)


def read_as_markdown(content: Mapping[str, Any]) -> str:
    """Put a certificate into words, for a model card."""
    figures = {
        "runtime": content["runtime"],
        "rendered conversations": content["num_rendered"],
        "logits": f"{content['num_positions']} positions, relative difference at most {content['relative']:.3g} "
        f"(bound {content['bound']:.3g})",
        "greedy answers": f"{content['num_answers']}, {content['num_near_ties']} of them parting at a near tie",
        "bytes": f"{content['num_tensors']} tensors, {content['num_files']} files",
        "test vectors": f"SHA-256 {content['vectors_sha256']}",
        "made": content["made"],
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in figures.items())
    about = "Compared with base and adapter as trained, by `finetune verify`."
    return f"## Certificate\n\n{about}\n\n| | |\n|---|---|\n{rows}\n"


def _figures(theirs: Sequence[torch.Tensor], ours: Sequence[torch.Tensor]) -> tuple[float, float, float]:
    """The largest relative difference of a position, that of a logit, and the share of equal greedy tokens."""
    if not ours:
        return math.inf, math.inf, 0.0
    found, expected = torch.cat(list(theirs)), torch.cat(list(ours))
    same = float((found.argmax(-1) == expected.argmax(-1)).double().mean())
    return float(_relative(found, expected).max()), float((found - expected).abs().max()), same


def _relative(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The relative difference at each position; not a number counts as infinitely far."""
    wanted = centred(expected)
    apart = (centred(found) - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
    return torch.nan_to_num(apart, nan=torch.inf)


def _other_logits(found: torch.Tensor, expected: torch.Tensor, positions: Sequence[int], bound: float) -> str:
    relative = _relative(found, expected)
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
