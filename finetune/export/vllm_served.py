"""A model in vLLM, through a server that runs here or anywhere: its tokenizer, chat template, weights and stop ids.

Endpoints: vLLM 0.32, see `finetune.inference.vllm_server`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from finetune.errors import ConfigError, RunFailedError, ServerLostError, last_line
from finetune.export.compressed_folder import scheme_of
from finetune.export.served_model import Rendered, Turns
from finetune.inference.vllm_server import ServerGoneError, VllmServer

PYTHON = "FINETUNE_VLLM"
"""Names the Python of an environment that has vLLM. Without it, vLLM must be installed beside finetune."""
_PATIENCE_SECONDS = 600.0
_ENDS_WITHIN_SECONDS = 30.0
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for --max-lora-rank."""
_TOKEN = "token_id:"


class ServedByVllm:
    """A model of a vLLM server. See `ServedModel`. Logits are log-probabilities of the whole vocabulary.

    Args:
        server: runs already.
        name: the model, or an adapter that the server has loaded.
        ends: tokens that should end an answer. The interface does not list the stop ids, so each of these is tried.

    Raises:
        RunFailedError: the server refuses a request.
    """

    def __init__(self, server: VllmServer, name: str, ends: Sequence[int]) -> None:
        self.runtime = f"vLLM {server.ask('/version')['version']}"
        self._server = server
        self._name = name
        self.stop_ids = [token for token in ends if self._ends_at(token)]

    def render(self, turns: Turns) -> Rendered:
        """Render and encode as the server does. The text is decoded from the tokens."""
        chat = {"messages": list(turns), "add_generation_prompt": True}
        ids = self._server.ask("/tokenize", model=self._name, **chat)["tokens"]
        return Rendered(self._server.ask("/detokenize", model=self._name, tokens=ids)["prompt"], ids)

    def logits(self, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """See `ServedModel.logits`."""
        return torch.stack([self._logits_after(token_ids[: position + 1]) for position in positions])

    def answer(self, token_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Answer a prompt greedily. Returns the new tokens, including the stop token if there was one."""
        return list(self._complete(token_ids, max_tokens=max_new_tokens)["token_ids"])

    def _ends_at(self, token: int) -> bool:
        only = self._complete([token], max_tokens=2, allowed_token_ids=[token])
        return bool(only["finish_reason"] == "stop")

    def _logits_after(self, prompt: Sequence[int]) -> torch.Tensor:
        """Return log p of each token of the vocabulary after a prompt, (vocabulary,)."""
        try:
            found = self._complete(prompt, max_tokens=1, logprobs=-1)
        except RunFailedError as error:
            if "logprobs" not in str(error):
                raise
            raise ConfigError(
                f"{error} A comparison needs the log-probabilities of all tokens: start the server with "
                "--max-logprobs -1."
            ) from error
        by_token = {
            int(name.removeprefix(_TOKEN)): value for name, value in found["logprobs"]["top_logprobs"][0].items()
        }
        return torch.tensor([by_token.get(token, -torch.inf) for token in range(max(by_token) + 1)])

    def _complete(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        found = self._server.ask(
            "/v1/completions",
            model=self._name,
            prompt=list(prompt),
            temperature=0,
            repetition_penalty=1.0,
            return_token_ids=True,
            return_tokens_as_token_ids=True,
            **fields,
        )
        choice: dict[str, Any] = found["choices"][0]
        return choice


@contextmanager
def served_by_vllm(
    folder: Path, ends: Sequence[int], *, url: str | None = None, base: Path | str | None = None
) -> Iterator[ServedByVllm]:
    """Serve a model folder, or an adapter on its base, by a vLLM server.

    Args:
        folder: of a model; with `base`, of an adapter.
        ends: see `ServedByVllm`.
        url: of a server that runs already, which serves the model or the base; None: one is started here, in fp32, and
            ended after the block.
        base: the base of an adapter, a folder or hub id; None for a whole model.

    Raises:
        ConfigError: vLLM is not installed.
        RunFailedError: the server does not start, or refuses the adapter.
    """
    opened: AbstractContextManager[VllmServer]
    if url is not None:
        opened = nullcontext(VllmServer(url, patience_seconds=_PATIENCE_SECONDS))
    elif base is None:
        opened = _started(folder, adapter=None)
    else:
        opened = _started(base, adapter=folder)
    with opened as server:
        server.wait()
        if base is None:
            yield ServedByVllm(server, server.base_model()["id"], ends)
        else:
            with server.loaded(folder) as name:
                yield ServedByVllm(server, name, ends)


@contextmanager
def _started(model: Path | str, adapter: Path | None) -> Iterator[VllmServer]:
    """Start a server on a free port, and end it after the block."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [_python(), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    scheme = scheme_of(Path(model))
    command += ["--model", str(model), "--dtype", "float32" if scheme is None else scheme.vllm_dtype]
    command += ["--enforce-eager", "--max-logprobs", "-1"]
    if adapter is not None:
        config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        rank = max(config["r"], *config.get("rank_pattern", {}).values(), 0)
        most = next((each for each in _RANKS if each >= rank), rank)
        command += ["--enable-lora", "--max-lora-rank", str(most)]
    settings = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    settings |= {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            server = VllmServer(
                f"http://127.0.0.1:{port}",
                patience_seconds=_PATIENCE_SECONDS,
                is_to_stop=lambda: process.poll() is not None,
            )
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


def _python() -> str:
    named = os.environ.get(PYTHON)
    if named is not None and shutil.which(named):
        return named
    if named is None and find_spec("vllm") is not None:
        return sys.executable
    raise ConfigError(
        f"vLLM is not installed here{'' if named is None else f', and {PYTHON}={named} is no Python'}. Set {PYTHON} to "
        "the Python of an environment that has it, or give --server URL of a server that runs."
    )


def _cause(log: str) -> str:
    """Return the last line of a log that names an error."""
    errors = [line for line in log.splitlines() if "Error" in line]
    # An engine that breaks later names the cause first: what its worker raised, or that the worker died.
    broken = [
        line for line in log.splitlines() if " ERROR " in line and ("died unexpectedly" in line or "Error: " in line)
    ]
    return broken[0].rpartition("] ")[2].strip() if broken else last_line("\n".join(errors) or log)
