"""Lines of JSON between guardians, and between a guardian and its worker."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from typing import Any, Literal, get_origin, get_type_hints

from finetune.distributed.guardian.faults import Position
from finetune.errors import Fault

Message = dict[str, Any]

_TYPES = {
    kind: {name: str if get_origin(hint) is Literal else hint for name, hint in get_type_hints(kind).items()}
    for kind in (Position, Fault)
}
_LONGEST_LINE = 1 << 16
_LONGEST_HELLO = 1 << 10


def occupy_standard_streams() -> None:
    """Open those of descriptors 0 to 2 that are closed: the next pipe would get such a number and be printed into."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


class LineBuffer:
    """Convert bytes to messages.

    Raises:
        ValueError: from `feed`: a line that is too long or is no JSON object.
    """

    def __init__(self, longest: int = _LONGEST_LINE) -> None:
        self.longest = longest
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """Add bytes, and return the messages that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if any(len(line) > self.longest for line in [*lines, self._rest]):
            raise ValueError("a line is too long")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("a line nests too deeply") from error
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a line is no object")
        return messages


def _read(kind: type[Any], values: Any) -> Any:
    """Return the position or fault that a message holds.

    Raises:
        ValueError: a field is missing, is unknown or has another type.
    """
    try:
        made = kind(**values)
    except TypeError:
        made = None
    if any(not isinstance(getattr(made, name, None), expected) for name, expected in _TYPES[kind].items()):
        raise ValueError(f"it holds no {kind.__name__.lower()}")
    return made


class Link:
    """A connection to another guardian. No method waits."""

    def __init__(self, connection: socket.socket, now: float, *, rank: int | None = None) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.rank = rank
        self.position = Position()
        self.heard_at = now
        self.has_left = False
        self.garbage = ""
        """Why its last message could not be read, if so."""
        self._lines = LineBuffer(_LONGEST_LINE if rank is not None else _LONGEST_HELLO)
        self._unsent = b""

    def admit(self, rank: int) -> None:
        """Accept longer lines from a peer that has shown its token."""
        self.rank = rank
        self._lines.longest = _LONGEST_LINE

    def send(self, message: Message | None = None) -> None:
        """Send a message and the rest of earlier ones as far as possible. A dead connection shows in `receive`."""
        if message is not None and len(self._unsent) < _LONGEST_LINE:
            self._unsent += json.dumps(message).encode() + b"\n"
        with suppress(OSError):
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def receive(self) -> tuple[list[Message], bool]:
        """Return the messages that have arrived, and whether the connection has ended."""
        try:
            data = self.connection.recv(self._lines.longest)
            messages = self._lines.feed(data)
            for message in messages:
                for name, kind in (("position", Position), ("fault", Fault)):
                    if name in message:
                        message[name] = _read(kind, message[name])
            return messages, not data
        except BlockingIOError:
            return [], False
        except OSError:
            return [], True
        except ValueError as error:
            self.garbage = str(error)
            return [], True
