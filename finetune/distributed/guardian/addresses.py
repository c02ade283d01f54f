"""Where rank 0's guardian listens, and the names by which the others may find it."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress


def listen(*, only_here: bool) -> socket.socket:
    """A socket at a free port, of this machine alone or of all its addresses."""
    if only_here:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # compiled in, but switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def is_loopback(address: str) -> bool:
    """Whether all ranks must be on this machine, so that no one else needs to reach the hub."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def own_addresses(master_addr: str) -> list[str]:
    """Names by which other nodes may reach this one, the likeliest first."""
    if is_loopback(master_addr):
        return ["127.0.0.1"]
    addresses = [master_addr]
    with suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(master_addr, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # sends nothing: it asks the routing table
            addresses.append(str(probe.getsockname()[0]))
    addresses.append(socket.gethostname())
    return list(dict.fromkeys(addresses))
