"""Ask a vLLM server through its OpenAI interface: for answers with an adapter that it loads, or for anything else.

Endpoints and fields: vLLM 0.32, `entrypoints/openai/completion/protocol.py`, `serve/lora` and `serve/tokenize`.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from pathlib import Path
from socket import SHUT_RDWR, socket
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

from finetune.config.schema import split_server_address
from finetune.deadlines import DeadlineExceededError, StopRequestedError, call_within
from finetune.errors import ConfigError, NoRowsError
from finetune.inference.decoding import Decoding, SampledAnswer
from finetune.inference.vllm_answers import Choice, Limits, LoadedModel, read_choices, read_models, read_tokens
from finetune.units import format_bytes, format_duration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Value = TypeVar("_Value")

_log = logging.getLogger(__name__)
_COMPLETIONS = "/v1/completions"
_PAUSE_SECONDS = 1.0
_LOOK_EVERY = 10
"""Pauses between two looks at a server that has not answered yet."""
_REPORT_EVERY_SECONDS = 60.0

_MOST_BYTES = 1 << 20
"""The longest answer to a short request about no tokens."""
_BYTES_OF_A_TOKEN = 512
"""The most that each token of a completion may add: its id, its text, and log p of it and of its place."""
_BYTES_OF_A_LIKELY_TOKEN = 128
_BYTES_OF_A_BYTE = 16
"""The most that each byte of a request may add: the server repeats prompts, or turns them into tokens or text."""
_MOST_SHOWN = 500


class VllmServer:
    """A vLLM server that answers prompts for a run. `VLLM_API_KEY` in the environment is its key, if it asks for one.

    It waits `patience_seconds` for a server that is gone, and for each answer from its first to its last byte.
    `is_to_stop` is called while a request waits; True ends the waiting.

    Raises:
        ConfigError: the address is not one of http or https, or has more than a host, a port and a path.
    """

    def __init__(self, url: str, *, patience_seconds: float, is_to_stop: Callable[[], bool] = lambda: False) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            self._address = split_server_address(self.url)
        except ValueError as error:
            raise ConfigError(f"--server: {error}") from None  # rollout.server was checked before
        self._patience = patience_seconds
        self._is_to_stop = is_to_stop
        prefix = f"finetune-{secrets.token_hex(4)}"
        self._adapter_names = (f"{prefix}-{number}" for number in itertools.count(1))
        self._gives_up = Event()
        self._answered_at = 0.0
        """When the last prompt was answered."""
        self._key = os.environ.get("VLLM_API_KEY", "")
        self._headers = {"Content-Type": "application/json"}
        if self._key:
            if not (self._key.isascii() and self._key.isprintable()):
                raise ConfigError("VLLM_API_KEY has characters that no key has. Set it again, without a newline.")
            self._headers["Authorization"] = f"Bearer {self._key}"

    def check(self, tokenizer: PreTrainedTokenizerBase, text: str, *, most_tokens: int) -> None:
        """Wait for the server, and check that its model reads a text as the run's does and has room for `most_tokens`.

        These are the most tokens of a prompt with its answer.

        Raises:
            ConfigError: the server's model has another tokenizer or a shorter context.
            ServerError: the server did not answer in time, or its answer is wrong.
        """

        def ask() -> tuple[LoadedModel, list[int]]:
            model = self.base_model()
            fields = {"model": model.id, "prompt": text, "add_special_tokens": False}
            return model, self.ask("/tokenize", read_tokens, fields)

        model, served_ids = self._patiently(ask)
        own_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if served_ids != own_ids:
            differing = (
                n for n, (served_id, own_id) in enumerate(zip(served_ids, own_ids, strict=False)) if served_id != own_id
            )
            place = next(differing, min(len(served_ids), len(own_ids)))
            raise ConfigError(
                f"{self.url} serves {model.id}. Its tokenizer reads a prompt of this run as other tokens (token "
                f"{place}: {served_ids[place : place + 1]}, here {own_ids[place : place + 1]}). Serve the run's own "
                "base model with its tokenizer."
            )
        longest = model.max_model_len
        if longest is not None and longest < most_tokens:
            raise ConfigError(
                f"{self.url} serves at most {longest:,} tokens of a prompt with its answer, but this run needs "
                f"{most_tokens:,}. Start the server with --max-model-len {most_tokens}, or lower "
                "rollout.max_completion_length or data.max_length."
            )

    def base_model(self) -> LoadedModel:
        """Return the model that the server serves without an adapter; `id` is its name."""
        model = next((model for model in self._models() if not model.parent), None)
        if model is None:
            raise ServerError(f"{self.url} lists no model without an adapter. Is it a vLLM server?")
        return model

    def _models(self) -> list[LoadedModel]:
        return self.ask("/v1/models", read_models)

    def name_of(self, adapter: Path) -> str | None:
        """Return the name of an adapter that the server loaded from this folder, which it sees by the same path."""
        return next((model.id for model in self._models() if model.parent and model.root == str(adapter)), None)

    def wait(self, level: int = logging.WARNING) -> None:
        """Wait until the server is there, and log that at a level.

        Raises:
            ServerLostError: it is not there in time.
        """
        self._patiently(lambda: self.post("/health"), level)

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        *,
        adapter: Path,
        limits: Sequence[Limits],
        seeds: Sequence[int],
        at_once: int,
    ) -> list[SampledAnswer]:
        """Sample answers to each prompt, prompt after prompt. If the server is lost meanwhile, wait for it and go on.

        The server reads the folder of the adapter, by the same path, for the time of this call. Answers keep their stop
        ids. Each prompt has limits and a seed, and `at_once` prompts are asked at the same time.

        Raises:
            ServerError: the server refuses the adapter or a prompt, its answer is wrong, or it is gone for too long.
        """
        answers: dict[int, list[SampledAnswer]] = {}

        def ask(name: str, place: int) -> None:
            answers[place] = self._sample(name, prompts[place], decoding, limits[place], seeds[place])
            self._answered_at = time.monotonic()

        def ask_for_the_rest() -> None:
            self._gives_up = Event()
            with self.loaded(adapter) as name, ThreadPoolExecutor(at_once) as threads:
                requests = [threads.submit(ask, name, place) for place in range(len(prompts)) if place not in answers]
                try:
                    self._wait_for(requests, name)
                except BaseException:
                    threads.shutdown(wait=False, cancel_futures=True)
                    self._gives_up.set()  # ends the requests that are under way, and so their threads
                    raise

        self._patiently(ask_for_the_rest)
        return [answer for place in range(len(prompts)) for answer in answers[place]]

    def _wait_for(self, requests: Sequence[Future[None]], adapter: str) -> None:
        """Wait for all answers. A server that was started anew has no adapter, and earlier requests may hang."""
        for seconds in itertools.count(1):
            finished, pending = wait(requests, timeout=_PAUSE_SECONDS, return_when=FIRST_EXCEPTION)
            for request in finished:
                request.result()
            if not pending:
                return
            if self._is_to_stop():
                raise ServerLostError("the run was asked to stop while it waited for answers", is_preempted=True)
            if seconds % _LOOK_EVERY == 0 and all(model.id != adapter for model in self._models()):
                raise ServerGoneError(self.url, "it was started again")

    @contextmanager
    def loaded(self, adapter: Path) -> Iterator[str]:
        """Load an adapter under a name of its own: vLLM's cache of prefixes knows adapters by their names."""
        name = next(self._adapter_names)
        self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(adapter))
        yield name
        self.post("/v1/unload_lora_adapter", lora_name=name)

    def _sample(
        self, model: str, prompt: Sequence[int], decoding: Decoding, limits: Limits, seed: int
    ) -> list[SampledAnswer]:
        sampling = decoding.sampling
        assert sampling is not None
        choices = self.complete(
            model,
            prompt,
            limits,
            seed=seed,
            # Without these, the server would take the defaults of the model's generation_config.json.
            temperature=sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            top_k=sampling.top_k or 0,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            ignore_eos=True,  # the stop ids are given
            stop_token_ids=list(decoding.stop_ids),
            logprobs=0,
        )
        return [
            SampledAnswer(choice.token_ids or [], [-value for value in choice.logprobs.token_logprobs])
            for choice in choices
            if choice.logprobs is not None
        ]

    def complete(self, model: str, prompt: Sequence[int], limits: Limits, **fields: Any) -> list[Choice]:
        """Complete a prompt, with token ids and no repetition penalty. Raises the errors of `ask`.

        Every answer has `token_ids`, and `logprobs` if the limits have `num_likely`.
        """
        likely = limits.max_tokens * (limits.num_likely or 0)
        more_bytes = limits.max_tokens * _BYTES_OF_A_TOKEN + likely * _BYTES_OF_A_LIKELY_TOKEN
        fields |= {"model": model, "prompt": list(prompt), "n": limits.num_answers, "max_tokens": limits.max_tokens}
        fields |= {"repetition_penalty": 1.0, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return self.ask(
            _COMPLETIONS, lambda text: read_choices(text, limits), fields, more_bytes=limits.num_answers * more_bytes
        )

    def post(self, path: str, **fields: Any) -> None:
        """Send a request, and check that the server accepts it. Raises the errors of `ask`."""
        self._exchange(path, fields)

    def ask(
        self,
        path: str,
        read: Callable[[bytes], _Value],
        fields: Mapping[str, Any] | None = None,
        *,
        more_bytes: int = 0,
    ) -> _Value:
        """Send a request, with fields as its JSON body if there are any, and return what `read` makes of the answer.

        Raises:
            ServerError: the server refuses it, does not answer in time, or its answer is too long or malformed.
        """
        text = self._exchange(path, fields or {}, more_bytes)
        try:
            return read(text)
        except ValueError as error:
            raise ServerError(
                f"the answer of {self.url}{path} is malformed: {error}. Check that this is a vLLM server, and see its "
                "log."
            ) from None

    def _exchange(self, path: str, fields: Mapping[str, Any], more_bytes: int = 0) -> bytes:
        """Send a request, and return the body of the answer. Its time and its size are limited, headers included."""
        connect = HTTPSConnection if self._address.scheme == "https" else HTTPConnection
        connection, gives_up = connect(self._address.netloc), self._gives_up
        body = json.dumps(fields).encode() if fields else b""
        most_bytes = _MOST_BYTES + more_bytes + _BYTES_OF_A_BYTE * len(body)
        opened: list[socket] = []

        def exchange() -> tuple[int, bytes]:
            method = "POST" if body else "GET"
            with closing(connection):
                connection.connect()
                opened.append(connection.sock)
                connection.request(method, self._address.path + path, body or None, self._headers)
                with connection.getresponse() as answer:
                    text = answer.read(most_bytes + 1)
                    if answer.length and len(text) <= most_bytes:
                        raise IncompleteRead(text, answer.length)
                    return answer.status, text

        try:
            status, text = call_within(
                self._patience,
                exchange,
                name=f"asking {path}",
                is_to_stop=lambda: gives_up.is_set() or self._is_to_stop(),
            )
        except StopRequestedError:
            raise ServerLostError(
                f"the run was asked to stop while it waited for {self.url}{path}", is_preempted=True
            ) from None
        except DeadlineExceededError:
            raise ServerLostError(
                f"{self.url}{path} has not answered completely within {format_duration(self._patience)}. See the log "
                "of the server, then run the command again; a run goes on with resume=auto."
            ) from None
        except (OSError, HTTPException) as error:
            raise ServerGoneError(self.url, str(error)[:_MOST_SHOWN] or type(error).__name__) from error
        finally:
            for open_socket in opened:  # a request that goes on would occupy the server
                with suppress(OSError):
                    open_socket.shutdown(SHUT_RDWR)
        if len(text) > most_bytes:
            raise ServerError(
                f"{self.url}{path} answers more than {format_bytes(most_bytes)}, the limit for this request. Check "
                "that this is a vLLM server, and see its log."
            )
        if status != HTTPStatus.OK:
            reason = f"{self.url}{path} answers {status}: {_error_message(text, self._key)}"
            # vLLM answers 500 to completions while it ends, and to an adapter that it cannot load. A proxy answers 502.
            server_error = HTTPStatus.INTERNAL_SERVER_ERROR
            is_gone = status > server_error or (status == server_error and path == _COMPLETIONS)
            raise ServerGoneError(self.url, reason) if is_gone else ServerRefusalError(reason)
        return text

    def _patiently(self, attempt: Callable[[], Any], level: int = logging.WARNING) -> Any:
        """Call a function until the server is there for it."""
        lost_at = next_report = -math.inf
        while True:
            try:
                return attempt()
            except ServerGoneError as error:
                now = time.monotonic()
                if lost_at < self._answered_at:  # it was there until now, or came back in between
                    lost_at = next_report = now
                if self._is_to_stop():
                    raise ServerLostError(f"{error}, and the run was asked to stop", is_preempted=True) from None
                if now - lost_at > self._patience:
                    waited = format_duration(now - lost_at)
                    raise ServerLostError(
                        f"{error}, for {waited} now. Start it, then run the command again; a run goes on with "
                        "resume=auto."
                    ) from None
                if now >= next_report:
                    left = format_duration(self._patience - now + lost_at)
                    _log.log(level, "%s: waiting for it, at most %s", error, left)
                    next_report = now + _REPORT_EVERY_SECONDS
                time.sleep(_PAUSE_SECONDS)


def _error_message(answer: bytes, key: str) -> str:
    """Return the error message of a server on one line, without the key. vLLM's JSON has it in `error.message`."""
    text = answer.decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        content = json.loads(answer)
        text = str(content["error"]["message"] if "error" in content else content["detail"])
    if key:
        text = text.replace(key, "…")  # a server may repeat the request
    return " ".join(text[: 2 * _MOST_SHOWN].split())[:_MOST_SHOWN]


class ServerError(NoRowsError):
    """The server that answers prompts is gone, or its answer cannot be used."""


class ServerLostError(ServerError):
    """The server was gone for too long, or the run was asked to stop while it waited."""


class ServerGoneError(ServerError):
    """The server does not answer any more, or not yet."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"the server {url} does not answer ({reason})")


class ServerRefusalError(ServerError):
    """The server answers with an error."""
