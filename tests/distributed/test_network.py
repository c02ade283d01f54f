import resource
import socket

import psutil
import pytest

from finetune.distributed.network import allow_connections, interface_towards, is_own_address, own_address_towards


def test_an_address_is_ours_or_not():
    assert is_own_address("127.0.0.1")
    assert is_own_address("localhost")
    assert not is_own_address("192.0.2.1")
    assert not is_own_address("no-such-host.invalid")


def test_no_port_that_only_root_may_bind_is_asked_for(monkeypatch):
    """An own address would look like another machine's to everybody else."""
    ports = []

    class Probe(socket.socket):
        def bind(self, place):
            ports.append(place[1])
            super().bind(place)

    monkeypatch.setattr(socket, "socket", Probe)
    assert is_own_address("127.0.0.1")
    assert ports == [0]


def test_the_way_to_this_machine_is_loopback():
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
    name = interface_towards("localhost")
    assert name in psutil.net_if_addrs()
    assert any(entry.address in ("127.0.0.1", "::1") for entry in psutil.net_if_addrs()[name])


def test_every_own_address_is_found_on_its_interface():
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET:
                assert interface_towards(entry.address) == name or entry.address.startswith("127.")


def test_there_is_no_way_to_a_name_that_nobody_knows():
    assert own_address_towards("no-such-host.invalid") is None
    assert interface_towards("no-such-host.invalid") is None


@pytest.fixture
def a_low_limit():
    """A soft limit of open files that many systems have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("a_low_limit")
def test_a_process_may_open_a_connection_to_each_rank(caplog):
    allow_connections(128)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
    allow_connections(200)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512 + 4 * 200
    assert not caplog.messages


@pytest.mark.usefixtures("a_low_limit")
def test_a_hard_limit_that_is_too_low_is_named(caplog, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    allow_connections(1024)
    (message,) = caplog.messages
    assert "may open at most 1024 files, and 1024 ranks may need 4608" in message
