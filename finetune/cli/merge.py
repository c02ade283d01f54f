"""`finetune merge`: a run's weights as a model folder of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from finetune.cli.alone import refuse_company
from finetune.cli.run_options import BaseOption, CheckpointOption, RunFolderArgument
from finetune.runs.durable import in_units


def merge(
    run_folder: RunFolderArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not be there, or be empty.")],
    dtype: Annotated[
        Literal["base", "float32", "bfloat16", "float16"],
        typer.Option(help="The type to store weights in; base: the base model's."),
    ] = "base",
    max_difference: Annotated[
        float | None,
        typer.Option(help="The largest relative difference of logits. Default: what fits the type.", min=0),
    ] = None,
    base: BaseOption = None,
    checkpoint: CheckpointOption = None,
) -> None:
    """Write a run's model for transformers alone: merged, reloaded in a fresh process, compared."""
    from finetune.export.out_folder import refuse_taken
    from finetune.export.run_to_ship import read_run
    from finetune.logs import configure_logs

    refuse_company("merge")
    configure_logs(rank=0)
    refuse_taken(out)
    run = read_run(run_folder, base=base, checkpoint=checkpoint)

    import torch

    from finetune.export.merged_folder import write_merged

    stored_as = None if dtype == "base" else getattr(torch, dtype)
    merged = write_merged(run, out, dtype=stored_as, most_difference=max_difference)
    embeddings = "embeddings tied" if merged.is_tied else "embeddings not tied"
    sys.stdout.write(
        f"Written to {out}: {in_units(merged.num_bytes)} of weights as {merged.dtype}, {embeddings}, "
        f"stop ids {merged.stop_ids}\n"
        f"Reloaded by transformers alone, against {'the run' if run.is_full else 'base and adapter'}: "
        f"{merged.difference}\n"
        f"Next: finetune export {out} GGUF_FOLDER --gguf, or finetune push {out} OWNER/NAME\n"
    )
