"""Write the result of a verification as a certificate, and read a folder's certificates as a section of a model card.

docs/test-vectors.md describes the files, and says what they prove.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import CheckpointError
from finetune.export.served_comparison import DEPEND_ON_BOUND, ServedComparison, rows_of_checks
from finetune.export.vectors import CERTIFICATE, VLLM_CERTIFICATE, Vectors
from finetune.limits import read_regular
from finetune.runs.durable import MANIFEST, describe_os_error, disk_failures_end_the_run, find_damage, replace_file
from finetune.runs.metrics import as_json
from finetune.runs.state import STATE_FILE

if TYPE_CHECKING:
    from finetune.export.merge_effect import MergeEffect
    from finetune.replay.steps import Replay

CERTIFICATE_HEAD = "## Certificate\n\nCompared by `finetune verify` with the run as it was trained.\n"
"""How the section of a model card begins. A section of that name that you wrote yourself begins otherwise."""
_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The result of a verification of the weights in a folder."""

    folder: Path
    source: str
    """The origin of the test vectors, for the title of the printed table."""
    vectors: Vectors
    comparison: ServedComparison
    notes: tuple[str, ...] = ()
    """What could not be compared, and why, one sentence each without a full stop."""
    replay: Replay | None = None
    merge_effect: MergeEffect | None = None
    """What merging changes, for a run on a base in 4 bits."""
    has_other_vectors: bool = False
    """Whether the test vectors are of other weights than these, because they belong to another run or the weights were
    replaced."""

    @property
    def mismatches(self) -> list[str]:
        """Return the differences, one sentence each."""
        return [*self.comparison.mismatches, *(self.replay.mismatches if self.replay else ())]

    def as_record(self) -> dict[str, Any]:
        """Return the content of the certificate."""
        replay_notes = self.replay.notes if self.replay else ()
        record = {
            "schema_version": _SCHEMA,
            "verdict": "differs" if self.mismatches else "same",
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "manifest_sha256": _digest_manifest(self.folder),
            "vectors_sha256": self.vectors.sha256 or None,
            **self.comparison.as_record(),
            "mismatches": self.mismatches,
            "notes": [*self.notes, *self.comparison.notes, *replay_notes],
            "replay": self.replay.as_record() if self.replay else None,
            "merge_effect": self.merge_effect and [model.as_record() for model in self.merge_effect.models],
        }
        return {name: as_json(value) for name, value in record.items()}


def path_of_certificate(folder: Path, *, in_vllm: bool) -> Path:
    """Return where the certificate of the weights in a folder is written: beside them.

    The certificate of a checkpoint is written into the run's folder, because a checkpoint keeps its files.
    """
    name = VLLM_CERTIFICATE if in_vllm else CERTIFICATE
    if folder.parent.name != "checkpoints" or not (folder / STATE_FILE).is_file():
        return folder / name
    stem, suffix = name.split(".")
    return folder.parent.parent / f"{stem}-{folder.name}.{suffix}"


def write_certificate(file: Path, verified: Verified) -> dict[str, Any]:
    """Write a certificate, also if something differs; an earlier one is replaced. Returns its content.

    Raises:
        RunFailedError: the disk refused.
    """
    content = verified.as_record()
    with disk_failures_end_the_run("Writing", file, then="run the command again"):
        replace_file(file, (json.dumps(content, indent=2) + "\n").encode())
    return content


def why_kept(file: Path, verified: Verified) -> str:
    """Say why an earlier certificate must stay although something differs; empty if it is replaced.

    The earlier one says `same`, and no file of the model has changed since. What differs is test vectors of other
    weights, or only a narrower bound than that of the earlier one.
    """
    comparison = verified.comparison
    is_refuted = verified.replay is not None and verified.replay.mismatches
    if is_refuted or not comparison.mismatches:
        return ""
    try:
        content = json.loads(read_regular(file))
        is_sound = content["verdict"] == "same" and content["manifest_sha256"] == _digest_manifest(verified.folder)
        is_narrower = comparison.bound < comparison.logits.most_relative <= content["bound"]
        bounds = f"The bound is {comparison.bound:.3g}, and that of the earlier certificate {content['bound']:.3g}"
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return ""
    damage = [line for line in find_damage(verified.folder) if not line.startswith("README.md:")]  # you may edit it
    if not is_sound or damage:
        return ""
    if verified.has_other_vectors:
        return "They belong to another run or another checkpoint, or these weights were replaced"
    if is_narrower and all(name in DEPEND_ON_BOUND for name, check in comparison.checks.items() if check.mismatches):
        return bounds
    return ""


def read_certificates(folder: Path) -> str | None:
    """Read a folder's certificates as a section of its model card; None if it has none.

    Raises:
        CheckpointError: one is damaged, says that something differs, or is of other files than those in the folder, or
            the folder has no list of checksums from which that could be seen.
    """
    files = [folder / name for name in (CERTIFICATE, VLLM_CERTIFICATE) if (folder / name).is_file()]
    return "".join([CERTIFICATE_HEAD, *map(_read_as_table, files)]) if files else None


def _read_as_table(file: Path) -> str:
    folder = file.parent
    again = f"Make it again with finetune verify {shlex.quote(str(folder))}."
    try:
        content = json.loads(read_regular(file))
        if content["verdict"] != "same":
            raise CheckpointError(
                f"{file} says that this model is not the trained one: {content['mismatches'][0]}. Write the "
                "model again, or remove the certificate."
            )
        if (manifest := _digest_manifest(folder)) is None:
            raise CheckpointError(
                f"{file} cannot be compared with the files in the folder, which has no {MANIFEST}. Push the folder "
                f"that finetune merge wrote, or remove {file.name}."
            )
        if content["manifest_sha256"] != manifest:
            raise CheckpointError(f"{file} is of other files than those in the folder. {again}")
        return _as_table(content)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {describe_os_error(error)}.") from error
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a certificate: {error}. {again}") from error


def _as_table(content: dict[str, Any]) -> str:
    """Write a table with the rows that `finetune verify` prints, what was served, when, and against which vectors."""
    made_by_run = content["vectors_sha256"] is None
    rows = [
        ("runtime", content["runtime"]),
        *((title, f"{equal}, {apart}" if apart else equal) for title, equal, apart in rows_of_checks(content)),
        ("test vectors", "made by the run" if made_by_run else f"SHA-256 {content['vectors_sha256']}"),
        *(("note", note) for note in content["notes"]),
        ("made", content["made"]),
    ]
    lines = "\n".join(f"| {name} | {str(value).replace('|', '&#124;')} |" for name, value in rows)
    return f"\n| | |\n|---|---|\n{lines}\n"


def _digest_manifest(folder: Path) -> str | None:
    file = folder / MANIFEST
    return hashlib.sha256(read_regular(file)).hexdigest() if file.is_file() else None
