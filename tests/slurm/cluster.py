"""A Slurm cluster on one host: a controller and several nodes, all in one folder, without systemd.

Every daemon is Slurm's own; their files, ports and the nodes' host names are the cluster's. Nothing outside the folder
is written: nodes read their host names from a file that is laid over /etc/hosts for them alone.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.launches import wait_until

NODES = ("n1", "n2", "n3")
CPUS_PER_NODE = 2
PARTITION = "tests"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "setpriv", "unshare", "mount")
_START_SECONDS = 30.0
_STOP_SECONDS = 10.0
_CONFIGURATION = """
ClusterName=finetune
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
# A world's port follows from the job's number: two clusters on one host should not count from the same one.
FirstJobId={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# A container has neither systemd nor cgroups of its own to give to a job.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0
# The nodes announce CPUs that this host may not have.
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName={partition} Nodes={names} Default=YES MaxTime=10 State=UP
"""


def reason_against() -> str | None:
    """Why no cluster can be started here, or None where one can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "a Slurm cluster is started by root only"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found; apt-get install slurm-wlm munge"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    return f"no mount namespaces here: {tried.stderr.strip()}" if tried.returncode else None


class Cluster:
    """The daemons of one folder, which is made, and removed in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def variables(self) -> dict[str, str]:
        """What srun, sbatch and scancel need to find this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons and wait until every node is idle."""
        (self.folder / "state").mkdir(parents=True)
        self.folder.chmod(0o755)
        self._write_files()
        folder = self.folder
        key, socket_file = folder / "munge.key", folder / "munge.socket"
        paths = (f"--{what}-file={folder / f'munged.{what}'}" for what in ("pid", "log", "seed"))
        self._spawn("munged", "munged", "--foreground", f"--key-file={key}", f"--socket={socket_file}", *paths)
        wait_until(socket_file.exists, "munged's socket", _START_SECONDS, self._last_words)
        self._spawn("slurmctld", "slurmctld", "-D", "-c")
        over_hosts = f'mount --bind {folder}/hosts /etc/hosts && exec "$@"'
        for name in NODES:
            (folder / f"spool-{name}").mkdir()
            in_namespace = ("unshare", "--mount", "--propagation", "private", "sh", "-c", over_hosts, "sh")
            self._spawn(f"slurmd-{name}", *in_namespace, "slurmd", "-D", "-N", name)
        wait_until(self._are_nodes_idle, "idle nodes", _START_SECONDS, self._last_words)

    def stop(self) -> None:
        """End every job and daemon, and remove the folder. Does nothing where there is none."""
        if not self.folder.exists():
            return
        if self._are_nodes_idle(any_state=True):
            self._call("scancel", f"--partition={PARTITION}")
            with suppress(TimeoutError):
                wait_until(lambda: not self._call("squeue", "--noheader"), "the end of all jobs", _STOP_SECONDS)
        for daemon in self._daemons:
            daemon.terminate()
        for daemon in self._daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(_STOP_SECONDS)
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.folder)

    def _write_files(self) -> None:
        ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE} Gres=gpu:2"
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        text = _CONFIGURATION.format(
            host=host,
            controller_port=ports[0],
            folder=self.folder,
            nodes="\n".join(nodes),
            partition=PARTITION,
            names=",".join(NODES),
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        # Two devices that every host has stand for GPUs, so that --gpus-per-node can be asked for. Nobody opens them.
        # Slurm would put their numbers into CUDA_VISIBLE_DEVICES, and they would be those of the host's real GPUs.
        gpus = (f"Name=gpu File={file} Flags=no_gpu_env\n" for file in ("/dev/null", "/dev/zero"))
        (self.folder / "gres.conf").write_text("".join(gpus))
        hosts = Path("/etc/hosts").read_text()
        (self.folder / "hosts").write_text(hosts + "".join(f"127.0.0.1 {name}\n" for name in NODES))
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    def _spawn(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.output").open("wb") as output:
            daemon = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],
                env={**os.environ, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
            )
        self._daemons.append(daemon)

    def _call(self, *command: str) -> str:
        try:
            done = subprocess.run(
                command, env={**os.environ, **self.variables}, capture_output=True, text=True, timeout=_STOP_SECONDS
            )
        except subprocess.TimeoutExpired:  # the controller does not answer
            return ""
        return done.stdout if done.returncode == 0 else ""

    def _last_words(self) -> str:
        outputs = {file.stem: file.read_text(errors="replace").splitlines() for file in self.folder.glob("*.output")}
        return "\n".join(f"{name}: {line}" for name, lines in sorted(outputs.items()) for line in lines[-3:])

    def _are_nodes_idle(self, *, any_state: bool = False) -> bool:
        if not (self.folder / "slurm.conf").exists():
            return False
        states = self._call("sinfo", "--noheader", "--Node", "--format=%t").split()
        return len(states) == len(NODES) and (any_state or set(states) == {"idle"})


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
