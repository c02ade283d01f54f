"""Build an ONNX model from a merged folder with onnxruntime-genai's own builder, and compare it with the run."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from finetune.errors import RunFailedError
from finetune.export.certificate import Verified, write_certificate
from finetune.export.converters import MODEL_TO_ONNX, files_of_model, refuse_no_model
from finetune.export.onnx_served import OnnxType, refuse_missing_packages
from finetune.export.out_folder import new_folder
from finetune.export.served_comparison import ServedComparison
from finetune.export.vectors import CERTIFICATE, copy_vectors, read_vectors
from finetune.export.verifying import verify_folder
from finetune.limits import read_chunks
from finetune.units import name_first

_BUILDER = "onnxruntime_genai.models.builder"
_PRECISION: dict[OnnxType, str] = {"f32": "fp32", "int4": "int4"}
"""The builder's names of the types."""
_OWN_TEXT = (
    "The runtime renders or splits text in its own way. Render and encode prompts with the tokenizer of transformers "
    "and give the runtime their ids, or serve the merged folder"
)
_ADVICE = {
    "of the prompt is": _OWN_TEXT,
    "rendered text": _OWN_TEXT,
    "it stops at": "The runtime stops where eos_token_id in its genai_config.json says",
    "f32": "Set another bound with --max-difference, or serve the merged folder",
    "int4": "int4 is too coarse for this model. Export with --type f32, which rounds nothing. If it must be small, "
    "use finetune export gguf RUN OUT --type q8_0 for llama.cpp",
}
"""What to do about a difference, by a part of its sentence; about logits and answers, by the type of the weights."""


def export_onnx(
    model: Path,
    out: Path,
    *,
    weight_type: OnnxType = "f32",
    most_difference: float | None = None,
    allows_differences: bool = False,
) -> Verified:
    """Write a folder that onnxruntime-genai serves, compared there with base and adapter; all of it or nothing.

    With int4, matrices are stored in blocks of 32 numbers with a scale each, and inputs of their products are rounded
    to int8; embeddings and norms stay in fp32. `most_difference` is the largest relative difference of a position's
    logits; None: a bound that fits the type. With `allows_differences`, a model that answers differently is kept, and
    its certificate says so.

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
    with new_folder(out, (4 if weight_type == "f32" else 2) * size) as writer:
        with tempfile.TemporaryDirectory(dir=writer.path) as aside:
            _build(model, Path(aside), weight_type)
            for built in sorted(path for path in Path(aside).iterdir() if path.is_file()):
                writer.write(built.name, read_chunks(built))
                built.unlink()
        copy_vectors(model, writer)
        comparison = _compare_elsewhere(writer.path, most_difference)
        if comparison.mismatches and not allows_differences:
            first = comparison.mismatches[0]
            advice = next((advice for part, advice in _ADVICE.items() if part in first), _ADVICE[weight_type])
            raise RunFailedError(
                "the ONNX model does not answer like base and adapter: "
                f"{name_first(comparison.mismatches, 1, separator='; ')}. Nothing was written. {advice}. "
                "--allow-differences keeps the model all the same, and its certificate lists all differences."
            )
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


def _compare_elsewhere(folder: Path, bound: float | None) -> ServedComparison:
    """Compare in a process of its own: a runtime in native code can end its process."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_compare_here, folder, bound).result()
        except BrokenProcessPool as error:
            raise RunFailedError(
                "onnxruntime-genai ended its process while it loaded or ran the model. Nothing was written."
            ) from error


def _compare_here(folder: Path, bound: float | None) -> ServedComparison:
    return verify_folder(folder, bound=bound).comparison
