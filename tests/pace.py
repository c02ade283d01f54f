"""Limits on processor time that mean the same on a slow or busy machine as on a fast and idle one."""

from __future__ import annotations

import json
import time

_WORK_SECONDS = 0.02
"""What `_work` takes on a core on which `finetune --help` takes 0.35 s."""


def processor_limit(seconds: float) -> float:
    """
    `seconds` on a fast and idle core, in seconds of this one as it is now: a slow core, or one that shares its caches
    with another process, takes several times as long for the same work. Call it right after the work that is limited.
    """
    return seconds * max(1.0, _work() / _WORK_SECONDS)


def _work() -> float:
    started = time.process_time()
    row = {"messages": [{"role": "user", "content": "How much is left?"}] * 8}
    for _ in range(2000):
        assert json.loads(json.dumps(row)) == row
    return time.process_time() - started
