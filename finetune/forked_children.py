"""Let SIGTERM end the children that a function of the user's forks, such as the workers of a `multiprocessing.Pool`.

Python calls a handler of its own between two instructions. A child that blocks right after the signal came never calls
it, and `Pool.terminate` then waits for ever. Importing this module is enough.
"""

from __future__ import annotations

import os
import signal
import threading

from finetune.signals import after_fork_in_child, raise_at_once

_before_fork = threading.local()


def _hold_sigterm() -> None:
    """Let SIGTERM wait until a child has dropped the handler, because a fork forgets signals that came before."""
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _obey_sigterm() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    if getattr(handler, "__module__", None) == raise_at_once.__module__:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release_sigterm()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_sigterm, after_in_parent=_release_sigterm)
after_fork_in_child(_obey_sigterm)
