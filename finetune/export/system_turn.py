"""The system turn of the training rows, which a model has learned to see and which no server adds."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from finetune.config.config_files import SHIPPED_PREFIX, is_address, is_list_or_glob
from finetune.config.schema import as_list
from finetune.data.values import quote
from finetune.errors import ConfigError
from finetune.export.model_card import hub_id
from finetune.inference.finished_run import FinishedRun
from finetune.inference.opening import recorded_opening, usual_opening

_log = logging.getLogger(__name__)


def usual_system(run: FinishedRun) -> str | None:
    """Return the system turn of most training rows; None if they differ, have none, or cannot be read."""
    section, recorded = run.config.data, recorded_opening(run)
    sources = section.mixture or [{"path": section.path or section.train}]
    paths = [path for source in sources for path in as_list(source.get("path") or source.get("train")) or [""]]
    paths += [path for source in sources for path in as_list(source.get("train", section.train)) if is_address(path)]
    # Of a data set on the hub only the first rows are read. Other rows that are elsewhere would be copied as a whole.
    others = [path for path in paths if not (path.startswith(SHIPPED_PREFIX) or is_list_or_glob(path))]
    if recorded or all(Path(path).expanduser().exists() or hub_id(path) for path in others):
        usual = usual_opening(section, run.config.objective.reads, recorded)
        return usual.system if usual.num_with_system > usual.num_rows / 2 else None
    _log.info("the training rows are not on this machine, so it is not known whether they have a system turn")
    return None


def describe_system(system: str) -> str:
    """Return a sentence, without its full stop, about a system turn that the chat template does not add."""
    return f"most training rows begin with the system turn {quote(system)}, which a server does not add"


def with_default_system(template: object, system: str | None) -> str:
    """Return a chat template that opens conversations without a system turn with this one.

    Raises:
        ConfigError: there is no template or no system turn.
    """
    if not isinstance(template, str) or not system:
        raise ConfigError(
            "--add-system writes the system turn of the training rows into the chat template, but there is "
            f"{'no system turn that most of them have' if template else 'no chat template'}. Leave out --add-system."
        )
    # A literal of Jinja: like JSON, but without its escapes of characters beyond the first 65,536.
    turn = json.dumps({"role": "system", "content": system}, ensure_ascii=False)
    condition = "not messages or messages[0]['role'] not in ['system', 'developer']"
    return f"{{%- if {condition} %}}{{%- set messages = [{turn}] + messages %}}{{%- endif %}}{template}"
