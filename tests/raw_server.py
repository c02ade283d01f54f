"""A server on loopback that sends exactly the bytes that a test gives it, and at the pace that the test gives."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

Answer = bytes | Callable[[Any], Iterable[bytes]]
"""Bytes to send, or a function that gets the fields of the request and yields the bytes one piece after the other."""


def http(body: object, *, status: str = "200 OK", headers: str = "") -> bytes:
    """Return an HTTP answer: JSON for a value, or a body of bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n{headers}\r\n".encode() + content


def drip(start: bytes, *, every_seconds: float = 0.05, byte: bytes = b" ") -> Callable[[Any], Iterator[bytes]]:
    """Send some bytes, then one byte at a time without an end."""

    def pieces(_: Any) -> Iterator[bytes]:
        yield start
        while True:
            time.sleep(every_seconds)
            yield byte

    return pieces


class RawServer(socketserver.ThreadingTCPServer):
    """Answers each path as `answers` says, and any other path with 404. Counts the bytes that it could send."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []
        self.sent = 0

    def handle_error(self, *_: object) -> None:
        pass


class _Handler(socketserver.StreamRequestHandler):
    server: RawServer

    def handle(self) -> None:
        path, length = self.rfile.readline().split()[1].decode(), 0
        while (line := self.rfile.readline()).strip():
            name, _, value = line.decode().partition(":")
            length = int(value) if name.lower() == "content-length" else length
        self.server.asked.append(path)
        fields = json.loads(self.rfile.read(length) or "null")
        answer = self.server.answers.get(path, http(b"no such path", status="404 Not Found"))
        for piece in [answer] if isinstance(answer, bytes) else answer(fields):
            with suppress(TimeoutError):
                self.wfile.write(piece)
            self.server.sent += len(piece)


@contextmanager
def raw_server() -> Iterator[RawServer]:
    """Serve until the end of the block."""
    with RawServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
