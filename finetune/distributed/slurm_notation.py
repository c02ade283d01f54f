"""Slurm's own notations: node lists such as ``gpu[07-08],c[1-2]n5`` and counts per node such as ``2(x3),1``."""

from __future__ import annotations

import re

from finetune.errors import LaunchError

_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def _first_host_from_slurm_nodelist(nodelist: str) -> str:
    """Return the first host of a Slurm node list.

    A list is names between commas; a name may hold several bracket groups, each a list of numbers and ranges:
    ``n[1-2]-ib,m[3-4]-eth`` begins with ``n1-ib`` and ``c[1-2]n[5-6]`` with ``c1n5``. Leading zeros count.

    Raises:
        LaunchError: the list is empty or malformed.
    """
    first = _names(nodelist)[0]
    return _GROUP.sub(lambda group: group[1].split(",")[0].split("-")[0], first)


def tasks_on_node(counts: str, node: int) -> int | None:
    """Return one node's number of tasks in Slurm's counts per node: ``2(x3),1`` is 2, 2, 2, 1; None if not given."""
    position = 0
    for part in counts.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            return None
        position += int(match[2] or 1)
        if node < position:
            return int(match[1])
    return None


def _names(nodelist: str) -> list[str]:
    """Split the list at the commas outside of brackets, and check each name."""
    text = nodelist.strip()
    names: list[str] = []
    depth = start = 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            names.append(text[start:position])
            start = position + 1
    names.append(text[start:])
    if not all(_is_well_formed(name) for name in names):
        raise LaunchError(
            f"The Slurm node list {nodelist[:200]!r} cannot be read; expected names such as node7, node[01-04,07] or "
            "c[1-2]n[5-6] between commas. Set MASTER_ADDR to the first host's name."
        )
    return names


def _is_well_formed(name: str) -> bool:
    parts = [part for group in _GROUP.findall(name) for part in group.split(",")]
    bare = _GROUP.sub("0", name)
    return bool(bare) and not re.search(r"[\[\]\s,]", bare) and all(map(_is_range, parts))


def _is_range(part: str) -> bool:
    """Return whether a part is ``7`` or an ascending range such as ``01-04``."""
    match = _RANGE.fullmatch(part)
    return match is not None and int(match[1]) <= int(match[2] or match[1])
