"""Two nodes on one host: network namespaces with addresses, host names and a cable of their own."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from tests.launches import REPOSITORY

INTERFACE = "cable"
MASTER_PORT = 29400
"""Nobody else is in these namespaces: every port is free."""
_numbers = itertools.count()
_LAY_OVER = """
echo "$1" > /proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts
# No name server can be reached from here: asking one takes seconds.
if [ -e /etc/nsswitch.conf ]; then mount --bind "$3" /etc/nsswitch.conf; fi
shift 3 && exec "$@"
"""


class Node(NamedTuple):
    """One of the two."""

    namespace: str
    host: str
    address: str


def reason_against() -> str | None:
    """Why no namespaces can be made here, or None where they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces are made by root only"
    missing = [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found; apt-get install iproute2"
    name = f"finetune-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no network namespaces here: {tried.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


class TwoNodes:
    """Two nodes that reach each other over one cable and nothing else."""

    def __init__(self, nodes: tuple[Node, Node], folder: Path) -> None:
        self.nodes = nodes
        self._folder = folder

    def start(self, index: int, words: Sequence[str | Path], **variables: str) -> subprocess.Popen[str]:
        """Start a command on a node; its output and errors come back together."""
        node = self.nodes[index]
        files = (str(self._folder / node.host), str(self._folder / "nsswitch.conf"))
        inside = ("unshare", "--uts", "sh", "-e", "-c", _LAY_OVER, "sh", node.host, *files)
        return subprocess.Popen(
            ["ip", "netns", "exec", node.namespace, *inside, *map(str, words)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, words: Sequence[str | Path], seconds: float = 240.0, **variables: str) -> list[tuple[int, str]]:
        """The same command on both nodes; exit code and output of each. `%n` in a word stands for the node's number."""
        processes = [
            self.start(index, [str(word).replace("%n", str(index)) for word in words], **variables) for index in (0, 1)
        ]
        deadline = time.monotonic() + seconds
        try:
            return [self._finish(process, deadline - time.monotonic()) for process in processes]
        finally:
            self.end_all()

    def _finish(self, process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
        try:
            output, _ = process.communicate(timeout=max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            self.end_all()
            output = f"{process.communicate()[0]}\nstopped by the test, which would not wait longer"
        return process.returncode, output

    def cut_cable(self) -> None:
        """No packet passes any more; no connection is closed."""
        _ip("-netns", self.nodes[0].namespace, "link", "set", INTERFACE, "down")

    def pids(self, index: int) -> list[int]:
        """Every process on a node."""
        return [int(pid) for pid in _ip("netns", "pids", self.nodes[index].namespace).split()]

    def end_all(self) -> None:
        """Kill every process on both nodes."""
        for pid in [*self.pids(0), *self.pids(1)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def torchrun(processes_per_node: int, *options: str) -> list[str]:
    """The command that starts both nodes' agents, which meet at the first node."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
        *("--nproc_per_node", str(processes_per_node), "--rdzv_backend", "c10d"),
        *("--rdzv_endpoint", f"node0:{MASTER_PORT}", "--rdzv_conf", "join_timeout=30", *options),
    ]


@contextmanager
def two_nodes(own_name: Literal["address", "loopback"] = "address") -> Iterator[TwoNodes]:
    """Make two nodes, 10.200.0.1 and 10.200.0.2, and remove them again with everything that runs there.

    Args:
        own_name: what a node's own name resolves to: its address, as on most clusters, or 127.0.1.1, as Debian and
            Ubuntu set it up.
    """
    prefix = f"finetune-{os.getpid()}-{next(_numbers)}"
    nodes = tuple(Node(f"{prefix}-{index}", f"node{index}", f"10.200.0.{index + 1}") for index in (0, 1))
    first, second = nodes
    with tempfile.TemporaryDirectory(prefix="finetune-nodes-") as folder:
        made = TwoNodes((first, second), Path(folder))
        Path(folder, "nsswitch.conf").write_text("hosts: files\n")
        try:
            for node in nodes:
                _write_hosts(Path(folder, node.host), nodes, node, own_name)
                _ip("netns", "add", node.namespace)
            peer = ("peer", "name", INTERFACE, "netns", second.namespace)
            _ip("-netns", first.namespace, "link", "add", INTERFACE, "type", "veth", *peer)
            for node in nodes:
                _ip("-netns", node.namespace, "address", "add", f"{node.address}/24", "dev", INTERFACE)
                for interface in ("lo", INTERFACE):
                    _ip("-netns", node.namespace, "link", "set", interface, "up")
            yield made
        finally:
            made.end_all()
            for namespace in _ip("netns", "list").split():
                if namespace.startswith(f"{prefix}-"):
                    _ip("netns", "delete", namespace)


def _write_hosts(file: Path, nodes: Sequence[Node], own: Node, own_name: str) -> None:
    addresses = {node.host: "127.0.1.1" if node is own and own_name == "loopback" else node.address for node in nodes}
    file.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {host}\n" for host, address in addresses.items()))


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
