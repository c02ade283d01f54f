"""The table of runtimes that serve a tuned model: the folders of each runtime, and how it loads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from finetune.errors import CheckpointError, ConfigError, ModelError, RunFailedError, first_line
from finetune.export.compressed_folder import load_compressed, refuse_no_compressed_tensors, scheme_of
from finetune.export.gguf_served import MODEL_FILE, gguf_bound, load_gguf
from finetune.export.onnx_served import GENAI_CONFIG, load_onnx, onnx_bound
from finetune.export.plain_reload import load_plain_model, logits_in_fp32
from finetune.export.served_comparison import Rendered, ServedModel, Turns
from finetune.export.vectors import MOST_DIFFERENCE, Digests, Vectors, answer_in_fp32, render_prompt
from finetune.model.lora import quiet_peft
from finetune.model.saved_adapter import ADAPTER_CONFIG, read_adapter_config, refuse_foreign_adapter
from finetune.model.unsupported import refuse_oversized_folder


class ServingRuntime(NamedTuple):
    """A runtime, and how to recognise and load its folders."""

    name: str
    patterns: tuple[str, ...]
    """A folder is for this runtime if it has a file for each pattern."""
    load: Callable[[Path], ServedModel]
    arithmetic_bound: Callable[[Path], float]
    """Returns the largest relative difference of a position's logits that the runtime's arithmetic explains."""
    is_merged: bool = True
    """Whether the folder's weights went through a merge, which rounded them."""
    digests: Callable[[Vectors], Digests] = lambda _: Digests()
    """Returns the digests of the folder's files in test vectors; empty for converted weights."""

    def bound(self, vectors: Vectors, folder: Path) -> float:
        """Return the largest relative difference of a position's logits that counts as equal.

        The rounding of a merge explains twice what was measured of it.
        """
        return self.arithmetic_bound(folder) + (2 * vectors.rounding if self.is_merged else 0.0)


def _fp32_bound(folder: Path) -> float:
    """Return what the order of additions in fp32 explains, or what a compressed folder's scheme makes of it."""
    scheme = scheme_of(folder)
    return MOST_DIFFERENCE["float32"] if scheme is None else scheme.bound


class ServedByTransformers:
    """A `ServedModel` in transformers, with or without an adapter in PEFT. It computes in fp32 on the stored weights.

    The model is on the CPU. The tokenizer and the stop ids come from the model's folder.
    """

    most_tokens: int | None = None

    def __init__(self, model: Any, tokenizer: Any, stop_ids: list[int], runtime: str) -> None:
        self.runtime = runtime
        self.stop_ids = stop_ids
        self._model = model.eval()
        self._tokenizer = tokenizer

    def render(self, turns: Turns) -> Rendered:
        """Render with the folder's chat template, and encode with its tokenizer."""
        return Rendered(*render_prompt(self._tokenizer, turns))

    def logits(self, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Compute the prompt in fp32, and return the logits at the positions; see `ServedModel.logits`."""
        logits: torch.Tensor = logits_in_fp32(self._model, [token_ids])
        return logits[list(positions)]

    def answer(self, token_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Answer greedily with `generate`, up to a stop id of the folder."""
        (answer,) = answer_in_fp32(
            self._model, [token_ids], stop_ids=self.stop_ids or [-1], max_new_tokens=max_new_tokens
        )
        return answer


def load_transformers(folder: Path, tokenizer: Any = None) -> ServedModel:
    """Load a model folder with transformers. A checkpoint has no tokenizer, so `tokenizer` is used there.

    Raises:
        ConfigError: it is compressed, and compressed-tensors is not installed.
        RunFailedError: it cannot be loaded.
    """
    import transformers

    if scheme_of(folder) is not None:
        refuse_no_compressed_tensors()
    with _failing_as_one_error(folder):
        model, tokenizer = _load(folder, tokenizer or folder)
    return ServedByTransformers(model, tokenizer, _stop_ids(model.generation_config), _name_and_version(transformers))


def load_peft(folder: Path, base: str | None = None, revision: str | None = None, tokenizer: Any = None) -> ServedModel:
    """Load an adapter with PEFT, on its base. A checkpoint has no tokenizer, so `tokenizer` is used there.

    `base` is a folder or hub id, at a commit, tag or branch; None: the base and the revision that the adapter names.

    Raises:
        RunFailedError: the adapter or its base cannot be loaded.
    """
    import peft
    import transformers

    with _failing_as_one_error(folder):
        config = read_adapter_config(folder)
        if base is None:
            base, revision = str(config.get("base_model_name_or_path")), config.get("revision")
        revision = revision or "main"
        model, tokenizer = _load(base, tokenizer or folder, revision)
        refuse_foreign_adapter(model, folder)
        if len(tokenizer) > len(model.get_input_embeddings().weight):
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        read: Any = transformers.GenerationConfig.from_pretrained
        has_own = (folder / "generation_config.json").is_file()
        stops = _stop_ids(read(folder if has_own else base, revision=revision, local_files_only=True))
        if config.get("modules_to_save"):  # PEFT rounds these layers to the type of the base
            model = model.float()
        with quiet_peft():
            model = peft.PeftModel.from_pretrained(model, str(folder))
    runtime = f"{_name_and_version(peft)} on {_name_and_version(transformers)}"
    return ServedByTransformers(model, tokenizer, stops, runtime)


def _quantized_file(known: Vectors) -> Digests:
    """Return the digest of the GGUF file that the test vectors were made of, which only a quantized file has."""
    return Digests(files={name: digest for name, digest in known.files.items() if name == MODEL_FILE})


RUNTIMES = (
    ServingRuntime("llama.cpp", ("*.gguf",), load_gguf, gguf_bound, digests=_quantized_file),
    ServingRuntime("PEFT", (ADAPTER_CONFIG,), load_peft, _fp32_bound, False, lambda known: Digests(known.trained)),
    ServingRuntime(
        "transformers",
        ("config.json", "*.safetensors"),
        load_transformers,
        _fp32_bound,
        digests=lambda known: Digests(known.written, known.files),
    ),
    ServingRuntime("onnxruntime-genai", (GENAI_CONFIG,), load_onnx, onnx_bound),
)
"""The first runtime with a file for each of its patterns serves a folder. To add a runtime, add an entry. Its `load`
imports its package. If its folders have a config.json and safetensors files too, it comes before transformers."""


def runtime_of(folder: Path) -> ServingRuntime:
    """Find the runtime that serves a folder.

    Raises:
        CheckpointError: there is none.
    """
    if not folder.exists():
        raise CheckpointError(
            f"{folder} does not exist. Name the folder of a run, or one that finetune merge or finetune export wrote."
        )
    for runtime in RUNTIMES:
        if all(any(folder.glob(pattern)) for pattern in runtime.patterns):
            return runtime
    known = "; ".join(f"{runtime.name}: {' and '.join(runtime.patterns)}" for runtime in RUNTIMES)
    raise CheckpointError(
        f"{folder} is neither a run nor a model: no runtime serves its files ({known}). Name the folder of a run, or a "
        "folder that finetune merge or finetune export wrote."
    )


def _load(model_folder: Path | str, tokenizer: Any, revision: str = "main") -> tuple[Any, Any]:
    """Load a model, and its tokenizer if `tokenizer` is a folder."""
    from transformers import AutoTokenizer

    for folder in (model_folder, tokenizer):  # a folder that is to be verified is not trusted
        if isinstance(folder, str | Path):
            refuse_oversized_folder(folder)
    if scheme_of(Path(model_folder)) is not None:
        model = load_compressed(Path(model_folder))
    else:
        model = load_plain_model(model_folder, revision=revision, dtype="auto")
    if isinstance(tokenizer, Path):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)
    return model, tokenizer


@contextmanager
def _failing_as_one_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except (ConfigError, ModelError):
        raise
    except Exception as error:  # of several libraries, for files that were changed in any way
        raise RunFailedError(f"{folder} cannot be loaded by the runtime that serves it: {first_line(error)}") from error


def _stop_ids(generation_config: Any) -> list[int]:
    ids = generation_config.eos_token_id
    return [ids] if isinstance(ids, int) else list(ids or ())


def _name_and_version(module: Any) -> str:
    return f"{module.__name__} {module.__version__}"
