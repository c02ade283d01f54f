"""Keep the state of a launch while another one is open inside it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from finetune.distributed.accelerate_library import copy_accelerate, restore_accelerate
from finetune.engine.fused import is_fused, replays_answers, switch_fused, switch_replays
from finetune.logs import PACKAGE


def copy_state() -> Callable[[], None]:
    """Return a function that restores what a launch sets for the whole process."""
    accelerate, fused, replays = copy_accelerate(), is_fused(), replays_answers()
    logger = logging.getLogger(PACKAGE)
    level, handlers = logger.level, list(logger.handlers)

    def restore() -> None:
        restore_accelerate(accelerate)
        switch_fused(fused)
        switch_replays(replays)
        logger.handlers = handlers
        logger.setLevel(level)

    return restore
