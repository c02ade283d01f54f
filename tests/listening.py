"""Find the sockets on which processes listen, and attack them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Listener(NamedTuple):
    """A socket that waits for TCP connections."""

    pid: int
    address: str
    port: int

    @property
    def is_on_loopback(self) -> bool:
        """Whether only processes of this machine can connect to it."""
        return ipaddress.ip_address(self.address).is_loopback


def listeners_of(pids: Iterable[int]) -> list[Listener]:
    """The listening sockets of these processes, by their inodes in /proc/net/tcp and tcp6; none without /proc."""
    listening = {}
    for table in Path("/proc/net").glob("tcp*"):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # TCP_LISTEN
                host, port = fields[1].split(":")
                listening[f"socket:[{fields[9]}]"] = (_address(host), int(port, 16))
    found = []
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                place = listening.get(str(descriptor.readlink()))
            except FileNotFoundError:
                continue  # closed meanwhile
            if place is not None:
                found.append(Listener(pid, *place))
    return found


def _address(text: str) -> str:
    """The kernel prints an address as words of four bytes in the order of this machine."""
    words = [int(text[start : start + 8], 16).to_bytes(4, "little") for start in range(0, len(text), 8)]
    raw = b"".join(words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def attack(port: int, letters: Iterable[bytes], num_silent: int) -> list[socket.socket]:
    """Send each letter over a connection of its own. Return silent connections, which the caller closes."""
    for letter in letters:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.settimeout(0.2)
            try:
                connection.sendall(letter)
                connection.recv(1)
            except OSError:
                continue  # hung up, or silent
    return [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(num_silent)]
