"""Run EleutherAI's lm-evaluation-harness, an optional extra, on a finished run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import ConfigError, RunFailedError, extra_command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIP_COMMAND = extra_command("harness")

Results = Mapping[str, Mapping[str, Any]]
"""Figures by task, as the harness names them: `acc,none`, `acc_stderr,none`."""


def require_harness() -> None:
    """Check that the harness can be imported, before a model is loaded.

    Raises:
        ConfigError: it is not installed, or a package that it needs is missing.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError(
            f"--harness needs lm-evaluation-harness, which is not installed here. Install it with: {PIP_COMMAND}"
        )
    try:
        import lm_eval.evaluator
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:  # it does not declare all its dependencies
        raise ConfigError(
            f"--harness needs lm-evaluation-harness, which cannot be imported here: {error}. Install what it needs "
            f"with: {PIP_COMMAND}"
        ) from error


def run_harness(
    model: Any, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[str], *, batch_size: int, task_folder: Path | None
) -> Results:
    """Measure a placed model on tasks of the harness, with the tokenizer's chat template if it has one.

    `task_folder` has the descriptions of further tasks.

    Raises:
        ConfigError: the harness does not know a task.
        RunFailedError: the harness failed.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    known = TaskManager(include_path=None if task_folder is None else str(task_folder))
    unknown = [task for task in tasks if not known.match_tasks([task])]
    if unknown:
        raise ConfigError(
            f"--harness names {', '.join(unknown)}, which this lm-evaluation-harness does not know. `lm-eval ls tasks` "
            "lists its tasks; --harness-tasks names a folder with your own."
        )
    try:
        output = simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
            tasks=list(tasks),
            task_manager=known,
            apply_chat_template=tokenizer.chat_template is not None,
            log_samples=False,
            bootstrap_iters=0,
        )
    except Exception as error:  # tasks download data and contain code
        raise RunFailedError(f"lm-evaluation-harness failed on {', '.join(tasks)}: {error!r}") from error
    results: Results = output["results"]
    return results
