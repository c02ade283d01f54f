"""Import everything once, then fork off a process for each request of `client.py`, until stdin ends.

    python -P server.py SOCKET PROGRAM [MODULES…]

A request is what an interpreter is started with: words, folder, variables and streams. One whose variables a library
may have read as it was imported is sent back, for a process of its own. With MODULES it is in another environment, of
vLLM for example: tests change no variables of what is started there, and what that starts has those that it has set.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import marshal
import multiprocessing
import os
import platform
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

_IMPORTED = """
    accelerate.commands.utils accelerate.utils.launch torch.distributed.elastic.multiprocessing.api
    torch.distributed.elastic.agent.server.local_elastic_agent torch.distributed.elastic.rendezvous.registry
    torch.distributed.launcher.api torch.distributed.elastic.rendezvous.c10d_rendezvous_backend
    transformers.models.phi3.modeling_phi3 transformers.models.phi.modeling_phi
    transformers.models.llama.modeling_llama transformers.models.auto.modeling_auto finetune.training.train
    finetune.cli.commands peft safetensors.torch transformers.generation.utils finetune.export.merge
    finetune.export.verifying finetune.inference.evaluation finetune.inference.generator finetune.diagnose.planner
    finetune.diagnose.rehearsal finetune.diagnose.doctor finetune.cli.overrides rich.console
    rich.table rich._unicode_data typer._click.decorators peft.utils.transformers_weight_conversion
    torch.profiler._cupti_monitor
""".split()
_MAY_DIFFER = """
    ARGUMENTS AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN CLICOLOR CLICOLOR_FORCE COLUMNS ENVIRONMENT FAULT FAULTY_PLAY
    FAULT_AT FORCE_COLOR GIT_PAGER GLOO_SOCKET_IFNAME GOMP_SPINCOUNT GPUS_PER_NODE HFI_NO_BACKTRACE HF_TOKEN HOSTNAME
    HUGGING_FACE_HUB_TOKEN IPATH_NO_BACKTRACE JOB_COMPLETION_INDEX LANG LINES LRU_CACHE_CAPACITY
    MALLOC_MMAP_THRESHOLD_ MASTER_ADDR MASTER_PORT MKL_NUM_THREADS MPLBACKEND NODES NODE_RANK NO_COLOR
    NUMEXPR_NUM_THREADS OLDPWD ONEDNN_PRIMITIVE_CACHE_CAPACITY OPENAI_API_KEY OPENBLAS_NUM_THREADS ORT_LIB_PATH PAGER
    PATH PROCESSES_PER_NODE PS1 PWD PYDEVD_USE_FRAME_EVAL PYTHONPATH PYTHONSAFEPATH PYTHONUNBUFFERED PYTHONWARNINGS
    RANK RENDEZVOUS ROOM_OF_RANK_1 SHLVL SHORT TERM TMPDIR TOKENIZERS_PARALLELISM TORCHINDUCTOR_CACHE_DIR VIRTUAL_ENV
    VIRTUAL_ENV_PROMPT WANDB_API_KEY WORLD_SIZE _
""".split()
"""Variables that no library reads as it is imported, or that mean nothing to one. The engine sets two of them.
The numbers of threads are 1, as OMP_NUM_THREADS says here, so no thread waits for another one. A test that is warm does
not look at memory. Torch sets TORCHINDUCTOR_CACHE_DIR when transformers imports it, always to the same folder."""
_MAY_DIFFER_FROM = tuple(
    "LOCAL_ GROUP_ ROLE_ TORCHELASTIC_ TORCH_NCCL_ ACCELERATE_ FSDP_ FINETUNE_ PYTEST_ SLURM_ _TORCHINDUCTOR_".split()
    + "MLFLOW_ _MLFLOW_ TRACKIO_ WANDB_".split()  # of packages that are not imported here
    + "SLURMD_ SRUN_ SBATCH_ JPY_ SKYPILOT_ OMPI_ PMIX_".split()
)
"""The beginnings of such names; torch.compile leaves one behind in the process that asked for it."""

_MOST_DESCRIPTORS = 100
_given = dict(os.environ)
"""Variables before anything was imported: some libraries set others."""


def main(address: str, program: str, *modules: str) -> None:
    sys.executable = program  # before an import reads it
    for name in modules or _IMPORTED:
        with suppress(ModuleNotFoundError):  # older libraries lack some of them
            importlib.import_module(name)
    if not modules:
        conversions = importlib.import_module("transformers.conversion_mapping")
        conversions.get_checkpoint_conversion_mapping("phi3")  # makes those of all models: a fifth of a short run
        importlib.import_module("finetune.config.render").schema_text()  # each run writes this text, always the same
        _know_the_modules_of_frames()
        _leave_the_ends_of_imports_out()
    multiprocessing.set_executable(program)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    woken, wake = socket.socketpair()
    for one in (woken, wake):
        one.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    events = selectors.DefaultSelector()
    for source in (listener, woken, sys.stdin):
        events.register(source, selectors.EVENT_READ)
    gc.collect()
    gc.freeze()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a fork would copy one of them"
    os.write(1, b"ready\n")
    clients: dict[int, socket.socket] = {}
    while True:
        for key, _ in events.select():
            if key.fileobj is sys.stdin:
                for process in clients:
                    os.kill(process, signal.SIGKILL)
                os._exit(0)  # torch takes long to go
            if key.fileobj is woken:
                with suppress(BlockingIOError):
                    woken.recv(1024)
                _collect(clients, events)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                client, *_ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                request = _receive(connection)
                if request is None:
                    connection.close()
                    continue
                is_served = bool(modules) or _is_served(request[0])
                process = os.fork() if is_served else 0
                if is_served and not process:
                    for own in (listener, woken, wake, connection, *clients.values()):
                        own.close()
                    events.close()
                    _become(*request, client)
                for fd in request[1].values():
                    os.close(fd)
                with suppress(OSError):
                    connection.sendall(process.to_bytes(8, "little", signed=True))
                if process:
                    clients[process] = connection
                    events.register(connection, selectors.EVENT_READ, process)
                else:
                    connection.close()
            elif key.data in clients:  # the client is gone: killed
                events.unregister(clients[key.data])
                clients.pop(key.data).close()
                with suppress(ProcessLookupError):
                    # A server is killed with its processes, whose group is not that of its client.
                    (os.killpg if modules else os.kill)(key.data, signal.SIGKILL)


def _know_the_modules_of_frames() -> None:
    """Fill a cache of `inspect`, with the files too that belong to no module, which it searches in vain each time.

    An agent of torchrun looks at all frames of its stack for each event of its rendezvous. Where this much is imported,
    the search takes nearly all of the agent's time.
    """
    inspect.stack()
    inspect.modulesbyfile |= {"<frozen runpy>": "runpy", __file__: "tests.warm.server"}


def _leave_the_ends_of_imports_out() -> None:
    """A fork that does nothing would spend two thirds of its time on them.

    They take down the operators of torch, and put together times of torch.compile that nobody reads.
    """
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    if (dynamo := sys.modules.get("torch._dynamo.utils")) is not None:
        atexit.unregister(dynamo.dump_compile_times)


def _receive(connection: socket.socket) -> tuple[Any, dict[int, int]] | None:
    head, descriptors, _, _ = socket.recv_fds(connection, 8 + _MOST_DESCRIPTORS, _MOST_DESCRIPTORS)
    if not head:
        return None
    left, data = int.from_bytes(head[:8], "little"), b""
    while len(data) < left:
        data += connection.recv(left - len(data))
    return marshal.loads(data), dict(zip(head[8:], descriptors, strict=True))


def may_differ(name: str) -> bool:
    """Whether a command may have another value of a variable than the process that has imported everything."""
    return name in _MAY_DIFFER or name.startswith(_MAY_DIFFER_FROM)


def _is_served(asked: Any) -> bool:
    variables = asked[2]
    differing = {name for name in {*variables, *_given} if variables.get(name) != _given.get(name)}
    unknown = sorted(name for name in differing if not may_differ(name))
    if unknown:
        print(f"for a process of its own, because of {', '.join(unknown)}: {asked[0][:5]}", file=sys.stderr, flush=True)
    return not unknown


def _collect(clients: dict[int, socket.socket], events: selectors.BaseSelector) -> None:
    """Tell the clients how their processes ended."""
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not process:
            return
        if (connection := clients.pop(process, None)) is not None:
            events.unregister(connection)
            with suppress(OSError):
                connection.sendall(status.to_bytes(8, "little", signed=True))
            connection.close()


def _become(asked: Any, streams: dict[int, int], client: int) -> None:
    """Be the process that the client asked for. Does not return."""
    words, folder, variables, ignored = asked
    code = 70
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        _take(streams)
        _enter_namespaces_of(client)
        os.chdir(folder)
        for name in _given:
            os.environ.pop(name, None)
        os.environ.update(variables)
        _renew_streams(is_unbuffered=words[0] == "-u" or bool(variables.get("PYTHONUNBUFFERED")))
        warnings.resetwarnings()
        for action in reversed([one for one in variables.get("PYTHONWARNINGS", "").split(",") if one]):
            warnings.simplefilter(action.partition(":")[0])  # type: ignore[arg-type]
        code = _run(words)
    except KeyboardInterrupt:
        _say_what_happened()
        _flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except SystemExit as end:
        code = _code_of(end)
    except BaseException:
        code = 1
        _say_what_happened()
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        _flush()
        os._exit(code)


def _enter_namespaces_of(client: int) -> None:
    """Have its network, host name and files, which are others on a node of `tests.two_nodes` or `tests.slurm`."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    for kind in ("net", "uts", "mnt"):
        if Path(f"/proc/{client}/ns/{kind}").readlink() != Path(f"/proc/self/ns/{kind}").readlink():
            with Path(f"/proc/{client}/ns/{kind}").open("rb") as namespace:
                if setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"the {kind} namespace of {client} cannot be entered")
    platform._uname_cache = None  # type: ignore[attr-defined]


def _take(given: dict[int, int]) -> None:
    """Let files that were received have the numbers that they had in the client."""
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _MOST_DESCRIPTORS + 1) for number, fd in given.items()}
    for fd in {0, 1, 2, *given.values()}:
        os.close(fd)
    for number, fd in moved.items():
        os.dup2(fd, number, inheritable=number <= 2)
        os.close(fd)


def _renew_streams(*, is_unbuffered: bool) -> None:
    """Streams know whether they are a terminal."""
    names = (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w"))
    for name, fd, mode in names:
        try:
            is_terminal = os.isatty(fd)
            by_line = name == "stderr" or is_terminal or is_unbuffered
            errors = "backslashreplace" if name == "stderr" else "strict"
            stream = open(fd, mode, buffering=1 if by_line else -1, encoding="utf-8", errors=errors, closefd=False)
            if is_unbuffered and mode == "w":
                stream.reconfigure(write_through=True)
        except OSError:  # it is closed
            stream = None  # type: ignore[assignment]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(words: list[str]) -> int:
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*entries, *(entry for entry in sys.path if entry not in entries and entry != str(_OWN_PATH))]
    sys.orig_argv = [sys.executable, *words]
    if words[0] == "-c":
        sys.argv = words[::2]
        exec(words[1], {"__name__": "__main__"})
        return 0
    is_safe = words[0] == "-P" or bool(os.environ.get("PYTHONSAFEPATH"))
    words = words[1:] if words[0] in ("-u", "-P") else words
    first = str(Path.cwd() if words[0] == "-m" else Path(words[0]).resolve().parent)
    if not is_safe:
        sys.path.insert(0, first)
    if words[0] == "-m":
        sys.argv = words[1:]
        # A module that the server has imported is none that this process has.
        warnings.filterwarnings("ignore", ".* found in sys.modules after import", RuntimeWarning)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    return 0


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _say_what_happened() -> None:
    kind, error, traceback = sys.exc_info()
    assert kind is not None
    assert error is not None
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, traceback
    with suppress(Exception):
        sys.excepthook(kind, error, traceback)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


_OWN_PATH = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    main(*sys.argv[1:])
