"""Find the smallest exported model that still answers as a run does: `finetune export smallest`."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from finetune.data.encoded import EncodedExamples
from finetune.errors import DataError, FinetuneError, PreemptedError, RunFailedError
from finetune.export.certificate import write_certificate
from finetune.export.compress import export_compressed, measure_run, refuse_rows_without_answer
from finetune.export.gguf import Gguf, export_model
from finetune.export.gguf_served import MOST_TOKENS, QUANTIZED
from finetune.export.merge import write_merged
from finetune.export.onnx import export_onnx
from finetune.export.out_folder import folder_beside, new_folder, refuse_taken
from finetune.export.runtimes import runtime_of
from finetune.export.vectors import CERTIFICATE, LOGITS_FILE, VECTORS_FILE, read_vectors, write_vectors
from finetune.export.verifying import summarize_mismatches, verify_folder
from finetune.inference.evaluation import Dialogues
from finetune.inference.finished_run import FinishedRun
from finetune.limits import read_chunks
from finetune.logs import waiting
from finetune.model.tokens import build_run_tokenizer
from finetune.runs.durable import MANIFEST
from finetune.units import counted, format_bytes

MOST_ROWS = 64
"""Validation rows that each model is measured on."""
MOST_LOSS = 1.01
"""The largest loss, relative to the run's."""
_GGUF_BITS = {"q2_k": 3.2, "q3_k_m": 4, "q4_0": 4.6, "q4_k_m": 4.9, "q5_k_m": 5.7, "q6_k": 6.6, "q8_0": 8.5, "f16": 16}
_NEARLY = 1.25
"""A type that is expected to be so many times as large as the kept file may still come out smaller: llama.cpp stores
some matrices in other types, and an ONNX model may store embeddings in fp32."""
_log = logging.getLogger(__name__)


class TriedFormat(NamedTuple):
    """A format whose types are tried. The runtime that serves its folders is in `runtimes.RUNTIMES`."""

    types: Mapping[str, tuple[float, float]]
    """Bits of a weight of a linear layer and of an embedding, by the name of a type. They decide the order."""
    write: Callable[[FinishedRun, Path, Path, Gguf, Any], object]
    """Writes a folder, given the run, the run as a merged folder, the new folder, the settings of GGUF and the type."""


class Tried(NamedTuple):
    """How a type of weights was measured. `equal` is the number of greedy answers that equal the run's."""

    name: str
    size: int
    loss: float
    equal: int
    holds: bool


class Search(NamedTuple):
    """The run's own loss, on how much it was measured, and how each type was."""

    loss: float
    num_rows: int
    num_answers: int
    tries: list[Tried]
    differences: list[str]
    """What the certificate of the kept type lists."""

    @property
    def kept(self) -> Tried | None:
        """The smallest type that holds; None if there is none."""
        return min((tried for tried in self.tries if tried.holds), key=lambda tried: tried.size, default=None)


def find_smallest(run: FinishedRun, out: Path, gguf: Gguf, *, keep: float) -> Search:
    """Export a run in one type after the other, from small to large, and keep the smallest that answers as the run.

    A type holds if at least `keep` of the greedy answers equal the run's and the loss is at most `MOST_LOSS` times the
    run's, in the runtime that serves it. The order follows the expected sizes. After a type that holds, those that may
    be smaller are exported too, and measured if they are. If no type holds, nothing is written.

    Raises:
        CheckpointError: `out` is taken.
        ConfigError, DataError: the run has no validation rows to measure on.
        FinetuneError: no type could be measured; the error of the last one.
    """
    out = refuse_taken(out)
    refuse_rows_without_answer(run)
    with folder_beside(out) as place:
        rows, error, note = _Rows(run), None, ""
        with waiting("measuring the run itself"):
            evaluation = measure_run(run, rows.select)
        answers = [answer.answers["tuned"] for answer in evaluation.answers]
        search = Search(evaluation.tuned.loss, evaluation.num_rows, len(answers), [], [])
        merged = write_merged(run, Path(place, "merged")).folder
        candidate, best = (Path(place, role, out.name) for role in ("candidate", "best"))
        candidate.parent.mkdir()
        expected = expected_sizes(merged)
        for number, name in enumerate(expected, start=1):
            kept = search.kept
            if kept is not None and expected[name] > _NEARLY * kept.size:
                break
            shutil.rmtree(candidate, ignore_errors=True)
            with waiting(f"trying {name}, {number} of at most {len(expected)}"):
                try:
                    write = next(each.write for each in FORMATS if name in each.types)
                    write(run, merged, candidate, gguf, name)
                    size = _size_of(candidate)
                    if kept is not None and size >= kept.size:
                        continue
                    loss, own = rows.measure(candidate)
                except PreemptedError:
                    raise
                except FinetuneError as failure:  # a type may not suit the model, or need what is not installed
                    error = failure
                    _log.warning("%s was not measured: %s", name, failure)
                    continue
            equal = sum(answer == other for answer, other in zip(own, answers, strict=True))
            holds = equal >= keep * len(answers) and loss <= MOST_LOSS * search.loss
            search.tries.append(Tried(name, size, loss, equal, holds))
            measured = (
                f"{name} on {counted(search.num_rows, 'validation row')}: loss {loss:.4f} (the run's: "
                f"{search.loss:.4f}), {equal} of {len(answers)} greedy answers equal, {format_bytes(size)}"
            )
            _log.info("%s", measured)
            if holds:
                note = measured
                shutil.rmtree(best.parent, ignore_errors=True)
                best.parent.mkdir()
                candidate.rename(best)
        if search.kept is not None:
            search.differences.extend(_keep(best, out, search.kept.size, note))
    if error is not None and not search.tries:
        raise error
    return search


class _Rows:
    """The first validation rows for which every runtime has room; `select` finds them."""

    def __init__(self, run: FinishedRun) -> None:
        self._tokenizer, self._limit = build_run_tokenizer(run.config), run.config.testing.max_new_tokens

    def select(self, examples: EncodedExamples) -> EncodedExamples:
        fits = (examples.lengths + self._limit <= MOST_TOKENS).nonzero()[:MOST_ROWS, 0]
        if not len(fits):
            raise DataError(
                f"no validation row with an answer of {self._limit} tokens fits into the {MOST_TOKENS} tokens that are "
                "compared in llama.cpp. Lower --set testing.max_new_tokens, or give shorter rows."
            )
        self._examples = examples.select(fits)
        return self._examples

    def measure(self, folder: Path) -> tuple[float, list[str]]:
        """Return what `measure_run` returns for a run: nats per target token, and the text of each answer."""
        served: Any = runtime_of(folder).load(folder)
        dialogues, nats, num_targets = Dialogues(self._examples, self._tokenizer), 0.0, 0
        try:
            for ids, is_target in map(self._examples.__getitem__, range(len(self._examples))):
                places = is_target.nonzero()[:, 0]
                if len(places):
                    logits = served.logits(ids.tolist(), (places - 1).tolist())
                    nats += float(cross_entropy(logits.double(), ids[places], reduction="sum"))
                    num_targets += len(places)
            answers = [served.answer(prompt, self._limit) for prompt in dialogues.prompts]
        finally:
            getattr(served, "close", lambda: None)()
        stops, read = set(served.stop_ids), dialogues.reader.read
        return nats / num_targets, [read([token for token in ids if token not in stops]).text for ids in answers]


def expected_sizes(model: Path) -> dict[str, float]:
    """Return the bytes that each type is expected to need for a merged model, the smallest first."""
    config: Any = AutoConfig.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
    config = config.get_text_config()
    num_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    linear = max(0, num_bytes / (4 if config.dtype == torch.float32 else 2) - embeddings)
    sizes = {
        name: (bits * linear + embedding_bits * embeddings) / 8
        for each in FORMATS
        for name, (bits, embedding_bits) in each.types.items()
    }
    return dict(sorted(sizes.items(), key=lambda item: item[1]))


def _size_of(folder: Path) -> int:
    """Return the bytes of an exported folder, without the test vectors."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.name not in (VECTORS_FILE, LOGITS_FILE))


def _write_gguf(_: FinishedRun, merged: Path, folder: Path, gguf: Gguf, name: Any) -> None:
    workspace = gguf.quantizer and replace(gguf.quantizer, workspace=folder.parents[1])
    quantizer = workspace if name in QUANTIZED else None
    export_model(merged, folder, gguf=replace(gguf, weight_type=name, quantizer=quantizer))


def _write_onnx(_: FinishedRun, merged: Path, folder: Path, *__: Any) -> None:
    """Write an int4 ONNX model. Other logits and answers do not matter here, because they are measured.

    Raises:
        RunFailedError: its runtime gives the model other tokens than the run does, or ends answers elsewhere.
    """
    checks = export_onnx(merged, folder, weight_type="int4", allows_differences=True).comparison.checks
    others = [line for name in ("stop_ids", "rendered") for line in checks[name].mismatches]
    if others:
        raise RunFailedError(f"its runtime reads or ends chats otherwise than the run: {summarize_mismatches(others)}")


FORMATS = (
    TriedFormat({name: (bits, bits) for name, bits in _GGUF_BITS.items()}, _write_gguf),
    TriedFormat({"w4a16": (4.25, 16)}, lambda run, _, folder, __, name: export_compressed(run, folder, name, 256)),
    TriedFormat({"int4 ONNX": (4.5, 8)}, _write_onnx),
)
"""To have another format tried, add an entry."""


def _keep(folder: Path, out: Path, size: int, note: str) -> list[str]:
    """Copy a folder to its place, with the measured difference in its test vectors, and write its certificate.

    Returns the differences that the certificate lists.
    """
    vectors = read_vectors(folder)
    with new_folder(out, size) as writer:
        digest = write_vectors(writer, replace(vectors, note="; ".join(filter(None, (vectors.note, note)))))
        for path in sorted(folder.iterdir()):
            if path.name == "README.md":  # it names the digest of the test vectors
                card = path.read_text(encoding="utf-8").replace(vectors.sha256, digest)
                writer.write(path.name, [card.encode()])
            elif path.name not in (MANIFEST, CERTIFICATE, VECTORS_FILE, LOGITS_FILE):
                writer.write(path.name, read_chunks(path))
    verified = verify_folder(out)
    write_certificate(out / CERTIFICATE, verified)
    return verified.mismatches
