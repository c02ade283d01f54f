"""Let a call of `os._exit` in a function of the user's fail, where it would end the program with that exit code."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn


def without_exit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in whose thread os._exit raises an error. It may run code that a model wrote."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        leave, own = os._exit, (os.getpid(), threading.get_ident())

        def refuse(status: int) -> NoReturn:
            if own != (os.getpid(), threading.get_ident()):  # a forked child, or a thread of this program
                leave(status)
            raise RuntimeError(f"it called os._exit({status})")

        os._exit = refuse
        try:
            return function(*arguments, **named)
        finally:
            os._exit = leave

    return call
