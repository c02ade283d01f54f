"""Ask a vLLM server through its OpenAI interface: for answers with an adapter that it loads, or for anything else.

Endpoints and fields: vLLM 0.32, `entrypoints/openai/completion/protocol.py`, `serve/lora` and `serve/tokenize`.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from socket import SHUT_RDWR
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from finetune.errors import ConfigError, RunFailedError, ServerLostError
from finetune.inference.decoding import Decoding, SampledAnswer
from finetune.units import format_duration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_COMPLETIONS = "/v1/completions"
_PAUSE_SECONDS = 1.0
_LOOK_EVERY = 10
"""Pauses between two looks at a server that has not answered yet."""
_SAY_EVERY_SECONDS = 60.0


class VllmServer:
    """A vLLM server that answers prompts for a run.

    `VLLM_API_KEY` in the environment is its key, if it asks for one.

    Args:
        url: where it listens, for example ``http://localhost:8000``.
        patience_seconds: how long a request waits for a server that is gone, or that takes long to answer.
        is_to_stop: called while the server is gone; True ends the waiting.

    Raises:
        ConfigError: the address is not one of http or https.
    """

    def __init__(self, url: str, *, patience_seconds: float, is_to_stop: Callable[[], bool] = lambda: False) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._address = urlsplit(self.url)
        if self._address.scheme not in ("http", "https") or not self._address.netloc:
            raise ConfigError(f"{url!r} is no address of a server. Expected something like http://localhost:8000.")
        self._patience = patience_seconds
        self._is_to_stop = is_to_stop
        prefix = f"finetune-{secrets.token_hex(4)}"
        self._adapter_names = (f"{prefix}-{number}" for number in itertools.count(1))
        key = os.environ.get("VLLM_API_KEY")
        self._connections: set[HTTPConnection] = set()
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def check(self, tokenizer: PreTrainedTokenizerBase, text: str, *, most_tokens: int) -> None:
        """Wait for the server, and check that its model reads a text as the run's does and has room for `most_tokens`.

        These are the most tokens of a prompt with its answer.

        Raises:
            ConfigError: the server's model has another tokenizer or a shorter context.
            ServerLostError: the server did not answer in time.
        """

        def ask() -> tuple[dict[str, Any], list[int]]:
            model = self.base_model()
            return model, self.ask("/tokenize", model=model["id"], prompt=text, add_special_tokens=False)["tokens"]

        model, theirs = self._patiently(ask)
        ours = tokenizer(text, add_special_tokens=False)["input_ids"]
        if theirs != ours:
            differing = (n for n, (one, other) in enumerate(zip(theirs, ours, strict=False)) if one != other)
            place = next(differing, min(len(theirs), len(ours)))
            raise ConfigError(
                f"{self.url} serves {model['id']}. Its tokenizer reads a prompt of this run as other tokens (token "
                f"{place}: {theirs[place : place + 1]}, here {ours[place : place + 1]}). Serve the run's own base "
                "model with its tokenizer."
            )
        longest = model.get("max_model_len")
        if longest is not None and longest < most_tokens:
            raise ConfigError(
                f"{self.url} serves at most {longest:,} tokens of a prompt with its answer, but this run needs "
                f"{most_tokens:,}. Start the server with --max-model-len {most_tokens}, or lower "
                "rollout.max_completion_length or data.max_length."
            )

    def base_model(self) -> dict[str, Any]:
        """Return the record of the model that the server serves without an adapter; `id` is its name."""
        models: list[dict[str, Any]] = self.ask("/v1/models")["data"]
        return next(model for model in models if not model.get("parent"))

    def name_of(self, adapter: Path) -> str | None:
        """Return the name of an adapter that the server loaded from this folder, which it sees by the same path."""
        models: list[dict[str, Any]] = self.ask("/v1/models")["data"]
        return next((model["id"] for model in models if model.get("parent") and model["root"] == str(adapter)), None)

    def wait(self, level: int = logging.WARNING) -> None:
        """Wait until the server is there, and log that at a level.

        Raises:
            ServerLostError: it is not there in time.
        """
        self._patiently(lambda: self.ask("/health"), level)

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        *,
        adapter: Path,
        num_answers: int,
        seeds: Sequence[int],
        at_once: int,
    ) -> list[SampledAnswer]:
        """Sample answers to each prompt, prompt after prompt. If the server is lost meanwhile, wait for it and go on.

        Args:
            prompts: token ids.
            decoding: stop ids, which an answer keeps, and sampling.
            adapter: a folder that the server reads, by the same path, for the time of this call.
            num_answers: to each prompt.
            seeds: of each prompt.
            at_once: prompts that are asked at the same time.

        Raises:
            RunFailedError: the server refuses the adapter or a prompt.
            ServerLostError: it is gone for too long.
        """
        found: dict[int, list[SampledAnswer]] = {}

        def ask(name: str, place: int) -> None:
            found[place] = self._complete(name, prompts[place], decoding, num_answers, seeds[place])

        def ask_for_the_rest() -> None:
            with self.loaded(adapter) as name, ThreadPoolExecutor(at_once) as threads:
                asked = [threads.submit(ask, name, place) for place in range(len(prompts)) if place not in found]
                try:
                    self._wait_for(asked, name)
                finally:
                    threads.shutdown(wait=False, cancel_futures=True)
                    self._hang_up()

        self._patiently(ask_for_the_rest)
        return [answer for place in range(len(prompts)) for answer in found[place]]

    def _wait_for(self, asked: Sequence[Future[None]], adapter: str) -> None:
        """Wait for all answers. A server that was started anew has no adapter, and earlier requests may hang."""
        for seconds in itertools.count(1):
            done, others = wait(asked, timeout=_PAUSE_SECONDS, return_when=FIRST_EXCEPTION)
            for one in done:
                one.result()
            if not others:
                return
            if self._is_to_stop():
                raise ServerLostError("the run was asked to stop while it waited for answers", is_preempted=True)
            if seconds % _LOOK_EVERY == 0 and all(model["id"] != adapter for model in self.ask("/v1/models")["data"]):
                raise ServerGoneError(self.url, "it was started again")

    def _hang_up(self) -> None:
        """End the requests that are under way, so that their threads end."""
        for connection in list(self._connections):
            with suppress(OSError, AttributeError):  # not connected, or no longer
                connection.sock.shutdown(SHUT_RDWR)

    @contextmanager
    def loaded(self, adapter: Path) -> Iterator[str]:
        """Load an adapter under a name of its own: vLLM's cache of prefixes knows adapters by their names."""
        name = next(self._adapter_names)
        self.ask("/v1/load_lora_adapter", lora_name=name, lora_path=str(adapter))
        yield name
        self.ask("/v1/unload_lora_adapter", lora_name=name)

    def _complete(
        self, model: str, prompt: Sequence[int], decoding: Decoding, num_answers: int, seed: int
    ) -> list[SampledAnswer]:
        sampling = decoding.sampling
        assert sampling is not None
        done = self.ask(
            _COMPLETIONS,
            model=model,
            prompt=list(prompt),
            n=num_answers,
            seed=seed,
            max_tokens=decoding.max_new_tokens,
            # Without these, the server would take the defaults of the model's generation_config.json.
            temperature=sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            top_k=sampling.top_k or 0,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            ignore_eos=True,  # the stop ids are given
            stop_token_ids=list(decoding.stop_ids),
            logprobs=0,
            return_token_ids=True,
        )
        choices = sorted(done["choices"], key=lambda choice: int(choice["index"]))
        if any(choice.get("token_ids") is None for choice in choices):
            raise RunFailedError(f"{self.url} returns no token ids. vLLM does so from version 0.10.2 on: upgrade it.")
        return [
            SampledAnswer(list(choice["token_ids"]), [-value for value in choice["logprobs"]["token_logprobs"]])
            for choice in choices
        ]

    def ask(self, path: str, **fields: Any) -> Any:
        """Send a request, with fields as its JSON body if there are any, and return the answer.

        Raises:
            RunFailedError: the server refuses it, or does not answer.
        """
        connect = HTTPSConnection if self._address.scheme == "https" else HTTPConnection
        connection = connect(self._address.netloc, timeout=self._patience)
        self._connections.add(connection)
        body = json.dumps(fields).encode() if fields else None
        try:
            connection.request("POST" if body else "GET", self._address.path + path, body=body, headers=self._headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, HTTPException) as error:
            raise ServerGoneError(self.url, str(error) or type(error).__name__) from error
        finally:
            self._connections.discard(connection)
            connection.close()
        if answer.status >= HTTPStatus.BAD_REQUEST:
            why = f"{self.url}{path} answers {answer.status}: {_message(text)}"
            # vLLM answers 500 to completions while it ends, and to an adapter that it cannot load. A proxy answers 502.
            server_error = HTTPStatus.INTERNAL_SERVER_ERROR
            is_gone = answer.status > server_error or (answer.status == server_error and path == _COMPLETIONS)
            raise ServerGoneError(self.url, why) if is_gone else RunFailedError(why)
        return json.loads(text) if answer.headers.get_content_type() == "application/json" else text.decode()

    def _patiently(self, attempt: Callable[[], Any], level: int = logging.WARNING) -> Any:
        """Call a function until the server is there for it."""
        lost_at = next_word = None
        while True:
            try:
                return attempt()
            except ServerGoneError as error:
                now = time.monotonic()
                lost_at = now if lost_at is None else lost_at
                if self._is_to_stop():
                    raise ServerLostError(f"{error}, and the run was asked to stop", is_preempted=True) from None
                if now - lost_at > self._patience:
                    waited = format_duration(now - lost_at)
                    raise ServerLostError(
                        f"{error}, for {waited} now. Start it, then run the command again; a run goes on with "
                        "resume=auto."
                    ) from None
                if next_word is None or now >= next_word:
                    left = format_duration(self._patience - now + lost_at)
                    _log.log(level, "%s: waiting for it, at most %s", error, left)
                    next_word = now + _SAY_EVERY_SECONDS
                time.sleep(_PAUSE_SECONDS)


class ServerGoneError(RunFailedError):
    """The server does not answer any more, or not yet."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"the server {url} does not answer ({why})")


def _message(answer: bytes) -> str:
    """Return what a server says of an error: vLLM's JSON has it in `error.message`."""
    try:
        found = json.loads(answer)
        return str(found["error"]["message"] if "error" in found else found["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace")[:500]
