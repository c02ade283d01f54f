import resource
import socket
import threading

import psutil
import pytest

from finetune.distributed.environment import LaunchEnvironment
from finetune.distributed.network import (
    NO_STORE,
    address_of_rank_0,
    allow_connections,
    interface_towards,
    is_loopback,
    is_own_address,
    listening_address,
    open_listener,
    own_address_towards,
    probe_store,
)


def test_the_way_to_this_machine_is_loopback():
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
    name = interface_towards("localhost")
    assert name in psutil.net_if_addrs()
    assert any(entry.address in ("127.0.0.1", "::1") for entry in psutil.net_if_addrs()[name])
    for find in (own_address_towards, interface_towards):
        assert find("no-such-host.invalid") is None


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


def place(master_addr, *, is_one_machine):
    return LaunchEnvironment(
        launcher="slurm",
        rank=0,
        local_rank=0,
        world_size=2,
        local_world_size=2,
        master_addr=master_addr,
        master_port=29500,
        is_one_machine=is_one_machine,
    )


def own_addresses_on_the_network():
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    return [e.address for e in entries if e.family == socket.AF_INET and not is_loopback(e.address)]


def test_ranks_on_one_machine_find_rank_0_on_loopback():
    own = [socket.gethostname(), *own_addresses_on_the_network()]
    for address in (name for name in own if is_own_address(name)):
        assert address_of_rank_0(place(address, is_one_machine=True)) == "127.0.0.1"
        assert address_of_rank_0(place(address, is_one_machine=False)) == address
    assert address_of_rank_0(place("192.0.2.1", is_one_machine=True)) == "192.0.2.1", "not of this machine"
    assert address_of_rank_0(place("127.0.0.5", is_one_machine=True)) == "127.0.0.5"


def test_rank_0_listens_where_others_look_for_it():
    for host in ("localhost", "127.0.0.1", "127.0.0.5", *own_addresses_on_the_network()):
        address = listening_address(host)
        assert address == ("127.0.0.1" if host == "localhost" else host)
        with open_listener(address) as listener:
            assert listener.getsockname()[0] == address


def test_rank_0_says_that_it_listens_on_all_interfaces(caplog):
    """The address of a load balancer leads here, but is not of this machine."""
    listening_address.cache_clear()
    with caplog.at_level("INFO", logger="finetune"):
        assert [listening_address("192.0.2.77") for _ in range(2)] == ["", ""]
    (message,) = caplog.messages
    assert "rank 0 listens on all interfaces, because MASTER_ADDR (192.0.2.77) does not mean exactly one" in message
    with open_listener("") as listener, socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5):
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


def test_a_server_that_answers_something_else_is_no_store():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with server.accept()[0] as connection:
                connection.recv(64)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        assert probe_store("127.0.0.1", server.getsockname()[1]) == NO_STORE
        answering.join()
