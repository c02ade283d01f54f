"""What is looked for in encoded rows before step 1: each gate says what it found, where, and what to do.

A gate refuses where training would learn or measure something else than was meant, and warns where the user may well
have meant it. `data.on_…` sets each; see docs/data.md. There is no gate for templates without generation markers:
answers are found by rendering the turns before them (see `templates`), which needs none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from finetune.data.encoded import Part
from finetune.errors import DataError

if TYPE_CHECKING:
    from finetune.config.schema import DataSection
    from finetune.data.encoded import EncodedExamples

_log = logging.getLogger(__name__)

SplitParts: TypeAlias = Mapping[str, Sequence[Part]]
"""The parts of train, validation and test."""

_MAX_NAMED = 3
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class RowGate:
    """Rows that should not be there.

    Attributes:
        key: of the data section.
        find: which rows of a part they are, bool, shape (rows,); given the beginning-of-sequence token, if any.
        what: what is wrong with them, after `3 of 1,000 rows`.
        so: what follows from it.
        advice: what to do, but for setting the key.
    """

    key: str
    find: Callable[[EncodedExamples, int | None], torch.Tensor]
    what: str
    so: str
    advice: str


def is_answer_truncated(examples: EncodedExamples) -> torch.Tensor:
    """Which rows end inside of an answer, before its end of turn: bool, shape (rows,). Plain text has no answers."""
    last = examples.rows.offsets[1:] - 1
    is_open = examples.rows.is_target[last] & (examples.rows.token_ids[last] != examples.end_id)
    return is_open & examples.is_truncated & (examples.kind != "text")


def is_bos_doubled(examples: EncodedExamples, bos_id: int | None) -> torch.Tensor:
    """Which rows begin with the beginning-of-sequence token twice: bool, shape (rows,)."""
    ids, first = examples.rows.token_ids, examples.rows.offsets[:-1]
    second = (first + 1).clamp(max=len(ids) - 1)
    return (ids[first] == bos_id) & (ids[second] == bos_id) & (examples.lengths > 1)


ROW_GATES = (
    RowGate(
        "on_long_row",
        lambda examples, _: examples.is_truncated,
        "are longer than data.max_length={max_length}",
        "what is beyond is cut off",
        "Raise data.max_length (the longest has {longest:,} tokens)",
    ),
    RowGate(
        "on_no_target",
        lambda examples, _: examples.num_targets == 0,
        "have no token that carries loss within data.max_length={max_length}",
        "nothing can be learnt from them or measured on them",
        "Raise data.max_length (the longest has {longest:,} tokens)",
    ),
    RowGate(
        "on_truncated_answer",
        lambda examples, _: is_answer_truncated(examples),
        "have an answer that data.max_length={max_length} cuts before its end of turn",
        "a model that is trained on them learns answers which break off",
        "Raise data.max_length (the longest has {longest:,} tokens)",
    ),
    RowGate(
        "on_doubled_bos",
        lambda examples, bos_id: is_bos_doubled(examples, bos_id),
        "begin with the beginning-of-sequence token twice",
        "a model that is asked later sees it once",
        "Remove it from the rows or from the chat template (model.chat_template)",
    ),
)
"""The gates that look at one row, in the order in which they are asked."""


def pass_gates(parts: SplitParts, section: DataSection, bos_id: int | None) -> dict[str, list[Part]]:
    """The rows that are trained and measured on: those given, but for what a gate leaves out.

    Args:
        parts: of each split, each row once.
        section: `on_…` says what each gate does.
        bos_id: the beginning-of-sequence token, if the tokenizer has one.

    Raises:
        DataError: one or more gates refuse the rows; all of them are named.
    """
    refused: list[str] = []
    passed = {split: list(of_split) for split, of_split in parts.items()}
    for gate in ROW_GATES:
        for split in passed:
            passed[split] = _ask(gate, split, passed[split], section, bos_id, refused)
    _check_overlap(passed, section, refused)
    _check_end_of_turn(passed.get("train", []), section, refused)
    if len(refused) > 1:
        raise DataError("\n  ".join([f"the data has {len(refused)} problems:", *refused]))
    if refused:
        raise DataError(refused[0])
    return passed


def _ask(
    gate: RowGate, split: str, parts: list[Part], section: DataSection, bos_id: int | None, refused: list[str]
) -> list[Part]:
    """One gate and one split: its parts, without the rows that are dropped."""
    action = getattr(section, gate.key)
    masks = [gate.find(part.examples, bos_id) for part in parts]
    found = [(part.examples, row) for part, mask in zip(parts, masks, strict=True) for row in _rows(mask)]
    if not found:
        return parts
    longest = max(int(examples.rows.full_lengths[row]) for examples, row in found)
    known = {"max_length": section.max_length, "longest": longest}
    num_rows = sum(len(part.examples) for part in parts)
    named = _named([_place(*one) for one in found[: _MAX_NAMED + 1]])
    what = f"{split}: {len(found):,} of {num_rows:,} rows {gate.what.format(**known)}: {named}"
    if action == "drop":
        _log.warning("%s. They are left out (data.%s=drop).", what, gate.key)
        return _without(parts, [~mask for mask in masks], split, gate.key)
    message = f"{what}: {gate.so}. {gate.advice.format(**known)}"
    if action == "warn":
        _log.warning("%s, or set data.%s=drop to leave these rows out.", message, gate.key)
    else:
        refused.append(f"{message}, or set data.{gate.key}=drop to leave these rows out, or =warn to keep them.")
    return parts


def _check_overlap(parts: dict[str, list[Part]], section: DataSection, refused: list[str]) -> None:
    """Rows to measure on that are training rows too: the same tokens, whatever file they are in."""
    train = parts.get("train", [])
    for split in ("validation", "test"):
        found = _equal_rows(train, parts.get(split, []))
        if not found:
            continue
        pairs = _named([f"{_place(*ours)} is {_place(*trained)}" for ours, trained in found[: _MAX_NAMED + 1]])
        num_rows = sum(len(part.examples) for part in parts[split])
        what = f"{split}: {len(found):,} of {num_rows:,} rows are training rows too: {pairs}"
        if section.on_overlap == "drop":
            _log.warning("%s. They are left out of training (data.on_overlap=drop).", what)
            doomed = {_tokens(*ours) for ours, _ in found}
            keep = [_is_none_of(part.examples, doomed) for part in train]
            parts["train"] = train = _without(train, keep, "train", "on_overlap")
            continue
        message = f"{what}: what is measured on them says nothing about new rows. Remove them from one of the two"
        if section.on_overlap == "warn":
            _log.warning("%s, or set data.on_overlap=drop to take them out of training.", message)
        else:
            refused.append(
                f"{message}, or set data.on_overlap=drop to take them out of training, or =warn to keep them."
            )


def _check_end_of_turn(train: Sequence[Part], section: DataSection, refused: list[str]) -> None:
    """Whether at least one training row teaches the model to stop; of plain text, whether one ends within its row."""
    talking = [part for part in train if part.examples.kind != "text"]
    asked = talking or list(train)
    if not asked or any(_teaches_end(part.examples) for part in asked):
        return
    end_id = asked[0].examples.end_id
    message = (
        f"train: none of {sum(len(part.examples) for part in asked):,} rows has the token that ends "
        f"{'an answer' if talking else 'a text'} (id {end_id}) among those that carry loss, so the model would not "
        f"learn to stop. Raise data.max_length, which is {section.max_length}, until answers fit with their end"
    )
    if section.on_untrained_end == "warn" or not talking:  # to be cut into pieces is usual for plain text
        _log.warning("%s.", message)
    else:
        refused.append(f"{message}, or set data.on_untrained_end=warn to train like that.")


def _teaches_end(examples: EncodedExamples) -> bool:
    return bool(((examples.rows.token_ids == examples.end_id) & examples.rows.is_target).any())


def _equal_rows(
    train: Sequence[Part], others: Sequence[Part]
) -> list[tuple[tuple[EncodedExamples, int], tuple[EncodedExamples, int]]]:
    """Rows of a split with the training row that has the same tokens. Hashes find candidates, tokens decide."""
    if not train or not others:
        return []
    wanted = np.unique(np.concatenate([_hashes(part.examples) for part in others]))
    trained: dict[bytes, tuple[EncodedExamples, int]] = {}
    for part in train:
        for row in np.flatnonzero(np.isin(_hashes(part.examples), wanted)).tolist():
            trained.setdefault(_tokens(part.examples, row), (part.examples, row))
    if not trained:
        return []
    found = (
        ((part.examples, row), _tokens(part.examples, row)) for part in others for row in range(len(part.examples))
    )
    return [(ours, trained[tokens]) for ours, tokens in found if tokens in trained]


def _hashes(examples: EncodedExamples) -> np.ndarray:
    """A 64-bit hash of the tokens of each row, uint64, shape (rows,)."""
    ids, offsets = examples.rows.token_ids.numpy(), examples.rows.offsets.numpy()
    factors = np.random.default_rng(0).integers(2**63, size=int(examples.lengths.max()), dtype=np.uint64) | np.uint64(1)
    hashes = np.empty(len(examples), dtype=np.uint64)
    for first in range(0, len(examples), _ROWS_AT_ONCE):
        edges = offsets[first : first + _ROWS_AT_ONCE + 1]
        lengths = np.diff(edges)
        starts = edges[:-1] - edges[0]
        positions = np.arange(edges[-1] - edges[0]) - np.repeat(starts, lengths)
        products = (ids[edges[0] : edges[-1]].astype(np.uint64) + np.uint64(1)) * factors[positions]
        hashes[first : first + len(lengths)] = np.add.reduceat(products, starts)
    return hashes


def _tokens(examples: EncodedExamples, row: int) -> bytes:
    return examples.tokens(row).tobytes()


def _is_none_of(examples: EncodedExamples, doomed: set[bytes]) -> torch.Tensor:
    return torch.tensor([_tokens(examples, row) not in doomed for row in range(len(examples))])


def _without(parts: Sequence[Part], keep: Sequence[torch.Tensor], split: str, key: str) -> list[Part]:
    """The parts with the rows to keep; a part of which none is left goes.

    Raises:
        DataError: no row is left.
    """
    left = [
        replace(part, examples=part.examples.select(_rows(mask)))
        for part, mask in zip(parts, keep, strict=True)
        if bool(mask.any())
    ]
    if not left:
        raise DataError(f"{split}: data.{key}=drop leaves no row. Raise data.max_length, or give other rows.")
    return left


def _rows(mask: torch.Tensor) -> list[int]:
    rows: list[int] = mask.nonzero()[:, 0].tolist()
    return rows


def _place(examples: EncodedExamples, row: int) -> str:
    full = int(examples.rows.full_lengths[row])
    return f"{examples.source(row)} ({full:,} tokens)" if bool(examples.is_truncated[row]) else examples.source(row)


def _named(places: Sequence[str]) -> str:
    return ", ".join(places[:_MAX_NAMED]) + (" and others" if len(places) > _MAX_NAMED else "")
