"""Read turns that few files write so: earlier turns as pairs, transcripts, and exchanges."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.data.values import BadRowError, list_in_cell, parse_text, quote, refuse_blank, refuse_python

_TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|Assistant):[^\S\n]?")
"""The speakers in texts such as Anthropic's hh-rlhf: `\\n\\nHuman: Hi\\n\\nAssistant: Hello`."""


def turns_of_history(value: object, name: str) -> list[dict[str, Any]]:
    """Read earlier questions and answers from the column `name`: a list of pairs."""
    history = list_in_cell(value)
    if not isinstance(history, list):
        refuse_python(history, name, is_text=False)
        raise BadRowError(f"{name} is {quote(history)}; expected a list of earlier questions and answers")
    turns = []
    for number, pair in enumerate(history):
        where = f"{name}[{number}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRowError(f"{where} is {quote(pair)}; expected a list with a question and its answer")
        for k, role in enumerate(("user", "assistant")):
            text = refuse_blank(parse_text(pair[k], f"{where}[{k}]"), f"{where}[{k}]")
            turns.append({"role": role, "content": text})
    return turns


def turns_of_transcript(text: str) -> list[dict[str, Any]]:
    """Return the turns of a transcript. A last `Assistant:` without text only asks for the answer."""
    pieces = _TRANSCRIPT.split("\n\n" + text.strip())
    roles = {"Human": "user", "Assistant": "assistant"}
    parts = zip(pieces[1::2], pieces[2::2], strict=True)
    turns = [{"role": roles[speaker], "content": content} for speaker, content in parts]
    return turns[:-1] if turns[-1]["role"] == "assistant" and not turns[-1]["content"].strip() else turns


def turns_of_exchanges(exchanges: Sequence[Any], speakers: tuple[str, str]) -> list[Any]:
    """Return two turns for each exchange: {human, assistant} in ms-swift, {input, output} in Capybara."""
    return [
        {"role": role, "content": exchange.get(speaker) if isinstance(exchange, Mapping) else exchange}
        for exchange in exchanges
        for speaker, role in zip(speakers, ("user", "assistant"), strict=True)
    ]
