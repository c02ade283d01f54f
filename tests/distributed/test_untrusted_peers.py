"""Peers that nobody trusts, at the sockets of a run that trains with several processes on one machine."""

from __future__ import annotations

import base64
import os
import pickle
import struct
import sys
import time
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from tests.launches import start_command
from tests.listening import attack, listeners_of
from tests.tiny_runs import random_model_words, write_base, write_rows

# Not warm: the workers of a warm launch are not its children, and would not be found.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="listening sockets are found in /proc"),
]


HELD = """
import os, time
from finetune import command, launch, load_config
def main(overrides):
    with launch(load_config(overrides)) as runtime:
        print(f"rank {runtime.rank} is ready\\n", end="", flush=True)
        while not os.path.exists("attacked"):
            time.sleep(0.05)
        print(f"rank {runtime.rank} got {runtime.collectives.sum([runtime.rank + 1.0])}\\n", end="", flush=True)
command(main)
"""
_MAGIC = struct.pack("<BI", 0, 0x3C85F7CE)
LETTERS = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    bytes(range(256)) * 1000,
    _MAGIC + bytes([1]) + struct.pack("<Q", 1 << 62),
    _MAGIC + bytes([1]) + struct.pack("<Q", 1) + b"x" + struct.pack("<Q", 1 << 40),
    _MAGIC + bytes([5]) + struct.pack("<Q", 1 << 60),
]
"""Garbage, and torch's own magic number with sizes that fit into no memory."""


class Payload:
    """What runs a command when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_processes_on_one_machine_listen_on_loopback_and_survive_untrusted_peers(tmp_path):
    script = tmp_path / "held.py"
    script.write_text(HELD)
    write_base(tmp_path / "tokenizer")
    write_rows(tmp_path / "rows")
    words = [*random_model_words(tmp_path / "tokenizer"), f"data.path={tmp_path / 'rows'}", "training.device=cpu"]
    process = start_command([sys.executable, script, *words, "parallel.num_processes=2"], cwd=tmp_path)
    try:
        lines = []
        while "".join(lines).count("is ready") < 2:  # both ranks write to one pipe, perhaps within a line
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        launcher = psutil.Process(process.pid)
        pids = [launcher.pid, *(child.pid for child in launcher.children(recursive=True))]
        listeners = listeners_of(pids)
        assert len(listeners) >= 3, "the store, and gloo on each rank"
        assert [found for found in listeners if not found.is_on_loopback] == []
        ports = {found.port for found in listeners}
        silent = [connection for port in ports for connection in attack(port, LETTERS, num_silent=50)]
        (store_port,) = (found.port for found in listeners if found.pid == launcher.pid)
        store = TCPStore("127.0.0.1", store_port, timeout=timedelta(seconds=5), wait_for_workers=False)
        names = [name for name in store.list_keys() if "torch.rendezvous" in name]
        for name in [*names, "torch.rendezvous.payload"]:
            store.set(name, base64.b64encode(pickle.dumps(Payload(tmp_path / "ran"))))
        time.sleep(1.0)
        assert names == [], "torch's elastic rendezvous unpickles its state"
        (tmp_path / "attacked").touch()
        output, _ = process.communicate(timeout=120)
        for connection in silent:
            connection.close()
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert output.count("got [3.0]") == 2, output
    assert not (tmp_path / "ran").exists()
