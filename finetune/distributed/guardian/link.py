"""Lines of JSON over pipes and sockets, without waiting."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from typing import Any

from finetune.distributed.guardian.faults import LOST_SECONDS, Position
from finetune.errors import Fault

Message = dict[str, Any]

_LONGEST_LINE = 1 << 16


class Link:
    """Messages over a pair of descriptors. No method waits."""

    def __init__(self, reader: int, writer: int) -> None:
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        self._reader, self._writer = reader, writer
        self._received = self._unsent = b""

    def send(self, message: Message | None = None) -> None:
        """Send a message and the rest of earlier ones as far as possible. A dead connection shows in `receive`."""
        if message is not None and len(self._unsent) < _LONGEST_LINE:
            self._unsent += json.dumps(message).encode() + b"\n"
        with suppress(OSError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._writer, self._unsent) :]

    def receive(self) -> list[Message]:
        """Return the messages that have arrived.

        Raises:
            EOFError: the connection has ended.
            ValueError: a line is too long, or no JSON object.
        """
        try:
            data = os.read(self._reader, _LONGEST_LINE)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > _LONGEST_LINE:
            raise ValueError("a line is too long")
        try:
            return [dict(json.loads(line)) for line in lines]
        except (TypeError, RecursionError) as error:
            raise ValueError("a line is no object") from error


class Peer(Link):
    """A connection between a guardian and the hub, and the state of the rank at its other end.

    Attributes:
        position: the phase and step in the last message of that rank.
        end: None while the connection is open. After its end, the reason, or "" if the peer closed it.
    """

    def __init__(self, connection: socket.socket, now: float = 0.0) -> None:
        super().__init__(connection.fileno(), connection.fileno())
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.position = Position()
        self.end: str | None = None
        self._heard_at = now

    def is_silent(self, now: float) -> bool:
        """Return whether nothing was heard for too long."""
        return now - self._heard_at > LOST_SECONDS

    def hear(self, now: float) -> list[Message]:
        """Return the messages that have arrived. A fault in them is a `Fault`. Note positions and the end."""
        messages = []
        try:
            for message in self.receive():
                self._heard_at = now
                if "position" in message:
                    position = Position(**message["position"])
                    position.age = float(position.age)
                    self.position = position
                if "fault" in message:
                    message["fault"] = Fault(**message["fault"])
                messages.append(message)
        except EOFError:
            self.end = ""
        except (ValueError, TypeError) as error:
            self.end = f"sent a message that cannot be read ({type(error).__name__})"
        return messages
