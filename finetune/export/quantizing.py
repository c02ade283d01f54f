"""Quantize a GGUF file with llama.cpp's own programs, and measure the quantized model against the run.

Without an error, the quantizer stores a matrix in another type if its rows are not a multiple of the type's blocks.
Source: ggml-org/llama.cpp, src/llama-quant.cpp (`tensor_type_fallback`) and tools/imatrix.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.errors import ConfigError
from finetune.export.converters import IMATRIX, QUANTIZER
from finetune.export.gguf_file import TENSOR_TYPES, read_header
from finetune.export.gguf_served import PACKAGE, installed_version
from finetune.export.served_comparison import ServedModel, served_vectors
from finetune.export.vectors import Vectors, compare_logits
from finetune.fallbacks import Fallback, Fallbacks

FEWEST_TOKENS = 1024
"""llama-imatrix needs the tokens of two contexts, each of the 512 that `Quantizer.quantize` asks for."""
_TEXT, _MATRIX, _QUANTIZED = "training-rows.txt", "imatrix.gguf", "quantized.gguf"


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """llama.cpp's quantizer, and the rows of an importance matrix."""

    program: Path
    imatrix_program: Path | None = None
    """llama-imatrix; None: no importance matrix."""
    rows: tuple[str, ...] = ()
    """Training rows as training rendered them, for the importance matrix."""
    is_strict: bool = False
    """Refuse a file in which matrices have other types than were asked for."""
    workspace: Path | None = None
    """A folder that keeps the unquantized file and the importance matrix for the next type. None: keep neither."""

    def quantize(self, source: Path, weight_type: str) -> Path:
        """Quantize a GGUF file into its folder. Returns the new file.

        Raises:
            ConfigError: matrices got other types, and this is refused.
            ModelError: a program of llama.cpp refuses the model.
        """
        folder, options = source.parent, list[str]()
        # Names without a folder: the quantizer writes them into the file.
        if self.imatrix_program is not None:
            options = ["--imatrix", _MATRIX]
            if not (folder / _MATRIX).is_file():
                (folder / _TEXT).write_text("".join(self.rows), encoding="utf-8")
                command = [str(self.imatrix_program), "-m", source.name, "-f", _TEXT, "-o", _MATRIX]
                IMATRIX.run([*command, "-c", "512", "--parse-special", "--no-ppl"], folder, inside=folder)
        command = [str(self.program), *options, source.name, _QUANTIZED, weight_type.upper()]
        QUANTIZER.run(command, folder, inside=folder)
        stored = types_of(folder / _QUANTIZED, weight_type)
        if isinstance(stored, Fallback):
            Fallbacks(strict=self.is_strict).take(stored)
        return folder / _QUANTIZED


def find_program(name: str, llama_cpp: Path) -> Path:
    """Find a program of llama.cpp in a checkout, in its build folder, or on PATH.

    Raises:
        ConfigError: it is nowhere, or llama-cpp-python, which measures what it writes, is not installed.
    """
    places = [str(llama_cpp), str(llama_cpp / "build" / "bin"), os.environ.get("PATH", "")]
    program = shutil.which(name, path=os.pathsep.join(places))
    if program is None:
        raise ConfigError(
            f"{name} is not in {llama_cpp}, its build/bin or on PATH. Build it there: cmake -B build && cmake --build "
            "build --target llama-quantize llama-imatrix. Or use finetune export gguf --type q8_0, which needs neither."
        )
    if installed_version() is None:
        raise ConfigError(f"a quantized model is measured in llama.cpp, not installed here: pip install {PACKAGE}.")
    return Path(program).absolute()


def types_of(file: Path, weight_type: str) -> str | Fallback:
    """Return the types of the matrices of a quantized file; a fallback if the rows of some do not fit the type."""
    matrices, block = read_header(file).matrices, 32 if weight_type == "q4_0" else 256
    counts = Counter(TENSOR_TYPES.get(number, f"type {number}") for _, number in matrices)
    stored = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
    misfits = sum(length % block != 0 for length, _ in matrices)
    if not misfits:
        return stored
    why = f"the rows of {misfits} of {len(matrices)} matrices are not a multiple of {block} long"
    return Fallback(what="--type", wanted=weight_type, used=stored, why=why)


def vectors_of_quantized(
    served: ServedModel, known: Vectors, file: Path, weight_type: str, quantizer: Quantizer
) -> Vectors:
    """Make test vectors of a quantized model, for the prompts of the run's own. Their note has the difference."""
    quantized = served_vectors(served, known)
    apart = compare_logits(quantized.logits, known.logits)
    both = zip(quantized.vectors, known.vectors, strict=True)
    pairs = [(own.answer, other.answer) for own, other in both if own.turns]
    matrix = (
        f"an importance matrix of {len(quantizer.rows)} training rows" if quantizer.rows else "no importance matrix"
    )
    note = (
        f"quantized as {weight_type} with {matrix} ({types_of(file, weight_type)}); the test vectors are of the "
        f"quantized model, whose logits are {apart.relative:.3g} of their norm from the run's, with "
        f"{sum(own == other for own, other in pairs)} of {len(pairs)} greedy answers equal"
    )
    return replace(quantized, rounding=0.0, stored_as=weight_type, note=note)
