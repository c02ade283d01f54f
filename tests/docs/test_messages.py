"""Each message of the troubleshooting page is what the code says, or what torch says when it is brought about."""

from __future__ import annotations

import ast
import re
import socket
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.docs.pages import DOCS, REPOSITORY, marked_blocks

BLOCKS = [block for block in marked_blocks(DOCS / "troubleshooting.md") if block.marker == "message"]
SAID = [" ".join(block.text.split()) for block in BLOCKS if not block.more]
MADE = {block.more.removeprefix("made: "): " ".join(block.text.split()) for block in BLOCKS if block.more}
_LEAST_SHARE = 0.4
"""Of a message must be the code's own letters; else a format of a few of them would fit anything."""
_PERCENT = re.compile(r"%[-#0-9.]*[sdgfr]")


@cache
def formats_of_the_package() -> list[tuple[re.Pattern[str], int]]:
    """Each text in the package as a pattern, with its number of fixed letters."""
    texts = {
        text
        for path in (REPOSITORY / "finetune").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for text in _texts(node)
    }
    return [(_pattern(pieces), sum(map(len, pieces))) for pieces in sorted(texts) if sum(map(len, pieces)) > 15]


def _texts(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """The fixed pieces of a text; between them stands what differs."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield tuple(_PERCENT.split(node.value))
    elif isinstance(node, ast.JoinedStr):
        pieces = [""]
        for value in node.values:
            if isinstance(value, ast.Constant):
                pieces[-1] += str(value.value)
            else:
                pieces.append("")
        yield tuple(pieces)


def _pattern(pieces: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(".+?".join(re.escape(" ".join(f"|{piece}|".split())[1:-1]) for piece in pieces), re.DOTALL)


def is_said(message: str) -> bool:
    """Whether a text of the package, its variable parts filled in, is this message."""
    return any(
        pattern.fullmatch(message) and letters >= _LEAST_SHARE * len(message)
        for pattern, letters in formats_of_the_package()
    )


@pytest.mark.parametrize("message", SAID, ids=lambda message: message[:50])
def test_a_message_stands_in_the_code(message):
    assert is_said(message)


def test_a_message_that_nobody_says_is_found():
    assert not is_said("Slurm gave this job several tasks, but this process was started outside of mpirun")
    assert not is_said("rank 0 cannot open port 29500, sorry")


def test_every_topic_has_its_message():
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert len(SAID) >= 15
    for topic in (
        "port",
        "process group",
        "device_ids",
        "CUDA_VISIBLE_DEVICES",
        "per GPU",
        "barrier",
        "srun",
        "without DDP",
    ):
        assert topic in text


def late_rank() -> str | None:
    from finetune.distributed.guardian.faults import Place, describe_late

    waits, works = Place("training", 57, True, "barrier", 3, 1800.0), Place("training", 57, True, None, 3, 1801.0)
    return describe_late({0: waits, 1: works}, 1800.0)


def unreachable_rank() -> str:
    from finetune.distributed.guardian.faults import Place, unreachable

    return unreachable(1, Place("training", 57))


def _error_of(call: Callable[[], object]) -> str:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        call()
    return str(caught.value)


def no_process_group() -> str:
    from torch import distributed

    return _error_of(distributed.barrier)


def port_in_use() -> str:
    from torch.distributed import TCPStore

    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        port = held.getsockname()[1]
        return _error_of(lambda: TCPStore("127.0.0.1", port, 1, is_master=True)).replace(str(port), "29500")


def _wrapped(device_ids: object) -> str:
    import torch
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.nn.parallel import DistributedDataParallel

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        return _error_of(lambda: DistributedDataParallel(torch.nn.Linear(2, 2), device_ids=device_ids))
    finally:
        destroy_process_group()


MAKERS = {
    "device_ids_are_several": lambda: _wrapped([0, 1]),
    "device_ids_is_a_number": lambda: _wrapped(0),
    "device_ids_on_the_cpu": lambda: _wrapped([0]),
    "late_rank": late_rank,
    "no_process_group": no_process_group,
    "port_in_use": port_in_use,
    "unreachable_rank": unreachable_rank,
}


@pytest.mark.parametrize("how", sorted(MAKERS))
def test_a_message_is_brought_about(how):
    assert MAKERS[how]() == MADE[how]


def test_every_message_that_is_made_has_its_maker():
    assert set(MADE) == set(MAKERS)
