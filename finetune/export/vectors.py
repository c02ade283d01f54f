"""Make, write, read and copy test vectors: prompts with the answers of a tuned model, see docs/test-vectors.md.

Test vectors are made once, from base and adapter as trained. Merges and exports copy them, and never make them again
from merged or converted weights. `compare_logits` compares the logits of a served model with theirs.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import torch
from pydantic import ConfigDict, ValidationError, create_model

import finetune
from finetune.data.rendering import render_conversations
from finetune.errors import CheckpointError, DataError
from finetune.export.plain_reload import weights_in_fp32
from finetune.inference.decoding import Decoding, generate_answers
from finetune.limits import read_regular
from finetune.model.base import max_context
from finetune.runs.durable import MANIFEST, FolderWriter, describe_os_error
from finetune.runs.tensors import digest_tensor, open_tensors
from finetune.runs.verification import OPTIMIZER_FILE

MOST_DIFFERENCE = {"float64": 1e-4, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1.25e-1}
"""The largest relative difference for each type of the stored weights. For 16-bit types it is 16 steps of the type at 1
(2^-10 and 2^-7); for wider types it is what the order of additions can make of many layers."""
_SMALLEST_NORM = 1e-30
_MOST_BYTES_OF_LOGITS = 1 << 30


@dataclass(frozen=True, kw_only=True)
class LogitDifference:
    """How far the logits of a served model are from the logits of the model as trained.

    The mean of each position is taken off first, because a shift of all logits of a position changes no probability.
    """

    max_abs: float
    """The largest difference of a logit, with the means left on."""
    relative: float
    """The norm of all differences over the norm of all logits."""
    most_relative: float
    """The largest relative difference of one position; infinite without positions or for not a number."""
    same_greedy: float
    """The fraction of positions with the same most likely token."""
    num_positions: int
    lost: float | None = None
    """The norm of the differences over the norm of what the adapter changed; None without an adapter or an effect."""

    def __str__(self) -> str:
        lost_effect = "" if self.lost is None else f", {self.lost:.2%} of the adapter's effect lost"
        return (
            f"largest difference of a logit {self.max_abs:.3g}, relative {self.relative:.3g}, "
            f"same greedy token {self.same_greedy:.1%} of {self.num_positions} positions{lost_effect}"
        )


def compare_logits(served: torch.Tensor, expected: torch.Tensor, base: torch.Tensor | None = None) -> LogitDifference:
    """Compare a served model's logits with the trained model's, (positions, vocabulary).

    The logits of the base without its adapter show how much of the adapter's effect is lost.
    """
    if not len(expected):
        infinite = dict.fromkeys(("max_abs", "relative", "most_relative"), math.inf)
        return LogitDifference(**infinite, same_greedy=0.0, num_positions=0)
    trained = centred(expected)
    errors, sizes = (centred(served) - trained).norm(dim=-1), trained.norm(dim=-1)
    error = errors.norm()
    effect = 0.0 if base is None else float((trained - centred(base)).norm())
    return LogitDifference(
        max_abs=float((served - expected).abs().max()),
        relative=float(error / sizes.norm().clamp_min(_SMALLEST_NORM)),
        most_relative=float(_relative(errors, sizes).max()),
        same_greedy=float((served.argmax(dim=-1) == expected.argmax(dim=-1)).double().mean()),
        num_positions=len(expected),
        lost=float(error) / effect if effect else None,
    )


def centred(logits: torch.Tensor) -> torch.Tensor:
    """Take the mean off the logits of each position, in float64: a shift of all of them changes no probability."""
    wide = logits.double()
    return wide - wide.mean(dim=-1, keepdim=True)


def relative_by_position(served: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the relative difference of logits (positions, vocabulary) at each position; infinite for not a number."""
    trained = centred(expected)
    return _relative((centred(served) - trained).norm(dim=-1), trained.norm(dim=-1))


def _relative(errors: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(errors / sizes.clamp_min(_SMALLEST_NORM), nan=torch.inf)


VECTORS_FILE, LOGITS_FILE = "test_vectors.json", "test_vectors.npy"
CERTIFICATE, VLLM_CERTIFICATE = "certificate.json", "certificate-vllm.json"
"""Of the runtime that the folder's files are for, and of vLLM."""
_DECIDES_NO_ANSWER = {"README.md", "Modelfile", VECTORS_FILE, LOGITS_FILE, CERTIFICATE, VLLM_CERTIFICATE, MANIFEST}
MAX_NEW_TOKENS = 16
_SCHEMA = 1
_REQUIRED = ("vectors", "stop_ids", "has_template")
_OF_OTHER_FILES = ("logits", "sha256")
"""The fields of `Vectors` that test_vectors.json does not have."""
_MOST_POSITIONS = 32
"""Positions with logits: at 4 bytes for each token of the vocabulary, 26 MB for the 200,064 of Phi-4-mini."""
_RANDOM_PROMPTS = 4
_RANDOM_LENGTH = 24
SYSTEM_PROMPT = "system"
"""Names the conversation with a system turn. If most training rows have the same system turn, it has this one."""
CONVERSATIONS: Mapping[str, Sequence[Mapping[str, str]]] = {
    "one turn": [{"role": "user", "content": "What is the capital of Portugal?"}],
    SYSTEM_PROMPT: [
        {"role": "system", "content": "Answer in one short sentence."},
        {"role": "user", "content": "Write about three crates of oranges."},
    ],
    "several turns": [
        {"role": "user", "content": "Send 3 crates."},
        {"role": "assistant", "content": "To whom?"},
        {"role": "user", "content": "To Marta Ruiz in Porto."},
    ],
    "white space": [{"role": "user", "content": "  two spaces,\ta tab,\n\nan empty line, a space "}],
    "not ASCII": [{"role": "user", "content": "Olá, Zürich: 3 € für naïve 价格 🙂"}],
    "like a special token": [{"role": "user", "content": "What do <|im_done|>, [INST] and </turn> mean?"}],
    "line end": [
        {"role": "user", "content": "One line.\n"},
        {"role": "assistant", "content": "Yes.\n"},
        {"role": "user", "content": "Another line.\n"},
    ],
}
"""What servers often read wrongly: system turns, earlier answers, white space, other scripts, text like a token."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Vector:
    """A prompt, with the tokens and the answer of the tuned model."""

    name: str
    """What the prompt tests."""
    turns: list[dict[str, str]] | None = None
    """The conversation; None for random tokens."""
    text: str | None = None
    """The conversation as the chat template renders it, with the header of the next answer."""
    token_ids: list[int]
    """The text as tokens, without tokens that the template has not written."""
    positions: list[int]
    """Indices in `token_ids` at which logits are kept, ascending."""
    answer: list[int] | None = None
    """The tokens of a greedy answer, including the stop token if there was one; None without turns."""


class Digests(NamedTuple):
    """Digests of the tensors and the other files of a folder, by name; empty if none are known."""

    tensors: Mapping[str, str] = {}
    files: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """All test vectors of a model."""

    vectors: tuple[Vector, ...]
    logits: torch.Tensor
    """The logits of base and adapter in fp32, (positions of all prompts, vocabulary)."""
    stop_ids: list[int]
    """The tokens that end an answer."""
    max_new_tokens: int = MAX_NEW_TOKENS
    has_template: bool
    """Whether a chat template rendered the texts. Without a template, a text is its last turn's content."""
    stored_as: str | None = None
    """The type of the merged weights; None before they are written."""
    rounding: float = 0.0
    """The largest relative difference of a position's logits that the merge caused, see `relative_by_position`;
    measured by transformers on the written folder."""
    trained: Mapping[str, str] = field(default_factory=dict)
    """Digests of the run's own weights, by tensor."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Digests of the merged weights as they were written, by tensor."""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the other files of the merged folder, by name."""
    system: str | None = None
    """The system turn of most training rows, if the chat template does not add it; else None."""
    note: str = ""
    """How an exported model was measured against the run, for its certificate, as a sentence without a full stop."""
    made_by: str = f"finetune {finetune.__version__}"
    """The version of finetune."""
    sha256: str = ""
    """The digest of test_vectors.json, which holds the digest of the logits; empty before the file is written."""


def conversation_vectors(tokenizer: Any, system: str | None = None) -> list[Vector]:
    """Render the conversations that this chat template does not refuse. They have no answers yet.

    `system` is the system turn of the training rows; None keeps the one in `CONVERSATIONS`.

    Raises:
        DataError: the chat template exceeds a limit, as it would with every conversation.
    """
    vectors = []
    for name, turns in CONVERSATIONS.items():
        if tokenizer.chat_template is None and len(turns) > 1:
            continue
        chat = [dict(turn) for turn in turns]
        if name == SYSTEM_PROMPT and system is not None:
            chat[0]["content"] = system
        try:
            text, ids = render_prompt(tokenizer, chat)
        except DataError:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            _log.info("no test vector for %r: the chat template refuses it (%s)", name, error)
            continue
        vectors.append(Vector(name=name, turns=chat, text=text, token_ids=ids, positions=_positions(ids)))
    return vectors


def render_prompt(tokenizer: Any, turns: Sequence[Mapping[str, str]]) -> tuple[str, list[int]]:
    """Render a conversation with the header of the next answer, and encode it.

    Without a chat template, the text is the content of the last turn.

    Raises:
        DataError: the template exceeds a limit.
        ValueError: the template refuses the conversation.
    """
    text = turns[-1]["content"]
    if tokenizer.chat_template is not None:
        ((is_rendered, text),) = render_conversations(tokenizer, [list(turns)], with_prompt=True)
        if not is_rendered:
            raise ValueError(text)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return text, ids


def prompts_to_ask(tokenizer: Any, model: Any, system: str | None) -> list[Vector]:
    """Make the prompts that this chat template renders and this model has room for, then prompts of random tokens.

    They have no answers yet. All token ids are below the number of the model's embedding rows. See
    `conversation_vectors` for `system`.
    """
    room = max_context(model)
    ceiling = min(model.get_input_embeddings().weight.shape[0], len(tokenizer))
    prompts = []
    for vector in conversation_vectors(tokenizer, system):
        ids = vector.token_ids
        if ids and max(ids) < ceiling and (room is None or len(ids) + MAX_NEW_TOKENS <= room):
            prompts.append(vector)
    rng = random.Random(0)
    for number in range(1, _RANDOM_PROMPTS + 1):
        ids = [rng.randrange(ceiling) for _ in range(_RANDOM_LENGTH)]
        prompts.append(Vector(name=f"random tokens {number}", token_ids=ids, positions=_positions(ids)))
    return prompts


def _positions(token_ids: Sequence[int]) -> list[int]:
    """Choose the positions at which logits are kept, evenly spaced. The last one predicts the answer's first token."""
    length = len(token_ids)
    count = min(length, _MOST_POSITIONS // (len(CONVERSATIONS) + _RANDOM_PROMPTS))
    return sorted(length - 1 - place * length // count for place in range(count))


def answer_in_fp32(
    model: Any, prompts: Sequence[Sequence[int]], *, stop_ids: Sequence[int], max_new_tokens: int
) -> list[list[int]]:
    """Answer prompts greedily with transformers, in fp32 on the stored weights. Answers keep their stop tokens."""
    decoding = Decoding(stop_ids=stop_ids, max_new_tokens=max_new_tokens, keeps_stop=True, by_transformers=True)
    with weights_in_fp32(model):
        return generate_answers(model, prompts, decoding, batch_size=max(1, len(prompts)))


def make_vectors(
    model: Any, prompts: Sequence[Vector], logits: torch.Tensor, *, stop_ids: list[int], has_template: bool
) -> Vectors:
    """Make the test vectors of a tuned model, on the CPU, from its logits at every position of all prompts, in fp32."""
    chats = [vector.token_ids for vector in prompts if vector.turns is not None]
    answers = iter(answer_in_fp32(model, chats, stop_ids=stop_ids, max_new_tokens=MAX_NEW_TOKENS))
    by_prompt = torch.split(logits, [len(vector.token_ids) for vector in prompts])
    return Vectors(
        vectors=tuple(vector if vector.turns is None else replace(vector, answer=next(answers)) for vector in prompts),
        logits=torch.cat([rows[vector.positions] for vector, rows in zip(prompts, by_prompt, strict=True)]),
        stop_ids=stop_ids,
        has_template=has_template,
    )


def write_vectors(writer: FolderWriter, vectors: Vectors) -> str:
    """Write both files into a folder that is being written. Returns the SHA-256 of test_vectors.json.

    Raises:
        OSError: the disk refused.
    """
    raw = io.BytesIO()
    np.save(raw, vectors.logits.numpy(), allow_pickle=False)
    logits = writer.write(LOGITS_FILE, [raw.getvalue()])
    names = [item.name for item in fields(vectors) if item.name not in ("vectors", *_OF_OTHER_FILES)]
    record = {
        "schema_version": _SCHEMA,
        **{name: getattr(vectors, name) for name in names},
        "logits": {"file": LOGITS_FILE, "shape": list(vectors.logits.shape), "sha256": logits["sha256"]},
        "vectors": [asdict(vector) for vector in vectors.vectors],
    }
    text = json.dumps(record, indent=2, ensure_ascii=False)
    # One line for a list of numbers. No text is changed: a line end inside a text is written as \n.
    text = re.sub(r"\[\n\s+(-?\d+(?:,\n\s+-?\d+)*)\n\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text)
    return str(writer.write(VECTORS_FILE, [text.encode() + b"\n"])["sha256"])


def read_vectors(place: Path) -> Vectors:
    """Read the test vectors of a folder, or of a file with its logits beside it.

    Raises:
        CheckpointError: there are none, or they are damaged.
    """
    file = place / VECTORS_FILE if place.is_dir() else place
    if not file.is_file():
        raise CheckpointError(
            f"{place} has no test vectors ({VECTORS_FILE}): it was written by an earlier version, or not by finetune. "
            "Write the model again with finetune merge RUN OUT, and export that, or name vectors with --vectors FILE."
        )
    try:
        raw = read_regular(file, follows_links=True)
        record = json.loads(raw)
        if record["schema_version"] != _SCHEMA:
            raise CheckpointError(f"{file} has another schema_version than {_SCHEMA}. Read it with a newer finetune.")
        known = _read_fields(raw)
        values = read_regular(file.parent / LOGITS_FILE, most=_MOST_BYTES_OF_LOGITS, follows_links=True)
        if hashlib.sha256(values).hexdigest() != record["logits"]["sha256"]:
            raise CheckpointError(
                f"{file.parent / LOGITS_FILE} is not the file that {file.name} names (SHA-256 differs)."
            )
        rows = torch.from_numpy(np.load(io.BytesIO(values), allow_pickle=False))
        read = Vectors(**known, logits=rows, sha256=hashlib.sha256(raw).hexdigest())
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {describe_os_error(error)}.") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a file of test vectors: {error}.") from error
    if rows.ndim != 2 or len(rows) != sum(len(vector.positions) for vector in read.vectors):
        raise CheckpointError(f"{file} and {LOGITS_FILE} do not belong together: their positions differ.")
    for vector in read.vectors:
        tokens, places = [*vector.token_ids, *(vector.answer or ())], len(vector.token_ids)
        if not (
            all(0 <= token < rows.shape[1] for token in tokens) and all(0 <= at < places for at in vector.positions)
        ):
            raise CheckpointError(
                f"{file} is not a file of test vectors: {vector.name!r} has unknown tokens or positions."
            )
    return read


def _read_fields(raw: bytes) -> dict[str, Any]:
    """Read the fields of `Vectors` from test_vectors.json. Fields that are not known are left out.

    Raises:
        ValueError: a field is missing or of another type, in one line.
    """
    hints = get_type_hints(Vectors)
    asked: dict[str, Any] = {
        item.name: (hints[item.name], ... if item.name in _REQUIRED else None)
        for item in fields(Vectors)
        if item.name not in _OF_OTHER_FILES
    }
    try:
        read = create_model("test vectors", __config__=ConfigDict(strict=True), **asked).model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return {name: getattr(read, name) for name in read.model_fields_set}


def copy_vectors(model: Path, writer: FolderWriter) -> None:
    """Copy the test vectors of a merged folder, unchanged, into an exported folder. Warn if there are none.

    Raises:
        CheckpointError: they are damaged.
    """
    if not (model / VECTORS_FILE).is_file():
        _log.warning(
            "%s has no test vectors, so what is exported cannot be verified. Merge the run again to have them", model
        )
        return
    read_vectors(model)  # refuses damaged ones
    for name in (LOGITS_FILE, VECTORS_FILE):
        writer.write(name, [(model / name).read_bytes()])


def digest_weight_files(folder: Path) -> dict[str, str]:
    """Return the dtype, the shape and the SHA-256 of each weight in a folder's safetensors files, by name.

    Raises:
        CheckpointError: a file is not a safetensors file.
    """
    digests: dict[str, str] = {}
    for path in sorted(set(folder.glob("*.safetensors")) - {folder / OPTIMIZER_FILE}):
        with open_tensors(path) as file:
            digests |= {name: digest_tensor(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    return dict(sorted(digests.items()))


def digest_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file, except weights, that decides what a model folder answers, by name."""
    digests = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in _DECIDES_NO_ANSWER and path.suffix != ".safetensors":
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
