"""Answer prompts with a finished run, for `finetune generate` and `finetune chat`."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from finetune.errors import ConfigError
from finetune.inference.finished_run import FinishedRun, load_finished_run
from finetune.logs import importing

if TYPE_CHECKING:
    from finetune.data.examples import Opening
    from finetune.distributed.runtime import Runtime
    from finetune.inference.prompts import Prompt

_log = logging.getLogger(__name__)
_LEAST_TEMPERATURE = 1e-30
"""A logit divided by less may be infinite in fp32."""


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """The settings for answers, from the command line or a script. They are checked before a model is loaded.

    Raises:
        ConfigError: a value of another type, or out of range.
    """

    system: str | None = None
    """The system turn; None: the most frequent one in the training rows."""
    tools: str | None = None
    """JSON text of the tools to offer, empty for none; None: the most frequent ones in the training rows."""
    max_new_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        from finetune.data.values import quote

        def check(name: str, value: Any, types: Any, low: float, high: float, expected: str) -> None:
            if not isinstance(value, types) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"--{name} is {quote(value)}; expected {expected}.")

        at_least_1 = "a whole number of at least 1"
        check("max-new-tokens", self.max_new_tokens, (int,), 1, math.inf, at_least_1)
        check("seed", self.seed, (int,), -math.inf, math.inf, "a whole number")
        if self.temperature is not None:
            expected = "a number above 0. Leave it out to choose the most likely token each time"
            check("temperature", self.temperature, (int, float), _LEAST_TEMPERATURE, sys.float_info.max, expected)
        if self.top_p is not None:
            check("top-p", self.top_p, (int, float), sys.float_info.min, 1, "a number above 0, at most 1")
        if self.top_k is not None:
            check("top-k", self.top_k, (int,), 1, math.inf, at_least_1)
        for name in ("system", "tools"):
            if not isinstance(text := getattr(self, name), (str, type(None))):
                raise ConfigError(f"--{name} is {quote(text)} ({type(text).__name__}); expected text.")


class Generator:
    """A loaded run that answers prompts, with the tuned model or with its base.

    By default, the training rows of the run give the system turn and the tools.

    Attributes:
        decoding: greedy unless the settings have a temperature, top_p or top_k.
        read: splits the tokens of an answer into its thinking, its text and its calls.
    """

    def __init__(self, runtime: Runtime, run: FinishedRun, settings: AnswerSettings) -> None:
        from finetune.data.templates import AnswerTokens
        from finetune.inference.answers import AnswerReader
        from finetune.inference.decoding import Decoding
        from finetune.inference.sampling import Sampling

        self.runtime = runtime
        self.model, self.tokenizer = load_finished_run(runtime, run)
        self._run = run
        self._settings = settings
        self._tokens = AnswerTokens(self.tokenizer)
        self.read = AnswerReader(self._tokens).read
        is_greedy = settings.temperature is settings.top_p is settings.top_k is None
        temperature = 1.0 if settings.temperature is None else settings.temperature
        sampling = Sampling(temperature=temperature, top_p=settings.top_p, top_k=settings.top_k, seed=settings.seed)
        greedy = Decoding.greedy(self.model, self.tokenizer, settings.max_new_tokens)
        self.decoding = greedy if is_greedy else replace(greedy, sampling=sampling)

    @classmethod
    @contextmanager
    def open(cls, run: FinishedRun, settings: AnswerSettings) -> Iterator[Generator]:
        """Load a run and yield it ready to answer. Collective: every process of the launch.

        Standard output is for answers, and the log has warnings and errors only.
        """
        with importing():
            from finetune.distributed.launch import launch

        with launch(run.config, trains=False, log_level=logging.WARNING) as runtime:
            yield cls(runtime, run, settings)

    @property
    def has_base(self) -> bool:
        """True if the model has an adapter, which can be switched off to get the base."""
        from finetune.runs.model_files import has_adapter

        return has_adapter(self.model)

    def require_base(self) -> None:
        """Refuse to compare a model that has no adapter.

        Raises:
            ConfigError: every weight of the model was trained.
        """
        if not self.has_base:
            raise ConfigError(
                "--compare switches the adapter off to get the base's answer, but this run trained every weight "
                "(training.method=full): it has no adapter. Drop --compare."
            )

    @cached_property
    def opening(self) -> Opening:
        """The system turn and the tools of a conversation that has none of its own."""
        from finetune.data.examples import Opening
        from finetune.data.turns import Dialogue
        from finetune.data.values import quote
        from finetune.inference.opening import recorded_opening, usual_opening

        config, system, tools = self._run.config, self._settings.system, self._settings.tools
        usual = Opening()
        if self.tokenizer.chat_template is not None and (system is None or tools is None):
            usual = usual_opening(config.data, config.objective.reads, recorded_opening(self._run))
        if tools is None and usual.tools:
            count = f"as in {usual.num_with_tools} of the first {usual.num_rows} training rows"
            if self._tokens.template.ignored(Dialogue((), (), usual.tools)):
                _log.info("tools are not offered, %s, because the chat template does not render them", count)
            else:
                tools = usual.tools
                _log.info('tools are offered, %s (--tools "" offers none): %s', count, quote(tools))
        return Opening(usual.system if system is None else system or None, tools or "")

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Encode prompts as token ids.

        A system turn or tools from the command line replace the prompt's own. If the command line has none, a prompt of
        a single turn gets the system turn and the tools that most training rows have.
        """
        from finetune.inference.prompts import encode_prompts

        return encode_prompts(self._tokens, [self._with_opening(prompt) for prompt in prompts])

    def encode_whole(self, prompt: Prompt) -> list[int]:
        """Encode a prompt with its own turns and tools alone."""
        from finetune.inference.prompts import encode_prompts

        return encode_prompts(self._tokens, [prompt])[0]

    def _with_opening(self, prompt: Prompt) -> Prompt:
        """Return a prompt with the system turn and the tools that `encode` gives it."""
        from finetune.inference.opening import with_system_turn

        system, tools = self._settings.system, self._settings.tools
        if prompt.messages and (prompt.is_open or system is not None):
            turns = with_system_turn(prompt.messages, self.opening.system, replaces=system is not None)
            prompt = replace(prompt, messages=tuple(turns))
        if prompt.messages and (prompt.is_open or tools is not None):
            own = prompt.tools if tools is None else ""
            prompt = replace(prompt, tools=own or self.opening.tools)
        return prompt

    def batch(self, name: str, prompts: Sequence[Sequence[int]], *, batch_size: int) -> list[list[int]]:
        """Answer encoded prompts with the model `name`, `base` or `tuned`. Collective; see `generate_answers`."""
        from finetune.inference.decoding import generate_answers

        with self._as_model(name):
            return generate_answers(self.model, prompts, self.decoding, batch_size=batch_size, runtime=self.runtime)

    def stream(self, name: str, prompt: Sequence[int], write: Callable[[str], object], answer_ids: list[int]) -> None:
        """Answer one encoded prompt with the model `name`, and write each piece of text as soon as it is final.

        The joined pieces are the text of the answer. Ctrl-C may cut it short. `answer_ids` receives its tokens.
        """
        from finetune.inference.decoding import stream_answer

        shown = ""

        def show(token: int) -> None:
            nonlocal shown
            answer_ids.append(token)
            text = self.text(answer_ids)
            # A character of several bytes may span tokens; until it is complete, it decodes as this mark.
            if text.startswith(shown) and not text.endswith("\ufffd"):
                write(text[len(shown) :])
                shown = text

        try:
            with self._as_model(name):
                stream_answer(self.model, prompt, self.decoding, show)
        finally:
            write(self.text(answer_ids)[len(shown) :])

    def text(self, ids: Sequence[int]) -> str:
        """Decode tokens, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _as_model(self, name: str) -> AbstractContextManager[Any]:
        """Switch the adapter off within the block if `name` is `base`."""
        return self.model.disable_adapter() if name == "base" else nullcontext()
