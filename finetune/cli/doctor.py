"""`finetune doctor`: check the launch and the machine before a run."""

from __future__ import annotations

from finetune.cli.commands import Overrides
from finetune.cli.overrides import config_from_overrides
from finetune.cli.run_options import JsonOption


def doctor(overrides: Overrides = None, as_json: JsonOption = False) -> int:
    """Check the launch and the machine, and return the exit code. Collective under a launcher."""
    config = config_from_overrides(overrides or [], complete=False)

    from finetune.diagnose.doctor import diagnose

    return diagnose(config, as_json=as_json)
