"""Compress a run with llm-compressor, and compare the compressed model with the run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedExamples, EncodedSplits
from finetune.data.examples import load_examples
from finetune.distributed.launch import launch
from finetune.distributed.runtime import Runtime
from finetune.errors import ConfigError, ModelError
from finetune.export import compressor
from finetune.export.compressed_folder import SCHEMES, SchemeName, load_compressed, refuse_no_compressed_tensors
from finetune.export.converters import MODEL_TO_COMPRESSED, python_with
from finetune.export.merge import merged_beside
from finetune.export.model_card import Compressed, fill_card, hub_base
from finetune.export.out_folder import new_folder, refuse_taken
from finetune.export.quantizing import FEWEST_TOKENS, Quantizer, find_program
from finetune.export.runtimes import load_transformers
from finetune.export.served_comparison import served_vectors
from finetune.export.vectors import (
    LogitDifference,
    Vectors,
    compare_logits,
    digest_files,
    digest_weight_files,
    read_vectors,
    write_vectors,
)
from finetune.inference.finished_run import FinishedRun, read_finished_run
from finetune.inference.scores import Evaluation
from finetune.limits import read_chunks
from finetune.model.base import read_model_config
from finetune.model.tokens import build_run_tokenizer
from finetune.runs.durable import FolderWriter
from finetune.runs.model_files import LoadedRun
from finetune.runs.recorded_rows import read_row_record
from finetune.training.measuring import KnownRows, measure_split
from finetune.units import counted

PYTHON = "FINETUNE_LLMCOMPRESSOR"
"""Names the Python of an environment that has llm-compressor. Without it, it must be installed beside finetune."""
MOST_ANSWERS = 64
"""Validation prompts that both models answer."""


def export_compressed(run: FinishedRun, out: Path, scheme: SchemeName, num_rows: int) -> Compressed:
    """Write a folder that vLLM and transformers load, with linear layers compressed; all of it or nothing.

    An adapter is merged first. For calibration, `num_rows` training rows are drawn with the run's seed; fp8 needs none.

    Raises:
        CheckpointError: `out` is taken.
        ConfigError: llm-compressor or compressed-tensors is not installed, or the run's rows have no single answer.
        DataError: the run's rows are not there any more.
        ModelError: llm-compressor or this command does not support the model.
        RunFailedError: the disk has too little room or failed, or the merged model is not the tuned one.
    """
    out = refuse_taken(out)
    refuse_rows_without_answer(run)
    if hasattr(read_model_config(run.config.model), "num_local_experts"):
        raise ModelError(
            "this model is a mixture of experts, whose compressed form was not tried. Serve the merged folder, or "
            "compress it with llm-compressor itself."
        )
    python = find_llm_compressor()
    refuse_no_compressed_tensors()
    # Before the merge, which takes longer: the rows may be gone.
    splits = encode_examples(load_examples(run.config.data), build_run_tokenizer(run.config), run.config.data)
    chosen = draw_rows(splits, num_rows, run.config.seed) if SCHEMES[scheme].is_calibrated else []
    with merged_beside(run, out) as merged, new_folder(out, merged.num_bytes) as writer:  # twice the compressed weights
        built = merged.folder.with_name("compressed")
        uncompressed = _run_llm_compressor(python, merged.folder, built, scheme, chosen)
        num_bytes = _fill(writer, merged.folder, built)
        vectors, difference = _own_vectors(writer, read_vectors(merged.folder))
        compressed = Compressed(
            scheme=scheme,
            kept=uncompressed,
            num_bytes=(merged.num_bytes, num_bytes),
            num_rows=len(chosen),
            apart=difference.relative,
            **_measure(run, writer.path, has_validation=splits.validation is not None),
        )
        stored = replace(
            merged,
            dtype=f"{merged.dtype}, linear layers as {scheme}",
            difference=difference,
            vectors_sha256=write_vectors(writer, vectors),
        )
        card = fill_card(run, hub_base(run), system=stored.system, merged=stored, compressed=compressed)
        writer.write("README.md", [card.encode()])
    return compressed


def find_llm_compressor() -> str:
    """Return the Python of an environment that has llm-compressor.

    Raises:
        ConfigError: there is none.
    """
    remedy = (
        "It needs other versions of packages than finetune, so give it an environment of its own: python3 -m venv "
        f"compressor && compressor/bin/pip install torch llmcompressor. Then set {PYTHON} to compressor/bin/python."
    )
    return python_with("llmcompressor", PYTHON, name="llm-compressor", remedy=remedy)


def draw_rows(splits: EncodedSplits, num_rows: int, seed: int) -> list[list[int]]:
    """Return the token ids of training rows that are drawn with a seed, as training encoded them."""
    train = splits.train
    chosen = random.Random(seed).sample(range(len(train)), min(num_rows, len(train)))
    return [train[row].input_ids.tolist() for row in chosen]


def find_quantizer(llama_cpp: Path, run: FinishedRun | None, num_rows: int | None) -> Quantizer:
    """Find llama.cpp's quantizer. With `num_rows`, draw training rows of the run for an importance matrix.

    Raises:
        ConfigError: a program is missing, the run's rows have no single answer, or the drawn rows have too few tokens.
        DataError: the run's rows are not there any more.
    """
    program = find_program("llama-quantize", llama_cpp)
    if run is None or num_rows is None:
        return Quantizer(program=program, is_strict=run is not None and run.config.strict)
    refuse_rows_without_answer(run)
    imatrix_program, tokenizer = find_program("llama-imatrix", llama_cpp), build_run_tokenizer(run.config)
    splits = encode_examples(load_examples(run.config.data), tokenizer, run.config.data)
    drawn = draw_rows(splits, num_rows, run.config.seed)
    refuse_few_tokens(drawn, len(splits.train))
    rows = tuple(str(tokenizer.decode(ids)) for ids in drawn)
    return Quantizer(program=program, imatrix_program=imatrix_program, rows=rows, is_strict=run.config.strict)


def refuse_few_tokens(drawn: list[list[int]], num_rows: int) -> None:
    """Refuse too few tokens for an importance matrix before minutes of merging.

    Raises:
        ConfigError: says what to do instead.
    """
    num_tokens = sum(map(len, drawn))
    if num_tokens < FEWEST_TOKENS:
        more = "name more rows" if len(drawn) < num_rows else "leave it out, because the run has no more rows"
        raise ConfigError(
            f"--imatrix {len(drawn)} draws rows of {counted(num_tokens, 'token')} together, and llama-imatrix needs "
            f"{FEWEST_TOKENS:,}: {more}. Nothing was written."
        )


def refuse_rows_without_answer(run: FinishedRun) -> None:
    """Refuse runs on rows that have several answers, or a label.

    Raises:
        ConfigError: says what to do instead.
    """
    objective = run.config.objective
    if objective.compares_answers:
        raise ConfigError(
            f"{run.folder.path} was trained with training.objective={objective.name}, and a compressed "
            "model is calibrated and measured on rows with one answer each. Merge the run, and compress the folder "
            "with llm-compressor or llama.cpp itself."
        )


def _run_llm_compressor(python: str, model: Path, out: Path, scheme: str, rows: list[list[int]]) -> list[str]:
    """Compress a model in the environment of llm-compressor. Returns the linear layers that it keeps as they are."""
    request, report = (out.with_name(name) for name in ("request.json", "report.json"))
    content = {"model": str(model), "out": str(out), "scheme": scheme, "rows": rows, "report": str(report)}
    request.write_text(json.dumps(content), encoding="utf-8")
    # -P: a folder that happens to be the current one must not supply modules.
    MODEL_TO_COMPRESSED.run([python, "-P", str(compressor.__file__), str(request)], model, inside=out.parent)
    uncompressed: list[str] = json.loads(report.read_text(encoding="utf-8"))
    return uncompressed


def _fill(writer: FolderWriter, merged: Path, built: Path) -> int:
    """Write the compressed weights, and beside them the files of the merged folder. Returns the size of the weights."""
    config, compressed = (json.loads((folder / "config.json").read_text("utf-8")) for folder in (merged, built))
    config["quantization_config"] = compressed["quantization_config"]
    writer.write("config.json", [(json.dumps(config, indent=2) + "\n").encode()])
    for name in digest_files(merged).keys() - {"config.json"}:
        if not name.endswith(".safetensors.index.json"):
            writer.write(name, [(merged / name).read_bytes()])
    size = 0
    for path in sorted(built.glob("model*.safetensors*")):
        size += int(writer.write(path.name, read_chunks(path))["size"])
        path.unlink()
    return size


def _own_vectors(writer: FolderWriter, known: Vectors) -> tuple[Vectors, LogitDifference]:
    """Make test vectors of the compressed model, for the prompts of the run's own. Returns how far they are apart."""
    written, files = digest_weight_files(writer.path), digest_files(writer.path)
    own = served_vectors(load_transformers(writer.path), replace(known, rounding=0.0, written=written, files=files))
    return own, compare_logits(own.logits, known.logits)


def measure_run(
    run: FinishedRun,
    select: Callable[[EncodedExamples], EncodedExamples] = lambda examples: examples,
    *,
    load: Callable[[Runtime, FinishedRun], LoadedRun] = read_finished_run,
) -> Evaluation:
    """Measure a run, or another model that `load` returns, on the validation split, as `finetune evaluate` does."""
    testing = run.config.testing.model_copy(update={"compare_base": False, "num_samples": MOST_ANSWERS})
    config, recorded = run.config.model_copy(update={"testing": testing}), read_row_record(run.folder)
    with launch(config, trains=False) as runtime:
        loaded = load(runtime, run)
        return measure_split(runtime, config, loaded, "validation", {}, KnownRows(recorded), select=select)


def _measure(run: FinishedRun, folder: Path, *, has_validation: bool) -> dict[str, Any]:
    """Measure the run and the compressed model on the validation split."""
    if not has_validation:
        return {}
    before = measure_run(run)
    # The engine does not know the layers of compressed-tensors.
    training = run.config.training.model_copy(update={"kernels": "reference"})
    by_transformers = replace(run, config=run.config.model_copy(update={"training": training}))
    tokenizer = build_run_tokenizer(run.config)
    after = measure_run(by_transformers, load=lambda *_: LoadedRun(load_compressed(folder), tokenizer))
    pairs = zip(before.answers, after.answers, strict=True)
    return {
        "num_validated": before.num_rows,
        "losses": (before.tuned.loss, after.tuned.loss),
        "changed": sum(answer.answers["tuned"] != other.answers["tuned"] for answer, other in pairs),
        "answered": len(before.answers),
    }
