"""Read prompts from the command line, a pipe or the rows of a file, and encode them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.config_files import resolve_shipped
from finetune.data.chat_template import WITHOUT_TEMPLATE, describe_key
from finetune.data.formats import FORMATS, PROMPTS, Example, detect_format, parse_row
from finetune.data.readers import SUFFIXES, FileRows, RawRow, parse_line, suffix_of
from finetune.data.rows import RowProblems
from finetune.data.templates import AnswerTokens
from finetune.data.turns import Dialogue, Turn, text_turn
from finetune.data.values import BadRowError, parse_text
from finetune.errors import DataError
from finetune.inference.answers import answer_text

_log = logging.getLogger(__name__)
_RENDERED_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt. Either `messages` or `text` is set."""

    source: str
    """The origin of the prompt, for messages: `prompt 2`, `asked.jsonl:17`."""
    messages: tuple[Turn, ...] = ()
    """The turns before the answer."""
    tools: str = ""
    """The tools that it offers, as JSON text."""
    text: str = ""
    """A text for the model without a template."""
    expected: str | None = None
    """The answer in the row, if it has one."""
    is_open: bool = False
    """True for a single user's turn, which may get a system turn and tools."""

    @property
    def shown(self) -> str:
        """The text of the last turn."""
        return str(self.messages[-1]["content"]) if self.messages else self.text


def user_prompt(text: str, source: str) -> Prompt:
    """Make a text one user's turn.

    Raises:
        DataError: it cannot be encoded.
    """
    try:
        return _open_prompt(parse_text(text, "it"), source)
    except BadRowError as error:
        raise DataError(f"{source}: {error}.") from None


def read_prompts_file(path: Path, *, named_by: str = "--from", separator: str | None = None) -> list[Prompt]:
    """Read the prompts of a file: each row has `prompt`, `messages` or `text`.

    In messages, `named_by` is the option or key that names the file. For `separator`, see `FileRows`.

    Raises:
        DataError: the file does not exist, or has rows that are not prompts.
    """
    if not path.is_file():
        instead = "give - for standard input" if named_by == "--from" else "give none"
        raise DataError(f"{named_by} is {path}, but that file does not exist. Correct the path, or {instead}.")
    if suffix_of(path) not in SUFFIXES:
        raise DataError(
            f"{named_by} is {path}, which ends in {path.suffix or 'nothing'}; expected {', '.join(SUFFIXES)}."
        )
    rows = FileRows(path, str(path), separator=separator)
    return read_rows(rows.rows(), rows.label, rows.place, parse_prompt)


def read_general_prompts(value: str) -> list[Prompt]:
    """Read the prompts that `testing.general_prompts` names; empty for `none`.

    Raises:
        DataError: the file does not exist, or has rows that are not prompts.
    """
    path = Path(resolve_shipped(value)).expanduser()
    return [] if value == "none" else read_prompts_file(path, named_by="testing.general_prompts")


def read_json_lines(lines: Iterable[str], source: str) -> list[Prompt]:
    """Read prompts from JSON lines, for example of standard input."""
    read = (parse_line(n, line.encode(errors="surrogateescape")) for n, line in enumerate(lines, 1) if line.strip())
    return read_rows(read, source, lambda number: f"{source}:{number}", parse_prompt)


def read_rows(
    rows: Iterable[RawRow], source: str, name_row: Callable[[int], str], parse: Callable[[RawRow, str], Any]
) -> list[Any]:
    """Parse each row. In messages, `source` names all rows, and `name_row` names one by its number.

    Raises:
        DataError: `parse` raised a BadRowError for a row, or there are no rows.
    """
    problems, prompts, count = RowProblems(), list[Any](), 0
    for count, row in enumerate(rows, start=1):  # noqa: B007
        place = name_row(row.number)
        try:
            if row.problem is not None:
                raise BadRowError(row.problem)
            prompts.append(parse(row, place))
        except BadRowError as error:
            problems.add(place, str(error))
    problems.raise_if_any(source, count)
    if not prompts:
        raise DataError(f"{source} has no rows: there is nothing to answer.")
    return prompts


def encode_prompts(tokens: AnswerTokens, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Encode prompts, each with the header of the assistant's turn. One request renders many of them.

    Without a chat template, a single turn is plain text. It begins with the beginning-of-sequence token if the
    tokenizer puts it there by default.

    Raises:
        DataError: a text contains a special token, or the template refuses the turns.
    """
    has_template, encoded = tokens.tokenizer.chat_template is not None, list[list[int]]()
    for start in range(0, len(prompts), _RENDERED_AT_ONCE):
        batch = prompts[start : start + _RENDERED_AT_ONCE]
        dialogues = [Dialogue(each.messages, (), each.tools) for each in batch if each.messages and has_template]
        rendered = iter(tokens.template.render(dialogues, with_prompt=True))
        encoded += [_encode(tokens, prompt, rendered) for prompt in batch]
    return encoded


def _encode(tokens: AnswerTokens, prompt: Prompt, rendered: Iterator[str | BadRowError]) -> list[int]:
    """Encode a prompt. If the chat template renders its turns, their text is the next one of `rendered`."""
    is_rendered = bool(prompt.messages) and tokens.tokenizer.chat_template is not None
    if is_rendered:
        text = _check_rendered(tokens, prompt, next(rendered))
    elif len(prompt.messages) > 1:
        raise DataError(
            f"{prompt.source}: the tokenizer has no chat template, so only a single text can be asked. Set "
            f"{WITHOUT_TEMPLATE}."
        )
    else:
        text = prompt.shown
    ids = tokens.tokenize([text], is_rendered=is_rendered)[0].ids if text else []
    if not ids:
        raise DataError(f"{prompt.source} is empty: there is nothing to answer.")
    return ids


def _check_rendered(tokens: AnswerTokens, prompt: Prompt, text: str | BadRowError) -> str:
    """Return the rendered text. Refuse special tokens in the prompt, and turns or tools that cannot be rendered."""
    template, source = tokens.template, prompt.source
    bad = tokens.special_text_in(Example(row_type="messages", messages=prompt.messages, tools=prompt.tools))
    if bad is not None or isinstance(text, BadRowError):
        raise DataError(f"{source}: {bad or text}.")
    ignored = template.ignored(Dialogue(prompt.messages, (), prompt.tools))
    if ("", "tools") in ignored:
        raise DataError(f"{source} offers tools, which this model's chat template leaves out. Remove them.")
    if ignored:
        keys = ", ".join(describe_key(key) for key in sorted(ignored))
        _log.warning("%s: the chat template of %s does not render %s", source, template.name, keys)
    return text


def parse_prompt(raw: RawRow, place: str) -> Prompt:
    """Read a text, or a row as for an objective that learns from prompts: an answer at its end is the expected one."""
    value = raw.value
    if isinstance(value, str):
        return _open_prompt(parse_text(value, "the row"), place)
    if isinstance(value, Mapping) and detect_format(value, {}, FORMATS) is FORMATS["text"]:
        return Prompt(source=place, text=parse_row(value, FORMATS["text"], {}).text)
    row = parse_row(value, PROMPTS, {}, is_table=raw.is_table)
    if row.row_type == "prompt_completion":
        return _open_prompt(row.prompt, place, expected=row.completion or None)
    *before, last = row.messages
    if not before:
        raise BadRowError("messages has an answer alone; expected a user's turn before it")
    return Prompt(source=place, messages=tuple(before), tools=row.tools, expected=answer_text(last) or None)


def _open_prompt(text: str, place: str, *, expected: str | None = None) -> Prompt:
    return Prompt(source=place, messages=(text_turn("user", text),), expected=expected, is_open=True)
