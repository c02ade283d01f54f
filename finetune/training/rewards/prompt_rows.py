"""The prompts of a split, and what their rows tell reward functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from finetune.data.encoded import EncodedExamples
from finetune.data.examples import load_examples
from finetune.data.formats import Example, as_messages
from finetune.data.row_checks import name_some
from finetune.data.splits import shuffled
from finetune.data.turns import Turn, text_turn
from finetune.errors import DataError
from finetune.inference.evaluation import Dialogues
from finetune.logs import warnings_only
from finetune.training.rewards.conversations import GeneratedConversation, Row, turns_of
from finetune.training.rewards.functions import GeneratedAnswer, Rewards
from finetune.units import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config, DataSection

_NOT_COLUMNS = frozenset({"prompt", "completion", "messages", "conversations", "expected"})
"""Columns that reward functions get in another form."""


def cut_prompts(examples: EncodedExamples) -> str | None:
    """Say which rows are refused because `data.max_length` cuts their last question or expected answer."""
    cut = (examples.has_answer.logical_not() | examples.is_truncated).nonzero()[:, 0].tolist()
    if not cut:
        return None
    lengths = examples.full_lengths.tolist()
    return (
        f"data.max_length cuts the prompt or the expected answer of {counted(len(cut), 'row')}: "
        f"{name_some(f'{examples.source(row)} ({lengths[row]:,} tokens)' for row in cut)}. Raise data.max_length (the "
        f"longest has {max(lengths):,} tokens), or leave such rows out: data.on_long_row=drop."
    )


def validation_sample(config: Config, rows: EncodedExamples) -> EncodedExamples:
    """Return the rows that validations answer, the same in every validation."""
    return rows.select(sorted(shuffled(len(rows), config.data.split_seed)[: config.validation.num_samples]))


class PromptRows:
    """The prompts of a split, and what its rows tell a reward function.

    `rows` are the rows as they were read, by their origin; None if no function reads them.

    Attributes:
        prompts: token ids of each prompt, with the header of the assistant's turn.
        expected: the expected answer of each row, empty if it has none.
        sources: file and line of each row.

    Raises:
        DataError: `data.max_length` cuts a row, so its last question or its expected answer is not whole.
    """

    def __init__(
        self, examples: EncodedExamples, tokenizer: PreTrainedTokenizerBase, rows: Mapping[str, Example] | None
    ) -> None:
        if cut := cut_prompts(examples):
            raise DataError(cut)
        dialogues = Dialogues(examples, tokenizer)
        self.prompts, self.expected, self.sources = dialogues.prompts, dialogues.expected, dialogues.sources
        self._reader, self._tokenizer, self._rows = dialogues.reader, tokenizer, rows

    def __len__(self) -> int:
        return len(self.prompts)

    def text(self, ids: Sequence[int]) -> str:
        """Decode tokens, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def row(self, row: int) -> Row:
        """Return what an environment gets of a row."""
        read = None if self._rows is None else as_messages(self._rows[self.sources[row]])
        return Row((), {}) if read is None else Row(read.messages[:-1], read.columns or {}, read.tools)

    def answer(self, row: int, answer: GeneratedConversation, stops: Sequence[int]) -> GeneratedAnswer:
        """Describe an answer to a row's prompt for reward functions."""
        ids = answer.answers[-1]
        without_stop = list(ids[:-1]) if ids and ids[-1] in stops else list(ids)
        source = self.sources[row]
        read = None if self._rows is None else self._rows[source]
        columns = (read.columns if read is not None else None) or {}
        return GeneratedAnswer(
            source=source,
            prompt="" if read is None else read.prompt or list(read.messages[:-1]),
            expected=self.expected[row],
            columns={name: value for name, value in columns.items() if name not in _NOT_COLUMNS},
            text=self._reader.read(without_stop).text,
            whole=str(self._tokenizer.decode(without_stop, skip_special_tokens=True)),
            marked=self.text(without_stop),
            ids=list(answer.ids),
            num_read=len(answer.ids) - answer.num_generated,
        )


class ConversationRows(PromptRows):
    """The prompts of a split to which the model answers with conversations, whose turns reward functions get."""

    def answer(self, row: int, answer: GeneratedConversation, stops: Sequence[int]) -> GeneratedAnswer:
        """Describe a conversation after a row's prompt for reward functions."""
        turns: list[Turn] = []
        for place, ids in enumerate(answer.answers):
            turn = self._reader.read(ids[:-1] if ids and ids[-1] in stops else ids).as_turn()
            replies = turns_of(answer.results[place]) if place < len(answer.results) else []
            called = zip(turn.get("tool_calls", ()), replies, strict=False)
            calls = [call | {"id": reply["tool_call_id"]} for call, reply in called if reply["role"] == "tool"]
            turns += [turn | ({"tool_calls": calls} if calls else {}), *replies]
        described = super().answer(row, answer, stops)
        prompt = described.prompt
        turns_of_prompt = [text_turn("user", prompt)] if isinstance(prompt, str) else prompt
        return replace(described, turns=turns, prompt=turns_of_prompt, score=answer.score)


def read_rows_by_source(section: DataSection) -> dict[str, Example]:
    """Read all rows of training and validation, by their origin.

    Raises:
        DataError: two sources of a mixture have rows of one origin and read them in different ways.
    """
    rows: dict[str, Example] = {}
    with warnings_only("finetune.data"):  # encoding has said all about these rows
        splits = load_examples(section, "prompts")
        parts = [part.whole for split in (splits.train, splits.validation) if split is not None for part in split.parts]
        for row in (row for part in dict.fromkeys(parts) for row in part.read()):
            other = rows.setdefault(row.source, row)
            # The digest stands for the columns, where NaN would not be equal to itself.
            if other._replace(columns=None) != row._replace(columns=None):
                raise DataError(
                    f"{row.source} is in two sources of data.mixture, which read it in different ways. Functions "
                    "would get the row of one for both. Give one source a copy of the rows, under another name."
                )
    return rows


def check_expected(config: Config, rewards: Rewards, prompts: PromptRows) -> None:
    """Raise DataError if functions compare with expected answers and a row has none."""
    without = [row for row, expected in enumerate(prompts.expected) if not expected]
    if rewards.needing_expected and without:
        rows = "1 row has" if len(without) == 1 else f"{len(without):,} rows have"
        names = "`columns: {completion: NAME}` of its source in data.mixture"
        key = names if config.data.mixture else "data.columns.completion"
        raise DataError(
            f"reward.functions is {', '.join(config.reward.functions)}, but {', '.join(rewards.needing_expected)} "
            f"compares with the expected answer, and {rows} none; the first is "
            f"{prompts.sources[without[0]]}. Add a column completion, or name the column in {key}."
        )
