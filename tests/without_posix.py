"""Run commands of finetune in a process that lacks what Windows lacks.

    python -m tests.without_posix COMMAND ... [--then COMMAND ...]

Other packages are imported before, because each of them has its own way on Windows, and none of these is here.
`msvcrt`, which Windows has instead of `fcntl`, is here one function on top of flock.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import types

MODULES = ("grp", "pwd", "resource", "syslog", "termios", "tty")
SIGNALS = (
    "ALRM",
    "CHLD",
    "CONT",
    "HUP",
    "KILL",
    "PIPE",
    "QUIT",
    "STOP",
    "TSTP",
    "TTIN",
    "TTOU",
    "USR1",
    "USR2",
    "WINCH",
)
FUNCTIONS = (
    *("chown", "fork", "forkpty", "fchmod", "getegid", "geteuid", "getgid", "getgroups", "getloadavg", "getpgid"),
    *("getpgrp", "getsid", "getuid", "killpg", "mkfifo", "nice", "openpty", "posix_fallocate", "posix_spawn", "pread"),
    *("pwrite", "register_at_fork", "sched_getaffinity", "set_blocking", "setpgid", "setsid", "tcgetpgrp", "ttyname"),
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK"),
)


def locking(descriptor: int, mode: int, num_bytes: int) -> None:
    """Lock a file as Windows locks a byte of it: a lock that another handle has is a PermissionError."""
    assert (mode, num_bytes) == (2, 1)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PermissionError(error.errno, "Permission denied") from None


def lock_as_windows() -> None:
    """Replace `fcntl` by `msvcrt`."""
    sys.modules["fcntl"] = None  # type: ignore[assignment]  # an import of it is an ImportError
    msvcrt = types.ModuleType("msvcrt")
    vars(msvcrt).update(LK_NBLCK=2, locking=locking)
    sys.modules["msvcrt"] = msvcrt


def block() -> None:
    """Take away these modules, signals and functions."""
    lock_as_windows()
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in SIGNALS:
        if hasattr(signal, f"SIG{name}"):
            delattr(signal, f"SIG{name}")
    for name in FUNCTIONS:
        if hasattr(os, name):
            delattr(os, name)


def main() -> None:
    """Import other packages, block, and run the command."""
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import psutil  # noqa: F401
    import rich.console  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401
    import transformers  # noqa: F401

    assert "finetune" not in sys.modules
    block()
    from finetune.cli import main as run_command

    for command in " ".join(sys.argv[1:]).split(" --then "):
        try:
            run_command(command.split())
        except SystemExit as ended:
            if ended.code:
                raise


if __name__ == "__main__":
    main()
