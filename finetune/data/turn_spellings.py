"""Read turns that few files write so: earlier turns as pairs, transcripts, and exchanges."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.data.columns import Cells
from finetune.data.turns import Turn, text_turn
from finetune.data.values import BadRowError, list_in_cell, parse_text, quote, refuse_blank, refuse_python

_TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|Assistant):[^\S\n]?")
"""The speakers in texts such as Anthropic's hh-rlhf: `\\n\\nHuman: Hi\\n\\nAssistant: Hello`."""


def turns_of_history(cells: Cells) -> list[Turn]:
    """Read earlier questions and answers: a list of pairs."""
    name, history = cells.name("history"), list_in_cell(cells["history"])
    if not isinstance(history, list):
        refuse_python(history, name, is_text=False)
        raise BadRowError(f"{name} is {quote(history)}; expected a list of earlier questions and answers")
    turns = []
    for number, pair in enumerate(history):
        where = f"{name}[{number}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRowError(f"{where} is {quote(pair)}; expected a list with a question and its answer")
        for k, role in enumerate(("user", "assistant")):
            turns.append(text_turn(role, refuse_blank(parse_text(pair[k], f"{where}[{k}]"), f"{where}[{k}]")))
    return turns


def turns_of_transcript(text: str) -> list[Turn]:
    """Return the turns of a transcript. A last `Assistant:` without text only asks for the answer."""
    pieces = _TRANSCRIPT.split("\n\n" + text.strip())
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [text_turn(roles[speaker], content) for speaker, content in zip(pieces[1::2], pieces[2::2], strict=True)]
    return turns[:-1] if turns[-1]["role"] == "assistant" and not turns[-1]["content"].strip() else turns


def turns_of_exchanges(exchanges: Sequence[Any], speakers: tuple[str, str]) -> list[Any]:
    """Return two turns for each exchange: {human, assistant} in ms-swift, {input, output} in Capybara."""
    return [
        {"role": role, "content": exchange.get(speaker) if isinstance(exchange, Mapping) else exchange}
        for exchange in exchanges
        for speaker, role in zip(speakers, ("user", "assistant"), strict=True)
    ]
