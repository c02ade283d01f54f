"""Write the result of a verification as certificate.json, and read it as a section of a model card.

docs/test-vectors.md describes the file, and says what it proves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError
from finetune.export.digests import CERTIFICATE
from finetune.export.served_comparison import Check
from finetune.runs.durable import MANIFEST, describe_os_error, disk_failures_end_the_run, replace_file
from finetune.runs.metrics import as_json

CERTIFICATE_HEAD = "## Certificate\n\nCompared by `finetune verify` with the run as it was trained.\n"
"""How the section of a model card begins. A section of that name that you wrote yourself begins otherwise."""
_SCHEMA = 1


def write_certificate(file: Path, folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Write certificate.json, also where something differs; an earlier one is replaced. Returns its content.

    Args:
        file: the file to write.
        folder: the folder that was verified; the certificate names the digest of its list of checksums.
        record: the results by name. `mismatches` decides the verdict.

    Raises:
        RunFailedError: the disk refused.
    """
    content = {
        "schema_version": _SCHEMA,
        "verdict": "differs" if record["mismatches"] else "same",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "manifest_sha256": _digest_manifest(folder),
        **{name: as_json(value) for name, value in record.items()},
    }
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
    rows = {
        "runtime": content["runtime"],
        "rendered conversations": Check(**content["rendered"]),
        "positions with logits": f"{Check(**content['positions'])}, relative difference at most "
        f"{content['relative']:.3g} (bound {content['bound']:.3g})",
        "greedy answers": f"{Check(**content['answers'])}, {content['near_ties']} of them up to a near tie",
        "tensors": Check(**content["tensors"]),
        "other files": Check(**content["files"]),
        "test vectors": f"SHA-256 {content['vectors_sha256']}" if content["vectors_sha256"] else "made by the run",
        "made": content["made"],
    }
    if replay := content["replay"]:
        rows["losses computed again"] = f"{len(replay['steps'])} steps, within {replay['bound']:.3g} x max(1, loss)"
    lines = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"{CERTIFICATE_HEAD}\n| | |\n|---|---|\n{lines}\n"


def _digest_manifest(folder: Path) -> str | None:
    file = folder / MANIFEST
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
