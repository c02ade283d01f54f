"""What `generate` and `chat` share: the settings of an answer, and a loaded run that gives one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from finetune.errors import ConfigError
from finetune.inference.finished_run import has_base

if TYPE_CHECKING:
    from finetune.data.templates import AnswerTokens
    from finetune.inference.decoding import Decoding
    from finetune.inference.finished_run import FinishedRun, LoadedRun
    from finetune.inference.prompts import Prompt


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How answers are made, as the command line says it."""

    system: str | None
    """None: the one most training rows have."""
    max_new_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Refuse what cannot be meant, before a model is loaded.

        Raises:
            ConfigError: a temperature or a probability out of range.
        """
        if self.temperature is not None and self.temperature <= 0:
            raise ConfigError(
                f"--temperature is {self.temperature:g}; expected a number above 0. Leave it out for the most likely "
                "token each time."
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p is {self.top_p:g}; expected a number above 0, at most 1.")

    def decoding(self, stops: Sequence[int]) -> Decoding:
        """What the decoder takes. Greedy unless one of temperature, top_p and top_k is set."""
        from finetune.inference.decoding import Decoding, Sampling

        drawn = any(value is not None for value in (self.temperature, self.top_p, self.top_k))
        sampling = Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
        )
        return Decoding(stop_ids=stops, max_new_tokens=self.max_new_tokens, sampling=sampling if drawn else None)


class Answering:
    """A loaded run that answers prompts, as the tuned model or as its base.

    Args:
        loaded: the run.
        run: its configuration, for the system turn.
        settings: of the answers.
    """

    def __init__(self, loaded: LoadedRun, run: FinishedRun, settings: AnswerSettings) -> None:
        from finetune.data.templates import AnswerTokens, stop_ids

        self.model, self.tokenizer = loaded
        self.tokens: AnswerTokens = AnswerTokens(self.tokenizer)
        self.stops = stop_ids(self.tokenizer, self.model.generation_config.eos_token_id)
        self.settings = settings
        self.decoding = settings.decoding(self.stops)
        self._data = run.config.data

    @property
    def has_base(self) -> bool:
        """Whether switching an adapter off gives the base."""
        return has_base(self.model)

    def require_base(self) -> None:
        """Refuse to compare where there is no adapter.

        Raises:
            ConfigError: every weight of the model was trained.
        """
        if not self.has_base:
            raise ConfigError(
                "--compare switches the adapter off to get the base's answer, but this run trained every weight "
                "(training.method=full): there is none. Drop --compare."
            )

    @cached_property
    def system(self) -> str | None:
        """The system turn of a conversation that brings none."""
        from finetune.inference.prompts import usual_system_turn

        if self.settings.system is not None:
            return self.settings.system or None
        return usual_system_turn(self._data) if self.tokenizer.chat_template is not None else None

    @contextmanager
    def as_model(self, name: str) -> Iterator[Any]:
        """A block in which the model is the base (`base`), its adapter switched off, or as it is (`tuned`)."""
        with self.model.disable_adapter() if name == "base" else nullcontext():
            yield self.model

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt's tokens. Its system turn: that of the command line, or, for a single turn, the usual one."""
        from finetune.inference.prompts import encode_prompt

        is_wanted = prompt.is_open or self.settings.system is not None
        return encode_prompt(self.tokens, prompt, system=self.system if is_wanted and prompt.messages else None)

    def text(self, ids: Sequence[int]) -> str:
        """Tokens as text, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def stream(self, name: str, ids: Sequence[int], write: Callable[[str], object]) -> list[int]:
        """Answer one prompt, and hand each piece of text over as soon as it is settled.

        Args:
            name: `base` or `tuned`.
            ids: the prompt.
            write: takes the pieces; together they are the answer's text.

        Returns:
            The answer's tokens; those there were when Ctrl-C stopped it.
        """
        from finetune.inference.decoding import stream_answer

        given: list[int] = []
        shown = ""

        def show(token: int) -> None:
            nonlocal shown
            given.append(token)
            text = self.text(given)
            # A character of several bytes may be spread over tokens: until it is whole, it decodes as this mark.
            if text.startswith(shown) and not text.endswith("\ufffd"):
                write(text[len(shown) :])
                shown = text

        try:
            with self.as_model(name) as model:
                stream_answer(model, ids, self.decoding, show)
        finally:
            write(self.text(given)[len(shown) :])
        return given
