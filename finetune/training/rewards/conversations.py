"""Let a model answer in several turns: it calls tools, reads their results and goes on.

A conversation is a list of tokens that only grows. What the model generated is never decoded and tokenised again: the
words of the chat template between two answers, and the results, are tokenised once and appended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from finetune.data.batches import derived_seed
from finetune.data.templates import AnswerTokens, tokenize
from finetune.data.turns import Dialogue, Turn, text_turn
from finetune.data.values import BadRowError, quote
from finetune.errors import ConfigError
from finetune.inference.answers import Answer, AnswerReader
from finetune.inference.decoding import Decoding, SampledAnswer
from finetune.model.base import max_context
from finetune.training.rewards.tool_process import error_text
from finetune.training.rewards.tools import Result, ToolProcess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config
    from finetune.distributed.runtime import Runtime

_QUESTION = text_turn("user", "a")
_SEVERAL = 2
_NO_NAME = re.compile(r"\W|^$")
"""What is no part of a name: the model may have made it up, or written none."""
Draw = Callable[[Sequence[Sequence[int]], Decoding], "Sequence[SampledAnswer] | Sequence[list[int]] | None"]
"""Generates an answer to each prompt; None if a rank was asked to stop meanwhile."""


@dataclass
class Conversation:
    """What follows a prompt: answers of the model, and between them results of tools."""

    ids: list[int] = field(default_factory=list)
    """All tokens, answers and results alike."""
    nats: list[float] = field(default_factory=list)
    """-log p of the tokens that the model generated, see `SampledAnswer`."""
    lengths: list[int] = field(default_factory=list)
    """The tokens of the first answer, of what follows it, of the second answer, and so on."""
    results: list[list[Result]] = field(default_factory=list)
    """The results of the calls of each answer that has some."""
    has_end: bool = False
    """Whether the last answer is whole and calls nothing."""
    goes_on: bool = True

    def add(self, tokens: Sequence[int], nats: Sequence[float] = ()) -> None:
        """Append an answer with its nats, or the tokens between two answers."""
        self.ids += tokens
        self.nats += nats
        self.lengths.append(len(tokens))

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for the file of a rollout, beside the tokens and the nats of an answer."""
        results = [[result.as_record() for result in each] for each in self.results]
        return {"parts": self.lengths, "calls": results, "has_end": self.has_end}

    @classmethod
    def from_record(cls, answer: Mapping[str, Any]) -> Conversation:
        """Read a conversation from an answer in the file of a rollout."""
        results = [[Result(**result) for result in each] for each in answer["calls"]]
        nats = answer.get("sampled_nats", [])
        return cls(answer["ids"], nats, answer["parts"], results, has_end=answer["has_end"], goes_on=False)

    @property
    def answers(self) -> list[list[int]]:
        """The tokens of each answer."""
        return answers_in(self.ids, self.lengths)


def answers_in(ids: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Return the tokens of each answer in a conversation, given the lengths of its parts."""
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    return [list(ids[start : start + lengths[place]]) for place, start in enumerate(starts) if place % 2 == 0]


def metrics_of(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Return the metrics of the calls in a rollout; nan where there is nothing to measure."""
    calls = [result for each in conversations for results in each.results for result in results]
    return {
        "turns": sum(len(each.lengths[::2]) for each in conversations) / len(conversations),
        "calls": len(calls) / len(conversations),
        "failed_calls": sum(call.failed for call in calls) / len(calls) if calls else math.nan,
    }


def is_generated(lengths: Sequence[int]) -> list[bool]:
    """Return for each token of a conversation whether the model generated it."""
    return [place % 2 == 0 for place, length in enumerate(lengths) for _ in range(length)]


class ToolUse:
    """Lets a model use the tools of a run. Every rank has one; only the main process calls tools.

    Raises:
        ConfigError: the chat template cannot go on after a call, or shows no tools.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, schemas: str) -> None:
        self._section = config.rollout
        self._schemas = schemas
        self._tokens = AnswerTokens(tokenizer, config.data.chat_template or "")
        self.reader = AnswerReader(self._tokens)
        self._process = ToolProcess(config.rollout.tools, config.rollout.tools_from)
        self._refuse_template()

    def _refuse_template(self) -> None:
        name = self._tokens.template.name
        advice = "Set data.chat_template to a template that does: phi4_mini, for a tokenizer with its tokens."
        if not any(self._tokens.template.renders(key) for key in (("", "tools"), ("system", "tools"))):
            raise ConfigError(f"rollout.tools is set, but the chat template of {name} shows no tools. {advice}")
        if not self.reader.reads_calls:
            raise ConfigError(
                f"rollout.tools is set, but the chat template of {name} writes calls in a form that is not read here; "
                f"expected JSON with name and arguments. {advice}"
            )
        for count in (1, _SEVERAL):
            result = Result(name="probe", arguments={}, text="probe-1", failed=False)
            problem = self._continuations([[result] * count])[0]
            if isinstance(problem, str):
                raise ConfigError(
                    f"rollout.tools is set, but with the chat template of {name} a conversation cannot go on after a "
                    f"call: {problem}. {advice}"
                )

    def converse(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        draw: Draw,
        *,
        runtime: Runtime,
        model: Any,
    ) -> list[Conversation] | None:
        """Return what follows each prompt, the same on every rank; None if a rank was asked to stop. Collective.

        `decoding.max_new_tokens` limits the tokens of a whole conversation after its prompt.
        """
        context = max_context(model) or math.inf
        limits = [int(min(decoding.max_new_tokens, context - len(prompt))) for prompt in prompts]
        conversations = [Conversation() for _ in prompts]
        for turn in range(self._section.max_turns):
            going = [place for place, each in enumerate(conversations) if each.goes_on]
            if not going:
                break
            room = [limits[place] - len(conversations[place].ids) for place in going]
            heads = [[*prompts[place], *conversations[place].ids] for place in going]
            answers = draw(heads, _of_turn(replace(decoding, max_new_tokens=max(room)), turn))
            if answers is None:
                return None
            for place, answer, most in zip(going, answers, room, strict=True):
                sampled = answer if isinstance(answer, SampledAnswer) else SampledAnswer(answer, [])
                conversations[place].add(sampled.ids[:most], sampled.nats[:most])
            self._answer(
                [conversations[place] for place in going],
                [limits[place] for place in going],
                decoding.stop_ids,
                runtime=runtime,
                is_last=turn == self._section.max_turns - 1,
            )
        return conversations

    def _answer(
        self,
        conversations: Sequence[Conversation],
        limits: Sequence[int],
        stops: Sequence[int],
        *,
        runtime: Runtime,
        is_last: bool,
    ) -> None:
        """Append the results of the calls in the last answers, or end conversations. Collective."""
        replies: list[tuple[list[Result], list[int], bool]] = []
        runtime.liveness.enter_phase("tools", timed=False)
        with runtime.collectives.failing_together("calling tools"):
            if runtime.is_main_process:
                replies = self._replies([each.answers[-1] for each in conversations], stops, is_last=is_last)
        replies = runtime.collectives.broadcast_from_main(replies)
        for conversation, limit, (results, tokens, has_end) in zip(conversations, limits, replies, strict=True):
            conversation.has_end = has_end
            conversation.results += [results] if results else []
            conversation.goes_on = bool(tokens) and len(conversation.ids) + len(tokens) < limit
            if conversation.goes_on:
                conversation.add(tokens)

    def _replies(
        self, answers: Sequence[Sequence[int]], stops: Sequence[int], *, is_last: bool
    ) -> list[tuple[list[Result], list[int], bool]]:
        """Return for each answer its results, the tokens to append, and whether it ends its conversation."""
        whole = [bool(answer) and answer[-1] in stops for answer in answers]
        read = [self.reader.read(answer[:-1]) if whole[n] else Answer("") for n, answer in enumerate(answers)]
        has_calls = [bool(each.calls or each.problem) for each in read]
        results = [self._call(each) if has_calls[n] and not is_last else [] for n, each in enumerate(read)]
        tokens = iter(self._continuations([each for each in results if each]))
        replies = []
        for n, each in enumerate(results):
            continuation = next(tokens) if each else []
            assert not isinstance(continuation, str), "the template was tried before"
            replies.append((each, continuation, whole[n] and not has_calls[n]))
        return replies

    def _call(self, answer: Answer) -> list[Result]:
        if answer.problem:
            message = f'{answer.problem}. Write {{"name": …, "arguments": {{…}}}}'
            return [Result(name="", arguments=None, text=error_text(message), failed=True)]
        seconds, most = self._section.tool_timeout_seconds, self._section.max_result_tokens
        return [
            self._shortened(self._process.call(call["name"], call["arguments"], seconds=seconds, most_tokens=most))
            for call in answer.calls
        ]

    def _shortened(self, result: Result) -> Result:
        """Cut a result at `max_result_tokens`, and say so at its end. Leave out the texts of special tokens."""
        text, most = self._tokens.without_special_text(result.text), self._section.max_result_tokens
        encoding = tokenize(self._tokens.tokenizer, [text])[0]
        if len(encoding.ids) <= most and result.characters <= len(result.text):
            return replace(result, text=text)
        end = encoding.offsets[most - 1][1] if len(encoding.ids) > most else len(text)
        note = f"\n[cut: {end:,} of {result.characters:,} characters are shown]"
        return replace(result, text=text[:end] + note)

    def _continuations(self, results: Sequence[Sequence[Result]]) -> list[list[int] | str]:
        """Return for the results after each answer the tokens that follow it, or why there are none.

        They are what the template renders between the end of an answer with as many calls and the next answer.
        """
        if not results:
            return []
        called = [Dialogue((_QUESTION, _turn_of_calls(each)), (), self._schemas) for each in results]
        answered = [
            dialogue._replace(turns=(*dialogue.turns, *turns_of(each)))
            for dialogue, each in zip(called, results, strict=True)
        ]
        asked = [dialogue._replace(turns=dialogue.turns[:1]) for dialogue in called]
        template, end = self._tokens.template, str(self._tokens.tokenizer.convert_ids_to_tokens(self._tokens.end_id))
        texts = zip(
            template.render(asked, with_prompt=True),
            template.render(called),
            template.render(answered, with_prompt=True),
            strict=True,
        )
        rests = [_after_the_answer(*rendered, end) for rendered in texts]
        problems = [str(rest) if isinstance(rest, BadRowError) else "" for rest in rests]
        good = ["" if problem else str(rest) for rest, problem in zip(rests, problems, strict=True)]
        encoded = tokenize(self._tokens.tokenizer, good)
        return [problem or list(encoding.ids) for problem, encoding in zip(problems, encoded, strict=True)]


def _after_the_answer(
    asked: str | BadRowError, called: str | BadRowError, answered: str | BadRowError, end: str
) -> str | BadRowError:
    """Return the text that a longer conversation has after the first answer, which ends with `end`."""
    for text in (asked, called, answered):
        if isinstance(text, BadRowError):
            return text
    assert isinstance(asked, str)
    assert isinstance(called, str)
    assert isinstance(answered, str)
    place = called.find(end, len(asked))
    if place < 0 or not called.startswith(asked):
        return BadRowError(f"no {end} ends an answer that is a call ({quote(called[-60:])})")
    before = called[: place + len(end)]
    if not answered.startswith(before):
        return BadRowError("the template writes earlier turns differently once a result follows")
    return answered.removeprefix(before)


def _turn_of_calls(results: Sequence[Result]) -> Turn:
    calls = [
        {"type": "function", "id": f"call{n:05}", "function": {"name": "probe", "arguments": {}}}
        for n in range(len(results))
    ]
    return text_turn("assistant", "") | {"tool_calls": calls}


def turns_of(results: Sequence[Result]) -> list[Turn]:
    """Return the turns that give results to a model."""
    return [
        text_turn("tool", result.text) | {"name": _NO_NAME.sub("_", result.name), "tool_call_id": f"call{n:05}"}
        for n, result in enumerate(results)
    ]


def _of_turn(decoding: Decoding, turn: int) -> Decoding:
    """Return the decoding of an answer after the first: it draws other random numbers."""
    if decoding.sampling is None or turn == 0:
        return decoding
    seed = derived_seed(decoding.sampling.seed, "turn", turn)
    return replace(decoding, sampling=replace(decoding.sampling, seed=seed))
