"""The system turn and the tools with which a conversation opens, as the training rows usually do."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finetune.config.schema import name_files
from finetune.config.yaml_reader import COMMAND_LINE
from finetune.data.examples import Opening, read_opening
from finetune.data.formats import Reads
from finetune.data.turns import Turn
from finetune.data.values import quote
from finetune.errors import DataError

if TYPE_CHECKING:
    from finetune.config.schema import DataSection
    from finetune.inference.finished_run import FinishedRun

_log = logging.getLogger(__name__)


def recorded_opening(run: FinishedRun) -> dict[str, Any]:
    """Return what a run recorded of the opening of its rows; empty without a record, or if the command names others."""
    is_of_run = not run.config.origin("data.path").startswith(COMMAND_LINE)
    return run.recorded.part("opening") if is_of_run else {}


def usual_opening(section: DataSection, reads: Reads = "answers", recorded: Mapping[str, Any] | None = None) -> Opening:
    """Return the system turn and the tools of a conversation that has none: those that the run recorded, or read them.

    The log has the system turn, and where it comes from.
    """
    try:
        is_recorded = recorded is not None and recorded.keys() == set(Opening._fields)
        usual = Opening(**recorded) if recorded is not None and is_recorded else read_opening(section, reads)
    except DataError as error:
        _log.warning("the training rows cannot be read, so no system turn is used (give one with --system): %s", error)
        return Opening()
    if usual.system is not None:
        # The file may be another one than the run had.
        where = "" if is_recorded or section.path is None else f" in {name_files(section.path)}"
        count = f"{usual.num_with_system} of the first {usual.num_rows} training rows{where}"
        _log.info("system turn, as in %s: %s", count, quote(usual.system))
    return usual


def with_system_turn(turns: Sequence[Turn], system: str | None, *, replaces: bool = False) -> list[Turn]:
    """Return the turns with this system turn, unless they have a non-empty one or `system` is empty.

    With `replaces`, it takes the place of theirs, and an empty one removes theirs.
    """
    has_one = bool(turns) and turns[0]["role"] in ("system", "developer")
    first, rest = (turns[0], turns[1:]) if has_one else ({"role": "system"}, turns)
    if not system:
        return list(rest if replaces else turns)
    return list(turns) if first.get("content") and not replaces else [{**first, "content": system}, *rest]
