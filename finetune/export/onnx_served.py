"""An ONNX model in onnxruntime-genai: its own tokenizer, chat template, weights and stop ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from finetune.data.rendering import render_template
from finetune.errors import ConfigError, ModelError, RunFailedError, extra_command, first_line
from finetune.export.served_comparison import Rendered, ServedModel, Turns

GENAI_CONFIG = "genai_config.json"
_WRITTEN_OPTIONS = {"log_id", "provider_options"}
"""The options of a session in the configurations that the builder writes for the CPU. Its `provider_options` is []."""
OnnxType = Literal["f32", "int4"]
MOST_DIFFERENCE: dict[OnnxType, float] = {"f32": 1e-3, "int4": 0.5}
"""The largest relative difference of a position's logits. f32: what approximations of GELU make of it. int4: what is
still of use, because rounding to 4 bits moves the logits of a small model further than any error of the runtime."""


def refuse_missing_packages(*, builds: bool) -> None:
    """Refuse to go on without the runtime and, if it `builds`, the packages that its builder imports.

    Raises:
        ConfigError: names what is missing and the command that installs it.
    """
    modules = {"onnxruntime_genai": "onnxruntime-genai", **({"onnx_ir": "onnx-ir"} if builds else {})}
    missing = [package for module, package in modules.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"an ONNX model needs {' and '.join(missing)}, not installed here. Run {extra_command('onnx')}."
        )


def load_onnx(folder: Path) -> ServedModel:
    """Load a folder that `finetune export onnx` wrote.

    Raises:
        ConfigError: onnxruntime-genai is not installed.
        ModelError: the folder's configuration could make the runtime run code or write files.
        RunFailedError: it cannot load the folder; the message repeats its reason.
    """
    refuse_missing_packages(builds=False)
    _refuse_other_options(folder)
    import onnxruntime_genai

    try:
        return OnnxModel(onnxruntime_genai, folder)
    except RuntimeError as error:
        raise RunFailedError(f"{folder} cannot be loaded by onnxruntime-genai: {first_line(error)}") from error


def _refuse_other_options(folder: Path) -> None:
    """Refuse options of a session that the builder does not write.

    `custom_ops_library` and some providers load a library, `enable_profiling` writes a file. Source: the keys of
    `SessionOptions_Element` in microsoft/onnxruntime-genai, src/config.cpp.
    """
    config = folder / GENAI_CONFIG
    try:
        parts = [json.loads(config.read_text(encoding="utf-8"))]
    except (OSError, ValueError, RecursionError) as error:
        raise RunFailedError(f"{config} cannot be read: {first_line(error)}. Export the model again.") from error
    while parts:
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
        options = part.get("session_options") if isinstance(part, dict) else None
        others = set(options) - _WRITTEN_OPTIONS if isinstance(options, dict) else set()
        if others or (isinstance(options, dict) and options.get("provider_options")):
            name = min(others, default="provider_options")
            raise ModelError(
                f"{config} sets session_options.{name}, which finetune export does not write. Such an option can run "
                "code or write files, so the model was not loaded. Remove the key if you trust the folder without it."
            )


def onnx_bound(folder: Path) -> float:
    """Return the largest relative difference of logits that the rounding of the type explains."""
    return MOST_DIFFERENCE[type_of(folder)]


def type_of(folder: Path) -> OnnxType:
    """Return the type of a folder's matrices, read from the operators that the graph names.

    Raises:
        RunFailedError: the folder has no graph.
    """
    graph = folder / "model.onnx"
    if not graph.is_file():
        raise RunFailedError(f"{folder} is damaged: it has no {graph.name}. Export the model again.")
    return "int4" if b"MatMulNBits" in graph.read_bytes() else "f32"


def _template_of(folder: Path) -> str | None:
    """Return the chat template that the runtime reads; None if there is none."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    return template if isinstance(template, str) else None


class OnnxModel:
    """A `ServedModel` on the CPU, in the library onnxruntime_genai."""

    most_tokens: int | None = None

    def __init__(self, library: Any, folder: Path) -> None:
        self.runtime = f"onnxruntime-genai {library.__version__}"
        self._folder = folder
        self._library = library
        self._model = library.Model(str(folder))
        self._tokenizer = library.Tokenizer(self._model)
        self.stop_ids = [int(token_id) for token_id in self._tokenizer.eos_token_ids]

    def render(self, turns: Turns) -> Rendered:
        """Render a conversation as the runtime does, and encode the text with its tokenizer.

        Raises:
            DataError: the template exceeds the limits of ours. The runtime's own renderer has none.
        """
        if template := _template_of(self._folder):
            render_template(template, [list(turns)], with_prompt=True, name=str(self._folder))
        text = self._tokenizer.apply_chat_template(json.dumps(list(turns)), add_generation_prompt=True)
        return Rendered(text, [int(token_id) for token_id in self._tokenizer.encode(text)])

    def logits(self, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Let onnxruntime-genai read the prompt, and return its logits at the positions; see `ServedModel.logits`."""
        logits = torch.from_numpy(self._prompted(token_ids, max_new_tokens=1).get_output("logits")).float()[0]
        return logits[list(positions)]

    def answer(self, token_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Answer a prompt greedily. Returns the new tokens, including the stop token if there was one."""
        generator = self._prompted(token_ids, max_new_tokens)
        new: list[int] = []
        while not generator.is_done() and len(new) < max_new_tokens:
            generator.generate_next_token()
            new.append(int(generator.get_next_tokens()[0]))
        return new

    def _prompted(self, token_ids: Sequence[int], max_new_tokens: int) -> Any:
        """Give the model a prompt. No option of genai_config.json changes which token is the most likely."""
        params = self._library.GeneratorParams(self._model)
        params.set_search_options(
            do_sample=False, num_beams=1, repetition_penalty=1.0, max_length=len(token_ids) + max_new_tokens
        )
        generator = self._library.Generator(self._model, params)
        generator.append_tokens(list(token_ids))
        return generator
