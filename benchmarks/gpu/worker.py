"""A process that measures: it takes tasks from the session one by one, and answers with their figures."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu.session import Session


def serve(connection: Connection) -> None:
    """Run tasks until the session closes the connection, or one fails: a GPU may be unusable after that."""
    session = Session(**json.loads(connection.recv_bytes()))
    while True:
        try:
            task = json.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer: dict[str, Any] = {"figures": _run(session, task["function"], task["arguments"])}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        connection.send_bytes(json.dumps(answer).encode())
        if "error" in answer:
            return


def _run(session: Session, function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    module, _, name = function.partition(":")
    figures: dict[str, Any] = getattr(importlib.import_module(module), name)(session, **arguments)
    gc.collect()
    if session.device == "cuda":
        import torch

        torch.cuda.empty_cache()
    return figures


def _end_with_the_session() -> None:
    """End this process and all that it started when the session is gone, even if it was killed."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_session, daemon=True).start()
    serve(Connection(int(sys.argv[1])))
