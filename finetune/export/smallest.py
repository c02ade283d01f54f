"""Find the smallest exported model that still answers as a run does: `finetune export --smallest`."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch.nn.functional import cross_entropy

from finetune.data.encoded import EncodedExamples
from finetune.errors import DataError, FinetuneError, PreemptedError
from finetune.export.certificate import write_certificate
from finetune.export.compress import export_compressed, measure_run, refuse_rows_without_answer
from finetune.export.gguf import Gguf, export_model
from finetune.export.gguf_served import MOST_TOKENS, QUANTIZED
from finetune.export.merge import write_merged
from finetune.export.onnx import export_onnx
from finetune.export.out_folder import nearest_parent, new_folder, read_on, refuse_taken
from finetune.export.runtimes import runtime_of
from finetune.export.served_comparison import ServedModel
from finetune.export.vectors import CERTIFICATE, LOGITS_FILE, VECTORS_FILE, read_vectors, write_vectors
from finetune.export.verifying import verify_folder
from finetune.inference.evaluation import Dialogues
from finetune.inference.finished_run import FinishedRun
from finetune.logs import waiting
from finetune.model.tokens import build_run_tokenizer
from finetune.runs.durable import MANIFEST
from finetune.units import counted, format_bytes

MOST_ROWS = 64
"""Validation rows that each model is measured on."""
MOST_LOSS = 1.01
"""The largest loss, relative to the run's."""
_GGUF_BITS = {"q2_k": 3.2, "q3_k_m": 4, "q4_0": 4.6, "q4_k_m": 4.9, "q5_k_m": 5.7, "q6_k": 6.6, "q8_0": 8.5, "f16": 16}
BITS = {**{name: (bits, bits) for name, bits in _GGUF_BITS.items()}, "w4a16": (4.25, 16), "int4 ONNX": (5, 32)}
"""Bits of a weight of a linear layer and of an embedding, by the name of a type. They decide the order of the tries."""
_log = logging.getLogger(__name__)


class Tried(NamedTuple):
    """How a type of weights was measured."""

    name: str
    size: int
    loss: float
    equal: int
    """The number of greedy answers that equal the run's."""
    holds: bool


class Search(NamedTuple):
    """The result of `find_smallest`."""

    loss: float
    """The run's own."""
    num_rows: int
    num_answers: int
    tries: list[Tried]
    """The last one is kept if it holds."""


def find_smallest(run: FinishedRun, out: Path, gguf: Gguf, *, keep: float) -> Search:
    """Export a run in one type after the other, from small to large, and keep the first that answers as the run does.

    A type holds if at least `keep` of the greedy answers equal the run's and the loss is at most `MOST_LOSS` times the
    run's, in the runtime that serves it. If no type holds, nothing is written.

    Raises:
        CheckpointError: `out` is taken.
        ConfigError, DataError: the run has no validation rows to measure on.
        FinetuneError: no type could be measured; the error of the last one.
    """
    out = refuse_taken(out)
    refuse_rows_without_answer(run)
    with tempfile.TemporaryDirectory(dir=nearest_parent(out), prefix=f".{out.name}.") as place:
        aside, rows = Path(place), Rows(run)
        with waiting("measuring the run itself"):
            evaluation = measure_run(run, rows.select)
        answers = [answer.answers["tuned"] for answer in evaluation.answers]
        search = Search(evaluation.tuned.loss, evaluation.num_rows, len(answers), [])
        merged = write_merged(run, aside / "merged").folder
        folder, error = aside / out.name, None
        for number, name in enumerate(names := by_expected_size(merged), start=1):
            with waiting(f"trying {name}, {number} of at most {len(names)}"):
                try:
                    _export(run, merged, folder, gguf, name)
                    loss, own = _measure(folder, rows)
                except PreemptedError:
                    raise
                except FinetuneError as failure:  # a type may not suit the model, or need what is not installed
                    error = failure
                    _log.warning("%s was not measured: %s", name, failure)
                    shutil.rmtree(folder, ignore_errors=True)
                    continue
            equal = sum(answer == other for answer, other in zip(own, answers, strict=True))
            holds = equal >= keep * len(answers) and loss <= MOST_LOSS * search.loss
            size = sum(path.stat().st_size for path in folder.iterdir() if path.name not in (VECTORS_FILE, LOGITS_FILE))
            search.tries.append(Tried(name, size, loss, equal, holds))
            note = (
                f"{name} on {counted(search.num_rows, 'validation row')}: loss {loss:.4f} (the run's: "
                f"{search.loss:.4f}), {equal} of {len(answers)} greedy answers equal, {format_bytes(size)}"
            )
            _log.info("%s", note)
            if holds:
                _keep(folder, out, size, note)
                break
            shutil.rmtree(folder)
    if error is not None and not search.tries:
        raise error
    return search


class Rows:
    """The validation rows on which a run and its exports are measured. `select` finds them."""

    def __init__(self, run: FinishedRun) -> None:
        self._tokenizer = build_run_tokenizer(run.config)
        self.max_new_tokens = run.config.testing.max_new_tokens

    def select(self, examples: EncodedExamples) -> EncodedExamples:
        """Choose the first rows for which every runtime has room.

        Raises:
            DataError: there are none.
        """
        fits = (examples.lengths + self.max_new_tokens <= MOST_TOKENS).nonzero()[:MOST_ROWS, 0]
        if not len(fits):
            raise DataError(
                f"no validation row with an answer of {self.max_new_tokens} tokens fits into the {MOST_TOKENS} tokens "
                "that are compared in llama.cpp. Lower --set testing.max_new_tokens, or give shorter rows."
            )
        self.examples = examples.select(fits)
        return self.examples

    def measure(self, served: ServedModel) -> tuple[float, list[str]]:
        """Return what `measure_run` returns for a run: nats per target token, and the text of each answer."""
        nats, num_targets = 0.0, 0
        for row in range(len(self.examples)):
            ids, is_target = self.examples[row]
            places = is_target.nonzero()[:, 0]
            if len(places):
                logits = served.logits(ids.tolist(), (places - 1).tolist())
                nats += float(cross_entropy(logits.double(), ids[places], reduction="sum"))
                num_targets += len(places)
        dialogues, stops = Dialogues(self.examples, self._tokenizer), set(served.stop_ids)
        answers = [served.answer(prompt, self.max_new_tokens) for prompt in dialogues.prompts]
        texts = [dialogues.reader.read([token for token in ids if token not in stops]).text for ids in answers]
        return nats / num_targets, texts


def by_expected_size(model: Path) -> list[str]:
    """Return the names of all types, the one expected to make the smallest file first."""
    linear = embeddings = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                *_, width = shape = file.get_slice(name).get_shape()
                number = shape[0] * width if len(shape) > 1 else 0
                if any(part in name for part in ("embed", "lm_head", "wte")):
                    embeddings += number
                else:
                    linear += number
    return sorted(BITS, key=lambda name: BITS[name][0] * linear + BITS[name][1] * embeddings)


def _export(run: FinishedRun, merged: Path, folder: Path, gguf: Gguf, name: Any) -> None:
    if name == "int4 ONNX":
        export_onnx(merged, folder, weight_type="int4")
    elif name == "w4a16":
        export_compressed(run, folder, name, 256)
    else:
        assert gguf.quantizer is not None
        quantizer = replace(gguf.quantizer, workspace=folder.parent) if name in QUANTIZED else None
        export_model(merged, folder, gguf=replace(gguf, weight_type=name, quantizer=quantizer))


def _measure(folder: Path, rows: Rows) -> tuple[float, list[str]]:
    served: Any = runtime_of(folder).load(folder)
    close: Callable[[], None] = getattr(served, "close", lambda: None)
    try:
        return rows.measure(served)
    finally:
        close()


def _keep(folder: Path, out: Path, size: int, note: str) -> None:
    """Copy a folder to its place, with the measured difference in its test vectors, and write its certificate."""
    vectors = read_vectors(folder)
    vectors = replace(vectors, note="; ".join(filter(None, (vectors.note, note))))
    with new_folder(out, size) as writer:
        for path in sorted(folder.iterdir()):
            if path.name not in (MANIFEST, CERTIFICATE, VECTORS_FILE, LOGITS_FILE):
                with path.open("rb") as file:
                    writer.write(path.name, read_on(file))
        write_vectors(writer, vectors)
    write_certificate(out / CERTIFICATE, verify_folder(out))
