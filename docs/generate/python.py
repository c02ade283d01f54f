"""Make the reference of the Python interface from the docstrings."""

from __future__ import annotations

import finetune

_INTRODUCTION = """# Python

The names that `from finetune import …` offers. The recipes use no others but `finetune.config.Config`. Each is imported
when it is first used. `Collective` in a docstring means that every process of the launch must make that call.
"""
_BESIDE = {
    "The configuration": ["finetune.config.schema.Config"],
    "The runtime": [
        "finetune.distributed.runtime.Runtime",
        "finetune.distributed.collectives.Collectives",
        "finetune.distributed.placement.Placement",
        "finetune.distributed.liveness.Liveness",
        "finetune.distributed.stop_requests.StopRequests",
    ],
    "One optimizer step": ["finetune.training.step"],
    "Callbacks": [
        "finetune.training.hooks.ValidationResult",
        "finetune.training.hooks.SaveResult",
        "finetune.training.hooks.EndResult",
    ],
    "Results": [
        "finetune.inference.scores.Evaluation",
        "finetune.cli.generate.AnswerOfRun",
        "finetune.export.model_card.Merged",
    ],
    "Errors": ["finetune.errors"],
}


def python_page() -> str:
    """Return the page as markdown, which mkdocstrings fills."""
    parts = [_INTRODUCTION]
    for name in sorted(finetune._HOMES, key=str.lower):
        parts += [
            f"::: {finetune._HOMES[name]}.{name}\n    options: {{heading_level: 2, show_root_full_path: false}}\n"
        ]
    for title, objects in _BESIDE.items():
        parts += [f"## {title}\n", *(f"::: {name}\n" for name in objects)]
    return "\n".join(parts)
