"""A GGUF file in llama.cpp, through llama-cpp-python: its tokenizer, chat template, weights and ends of an answer.

Prompts are made by the chat handler that llama-cpp-python's own server calls.
Source: abetlen/llama-cpp-python, llama_cpp/llama.py (`create_chat_completion`) and llama_chat_format.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from finetune.data.rendering import render_template
from finetune.errors import CheckpointError, ConfigError, ModelError
from finetune.export.gguf_file import read_header
from finetune.export.gguf_tokens import OtherIds, Reading
from finetune.export.served_comparison import Rendered, Turns

PACKAGE = "llama-cpp-python"
MODEL_FILE, BASE_FILE, ADAPTER_FILE = "model.gguf", "base.gguf", "adapter.gguf"
ROUNDING_KEY = "finetune.rounding"
"""The key in a GGUF file with the result of `measure_rounding`."""
_LEAST_BOUND = 2**-9
"""Two steps of f16 at 1, whatever the type: llama.cpp looks GELU up in a table of 16-bit numbers, and rounds the
softmax of attention to 16 bits. `measure_rounding` does neither."""
QUANTIZED: Mapping[str, int] = {"q2_k": 10, "q3_k_m": 12, "q4_0": 2, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}
"""`general.file_type` of the types that llama.cpp's quantizer writes. Source: `llama_ftype` in include/llama.h."""
_QUANTIZED_BOUND = 1.25e-1
"""The bound for a quantized file, which has test vectors of its own. llama.cpp rounds the inputs of its products to 8
bits. On another CPU, a difference in the last bit can therefore become a whole step."""
MOST_TOKENS = 2048
"""The most tokens of a prompt with its answer: llama-cpp-python keeps the logits of this many positions."""


class GgufFiles(NamedTuple):
    """The files that llama.cpp loads from a folder."""

    model: Path
    """The model, or the base of `adapter`."""
    adapter: Path | None = None
    """A GGUF LoRA."""


def find_gguf(folder: Path) -> GgufFiles | None:
    """Find the GGUF files that an export wrote: a model, or a base with its adapter. None if there are none."""
    if (folder / MODEL_FILE).is_file():
        return GgufFiles(folder / MODEL_FILE)
    if (folder / BASE_FILE).is_file() and (folder / ADAPTER_FILE).is_file():
        return GgufFiles(folder / BASE_FILE, folder / ADAPTER_FILE)
    return None


def installed_version() -> str | None:
    """Return the version of llama-cpp-python, or None if it is not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def gguf_bound(folder: Path) -> float:
    """Return twice what the rounding of the type was measured to move logits by, and at least `_LEAST_BOUND`.

    llama.cpp adds in another order, so its error is as large as the measured one, but not the same. A file of a type in
    `QUANTIZED` has test vectors of its own, and `_QUANTIZED_BOUND`.

    Raises:
        CheckpointError: it was not measured.
        ConfigError: the folder holds no GGUF file that llama.cpp can load alone.
        RunFailedError: the file is damaged.
    """
    keys = read_header(_require_gguf(folder).model).keys
    if keys.get("general.file_type") in QUANTIZED.values():
        return _QUANTIZED_BOUND
    measured = keys.get(ROUNDING_KEY)
    if not (isinstance(measured, float | int) and 0 <= measured <= 1):  # a file from others may claim any bound
        raise CheckpointError(
            f"the GGUF file in {folder} does not say how far the rounding of its type moves this model's logits "
            f"({ROUNDING_KEY} is {measured}; expected a number from 0 to 1): an earlier version of finetune wrote it, "
            "or another program. Export it again, or set a bound with --max-difference."
        )
    return max(_LEAST_BOUND, 2 * float(measured))


def load_gguf(folder: Path) -> LlamaCpp:
    """Load what `finetune export gguf` wrote.

    Raises:
        ConfigError: llama-cpp-python is not installed, or the folder holds no GGUF file that it can load alone.
        ModelError: llama.cpp does not load the file.
    """
    files = _require_gguf(folder)
    if installed_version() is None:
        raise ConfigError(f"{files.model.name} runs in llama.cpp, which is not installed: pip install {PACKAGE}.")
    return LlamaCpp(files)


def _require_gguf(folder: Path) -> GgufFiles:
    files = find_gguf(folder)
    if files is None:
        raise ConfigError(
            f"{folder} has no {MODEL_FILE}, and no {BASE_FILE} with an {ADAPTER_FILE}. Name a folder that "
            "`finetune export gguf` or `finetune export lora` wrote, with its base."
        )
    return files


def check_in_llama_cpp(files: GgufFiles, reading: Reading, tokenizer: Any, stop_ids: Sequence[int]) -> str:
    """Load what was written, and encode the chats of `find_rules` in llama.cpp itself. Returns its name and version.

    Raises:
        ModelError: llama.cpp does not load it, renders or reads a chat in another way than its rules say, or does not
            end an answer at a stop id.
    """
    served = LlamaCpp(files)
    try:
        wrong = next(_find_surprises(served, reading, tokenizer, stop_ids), None)
    finally:
        served.close()
    if wrong is not None:
        raise ModelError(f"{served.runtime} does not serve the model as it was trained: {wrong} Nothing was written.")
    return served.runtime


def _find_surprises(served: LlamaCpp, reading: Reading, tokenizer: Any, stop_ids: Sequence[int]) -> Iterator[str]:
    foreseen = {other.text for other in reading.others}
    for vector in reading.chats:
        text = str(vector.text)
        if tokenizer.chat_template is not None and (rendered := served.render(vector.turns or []).text) != text:
            yield f"it renders a chat as {rendered!r}, and the chat template as {text!r}. Use another llama.cpp."
        served_ids = served.encode(text)
        if text not in foreseen and served_ids != vector.token_ids:
            yield (
                f"{OtherIds.of(vector, served_ids, tokenizer)}. Its rules are not those that were expected: "
                "tell the authors of finetune which tokenizer this is, and send token ids instead of text."
            )
    for token_id in stop_ids:
        if token_id not in served.ends:
            yield (
                f"it does not end an answer at {tokenizer.convert_ids_to_tokens(token_id)} ({token_id}). Give it as "
                "`stop` in each request."
            )


class LlamaCpp:
    """A model in llama.cpp. See `ServedModel`. `close()` frees its memory.

    Attributes:
        stop_ids: the ends of an answer that the file names.
        ends: those, and tokens that llama.cpp takes for ends because it knows their text, `</s>` for example.

    Raises:
        ModelError: llama.cpp does not load the files.
    """

    most_tokens: int | None = None

    def __init__(self, files: GgufFiles) -> None:
        import llama_cpp

        self._library: Any = llama_cpp
        self._files = files
        adapter = None if files.adapter is None else str(files.adapter)
        settings = {"n_ctx": MOST_TOKENS, "n_batch": MOST_TOKENS, "logits_all": True, "verbose": False}
        try:
            self._llama: Any = llama_cpp.Llama(str(files.model), lora_path=adapter, **settings)
        except (ValueError, RuntimeError) as error:
            named = " and ".join(path.name for path in files if path is not None)
            raise ModelError(
                f"llama.cpp does not load {named} in {files.model.parent}: {error}. Its reasons are in the log of: "
                f'python -c "import llama_cpp; llama_cpp.Llama({str(files.model)!r})"'
            ) from error
        self.close = weakref.finalize(self, self._llama.close)  # not in __del__: at the end, its library is gone before
        self.runtime = f"{PACKAGE} {llama_cpp.__version__}"
        vocabulary, ids = llama_cpp.llama_model_get_vocab(self._llama.model), range(self._llama.n_vocab())
        stated = {self._llama.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")}
        self.ends = [token_id for token_id in ids if llama_cpp.llama_vocab_is_eog(vocabulary, token_id)]
        self.stop_ids = [token_id for token_id in self.ends if str(token_id) in stated]

    def render(self, turns: Turns) -> Rendered:
        """Render and encode a conversation through the chat handler of llama-cpp-python's server.

        Raises:
            DataError: the template exceeds the limits of ours. That handler has none.
        """
        if template := self._llama.metadata.get("tokenizer.chat_template"):
            render_template(template, [list(turns)], with_prompt=True, name=str(self._files.model))
        prompt = _AskedPrompt(self._llama)
        try:
            self._chat_handler()(llama=prompt, messages=[dict(turn) for turn in turns])
        except _PromptIsMade:
            return Rendered(prompt.text, prompt.token_ids)
        raise AssertionError("the chat handler asked for no completion")

    def encode(self, text: str) -> list[int]:
        """Encode a rendered chat, as the chat handler does."""
        return list(map(int, self._llama.tokenize(text.encode(), add_bos=False, special=True)))

    def logits(self, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Let llama.cpp compute the prompt anew, and return its logits at the positions; see `ServedModel.logits`."""
        self._refuse_long(len(token_ids))
        self._llama.reset()
        self._llama.eval(list(token_ids))
        return torch.from_numpy(self._llama.scores[list(positions)].copy())

    def answer(self, token_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Answer a prompt greedily, without a repetition penalty."""
        self._refuse_long(len(token_ids) + max_new_tokens)
        answer: list[int] = []
        self._llama.reset()
        for token_id in islice(self._llama.generate(list(token_ids), temp=0.0, repeat_penalty=1.0), max_new_tokens):
            answer.append(int(token_id))
            if token_id in self.ends:
                break
        return answer

    def _chat_handler(self) -> Any:
        """Choose the chat handler as `Llama.create_chat_completion` does."""
        llama, formats = self._llama, self._library.llama_chat_format
        own = llama.chat_handler or llama._chat_handlers.get(llama.chat_format)
        return own or formats.get_chat_completion_handler(llama.chat_format)

    def _refuse_long(self, num_tokens: int) -> None:
        if num_tokens > MOST_TOKENS:
            raise ModelError(f"a prompt and its answer have {num_tokens} tokens; at most {MOST_TOKENS} are compared.")


class _PromptIsMade(Exception):
    """The chat handler has asked for a completion: its prompt is known."""


class _AskedPrompt:
    """Stands for a `Llama` before a chat handler, and keeps the prompt instead of completing it."""

    verbose = False
    text = ""
    token_ids: list[int]

    def __init__(self, llama: Any) -> None:
        self._llama = llama

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        self.text = text.decode()
        return list(self._llama.tokenize(text, add_bos=add_bos, special=special))

    def create_completion(self, prompt: list[int], **_: Any) -> None:
        self.token_ids = list(map(int, prompt))
        raise _PromptIsMade
