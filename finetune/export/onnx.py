"""Build an ONNX model from a merged folder with onnxruntime-genai's own builder, and compare it with the run."""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import RunFailedError
from finetune.export.certificate import Verified, write_certificate
from finetune.export.converters import MODEL_TO_ONNX, files_of_model
from finetune.export.exported_folder import refuse_no_model
from finetune.export.onnx_served import OnnxType, load_onnx, onnx_bound, refuse_missing_packages
from finetune.export.out_folder import new_folder, read_on
from finetune.export.rounding import Q8_0, measure_folder
from finetune.export.served_comparison import ServedComparison, compare
from finetune.export.vectors import CERTIFICATE, copy_vectors, read_vectors

_BUILDER = "onnxruntime_genai.models.builder"
_PRECISION: dict[OnnxType, str] = {"f32": "fp32", "int4": "int4"}
"""The builder's names of the types."""


@dataclass(frozen=True, kw_only=True)
class Onnx:
    """The settings of an ONNX model."""

    weight_type: OnnxType = "f32"
    """The type of the weights. With int4, matrices are stored in blocks of 32 numbers with a scale each, and inputs of
    their products are rounded to int8; embeddings and norms stay in fp32."""
    most_difference: float | None = None
    """The largest relative difference of a position's logits; None: a bound that fits the type."""
    allows_differences: bool = False
    """Keep a model that answers differently from base and adapter; its certificate says so."""


def export_onnx(model: Path, out: Path, onnx: Onnx) -> Verified:
    """Write a folder that onnxruntime-genai serves, compared there with base and adapter; all of it or nothing.

    Raises:
        CheckpointError: `out` is taken, or `model` is not a merged folder with test vectors.
        ConfigError: onnxruntime-genai is not installed.
        ModelError: its builder does not support the model.
        RunFailedError: the disk failed, or the runtime answers differently from base and adapter.
    """
    refuse_missing_packages(builds=True)
    model = model.expanduser().absolute()
    refuse_no_model(model)
    vectors = read_vectors(model)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    with new_folder(out, (4 if onnx.weight_type == "f32" else 2) * size) as writer:
        with tempfile.TemporaryDirectory(dir=writer.path.parent) as aside:
            _build(model, Path(aside), onnx.weight_type)
            for built in sorted(path for path in Path(aside).iterdir() if path.is_file()):
                with built.open("rb") as file:
                    writer.write(built.name, read_on(file))
                built.unlink()
        copy_vectors(model, writer)
        bound = onnx.most_difference
        if bound is None:
            bound = onnx_bound(writer.path) + vectors.merge_bound
        comparison = _compare_elsewhere(writer.path, bound)
        if comparison.mismatches and not onnx.allows_differences:
            raise RunFailedError(_refusal(comparison.mismatches, model, onnx.weight_type))
    out = out.expanduser().absolute()
    verified = Verified(folder=out, source="base and adapter", vectors=vectors, comparison=comparison)
    write_certificate(out / CERTIFICATE, verified)
    return verified


def _build(model: Path, out: Path, weight_type: OnnxType) -> None:
    """Run the builder, which runs no code from the model."""
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        source = Path(scratch, "model")
        source.mkdir()
        MODEL_TO_ONNX.copy(files_of_model(model), source)
        # -P: a folder that happens to be the current one must not supply modules.
        command = [sys.executable, "-P", "-m", _BUILDER, "-i", str(source), "-o", str(out), "-e", "cpu"]
        command += ["-p", _PRECISION[weight_type], "-c", str(Path(scratch, "cache")), "--extra_options"]
        # A cache of the window's size refuses prompts that are shorter than the window.
        command += ["hf_remote=false", "hf_token=false", "windowed_kv_cache=false"]
        MODEL_TO_ONNX.run(command, source, inside=Path(scratch))


def _compare_elsewhere(folder: Path, bound: float) -> ServedComparison:
    """Compare in a process of its own: a runtime in native code can end its process."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_compare_here, folder, bound).result()
        except BrokenProcessPool as error:
            raise RunFailedError(
                "onnxruntime-genai ended its process while it loaded or ran the model. Nothing was written."
            ) from error


def _compare_here(folder: Path, bound: float) -> ServedComparison:
    return compare(load_onnx(folder), read_vectors(folder), bound=bound)


def _refusal(mismatches: Sequence[str], model: Path, weight_type: OnnxType) -> str:
    """Write the message of a refusal: the first difference, and what to do about it."""
    more = f"; and {len(mismatches) - 1} more" if len(mismatches) > 1 else ""
    return (
        f"the ONNX model does not answer like base and adapter: {mismatches[0]}{more}. Nothing was written. "
        f"{_what_to_do(mismatches[0], model, weight_type)}. --allow-differences keeps the model all the same, and its "
        "certificate lists all differences."
    )


def _what_to_do(mismatch: str, model: Path, weight_type: OnnxType) -> str:
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
    if weight_type == "int4":
        return (
            "int4 is too coarse for this model. Export with --type f32, which rounds nothing. If it must be small, use "
            "finetune export MODEL OUT --gguf --type q8_0 for llama.cpp: 8 bits were measured to move this model's "
            f"logits by {measure_folder(model, read_vectors(model), Q8_0):.2g} of their norm"
        )
    return "Set another bound with --max-difference, or serve the merged folder"


def _stripped_before(model: Path) -> list[str]:
    """Return the tokens before which the tokenizer drops white space."""
    described = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    return [token["content"] for token in described.get("added_tokens", ()) if token.get("lstrip")]
