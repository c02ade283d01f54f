"""A model in vLLM, through a server that runs here or anywhere: its tokenizer, chat template, weights and stop ids.

Endpoints: vLLM 0.32, see `finetune.inference.vllm_server`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from finetune.errors import ConfigError, RunFailedError, last_line
from finetune.export.compressed_folder import scheme_of
from finetune.export.converters import python_with
from finetune.export.served_comparison import Rendered, Turns
from finetune.export.vectors import Vectors
from finetune.inference.vllm_answers import Choice, Limits, read_text, read_tokens, read_version
from finetune.inference.vllm_server import ServerGoneError, ServerLostError, ServerRefusalError, VllmServer
from finetune.logs import waiting
from finetune.model.saved_adapter import read_adapter_config
from finetune.signals import end_with_parent

PYTHON = "FINETUNE_VLLM"
"""Names the Python of an environment that has vLLM. Without it, vLLM must be installed beside finetune."""
_PATIENCE_SECONDS = 600.0
_ENDS_WITHIN_SECONDS = 30.0
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for --max-lora-rank."""
_DEFAULT_RANK = 16
_REFUSED = {
    "use_dora": "DoRA",
    "trainable_token_indices": "new tokens",
    "modules_to_save": "layers that are trained whole",
}
"""What vLLM refuses, by the key in adapter_config.json."""
_GIVEN_BY_DEFAULT = 20
"""The default of vLLM's --max-logprobs."""


class InVllm(NamedTuple):
    """Where to compare in vLLM, instead of in the runtime that the files are for."""

    url: str | None = None
    """Of a server that runs already, which serves the model or its base; None: one is started here, in fp32, and ended
    after the comparison."""
    served_as: str | None = None
    """The name of the model or adapter in that server; None: the model without an adapter, or the adapter that was
    loaded from the folder. If there is none, it is loaded for the comparison."""


class ServedByVllm:
    """A model of a vLLM server. See `ServedModel`. Logits are log-probabilities.

    Args:
        server: runs already.
        name: the model, or an adapter that the server has loaded.
        known: test vectors. The interface does not list the stop ids, so each of theirs is tried.

    Raises:
        RunFailedError: the server refuses a request.
    """

    most_tokens: int | None = None

    def __init__(self, server: VllmServer, name: str, known: Vectors) -> None:
        self.runtime = f"vLLM {server.ask('/version', read_version)}"
        self._server = server
        self._name = name
        self._vocabulary = known.logits.shape[1]
        self.stop_ids = [
            token
            for token in known.stop_ids
            if self._complete([token], 2, allowed_token_ids=[token]).finish_reason == "stop"
        ]

    def render(self, turns: Turns) -> Rendered:
        """Render and encode as the server does. The text is decoded from the tokens."""
        chat = {"model": self._name, "messages": list(turns), "add_generation_prompt": True}
        ids = self._server.ask("/tokenize", read_tokens, chat)
        return Rendered(self._server.ask("/detokenize", read_text, {"model": self._name, "tokens": ids}), ids)

    def logits(self, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Ask the server for the next token after each position, and return log-probabilities as logits."""
        answers = [self._logits_after(token_ids[: position + 1]) for position in positions]
        width = max(self._vocabulary, *(max(by_token) + 1 for by_token in answers))
        logits = torch.full((len(answers), width), -torch.inf)
        for row, by_token in zip(logits, answers, strict=True):
            row[list(by_token)] = torch.tensor(list(by_token.values()))
        return logits

    def answer(self, token_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Answer a prompt greedily. Returns the new tokens, including the stop token if there was one."""
        return self._complete(token_ids, max_new_tokens).token_ids or []

    def _logits_after(self, prompt: Sequence[int]) -> dict[int, float]:
        """Return log p of tokens after a prompt: of all, or of as many as a server gives by default."""
        num_logprobs = -1 if self.most_tokens is None else self.most_tokens
        try:
            choice = self._complete(prompt, 1, num_likely=self.most_tokens or self._vocabulary, logprobs=num_logprobs)
        except ServerRefusalError as error:
            if "logprobs" not in str(error):
                raise
            if self.most_tokens is None:
                self.most_tokens = _GIVEN_BY_DEFAULT
                return self._logits_after(prompt)
            raise ConfigError(
                f"{error} A comparison needs the log-probabilities of {num_logprobs} tokens or of all: start the "
                "server without --max-logprobs, or with --max-logprobs -1."
            ) from error
        assert choice.logprobs is not None
        return (choice.logprobs.top_logprobs or [{}])[0]

    def _complete(
        self, prompt: Sequence[int], max_tokens: int, *, num_likely: int | None = None, **fields: Any
    ) -> Choice:
        limits = Limits(1, max_tokens, self._vocabulary, num_likely)
        return self._server.complete(self._name, prompt, limits, temperature=0, **fields)[0]


@contextmanager
def served_by_vllm(
    folder: Path, known: Vectors, where: InVllm, *, base: str | None = None, revision: str | None = None
) -> Iterator[ServedByVllm]:
    """Serve a model folder, or an adapter on its base, by a vLLM server.

    `base` is the base of an adapter, a folder or a hub id at a commit, tag or branch; None for a whole model. See
    `ServedByVllm` for `known`.

    Raises:
        ConfigError: vLLM is not installed.
        RunFailedError: the server does not start, or refuses the adapter.
    """
    with ExitStack() as opened:
        if where.url is not None:
            server = VllmServer(where.url, patience_seconds=_PATIENCE_SECONDS)
        else:
            whole = _started(folder, None) if base is None else _started(base, folder, revision)
            server = opened.enter_context(whole)
        server.wait()
        name = where.served_as or (server.base_model().id if base is None else server.name_of(folder))
        if name is None:
            try:
                name = opened.enter_context(server.loaded(folder))
            except RunFailedError as error:
                raise RunFailedError(". ".join([str(error), *limits_of_adapter(folder)])) from error
        yield ServedByVllm(server, name, known)


def limits_of_adapter(folder: Path) -> list[str]:
    """Say why vLLM does not serve an adapter on its base, and what it needs: sentences without a full stop.

    Source: vLLM 0.32, `validate_legal` in vllm/lora/peft_helper.py.
    """
    config = read_adapter_config(folder)
    limits = []
    if refused := [part for key, part in _REFUSED.items() if config.get(key)]:
        limits.append(
            f"vLLM does not serve this adapter on its base, because it has {' and '.join(refused)}: finetune merge "
            "writes a model that it serves"
        )
    if (rank := _rank_of(config)) > _DEFAULT_RANK:
        limits.append(f"vLLM needs --max-lora-rank {_rank_to_allow(rank)} to serve this adapter")
    return limits


def _rank_of(adapter: Mapping[str, Any]) -> int:
    ranks: list[int] = [adapter["r"], *(adapter.get("rank_pattern") or {}).values()]
    return max(ranks)


def _rank_to_allow(rank: int) -> int:
    return next((each for each in _RANKS if each >= rank), rank)


@contextmanager
def _started(model: Path | str, adapter: Path | None, revision: str | None = None) -> Iterator[VllmServer]:
    """Start a server on a free port, and end it after the block."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    remedy = f"Set {PYTHON} to the Python of an environment that has it, or give --server URL of a server that runs."
    python = python_with("vllm", PYTHON, name="vLLM", remedy=remedy)
    command = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    scheme = scheme_of(Path(model))
    command += ["--model", str(model), "--dtype", "float32" if scheme is None else scheme.vllm_dtype]
    command += ["--enforce-eager", "--max-logprobs", "-1"]
    if revision is not None and not Path(model).is_absolute():
        command += ["--revision", revision, "--tokenizer-revision", revision]
    if adapter is not None:
        config = read_adapter_config(adapter)
        command += ["--enable-lora", "--max-lora-rank", str(_rank_to_allow(_rank_of(config)))]
    settings = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    settings |= {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **settings},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
        try:
            server = VllmServer(
                f"http://127.0.0.1:{port}",
                patience_seconds=_PATIENCE_SECONDS,
                is_to_stop=lambda: process.poll() is not None,
            )
            with waiting("starting vLLM"):
                server.wait(logging.DEBUG)
            yield server
        except (ServerLostError, ServerGoneError):
            text = Path(log.name).read_text(encoding="utf-8", errors="replace")
            raise RunFailedError(f"vLLM does not serve {model}: {_cause(text)}") from None
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_ENDS_WITHIN_SECONDS)
            with suppress(ProcessLookupError):  # what is left of its processes
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _cause(log: str) -> str:
    """Return the last line of a log that names an error."""
    errors = [line for line in log.splitlines() if "Error" in line]
    # An engine that breaks later names the cause first: what its worker raised, or that the worker died.
    broken = [
        line for line in log.splitlines() if " ERROR " in line and ("died unexpectedly" in line or "Error: " in line)
    ]
    return broken[0].rpartition("] ")[2].strip() if broken else last_line("\n".join(errors) or log)
