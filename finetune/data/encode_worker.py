"""A process that encodes: batches of rows in on its standard input, tokens out on its standard output.

Started by `finetune.data.parallel`; it ends when its input does.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from array import array
from typing import IO, Any

from finetune.data.parallel import read_frame, write_frame
from finetune.data.rows import BadRowError, Example
from finetune.data.templates import AnswerTokens
from finetune.data.tokenise import digest_tokenizer, encode_batch
from finetune.errors import DataError


def main() -> None:
    """Encode until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the one who asked for us decides
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not stand between the frames
    start = read_frame(source)
    if start is None:
        return
    about = json.loads(start)
    tokens = _build_tokens(about)
    while (batch := read_frame(source)) is not None:
        try:
            _answer(answers, json.loads(batch), about, tokens)
        except BrokenPipeError:
            os._exit(0)  # nobody is there any more; closing the pipe would only fail again


def _build_tokens(about: dict[str, Any]) -> AnswerTokens | None:
    """The tokenizer that the files make; None where it is another than the one they were written from."""
    kind = getattr(importlib.import_module(about["module"]), about["class"])
    tokenizer = kind.from_pretrained(about["folder"])
    return AnswerTokens(tokenizer) if digest_tokenizer(tokenizer) == about["digest"] else None


def _answer(answers: IO[bytes], batch: list[list[Any]], about: dict[str, Any], tokens: AnswerTokens | None) -> None:
    if tokens is None:
        why = f"a {about['class']} that is read from its own files is not equal to the one they were written from"
        write_frame(answers, json.dumps({"lost": why}).encode())
        return
    rows = [
        Example(
            kind=kind,
            source=source,
            number=0,
            messages=tuple(messages),
            num_given=num_given,
            prompt=prompt,
            completion=completion,
            text=text,
        )
        for kind, source, messages, num_given, prompt, completion, text in batch
    ]
    try:
        encoded = encode_batch(rows, tokens, about["train_on"])
    except DataError as error:
        write_frame(answers, json.dumps({"refused": str(error)}).encode())
        return
    problems = [(number, str(row)) for number, row in enumerate(encoded) if isinstance(row, BadRowError)]
    good = [None if isinstance(row, BadRowError) else row for row in encoded]
    lengths = [len(row.token_ids) if row else 0 for row in good]
    write_frame(answers, json.dumps({"problems": problems, "lengths": lengths}).encode())
    write_frame(answers, array("i", [token_id for row in good if row for token_id in row.token_ids]).tobytes())
    write_frame(answers, b"".join(bytes(row.is_target) for row in good if row))


if __name__ == "__main__":
    main()
