"""The formats of rows for preferences: pairs of answers to one prompt, and answers that a label calls good or bad."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from itertools import takewhile

from finetune.data.columns import BAD_LABELS, CONTEXT, MEANINGS, PROMPT, TEXT, Cells, holds_something, meaning_of
from finetune.data.formats import (
    BESIDE_TURNS,
    FORMATS,
    OF_PROMPT,
    PROMPTS,
    Example,
    Format,
    Reads,
    join_answer,
    read_answer,
    read_prompt,
    read_question,
    turns_after,
    until_last_answer,
    with_system,
)
from finetune.data.turns import Dialogue, dialogue_of, is_transcript, parse_tools, parse_turns
from finetune.data.values import BadRowError, quote

_SIDES = ("chosen", "rejected")
_BEFORE_SPACE = re.compile(r"(?=\s)")
LABELS = {
    **dict.fromkeys(("true", "good", "thumbs_up", "1", "1.0"), True),
    **dict.fromkeys(("false", "bad", "thumbs_down", "0", "0.0", "-1", "-1.0"), False),
}
"""The values of a label, and whether each says that an answer is good."""
_NO_PART = re.compile(
    r"(.*_)?(id|ids|idx|index|uuid|hash|source|origin|dataset|split|subset|category|topic|type|lang|language|model"
    r"|url|license|date|time|timestamp|at|score|scores|rating|ratings|rank|reward|margin|difficulty|level|domain|tags?"
    r"|author|annotator|reviewer|title|name|version)|(score|rating|num)_.*|\(unnamed column \d+\)"
)
"""Names of columns that are no part of a row."""


def may_be_prompt(name: str) -> bool:
    """Return whether a text of this name could be the prompt of its row: nothing else is known about the name."""
    column = meaning_of(name)
    if column is None:
        return _NO_PART.fullmatch(name.strip().lower()) is None
    return MEANINGS[column].part in (PROMPT, CONTEXT, TEXT)


def _parse_pair(side: str, cells: Cells) -> Example:
    """Read one side of a pair. Both sides are checked, so that readings of either refuse the same rows."""
    prompt, answers = _pair(cells)
    sides = {name: join_answer(prompt, answer, cells, name) for name, answer in answers.items()}
    chosen, rejected = sides.values()
    names = " and ".join(cells.name(name) for name in sides)
    starts = [side.messages[: side.learnt[0]] for side in (chosen, rejected) if side.learnt]
    if starts[1:] and starts[0] != starts[1]:
        raise BadRowError(f"{names} answer prompts that differ; expected the same prompt in both")
    return sides[side]


def _pair(cells: Cells) -> tuple[str | Dialogue, dict[str, str | Dialogue]]:
    """Return the prompt of a pair, and its two answers.

    The prompt stands in a column of its own; or it is the turns that both sides begin with, as in TRL; or the turns
    before the last answer, where `messages` has the chosen answer, as in ms-swift.
    """
    answers = {name: read_answer(cells, name) for name in _SIDES if name in cells}
    request = cells.get("input")
    if isinstance(request, Mapping) and "messages" in request:  # OpenAI's preference format
        return parse_turns(request["messages"], f"{cells.name('input')}.messages", request.get("tools")), answers
    column = next(
        (name for name in ("prompt", "instruction", "conversations", "messages", "input") if name in cells), ""
    )
    if column in ("prompt", "instruction", "input"):
        return read_prompt(cells, column), answers
    if column:
        context = parse_turns(cells[column], cells.name(column), cells.get("tools"))
        if "chosen" not in answers:
            last = context.turns[-1]
            if last["role"] != "assistant":
                raise BadRowError(
                    f"{cells.name(column)} ends with a turn of the {last['role']}; expected the chosen answer"
                )
            answers = {"chosen": dialogue_of([last]), **answers}
            context = context._replace(turns=context.turns[:-1])
        elif context.turns[-1]["role"] == "assistant" and not _repeats_prompt(answers["chosen"]):
            raise BadRowError(
                f"{cells.name(column)} ends with a turn of the assistant, while {cells.name('chosen')} has an answer; "
                "expected a turn of the user at the end"
            )
        if not _repeats_prompt(answers["chosen"]):
            return with_system(context, cells), answers
    if not any(isinstance(answer, Dialogue) for answer in answers.values()):
        start, answers = _common_start(answers, cells)
        return read_question(start, cells), answers
    prompt, answers = _common_prompt(answers, cells)
    return with_system(prompt, cells), answers


def _repeats_prompt(answer: str | Dialogue) -> bool:
    """Return whether an answer is a whole conversation."""
    return isinstance(answer, Dialogue) and answer.turns[0]["role"] != "assistant"


def _common_start(answers: Mapping[str, str | Dialogue], cells: Cells) -> tuple[str, dict[str, str | Dialogue]]:
    """Split two texts into the words that both begin with, which are the prompt, and the rest of each.

    TRL reads these rows in the same way (`extract_prompt`), but may split a word. Here, a prompt ends before white
    space, so that both answers begin with a whole word.
    """
    texts = [str(answer) for answer in answers.values()]
    words, other_words = (_BEFORE_SPACE.split(text)[:-1] for text in texts)  # the last word is never the prompt's
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(words, other_words, strict=False))
    start = "".join(word for word, _ in alike).rstrip()
    if not start:
        names = " and ".join(cells.name(name) for name in answers)
        raise BadRowError(
            f"no column prompt, and the texts {names} begin differently; expected a prompt, or texts that begin with it"
        )
    return start, {name: text[len(start) :] for name, text in zip(answers, texts, strict=True)}


def _common_prompt(answers: Mapping[str, str | Dialogue], cells: Cells) -> tuple[Dialogue, dict[str, str | Dialogue]]:
    """Split two conversations into the turns that both begin with, and the rest of each."""
    sides = {name: answer for name, answer in answers.items() if isinstance(answer, Dialogue)}
    names = " and ".join(cells.name(name) for name in answers)
    if len(sides) < 2:
        raise BadRowError(f"one of {names} is text and one is turns; expected two texts or two lists of turns")
    chosen, rejected = (side.turns for side in sides.values())
    alike = (chosen_turn == rejected_turn for chosen_turn, rejected_turn in zip(chosen, rejected, strict=False))
    count = next((k for k, is_alike in enumerate(alike) if not is_alike), min(len(chosen), len(rejected)))
    if count == len(chosen) == len(rejected):
        count = max((k for k, turn in enumerate(chosen) if turn["role"] == "assistant"), default=count)
    prompt = Dialogue(chosen[:count], (), sides["chosen"].tools or parse_tools(cells.get("tools")))
    if not count:
        raise BadRowError(
            f"no column prompt, and {names} begin with turns that differ; expected the same prompt in both"
        )
    return prompt, {name: turns_after(side, count, cells.name(name)) for name, side in sides.items()}


def _parse_labelled(known: Format, cells: Cells) -> Example:
    """Read an answer and its label. In a conversation, the label belongs to the last answer."""
    name, label = cells.name("label"), cells["label"]
    word = str(label).strip().lower()
    if word not in LABELS:
        raise BadRowError(f"{name} is {quote(label)}; expected true for a good answer or false for a bad one")
    example = known.parse(cells)
    if known.name in ("messages", "conversations") or cells.has("history"):
        example = until_last_answer(example)._replace(learnt=example.learnt[-1:])
    return example._replace(is_good=LABELS[word] is not (name in BAD_LABELS))


def _begins_with_prompt(cells: Cells, renamed: Mapping[str, str]) -> bool:
    """Return whether two answers may begin with their prompt.

    They hold turns, or no other text of the row can be the prompt, or the user says that none is.
    """
    if "prompt" in renamed or any(not isinstance(cells[side], str) or is_transcript(cells[side]) for side in _SIDES):
        return True
    others = cells.row.keys() - {cells.name(side) for side in _SIDES}
    texts = (name for name in others if isinstance(cells.row[name], str) and holds_something(cells.row[name]))
    return not any(map(may_be_prompt, texts))


def _pairs(side: str) -> dict[str, Format]:
    """Return the formats of pairs: the ways to write their prompts, in the order in which they are tried."""
    read = partial(_parse_pair, side)
    both = _SIDES
    return {
        "prompt_completion": Format("pairs", ("prompt", *both), OF_PROMPT, read),
        "instruction": Format("pairs", ("instruction", *both), OF_PROMPT, read),
        "conversations": Format("pairs", ("conversations", *both), BESIDE_TURNS, read),
        "context": Format("pairs", ("messages", *both), BESIDE_TURNS, read),
        "input": Format("pairs", ("input", *both), ("system", "history", "tools"), read),
        "messages": Format("pairs", ("messages", "rejected"), BESIDE_TURNS, read),
        "pairs": Format("pairs that begin with their prompt", both, BESIDE_TURNS, read, _begins_with_prompt),
    }


FORMATS_OF: Mapping[Reads, Mapping[str, Format]] = {
    "answers": FORMATS,
    "chosen": _pairs("chosen"),
    "rejected": _pairs("rejected"),
    "labelled": {
        known.name: Format(known.name, (*known.needs, "label"), known.may_have, partial(_parse_labelled, known))
        for known in FORMATS.values()
        if known.name != "text"
    },
    "prompts": {PROMPTS.name: PROMPTS},
}
"""The formats that each objective reads."""
