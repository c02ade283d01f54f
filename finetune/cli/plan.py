"""`finetune plan`: what a run will be and whether it fits."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence

from finetune.config.compose import load_config
from finetune.distributed.environment import is_first_process
from finetune.logs import configure_logs


def plan_from_words(
    words: Sequence[str], *, run: str | None, device: str | None = None, is_probed: bool = False, as_json: bool = False
) -> int:
    """Say what a run will be. Under a launcher the first process does it for all.

    Args:
        words: as for `finetune train`.
        run: a run file.
        device: one by name, in place of the one at hand.
        is_probed: measure a few steps for the time.
        as_json: write the figures as JSON.

    Returns:
        The exit code: 0, or 2 where the run does not fit (strict: or there is a warning).
    """
    config = load_config(words, run=run)
    if not is_first_process(os.environ):
        return 0
    configure_logs(0, level=logging.ERROR)  # what matters is among the findings

    from finetune.diagnose.plan import make_plan
    from finetune.diagnose.plan_devices import find_device, read_device
    from finetune.findings import exit_code

    where = find_device(config.training.device) if device is None else read_device(device)
    plan = make_plan(config, where, is_probed=is_probed)
    code = exit_code(plan.findings, strict=config.strict)
    if as_json:
        sys.stdout.write(json.dumps({**plan.as_record(), "exit_code": code}) + "\n")
    else:
        from rich.console import Console

        from finetune.diagnose.plan_text import show_plan

        show_plan(plan, Console())
    sys.stdout.flush()
    return code
