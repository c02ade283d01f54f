"""Call functions of the user's own, such as metrics and reward functions: what they raise loses no step of a run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn

from finetune.errors import FinetuneError


@contextmanager
def saving_first() -> Iterator[None]:
    """Let the loop save the steps that are done before it ends with an error of this block.

    The block is in one of `Collectives.failing_together`, between two steps.
    """
    try:
        yield
    except FinetuneError as error:
        error.saves_first = True
        raise


def without_exit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in whose thread os._exit raises an error. Otherwise it would end the program.

    The function may run code that a model wrote.
    """

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
