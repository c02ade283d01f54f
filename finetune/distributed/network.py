"""Find the addresses and interfaces under which other nodes reach this machine, and what listens at an address."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import struct
from contextlib import suppress
from functools import cache

from finetune.distributed.environment import DEFAULT_MASTER_ADDR, LaunchEnvironment

_log = logging.getLogger(__name__)

_OWN_FILES = 512
_CONNECTIONS_PER_RANK = 4


def allow_connections(world_size: int) -> None:
    """Raise this process's limit of open files, if necessary, for connections to all ranks.

    A limit of 1,024 is common. Rank 0's store has a connection to each rank, and so has each of gloo's groups on every
    rank: the world's, one more beside nccl, and two of hybrid sharding.
    """
    needed = _OWN_FILES + _CONNECTIONS_PER_RANK * world_size
    most = allow_open_files(needed)
    if most < needed:
        _log.warning(
            "[Distributed] this process may open at most %d files, and %d ranks may need %d. If connections fail, "
            "raise the hard limit (ulimit -Hn, LimitNOFILE= of a service, --ulimit nofile= of a container).",
            *(most, world_size, needed),
        )


def allow_open_files(number: int | None = None) -> int:
    """Raise this process's limit of open files to a number, or as far as the system allows; return how far that is."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return number or 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = number or hard
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    if soft != resource.RLIM_INFINITY and (soft < most or most == resource.RLIM_INFINITY):
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def is_loopback(host: str) -> bool:
    """Return whether an address means each machine itself. The only name that is known here is ``localhost``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_of_rank_0(environment: LaunchEnvironment) -> str:
    """Return the address at which the ranks find rank 0: a loopback address if all of them are on this machine."""
    host = environment.master_addr
    is_here = environment.is_one_machine and not is_loopback(host) and is_own_address(host)
    return DEFAULT_MASTER_ADDR if is_here else host


@cache  # the log line once
def listening_address(host: str) -> str:
    """Return the address on which rank 0 listens for ranks that look for it at `host`; empty: on all interfaces."""
    addresses = {place[0] for *_, place in _resolve(host)}
    if is_loopback(host):
        return DEFAULT_MASTER_ADDR if host == "localhost" else host
    if len(addresses) == 1 and not is_loopback(address := addresses.pop()) and is_own_address(address):
        return address
    _log.info(
        "[Distributed] rank 0 listens on all interfaces, because MASTER_ADDR (%s) does not mean exactly one address "
        "of this machine that others can reach. Use a network that you trust",
        host,
    )
    return ""


def open_listener(address: str, port: int = 0) -> socket.socket:
    """Listen at an address of this machine, or on all interfaces if it is empty; port 0 means any free port."""
    if not address and socket.has_dualstack_ipv6():
        with suppress(OSError):  # compiled in, but switched off
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def own_name_is_loopback() -> bool:
    """Return whether this machine resolves its own name to 127.x, as Debian and Ubuntu set it up."""
    try:
        return is_loopback(socket.gethostbyname(socket.gethostname()))
    except OSError:
        return False


def own_addresses(master_addr: str) -> list[str]:
    """Return addresses under which other ranks may reach this machine, rank 0's, the likeliest first."""
    if is_loopback(master_addr):
        return ["127.0.0.1"]
    towards = own_address_towards(master_addr)
    return list(dict.fromkeys([master_addr, *([towards] if towards else []), socket.gethostname()]))


def is_own_address(host: str) -> bool:
    """Return whether an address or name belongs to this machine: only then can a socket be bound to it."""
    for family, socket_type, protocol, _, place in _resolve(host):
        with socket.socket(family, socket_type, protocol) as probe:
            try:
                probe.bind((place[0], 0, *place[2:]))  # any free port: low ones are root's alone
            except OSError:
                continue
            return True
    return False


def own_address_towards(host: str) -> str | None:
    """Return this machine's address on the way to `host`, from the routing table; None if there is no route."""
    for family, socket_type, protocol, _, place in _resolve(host):
        with socket.socket(family, socket_type, protocol) as probe:
            try:
                probe.connect(place)  # of a datagram socket: it asks the routing table, and sends nothing
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def interface_towards(host: str) -> str | None:
    """Return the name of this machine's network interface on the way to `host`; None if it is unknown.

    gloo takes the interface of the machine's own name, which on many systems means 127.0.1.1: no other node reaches it.
    """
    address = own_address_towards(host)
    if address is None:
        return None
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in entries):
            return str(name)
    return None


PROBE_SECONDS = 2.0
NO_STORE = "something other than a torch store listens there"


def probe_store(host: str, port: int, seconds: float = PROBE_SECONDS) -> str | None:
    """Return what is wrong at an address; None if a torch store answers there within the seconds.

    torch's own client is no such probe: with another server it prints its C++ stack and tries again, and with a silent
    one it waits forever.

    A store echoes the four bytes behind a ping: torch/csrc/distributed/c10d/TCPStore.cpp, VALIDATE = 0 with the magic
    number of TCPStoreBackend.hpp, PING = 13. `tests/distributed/test_rendezvous.py` tries it on the installed torch.
    """
    nonce = os.urandom(4)
    try:
        connection = socket.create_connection((host, port), timeout=min(seconds, PROBE_SECONDS))
    except (socket.gaierror, UnicodeError):  # UnicodeError: not a valid name, for example node..1
        return f"the name {host} cannot be resolved here"
    except OSError as error:
        return error.strerror or "no answer"
    with connection:
        try:
            connection.settimeout(seconds)
            connection.sendall(struct.pack("<BIB", 0, 0x3C85F7CE, 13) + nonce)
            answer = connection.recv(4)
        except OSError:
            answer = b""
    return None if answer == nonce else NO_STORE


def _resolve(host: str) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)  # type: ignore[return-value]
    except (socket.gaierror, UnicodeError):
        return []
