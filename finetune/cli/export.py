"""`finetune export`: a merged folder for llama.cpp and Ollama."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from finetune.cli.alone import refuse_company
from finetune.runs.durable import in_units


def export(
    model_folder: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A folder that `finetune merge` wrote.", show_default=False)
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="The folder to write; it must not be there, or be empty.", show_default=False
        ),
    ],
    gguf: Annotated[bool, typer.Option("--gguf", help="Convert to GGUF with llama.cpp's converter.")] = False,
    llama_cpp: Annotated[
        Path | None,
        typer.Option(help="A checkout of llama.cpp. Default: LLAMA_CPP_DIR.", show_default=False),
    ] = None,
    gguf_type: Annotated[
        Literal["auto", "f32", "f16", "bf16", "q8_0"],
        typer.Option("--type", help="Of the GGUF file's weights; auto: the model's 16-bit type."),
    ] = "auto",
    base: Annotated[
        Path | None,
        typer.Option(help="The base's folder, for its tokenizer.model (Phi-3 and Phi-3.5).", show_default=False),
    ] = None,
    modelfile: Annotated[bool, typer.Option("--modelfile/--no-modelfile", help="Write an Ollama Modelfile.")] = True,
) -> None:
    """Write a merged model for Ollama, and with --gguf for llama.cpp: OUT/model.gguf and OUT/Modelfile."""
    from finetune.export.exported_folder import Gguf, export_model
    from finetune.export.gguf import find_converter
    from finetune.logs import configure_logs

    refuse_company("export")
    configure_logs(rank=0)
    wanted = Gguf(converter=find_converter(llama_cpp, os.environ), kind=gguf_type, base=base) if gguf else None
    exported = export_model(model_folder, out, gguf=wanted, with_modelfile=modelfile)
    listed = ", ".join(f"{name} ({in_units(size)})" for name, size in exported.files.items())
    sys.stdout.write(f"Written to {out}: {listed}\n")
    if exported.header is not None:
        sys.stdout.write(f"The GGUF file holds {exported.header.num_tensors} tensors.\n")
    if modelfile:
        sys.stdout.write(f"Next: cd {out} && ollama create my-model -f Modelfile\n")
