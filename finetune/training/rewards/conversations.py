"""Let a model answer in several turns: it calls tools, reads their results and goes on.

A conversation is a list of tokens that only grows. What the model generated is never decoded and tokenised again: the
words of the chat template between two answers, and the results, are tokenised once and appended.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.data.batches import derived_seed
from finetune.data.templates import AnswerTokens, tokenize
from finetune.data.turns import REASONING_KEYS, Dialogue, Turn, text_turn
from finetune.data.values import BadRowError, quote
from finetune.errors import ConfigError, DataError
from finetune.fallbacks import Fallback
from finetune.inference.answers import Answer, AnswerReader
from finetune.inference.decoding import Decoding, SampledAnswer
from finetune.model.base import max_context
from finetune.training.rewards.tool_process import error_text
from finetune.training.rewards.tools import Environment, Result, ToolProcess, made_up_call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config
    from finetune.distributed.runtime import Runtime

_QUESTION = text_turn("user", "a")
_ANSWER = text_turn("assistant", "probe-1")
_SEVERAL = 2
_NO_NAME = re.compile(r"\W|^$")
"""What is no part of a name: the model may have made it up, or written none."""
Draw = Callable[[Sequence[Sequence[int]], Decoding], "Sequence[SampledAnswer] | None"]
"""Generates an answer to each prompt; None if a rank was asked to stop meanwhile."""


class Row(NamedTuple):
    """What an environment gets of a row."""

    turns: Sequence[Turn]
    columns: Mapping[str, Any]
    tools: str = ""
    """The tools that the row itself offers, as JSON text."""


@dataclass
class GeneratedConversation:
    """What follows a prompt: one answer of the model, or several and between them results of tools."""

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
    prompt: list[int] | None = None
    """The tokens of the prompt, if the environment added turns to it; None: the row's own prompt."""
    score: float = math.nan
    """The score of the environment, if it is asked for."""

    def add(self, tokens: Sequence[int], nats: Sequence[float] = ()) -> None:
        """Append an answer with its nats, or the tokens between two answers."""
        self.ids += tokens
        self.nats += nats
        self.lengths.append(len(tokens))

    @property
    def num_generated(self) -> int:
        """How many tokens the model generated."""
        return sum(self.lengths[::2])

    @property
    def turns(self) -> list[int]:
        """The turn of each token that the model generated, counted from 0."""
        return [turn for turn, length in enumerate(self.lengths[::2]) for _ in range(length)]

    @property
    def answers(self) -> list[list[int]]:
        """The tokens of each answer."""
        return parts_of(self.ids, self.lengths)[::2]


def parts_of(ids: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Return the tokens of each part of a conversation: an answer, what follows it, the second answer, and so on."""
    tokens = iter(ids)
    return [list(islice(tokens, length)) for length in lengths]


def is_generated(lengths: Sequence[int]) -> list[bool]:
    """Return for each token of a conversation whether the model generated it."""
    return [place % 2 == 0 for place, length in enumerate(lengths) for _ in range(length)]


class SingleAnswers:
    """Lets a model answer each prompt once. `ToolUse` lets it go on."""

    fallback: Fallback | None = None

    def converse(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        draw: Draw,
        *,
        rows: Iterable[Row],
        runtime: Runtime,
        model: Any,
    ) -> list[GeneratedConversation] | None:
        """Return the answer to each prompt, the same on every rank; None if a rank was asked to stop. Collective."""
        del rows, runtime, model
        answers = draw(prompts, decoding)
        if answers is None:
            return None
        records = ({"ids": answer.ids, "sampled_nats": answer.nats} for answer in answers)
        return [self.from_record(record, decoding.stop_ids) for record in records]

    def as_record(self, answer: GeneratedConversation, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """Return what the file of a rollout has beside the tokens and the nats of an answer: nothing."""
        del answer, decode
        return {}

    def from_record(self, record: Mapping[str, Any], stops: Sequence[int]) -> GeneratedConversation:
        """Read an answer or a conversation from the file of a rollout. `stops` are the tokens that end an answer."""
        ids = record["ids"]
        return GeneratedConversation(
            ids,
            record.get("sampled_nats", []),
            record.get("parts", [len(ids)]),
            [[Result(**result) for result in each] for each in record.get("calls", [])],
            has_end=record.get("has_end", bool(ids) and ids[-1] in stops),
            goes_on=False,
            prompt=record.get("prompt"),
        )

    def metrics_of(self, answers: Sequence[GeneratedConversation]) -> dict[str, float]:
        """Return the metrics that only conversations have: none."""
        del answers
        return {}

    def by_turn(
        self, answers: Sequence[GeneratedConversation], rewards: Mapping[str, torch.Tensor]
    ) -> dict[str, list[float | None]]:
        """Return metrics for each turn of a conversation: none."""
        del answers, rewards
        return {}


class ToolUse(SingleAnswers):
    """Lets a model use the tools of a run and answer its environment. Only the main process calls them.

    Every rank has one. `schemas` describe the tools, see `offered_tools`.

    Attributes:
        fallback: says so if the chat template leaves out thinking that a conversation keeps; else None.

    Raises:
        ConfigError: the chat template cannot go on after an answer, or shows no tools.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, schemas: str) -> None:
        self._section = config.rollout
        self._schemas = schemas
        self._tokens = AnswerTokens(tokenizer, config.data.chat_template or "")
        self._end = str(tokenizer.convert_ids_to_tokens(self._tokens.end_id))
        self.reader = AnswerReader(self._tokens)
        self._process = ToolProcess(config.rollout.tools, config.rollout.tools_from)
        self._environment = Environment(config.rollout) if config.rollout.environment else None
        self._asks_score = "environment" in config.reward.functions
        if config.rollout.tools:
            self._refuse_template()
        if self._environment is not None:
            self._try_turns()

    def _refuse_template(self) -> None:
        name = self._tokens.template.name
        advice = "Set data.chat_template to a template that does: phi4_mini, for a tokenizer with its tokens."
        if not any(self._tokens.template.renders(key) for key in (("", "tools"), ("system", "tools"))):
            raise ConfigError(f"rollout.tools is set, but the chat template of {name} shows no tools. {advice}")
        if self.reader.call_marks is None:
            raise ConfigError(
                f"rollout.tools is set, but the chat template of {name} writes calls in a form that is not read here; "
                f"expected JSON with name and arguments. {advice}"
            )
        for count in (1, _SEVERAL):
            result = Result(name="probe", arguments={}, text="probe-1", failed=False)
            problem = self._continuations([(_turn_of_calls([result] * count), turns_of([result] * count))])[0]
            if isinstance(problem, str):
                raise ConfigError(
                    f"rollout.tools is set, but with the chat template of {name} a conversation cannot go on after a "
                    f"call: {problem}. {advice}"
                )

    def _try_turns(self) -> None:
        """Refuse a template with which a conversation cannot go on. Note whether it leaves out earlier thinking."""
        thinking = _ANSWER | {REASONING_KEYS[0]: "probe-2"}
        problem, of_thinking = self._continuations([(_ANSWER, [_QUESTION]), (thinking, [_QUESTION])])
        if isinstance(problem, str):
            raise ConfigError(
                f"rollout.environment is set, but with the chat template of {self._tokens.template.name} a "
                f"conversation cannot go on after an answer: {problem}. Set another template: data.chat_template."
            )
        if isinstance(of_thinking, str):
            wanted, used = "conversations as the chat template renders them", "conversations that keep all thinking"
            why = f"after later turns, {of_thinking}, and no token is changed"
            self.fallback = Fallback(what="rollout.environment", wanted=wanted, used=used, why=why)

    def converse(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        draw: Draw,
        *,
        rows: Iterable[Row],
        runtime: Runtime,
        model: Any,
    ) -> list[GeneratedConversation] | None:
        """Return what follows each prompt, the same on every rank; None if a rank was asked to stop. Collective.

        `decoding.max_new_tokens` limits the tokens of a whole conversation after the prompt of its row. `rows` are
        those of the prompts; only an environment reads them.
        """
        context, conversations = max_context(model) or math.inf, [GeneratedConversation() for _ in prompts]
        given, most = prompts, decoding.max_new_tokens
        if self._environment is not None:
            begin = partial(self._open, self._environment, list(rows))
            opened = _on_main(runtime, "resetting the environments", begin)
            for place, conversation in enumerate(conversations):
                conversation.prompt = opened.get(place)
            prompts = [opened.get(place, prompt) for place, prompt in enumerate(prompts)]
        added = [len(prompt) - len(before) for prompt, before in zip(prompts, given, strict=True)]
        limits = [int(min(most - more, context - len(prompt))) for more, prompt in zip(added, prompts, strict=True)]
        if self._environment is not None and min(limits) < 1:
            raise DataError(
                f"reset of the environment adds {max(added)} tokens to a prompt, which leaves no room for an answer. "
                "Raise rollout.max_completion_length, which counts them too."
            )
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
                conversations[place].add(answer.ids[:most], answer.nats[:most])
            self._answer(
                {place: conversations[place] for place in going},
                [limits[place] for place in going],
                decoding.stop_ids,
                runtime=runtime,
                is_last=turn == self._section.max_turns - 1,
            )
        if self._environment is not None and self._asks_score:
            ask = self._environment.score
            scores = _on_main(runtime, "asking for scores", lambda: list(map(ask, range(len(conversations)))))
            for conversation, score in zip(conversations, scores, strict=True):
                conversation.score = score
        return conversations

    def example(self) -> GeneratedConversation:
        """Return a made-up conversation, which shows what carries loss. No tool and no environment is called."""
        answers: list[str] = []
        replies: list[tuple[Turn, list[Turn]]] = []
        if self._section.tools:
            call = made_up_call(self._schemas)
            result = Result(**call, text="a result", failed=False)
            answers.append(self._written(call))
            replies.append((_turn_of_calls([result]), turns_of([result])))
        if self._environment is not None:
            answers.append("an answer")
            replies.append((_ANSWER, [text_turn("user", "a reply")]))
        first, *others = tokenize(self._tokens.tokenizer, [text + self._end for text in [*answers, "the last answer"]])
        conversation = GeneratedConversation(list(first.ids), lengths=[len(first.ids)], has_end=True, goes_on=False)
        for continuation, answer in zip(self._continuations(replies), others, strict=True):
            conversation.add(_no_problem(continuation))
            conversation.add(answer.ids)
        return conversation

    def _written(self, call: Mapping[str, Any]) -> str:
        """Return the text of an answer with a call: as the template renders it, or between the marks of the reader."""
        turn = text_turn("assistant", "") | {"tool_calls": [{"type": "function", "id": "call00000", "function": call}]}
        asked = Dialogue((_QUESTION,), (), self._schemas)
        (before,) = self._tokens.template.render([asked], with_prompt=True)
        (rendered,) = self._tokens.template.render([asked._replace(turns=(_QUESTION, turn))])
        text = str(rendered).removeprefix(str(before)).partition(self._end)[0]
        if self.reader.read(tokenize(self._tokens.tokenizer, [text])[0].ids).calls:
            return text
        first, last = self.reader.call_marks or ("", "")
        return f"{first}{json.dumps([call])}{last}"

    def as_record(self, answer: GeneratedConversation, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """Return what the file of a rollout has beside the tokens and the nats of a conversation."""
        texts = list(map(decode, parts_of(answer.ids, answer.lengths)))
        results = [[result.as_record() for result in each] for each in answer.results]
        prompt = {} if answer.prompt is None else {"prompt": answer.prompt}
        return {"parts": answer.lengths, "texts": texts, "calls": results, "has_end": answer.has_end, **prompt}

    def metrics_of(self, conversations: Sequence[GeneratedConversation]) -> dict[str, float]:
        """Return the metrics of the turns and calls in a rollout; nan where there is nothing to measure."""
        calls = [call for each in conversations for calls in each.results for call in calls if call.role == "tool"]
        return {
            "turns": sum(len(each.lengths[::2]) for each in conversations) / len(conversations),
            "calls": len(calls) / len(conversations),
            "failed_calls": sum(call.failed for call in calls) / len(calls) if calls else math.nan,
        }

    def by_turn(
        self, conversations: Sequence[GeneratedConversation], rewards: Mapping[str, torch.Tensor]
    ) -> dict[str, list[float | None]]:
        """Return for each turn the mean rewards of the conversations that end with it, and the calls that fail in it.

        `truncated_by_turn` is the share of these conversations without an end. Where there is nothing to measure, the
        value is None.
        """
        last = torch.tensor([len(each.answers) for each in conversations])
        has_end = torch.tensor([each.has_end for each in conversations])
        values = {**rewards, "truncated": has_end.logical_not().double()}
        turns = range(1, int(last.max()) + 1)
        metrics = {f"{name}_by_turn": [_mean(value[last == turn]) for turn in turns] for name, value in values.items()}
        failed = [torch.tensor(self._failed_in(conversations, turn)).double() for turn in turns]
        return metrics | {"failed_calls_by_turn": list(map(_mean, failed))} if self._section.tools else metrics

    def _failed_in(self, conversations: Sequence[GeneratedConversation], turn: int) -> list[bool]:
        """Return for each call in a turn, counted from 1, whether it failed."""
        results = [results for each in conversations for results in each.results[turn - 1 : turn]]
        return [call.failed for calls in results for call in calls if call.role == "tool"]

    def _open(self, environment: Environment, rows: Sequence[Row]) -> dict[int, list[int]]:
        """Begin the environments. Return the prompts to which `reset` adds turns, by place."""
        added = [environment.turns(place, "reset", row.columns) for place, row in enumerate(rows)]
        places = [place for place, turns in enumerate(added) if turns]
        whole = [
            Dialogue((*rows[place].turns, *self._cleaned(added[place] or [])), (), self._schemas or rows[place].tools)
            for place in places
        ]
        texts = self._tokens.template.render(whole, with_prompt=True)
        if problem := next((text for text in texts if isinstance(text, BadRowError)), None):
            raise DataError(f"the turns that reset of the environment adds cannot be used: {problem}")
        encoded = tokenize(self._tokens.tokenizer, list(map(str, texts))) if texts else []
        return {place: list(each.ids) for place, each in zip(places, encoded, strict=True)}

    def _cleaned(self, turns: Sequence[Turn]) -> list[Turn]:
        return [turn | {"content": self._tokens.without_special_text(turn["content"])} for turn in turns]

    def _answer(
        self,
        conversations: Mapping[int, GeneratedConversation],
        limits: Sequence[int],
        stops: Sequence[int],
        *,
        runtime: Runtime,
        is_last: bool,
    ) -> None:
        """Append the results of the calls in the last answers, or end conversations, given by place. Collective."""
        runtime.liveness.enter_phase("tools", timed=False)
        last = {place: each.answers[-1] for place, each in conversations.items()}
        replies = _on_main(runtime, "calling tools", partial(self._replies, last, stops, is_last=is_last))
        going = zip(conversations.values(), limits, replies, strict=True)
        for conversation, limit, (results, tokens, has_end) in going:
            conversation.has_end = has_end
            conversation.results += [results] if results else []
            conversation.goes_on = bool(tokens) and len(conversation.ids) + len(tokens) < limit
            if conversation.goes_on:
                conversation.add(tokens)

    def _replies(
        self, answers: Mapping[int, Sequence[int]], stops: Sequence[int], *, is_last: bool
    ) -> list[tuple[list[Result], list[int], bool]]:
        """Return for each answer its results, the tokens to append, and whether it ends its conversation.

        The environment gets the last answer too, because it decides what the conversation is worth. The model reads
        none of the turns that it returns then.
        """
        replies: list[tuple[list[Result], list[int], bool]] = []
        to_render: list[tuple[Turn, list[Turn]]] = []
        for place, ids in answers.items():
            is_whole = bool(ids) and ids[-1] in stops
            answer = self.reader.read(ids[:-1]) if is_whole else Answer("")
            has_calls = bool(self._section.tools and (answer.calls or answer.problem))
            results: list[Result] = []
            has_end = is_whole and not has_calls
            if has_calls and not is_last:
                results = self._call(answer)
                to_render.append((_turn_of_calls(results), turns_of(results)))
            elif has_end and self._environment is not None:
                turns = self._environment.turns(place, "step", answer.text)
                has_end = turns is None
                results = [] if is_last else [_as_result(turn) for turn in self._cleaned(turns or [])]
                to_render += [(_ANSWER, turns_of(results))] if results else []
            replies.append((results, [], has_end))
        tokens = iter(self._continuations(to_render))
        return [(results, _no_problem(next(tokens)) if results else [], has_end) for results, _, has_end in replies]

    def _call(self, answer: Answer) -> list[Result]:
        if answer.problem:
            message = f'{answer.problem}. Write {{"name": …, "arguments": {{…}}}}'
            return [Result(name="", arguments=None, text=error_text(message), failed=True)]
        seconds, most = self._section.tool_timeout_seconds, self._section.max_result_tokens
        results = [
            self._shortened(self._process.call(call["name"], call["arguments"], seconds=seconds, most_tokens=most))
            for call in answer.calls
        ]
        ids = answer.call_ids or [""] * len(results)
        return [replace(result, id=call_id) for result, call_id in zip(results, ids, strict=True)]

    def _shortened(self, result: Result) -> Result:
        """Cut a result at `max_result_tokens`, and say so at its end. Leave out the texts of special tokens."""
        text, most = self._tokens.without_special_text(result.text), self._section.max_result_tokens
        encoding = tokenize(self._tokens.tokenizer, [text])[0]
        if len(encoding.ids) <= most and result.characters <= len(result.text):
            return replace(result, text=text)
        end = encoding.offsets[most - 1][1] if len(encoding.ids) > most else len(text)
        note = f"\n[cut: {end:,} of {max(result.characters, len(text)):,} characters are shown]"
        return replace(result, text=text[:end] + note)

    def _continuations(self, replies: Sequence[tuple[Turn, Sequence[Turn]]]) -> list[list[int] | str]:
        """Return for an answer and the turns after it the tokens that follow it, or why there are none.

        They are what the template renders between the end of the answer and the next one.
        """
        if not replies:
            return []
        called = [Dialogue((_QUESTION, answer), (), self._schemas) for answer, _ in replies]
        answered = [
            dialogue._replace(turns=(*dialogue.turns, *turns))
            for dialogue, (_, turns) in zip(called, replies, strict=True)
        ]
        asked = [dialogue._replace(turns=dialogue.turns[:1]) for dialogue in called]
        template = self._tokens.template
        texts = zip(
            template.render(asked, with_prompt=True),
            template.render(called),
            template.render(answered, with_prompt=True),
            strict=True,
        )
        rests = [_after_the_answer(*rendered, self._end) for rendered in texts]
        problems = [str(rest) if isinstance(rest, BadRowError) else "" for rest in rests]
        good = ["" if problem else str(rest) for rest, problem in zip(rests, problems, strict=True)]
        encoded = tokenize(self._tokens.tokenizer, good)
        return [problem or list(encoding.ids) for problem, encoding in zip(problems, encoded, strict=True)]


def _mean(values: torch.Tensor) -> float | None:
    mean = float(values.nanmean())
    return None if math.isnan(mean) else mean


def _on_main(runtime: Runtime, during: str, call: Callable[[], Any]) -> Any:
    """Call a function on the main process, and return its value on all ranks. Collective."""
    value = None
    with runtime.collectives.failing_together(during):
        value = call() if runtime.is_main_process else None
    return runtime.collectives.broadcast_from_main(value)


def _after_the_answer(
    asked: str | BadRowError, called: str | BadRowError, answered: str | BadRowError, end: str
) -> str | BadRowError:
    """Return the text that a longer conversation has after the first answer, which ends with `end`."""
    if isinstance(asked, BadRowError) or isinstance(called, BadRowError) or isinstance(answered, BadRowError):
        return next(text for text in (asked, called, answered) if isinstance(text, BadRowError))
    place = called.find(end, len(asked))
    if place < 0 or not called.startswith(asked):
        return BadRowError(f"no {end} ends an answer that is a call ({quote(called[-60:])})")
    before = called[: place + len(end)]
    if not answered.startswith(before):
        return BadRowError("the template writes earlier turns differently once others follow")
    return answered.removeprefix(before)


def _turn_of_calls(results: Sequence[Result]) -> Turn:
    calls = [
        {"type": "function", "id": _id_of_call(n, result), "function": {"name": "probe", "arguments": {}}}
        for n, result in enumerate(results)
    ]
    return text_turn("assistant", "") | {"tool_calls": calls}


def _as_result(turn: Turn) -> Result:
    return Result(name="environment", arguments=None, text=turn["content"], failed=False, role=turn["role"])


def _no_problem(continuation: list[int] | str) -> list[int]:
    if isinstance(continuation, str):
        raise DataError(f"a conversation cannot go on with the chat template: {continuation}")
    return continuation


def _id_of_call(number: int, result: Result) -> str:
    """Return the id of a call: the model's own, or one by its place in the answer. Some templates need one."""
    return result.id or f"call{number:05}"


def turns_of(results: Sequence[Result]) -> list[Turn]:
    """Return the turns that give results to a model."""
    return [
        text_turn("tool", result.text)
        | {"name": _NO_NAME.sub("_", result.name), "tool_call_id": _id_of_call(n, result)}
        if result.role == "tool"
        else text_turn(result.role, result.text)
        for n, result in enumerate(results)
    ]


def _of_turn(decoding: Decoding, turn: int) -> Decoding:
    """Return the decoding of an answer after the first: it draws other random numbers."""
    if decoding.sampling is None or turn == 0:
        return decoding
    seed = derived_seed(decoding.sampling.seed, "turn", turn)
    return replace(decoding, sampling=replace(decoding.sampling, seed=seed))
