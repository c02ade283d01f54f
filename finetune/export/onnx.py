"""Build an ONNX model from a merged folder with onnxruntime-genai's own builder, after saying what it would misread.

Facts about the builder: microsoft/onnxruntime-genai 0.18, models/builder.py, builders/base.py and builders/phi.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.engine.decoder import FAMILIES, SLIDING
from finetune.errors import ModelError, RunFailedError, last_line
from finetune.export.certificate import Verified, write_certificate
from finetune.export.digests import CERTIFICATE
from finetune.export.exported_folder import refuse_no_model
from finetune.export.onnx_served import OnnxType, load_onnx, onnx_bound, refuse_missing_packages
from finetune.export.out_folder import new_folder, read_on
from finetune.export.served_comparison import ServedComparison, compare
from finetune.export.vectors import copy_vectors, read_vectors

_BUILDER = "onnxruntime_genai.models.builder"
_PRECISION: dict[OnnxType, str] = {"f32": "fp32", "int4": "int4"}
"""The builder's names of the types."""
_SAME_SPLITS = {r"\p{L}+|\p{N}|[^\p{L}\p{N}]+": r"[\p{L}]+|[\p{N}]"}
"""Patterns by which a tokenizer splits text, in a form that the runtime knows: what lies between two matches is a piece
as well. The first is phi_tiny's."""


@dataclass(frozen=True, kw_only=True)
class Onnx:
    """The settings of an ONNX model.

    Attributes:
        kind: the type of the weights. With int4, matrices are stored in blocks of 32 numbers with a scale each, and
            inputs of their products are rounded to int8; embeddings and norms stay in fp32.
        most_difference: the largest relative difference of a position's logits; None: what fits the type.
        allows_differences: keep a model that answers otherwise than base and adapter; its certificate says so.
    """

    kind: OnnxType = "f32"
    most_difference: float | None = None
    allows_differences: bool = False


def export_onnx(model: Path, out: Path, onnx: Onnx) -> Verified:
    """Write a folder that onnxruntime-genai serves, compared there with base and adapter; all of it or nothing.

    Args:
        model: a merged folder with test vectors.
        out: a folder that does not exist or is empty.
        onnx: the settings.

    Raises:
        CheckpointError: `out` is taken, or `model` is not a merged folder with test vectors.
        ConfigError: onnxruntime-genai is not installed.
        ModelError: its builder does not support the model.
        RunFailedError: the disk failed, or the runtime answers otherwise than base and adapter.
    """
    refuse_missing_packages(builds=True)
    model = model.expanduser().absolute()
    refuse_no_model(model)
    vectors = read_vectors(model)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    with new_folder(out, (4 if onnx.kind == "f32" else 2) * size) as writer:
        with tempfile.TemporaryDirectory(dir=writer.path.parent) as aside:
            _build(model, Path(aside), onnx.kind)
            for built in sorted(path for path in Path(aside).iterdir() if path.is_file()):
                with built.open("rb") as file:
                    writer.write(built.name, read_on(file))
                built.unlink()
        copy_vectors(model, writer)
        bound = onnx.most_difference
        if bound is None:
            bound = onnx_bound(writer.path) + vectors.merge_bound
        comparison = _compare_elsewhere(writer.path, bound)
        if not comparison.is_same and not onnx.allows_differences:
            raise RunFailedError(_refusal(comparison.mismatches, model))
    out = out.expanduser().absolute()
    verified = Verified(folder=out, source="base and adapter", vectors=vectors, comparison=comparison)
    write_certificate(out / CERTIFICATE, verified)
    return verified


def _build(model: Path, out: Path, kind: OnnxType) -> None:
    """Run the builder in a process of its own, which cannot ask the hub and runs no code from the model.

    Raises:
        ModelError: it does not support the model; the message repeats its reason.
    """
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        source = Path(scratch, "model")
        source.mkdir()
        _link_model(model, source)
        # -P: a folder that happens to be the current one must not supply modules.
        command = [sys.executable, "-P", "-m", _BUILDER, "-i", str(source), "-o", str(out), "-e", "cpu"]
        command += ["-p", _PRECISION[kind], "-c", str(Path(scratch, "cache")), "--extra_options"]
        # A cache of the window's size refuses prompts that are shorter than the window.
        command += ["hf_remote=false", "hf_token=false", "windowed_kv_cache=false"]
        variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=scratch, env=variables, capture_output=True, text=True)
    if done.returncode != 0:
        reason = last_line(done.stderr) or "it gave no reason"
        raise ModelError(
            f"onnxruntime-genai's builder refused the model: {reason.replace(str(source), 'the model')}. If the model "
            "is newer than your onnxruntime-genai, update it. The merged folder can be served without it."
        )


def _link_model(model: Path, source: Path) -> None:
    """Link the model's files, with copies of those that the builder or the runtime would misread."""
    rewritten = {"config.json": as_the_builder_reads, "tokenizer.json": _as_the_runtime_splits}
    for path in sorted(model.iterdir()):
        if path.name in rewritten:
            record = rewritten[path.name](json.loads(path.read_text(encoding="utf-8")))
            (source / path.name).write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
        elif path.is_file() and path.name != "README.md":
            (source / path.name).symlink_to(path.resolve())


def as_the_builder_reads(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json with keys that the builder needs and transformers does not.

    The builder gives a layer its window only where `layer_types` says so, takes a phi3 model whose
    original_max_position_embeddings differs from max_position_embeddings for one with LongRoPE, and reads the kind of
    rotary embedding under an older name.
    """
    kind, longest, window = config["model_type"], config.get("max_position_embeddings"), config.get("sliding_window")
    changed = dict(config)
    if rope := config.get("rope_parameters") or config.get("rope_scaling"):
        changed["rope_parameters"] = {**rope, "type": rope.get("rope_type", rope.get("type", "default"))}
    if kind == "phi3" and (not rope or changed["rope_parameters"]["type"] == "default"):
        changed["original_max_position_embeddings"] = longest
    if kind in FAMILIES and FAMILIES[kind].window == "all layers" and window and longest and window < longest:
        changed["layer_types"] = [SLIDING] * config["num_hidden_layers"]
    return changed


def _as_the_runtime_splits(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer.json with its patterns spelled as in `_SAME_SPLITS`."""
    whole = tokenizer.get("pre_tokenizer") or {}
    for part in whole.get("pretokenizers", [whole]):
        pattern = part.get("pattern", {})
        if pattern.get("Regex") in _SAME_SPLITS:
            pattern["Regex"] = _SAME_SPLITS[pattern["Regex"]]
    return tokenizer


def _compare_elsewhere(folder: Path, bound: float) -> ServedComparison:
    """Compare in a process of its own: a runtime in native code can end its process.

    Raises:
        RunFailedError: the runtime cannot load the folder, or ended the process.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_compare_here, folder, bound).result()
        except BrokenProcessPool as error:
            raise RunFailedError(
                "onnxruntime-genai ended its process while it loaded or ran the model. Nothing was written."
            ) from error


def _compare_here(folder: Path, bound: float) -> ServedComparison:
    return compare(load_onnx(folder), read_vectors(folder), bound=bound)


def _refusal(mismatches: Sequence[str], model: Path) -> str:
    """Write the message of a refusal: the first difference, and what to do about it."""
    more = f"; and {len(mismatches) - 1} more" if len(mismatches) > 1 else ""
    return (
        f"the ONNX model does not answer like base and adapter: {mismatches[0]}{more}. Nothing was written. "
        f"{_what_to_do(mismatches[0], model)}. --allow-differences keeps the model all the same, and its certificate "
        "lists all differences."
    )


def _what_to_do(mismatch: str, model: Path) -> str:
    if "of the prompt is" in mismatch and (tokens := _stripped_before(model)):
        return (
            f"The tokenizer drops white space before {', '.join(tokens[:3])}, and the runtime keeps it: cut white "
            "space off the ends of messages before you send them"
        )
    if "of the prompt is" in mismatch or "rendered text" in mismatch:
        return (
            "The runtime renders or splits text in its own way. Render and encode prompts with the tokenizer of "
            "transformers and give the runtime their ids, or serve the merged folder"
        )
    if "it stops at" in mismatch:
        return "The runtime stops where eos_token_id in its genai_config.json says"
    return "Export with --type f32, or set another bound with --max-difference"


def _stripped_before(model: Path) -> list[str]:
    """Return the tokens before which the tokenizer drops white space."""
    described = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    return [token["content"] for token in described.get("added_tokens", ()) if token.get("lstrip")]
