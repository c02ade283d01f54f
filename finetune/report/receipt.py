"""The receipt of a finished run: its rows, base, computation, time, versions and results, from its files alone."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.config.schema import Config
from finetune.errors import CheckpointError, ConfigError, RequirementError, first_line
from finetune.limits import read_regular
from finetune.model.published import published_sizes
from finetune.report.page import page_template
from finetune.runs.durable import MANIFEST, describe_os_error, replace_file
from finetune.runs.metrics import number_in
from finetune.runs.output_files import writes
from finetune.runs.recorded_rows import read_row_record
from finetune.runs.recorded_run import RecordedRun, mapping

NOT_KNOWN = "not known"
JSON_NAME, PAGE_NAME = "receipt.json", "receipt.html"
_CERTIFICATE = "certificate.json"


def build_receipt(run: RecordedRun) -> dict[str, Any]:
    """Build the receipt. What the files do not tell is `NOT_KNOWN`.

    Raises:
        CheckpointError: the run has no published weights, or they are damaged; or a file has a number or a nesting that
            no run writes.
        ConfigError: the run is not complete.
    """
    try:
        return dict(json.loads(json.dumps(_facts(run), allow_nan=False)))
    except (ArithmeticError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{run.name} has no receipt: run.json or metrics.jsonl has a value that no run writes "
            f"({first_line(error)}). Restore the file, or use another run."
        ) from None


def _facts(run: RecordedRun) -> dict[str, Any]:
    weights = run.find_weights()
    if run.state != "completed" or run.config is None:
        why = run.why_no_config or f"its state is {run.state}"
        raise ConfigError(f"{run.name} has no receipt: {why}. A receipt is of a completed run: go on with resume=auto.")
    prints, config, verdicts = run.part("fingerprints"), run.config, mapping(run.result.get("verdict"))
    manifest = hashlib.sha256(read_regular(weights / MANIFEST)).hexdigest()
    return {
        "receipt": 1,
        "rows": _rows(run),
        "base": {"name": _base_name(run, config), "sha256": prints.get("base", NOT_KNOWN)},
        "weights": {"manifest_sha256": manifest},
        "training": {
            "objective": config.training.objective,
            "method": config.training.method,
            "config_sha256": prints.get("config", NOT_KNOWN),
            **_computation(run, config),
        },
        "time": {
            "starts": run.entries("starts"),
            "finished": run.finished or NOT_KNOWN,
            "device": run.record.get("device") or NOT_KNOWN,
            "device_seconds_of_steps": _device_seconds(run),
        },
        "energy": _energy(run),
        "versions": run.part("versions"),
        "git_commit": run.record.get("git_commit") or NOT_KNOWN,
        "fallbacks": [
            f"{fact['what']}: {fact['used']} instead of {fact['wanted']}, because {fact['why']}"
            for fact in run.entries("fallbacks")
            if {"what", "used", "wanted", "why"} <= fact.keys()
        ],
        "certificate": _certificate(weights, manifest),
        "verdict": {name: mapping(part).get("sentence") for name, part in verdicts.items()} or NOT_KNOWN,
    }


def _base_name(run: RecordedRun, config: Config) -> str:
    """Return the base as the run was given it. `config` names a relative path differently in each current folder."""
    started = mapping(mapping(run.part("started_with").get("config")).get("model"))
    return str(started.get("path") or config.model.path or NOT_KNOWN)


def _rows(run: RecordedRun) -> dict[str, Any]:
    """Describe the training rows. Their root is the SHA-256 of the sorted digests of their contents."""
    recorded = read_row_record(run.folder)
    if recorded is None or "train" not in recorded.splits:
        return {"distinct": NOT_KNOWN, "root_sha256": NOT_KNOWN}
    digests = sorted(recorded.splits["train"])
    root = hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()
    return {"distinct": len(digests), "root_sha256": root}


def _computation(run: RecordedRun, config: Config) -> dict[str, Any]:
    """Count the operations of all steps, and compare them with the pretraining of a published base.

    A token costs two operations for each parameter in the forward pass, two for the gradients of activations, and two
    for the gradient of each trained parameter (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Pretraining costs
    six for each parameter and token.
    """
    steps = run.of("step")
    tokens = sum(number_in(step, "num_tokens") or 0 for step in steps)
    computed = sum(number_in(step, "num_computed") or number_in(step, "num_tokens") or 0 for step in steps)
    counts = run.part("parameters")
    trained, total = counts.get("trained"), counts.get("all")
    published = published_sizes(config.model)
    operations = pretraining = None
    if isinstance(trained, int) and isinstance(total, int):
        operations = (4 * total + 2 * trained) * computed
        if published is not None and published.pretraining_tokens is not None:
            base = total - trained if config.training.method == "lora" else total
            pretraining = 6 * base * published.pretraining_tokens
    return {
        "steps": len(steps),
        "tokens": int(tokens),
        "tokens_computed": int(computed),
        "parameters": counts or NOT_KNOWN,
        "operations": operations if operations is not None else NOT_KNOWN,
        "operations_of_pretraining": pretraining if pretraining is not None else NOT_KNOWN,
        "share_of_pretraining": operations / pretraining if operations is not None and pretraining else NOT_KNOWN,
    }


def _device_seconds(run: RecordedRun) -> float | str:
    """Return the seconds of all recorded steps, times the number of processes."""
    seconds = 0.0
    for step in run.of("step"):
        tokens, rate = number_in(step, "num_tokens"), number_in(step, "tokens_per_second")
        if not tokens or not rate:
            return NOT_KNOWN
        seconds += tokens / rate
    return round(seconds * (run.record.get("world_size") or 1), 1)


def _energy(run: RecordedRun) -> dict[str, float | str] | str:
    """Return the joules from step 1 to the last one, by kind of device; a kind must be known at all times."""
    told = run.of("resources")
    kinds = ["gpu_joules", "cpu_joules"] if run.record.get("device") == "cuda" else ["cpu_joules"]
    known = [kind for kind in kinds if told and all(kind in event for event in told)]
    sums = {kind: round(sum(number_in(event, kind) or 0 for event in told), 1) for kind in known}
    return {kind: sums.get(kind, NOT_KNOWN) for kind in kinds} if sums else NOT_KNOWN


def _certificate(weights: Path, manifest: str) -> Any:
    """Return runtime and verdict of the certificate beside the weights. One of other weights tells nothing."""
    try:
        content = dict(json.loads(read_regular(weights / _CERTIFICATE)))
    except (OSError, ValueError, TypeError, RecursionError):
        return NOT_KNOWN
    if content.get("manifest_sha256") != manifest:
        return NOT_KNOWN
    return {name: content.get(name, NOT_KNOWN) for name in ("runtime", "verdict")}


def write_receipt(run: RecordedRun) -> tuple[Path, Path]:
    """Write both files into the run's folder, and return their paths. A receipt of the run is replaced.

    Raises:
        CheckpointError, ConfigError: see `build_receipt`; or a file cannot be written.
        RunFailedError: the disk is full.
    """
    receipt = build_receipt(run)
    sections: dict[str, list[tuple[str, Any]]] = {}
    for (title, *names), value in _leaves(receipt):
        sections.setdefault(title.replace("_", " "), []).append((" ".join(names).replace("_", " "), value))
    page = page_template("receipt.html.j2").render(sections=sections, name=run.folder.path.resolve().name)
    files = {JSON_NAME: json.dumps(receipt, indent=2, allow_nan=False) + "\n", PAGE_NAME: page}
    for name, text in files.items():
        with writes(run.folder.path / name, "Copy the run's folder to a place that you can write."):
            replace_file(run.folder.path / name, text.encode())
    return run.folder.path / JSON_NAME, run.folder.path / PAGE_NAME


def check_receipt(run: RecordedRun) -> int:
    """Compare receipt.json with a receipt that is built anew, and return the number of facts.

    Raises:
        CheckpointError: there is no receipt, or it cannot be read.
        RequirementError: a fact differs.
    """
    file = run.folder.path / JSON_NAME
    try:
        before = dict(_leaves(dict(json.loads(read_regular(file)))))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else "it is not JSON"
        raise CheckpointError(
            f"{file} cannot be read: {why}. Write it with `finetune receipt {shlex.quote(run.name)}`."
        ) from None
    now = dict(_leaves(build_receipt(run)))
    # A certificate may be written after the receipt, and again with another version of its runtime.
    is_verified = now.get(("certificate", "verdict")) == "same"
    differences = [
        f"{'.'.join(path)} is {now.get(path, 'missing')} in the run, and {before.get(path, 'missing')} in the receipt"
        for path in sorted({*before, *now})
        if before.get(path) != now.get(path) and not (is_verified and path[0] == "certificate")
    ]
    if differences:
        raise RequirementError(f"{file} does not fit its run: {'; '.join(differences)}.")
    return len(now)


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each fact with the names that lead to it."""
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from _leaves(part, (*path, str(name)))
    else:
        yield path, value
