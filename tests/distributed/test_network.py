import socket

import psutil

from finetune.distributed.network import interface_towards, is_own_address, own_address_towards


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
