"""Check encoded rows before step 1. Each check reports the rows that it finds, where they are, and what to do.

Rows that would make training learn or measure something unintended are refused. For rows that the user may intend,
there is a warning. A key `data.on_…` sets each check; see docs/data.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.data.encoded import Part
from finetune.data.examples import holds_out_by_default
from finetune.data.templates import LOSS_KINDS, ODDITIES
from finetune.errors import DataError
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.config.schema import DataSection
    from finetune.data.encoded import EncodedExamples

_log = logging.getLogger(__name__)
_MAX_NAMED = 3
_FEW_DROPPED = 0.01
_FEW_TARGETS, _MOST_TARGETS = 0.01, 0.99
_MOST_FILES = 100
_ODD_ROWS = {
    "without_end_of_turn": "whose end of turn carries no loss or was cut",
    "few_targets": "with loss on less than 1 % of their tokens",
    "most_targets": "with loss on more than 99 % of them",
    "repeated": "that repeat an earlier one",
    "empty_question": "with an empty question",
    "reordered_results": "with tool results in another order than their calls, though the chat template writes no ids",
}
_RAISE_LENGTH = "Raise data.max_length (the longest has {longest:,} tokens)"


@dataclass(frozen=True)
class RowCheck:
    """A check that looks at each row by itself.

    Attributes:
        key: the key of the data section that chooses its action.
        find: maps rows and the id of the beginning-of-sequence token (None if the tokenizer has no such token) to a
            bool tensor of shape (rows,), True for rows with the problem.
        what: the problem. In the message it follows `3 of 1,000 rows`.
        so: its consequence.
        advice: its remedy. The message also names the key.
    """

    key: str
    find: Callable[[EncodedExamples, int | None], torch.Tensor]
    what: str
    so: str
    advice: str


def is_answer_truncated(examples: EncodedExamples) -> torch.Tensor:
    """Mark the rows cut within an answer, before its end of turn: bool, shape (rows,). Plain text has no answers."""
    last, is_target = examples.tokens_at(examples.starts + examples.lengths - 1)
    is_open = is_target & (last != examples.end_id)
    return is_open & examples.is_truncated & (examples.row_type != "text")


def is_bos_doubled(examples: EncodedExamples, bos_id: int | None) -> torch.Tensor:
    """Mark the rows that begin with the beginning-of-sequence token twice: bool, shape (rows,)."""
    first, second = (examples.tokens_at(examples.starts + place)[0] for place in (0, 1))
    return (first == bos_id) & (second == bos_id) & (examples.lengths > 1)


ROW_CHECKS = (
    RowCheck(
        "on_long_row",
        lambda examples, _: examples.is_truncated,
        "are longer than data.max_length={max_length}",
        "the rest is cut off",
        _RAISE_LENGTH,
    ),
    RowCheck(
        "on_no_target",
        lambda examples, _: examples.num_targets == 0,
        "have no token that carries loss within data.max_length={max_length}",
        "they can neither be learned from nor measured on",
        _RAISE_LENGTH,
    ),
    RowCheck(
        "on_truncated_answer",
        lambda examples, _: is_answer_truncated(examples),
        "have an answer that data.max_length={max_length} cuts before its end of turn",
        "the model would learn answers that break off",
        _RAISE_LENGTH,
    ),
    RowCheck(
        "on_doubled_bos",
        is_bos_doubled,
        "begin with the beginning-of-sequence token twice",
        "at generation the model sees it once",
        "Remove it from the rows or from the chat template (data.chat_template)",
    ),
)
"""The checks of one row at a time, in the order in which they run."""


def check_rows(
    parts: Mapping[str, Sequence[Part]],
    section: DataSection,
    bos_id: int | None,
    template: str,
    *,
    knows_trained: bool = False,
) -> dict[str, list[Part]]:
    """Run all checks. Rows are dropped, refused or named in a warning, as the section says.

    `parts` has each row of a split once. A check that finds one side of a pair finds the pair. `template` names the
    chat template. For `knows_trained`, see `encode_examples`.

    Raises:
        DataError: one or more checks refuse the rows; the message names all of them.
    """
    refused: list[str] = []
    passed = {split: list(of_split) for split, of_split in parts.items()}
    for check in ROW_CHECKS:
        for split in passed:
            passed[split] = _apply(check, split, passed[split], section, bos_id, refused)
    _check_dropped(parts)
    _check_keys(parts, section, template, refused)
    if not knows_trained or section.on_overlap == "drop":  # what a run dropped is no training row of it
        _check_overlap(passed, section, refused)
    _check_end_of_turn(passed.get("train", []), section, refused)
    _check_equal_answers(passed)
    if len(refused) > 1:
        raise DataError("\n  ".join([f"the data has {len(refused)} problems:", *refused]))
    if refused:
        raise DataError(refused[0])
    return passed


def keys_of_rows(digests: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint64]:
    """Return 64 bits for each row, shape (rows,), given the `digest_rows` of all sides of a split."""
    keys = [np.ascontiguousarray(side[:, 1, :8]).view(np.uint64)[:, 0] for side in digests]
    return sum(key * np.uint64(2 * place + 1) for place, key in enumerate(keys))  # type: ignore[return-value]


def repeated_rows(rows: Any, keys: NDArray[np.uint64]) -> list[int]:
    """Return the rows that have the tokens and the loss of an earlier row, but are another row of their file.

    `keys` is the result of `keys_of_rows`.
    """
    numbers = rows.sides[0].numbers.numpy()
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    others = (numbers != numbers[first[group]]).nonzero()[0]
    _, once = np.unique(np.stack([group, numbers])[:, others], axis=1, return_index=True)
    return sorted(others[once].tolist())


def count_by_file(rows: Any, repeated: Sequence[int], *, are_prompts: bool = False) -> list[dict[str, Any]]:
    """Count the rows and tokens of each file of a split, the targets by what they are, and rows that may be mistakes.

    The files from the hundredth on are one entry. No token of a prompt carries loss. docs/watching.md lists the keys.
    """
    sides = rows.sides
    names, file_of, _ = sides[0].files()
    names = names if len(names) <= _MOST_FILES else [*names[: _MOST_FILES - 1], f"{len(names) - _MOST_FILES + 1} more"]
    tokens, targets = (sum(getattr(side, name) for side in sides) for name in ("lengths", "num_targets"))
    targets = targets * (not are_prompts)
    kinds = sum(side.loss_kinds for side in sides) * (not are_prompts)
    has_no_end = [(side.loss_kinds[:, 2] == 0) & (side.num_targets > 0) | is_answer_truncated(side) for side in sides]
    has_answers = torch.stack([side.has_answer for side in sides]).any(0) & (targets > 0)
    columns = {
        "rows": torch.ones_like(tokens),
        "tokens": tokens,
        "target_tokens": targets,
        "answer": targets - kinds.sum(1),
        **{kind: kinds[:, index] for index, kind in enumerate(LOSS_KINDS)},
        "without_end_of_turn": torch.stack(has_no_end).any(0) * (not are_prompts),
        "truncated": torch.stack([side.is_truncated for side in sides]).any(0),
        "few_targets": (targets < _FEW_TARGETS * tokens) * (not are_prompts),
        "most_targets": has_answers & (targets > _MOST_TARGETS * tokens),
        **{name: torch.stack([side.oddities[:, k] for side in sides]).any(0) for k, name in enumerate(ODDITIES)},
        "repeated": torch.zeros_like(tokens).index_fill(0, torch.tensor(repeated, dtype=torch.int64), 1),
    }
    of_file = file_of.clamp(max=_MOST_FILES - 1)
    counts = [of_file.bincount(column.double(), len(names)).long().tolist() for column in columns.values()]
    return [{"file": name, **dict(zip(columns, of, strict=True))} for name, *of in zip(names, *counts, strict=True)]


def describe_rows(rows: Any, keys: NDArray[np.uint64]) -> tuple[list[Any], list[str]]:
    """Return an array for each field of a row in rows.safetensors, and the names of the files."""
    names, file_of, line = rows.sides[0].files()
    sums = [sum(getattr(side, name) for side in rows.sides).numpy() for name in ("lengths", "num_targets")]
    raw = np.ascontiguousarray(rows.sides[0].raw_digest[:, :4].numpy()).view(np.uint32)[:, 0]
    return [file_of.numpy(), line.numpy(), *sums, keys, raw], names


def describe_counts(counts: Mapping[str, Any]) -> str:
    """Describe the counts of a file on one line, and what may be a mistake in it."""
    kinds = [f"{name.replace('_', ' ')} {counts[name]:,}" for name in ("answer", *LOSS_KINDS) if counts[name]]
    found = [f"rows {what}: {counts[key]:,}" for key, what in _ODD_ROWS.items() if counts.get(key)]
    text = f"{counts['file']}: {counted(counts['rows'], 'row')}, {counts['tokens']:,} tokens"
    text += f", {counts['target_tokens']:,} with loss"
    return "; ".join([f"{text} ({', '.join(kinds)})" if kinds else text, *found])


def learns_nothing_or_everything(counts: Mapping[str, Any]) -> str:
    """Return a sentence if a file's rows have no token with loss, or almost no other; else nothing."""
    if counts["target_tokens"] and counts["most_targets"] < counts["rows"]:
        return ""
    what = "more than 99 % of the tokens of every row carry" if counts["target_tokens"] else "no token carries"
    return f"{counts['file']}: {what} loss; the chat template marks other tokens than the answers"


def name_some(places: Iterable[str]) -> str:
    """Name the first few of many rows."""
    first = list(islice(places, _MAX_NAMED + 1))
    return ", ".join(first[:_MAX_NAMED]) + (" and others" if len(first) > _MAX_NAMED else "")


def _apply(
    check: RowCheck, split: str, parts: list[Part], section: DataSection, bos_id: int | None, refused: list[str]
) -> list[Part]:
    """Apply a check to a split. Returns its parts without the rows that are dropped."""
    action = getattr(section, check.key)
    masks = [torch.stack([check.find(side, bos_id) for side in part.sides]).any(0) for part in parts]
    found = [(part, row) for part, mask in zip(parts, masks, strict=True) for row in mask.nonzero()[:, 0].tolist()]
    if not found:
        return parts
    is_cut_prompt = parts[0].are_prompts and check.advice == _RAISE_LENGTH
    if is_cut_prompt and (check.key, action) == ("on_long_row", "warn"):
        return parts  # the next checks refuse it
    longest = max(int(side.full_lengths[row]) for part, row in found for side in part.sides)
    known = {"max_length": section.max_length, "longest": longest}
    num_rows = sum(map(len, parts))
    named = name_some(part.name_row(row) for part, row in found)
    problem = f"{split}: {len(found):,} of {num_rows:,} {_rows_of(parts)} {check.what.format(**known)}: {named}"
    if action == "drop":
        _log.warning("%s. They are left out (data.%s=drop).", problem, check.key)
        return _without(parts, [~mask for mask in masks], split, check.key, check.advice.format(**known))
    drop = f"data.{check.key}=drop to leave these rows out" if len(found) < num_rows else ""
    keep = "" if is_cut_prompt else f"data.{check.key}=warn to keep them"
    so = "prompts and expected answers must be whole" if is_cut_prompt else check.so
    _warn_or_refuse(action, f"{problem}: {so}. {check.advice.format(**known)}", refused, drop, keep)
    return parts


def _rows_of(parts: Sequence[Part]) -> str:
    """Return what the examples of these parts are called in messages."""
    return "rows" if len(parts[0].sides) == 1 else "pairs"


def _warn_or_refuse(action: str, message: str, refused: list[str], drop: str, warn: str) -> None:
    """Log the message as a warning, or add it to `refused`. `drop` and `warn` are what the user can set instead."""
    settings = ", or ".join(filter(None, [drop, warn if action != "warn" else ""]))
    advice = f"{message}{', or set ' if settings else ''}{settings}."
    if action == "warn":
        _log.warning("%s", advice)
    else:
        refused.append(advice)


def _check_dropped(parts: Mapping[str, Sequence[Part]]) -> None:
    """Warn if more than one row in a hundred was left out because it cannot be used."""
    for label, part in {part.label: part for of_split in parts.values() for part in of_split}.items():
        num_dropped = max(side.num_dropped for side in part.sides)
        num_rows = num_dropped + sum(len(set(source.numbers.tolist())) for source in part.examples.sources)
        if num_dropped > _FEW_DROPPED * num_rows:
            _log.warning(
                "%s: %s of %s rows cannot be used and are left out (data.on_bad_row=drop). Look at the reasons in the "
                "description of the rows, and correct the file",
                *(label, f"{num_dropped:,}", f"{num_rows:,}"),
            )


def _check_keys(parts: Mapping[str, Sequence[Part]], section: DataSection, template: str, refused: list[str]) -> None:
    """Look for keys of the rows that the chat template does not render, once for each source."""
    sources = {part.label: part for of_split in parts.values() for part in of_split}
    for label, part in sources.items():
        found = {key: (count, side.name_row(first)) for side in part.sides for key, count, first in side.ignored_keys}
        for key, (count, first) in found.items():
            message = (
                f"{label}: the chat template of {template} does not render {key} (rows that have it: {count:,}, the "
                f"first is {first}): the model would not see it. Use a template that renders it "
                "(data.chat_template), or remove the key"
            )
            warn = "data.on_ignored_key=warn to train without it"
            _warn_or_refuse(section.on_ignored_key, message, refused, "", warn)


def _check_overlap(parts: dict[str, list[Part]], section: DataSection, refused: list[str]) -> None:
    """Look for validation and test rows with the same tokens as a training row, whatever file they are in."""
    train = parts.get("train", [])
    for split in ("validation", "test"):
        held_out = parts.get(split, [])
        doomed = set[tuple[int, bytes]]().union(*(of_row for part in held_out for of_row in part.digests()))
        overlaps = _equal_rows(train, held_out, doomed)
        if not overlaps:
            continue
        named = name_some(f"{name} is {trained}" for name, trained in overlaps)
        num_rows = sum(map(len, held_out))
        problem = f"{split}: {len(overlaps):,} of {num_rows:,} {_rows_of(train)} are training rows too: {named}"
        keep = [torch.tensor([not doomed & of_row for of_row in part.digests()]) for part in train]
        if section.on_overlap == "drop":
            _log.warning("%s. They are left out of the train split (data.on_overlap=drop).", problem)
            advice = f"Take the training rows out of the {split} split"
            parts["train"] = train = _without(train, keep, "train", "on_overlap", advice)
            continue
        message = f"{problem}: results on them say nothing about new rows. Remove them from one of the two"
        drop = "data.on_overlap=drop to take them out of training" if any(bool(mask.any()) for mask in keep) else ""
        # Nobody asked to hold rows out of one file, so a row that stands in it twice does not end the run.
        is_default = split == "validation" and holds_out_by_default(section)
        action = "warn" if is_default else section.on_overlap
        _warn_or_refuse(action, message, refused, drop, "data.on_overlap=warn to keep them")


def _check_end_of_turn(train: Sequence[Part], section: DataSection, refused: list[str]) -> None:
    """Check that at least one training row teaches the model to stop; for plain text, that one row is not cut."""
    chat_parts = [part for part in train if part.examples.row_type != "text"]
    parts = chat_parts or list(train)
    if not parts or any(bool(part.examples.loss_kinds[:, 2].any()) for part in parts):
        return
    message = (
        f"train: none of {sum(map(len, parts)):,} rows has the token that ends "
        f"{'an answer' if chat_parts else 'a text'} (id {parts[0].examples.end_id}) among those that carry loss, so "
        f"the model would not learn to stop. Raise data.max_length, which is {section.max_length}, until answers fit "
        "with their end"
    )
    action = section.on_untrained_end if chat_parts else "warn"  # plain text is often cut into pieces
    _warn_or_refuse(action, message, refused, "", "data.on_untrained_end=warn to train like that")


def _check_equal_answers(parts: Mapping[str, Sequence[Part]]) -> None:
    """Warn of pairs with two equal answers. They have no gradient."""
    for split, of_split in parts.items():
        equal = []
        for part in of_split if len(of_split[0].sides) > 1 else ():
            digests = zip(*(side.digests(with_targets=True) for side in part.sides), strict=True)
            equal += [part.name_row(row) for row, (chosen, rejected) in enumerate(digests) if chosen == rejected]
        if equal:
            _log.warning(
                "%s: %s of %s pairs have the same answer twice: %s. Remove them: nothing can be preferred.",
                *(split, f"{len(equal):,}", f"{sum(map(len, of_split)):,}", name_some(equal)),
            )


def _equal_rows(
    train: Sequence[Part], others: Sequence[Part], digests_of_others: set[tuple[int, bytes]]
) -> list[tuple[str, str]]:
    """Name each row of a split that has the tokens of a training row, and the first of these training rows."""
    trained: dict[tuple[int, bytes], str] = {}
    for part in train if digests_of_others else ():
        for row, of_row in enumerate(part.digests()):
            for digest in of_row & digests_of_others:
                trained.setdefault(digest, part.name_row(row))
    return [
        (part.name_row(row), trained[min(of_row & trained.keys())])
        for part in (others if trained else ())
        for row, of_row in enumerate(part.digests())
        if of_row & trained.keys()
    ]


def _without(parts: Sequence[Part], keep: Sequence[torch.Tensor], split: str, key: str, advice: str) -> list[Part]:
    """Keep the marked rows of each part, and drop parts without rows. Raise a DataError if no row is left."""
    left = [part.select(mask) for part, mask in zip(parts, keep, strict=True) if bool(mask.any())]
    if not left:
        raise DataError(f"{split}: data.{key}=drop leaves no row. {advice}, or give other rows.")
    return left
