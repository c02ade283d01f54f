"""`finetune merge`, `finetune export` and `finetune push`: merge, convert and publish a run's weights."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from finetune.cli.run_options import (
    BaseOption,
    CheckpointOption,
    OptionRules,
    RunFolderArgument,
    SetOption,
    find_run_folder,
    refuse_password,
    refuse_several_processes,
)
from finetune.logs import configure_logs, importing, waiting
from finetune.signals import raise_at_once, stop_signals_go_to
from finetune.terminal import print_table, say
from finetune.units import counted, format_bytes

if TYPE_CHECKING:
    from finetune.export.compressed_folder import SchemeName
    from finetune.export.gguf import Exported, Gguf
    from finetune.export.model_card import Merged
    from finetune.export.onnx_served import OnnxType
    from finetune.inference.finished_run import FinishedRun

_QUANTIZED = ("q2_k", "q3_k_m", "q4_0", "q4_k_m", "q5_k_m", "q6_k")
_TYPES = {"--gguf": ("f32", "f16", "bf16", "q8_0", *_QUANTIZED), "--onnx": ("f32", "int4")}
"""The types of weights that each format can store."""
_log = logging.getLogger(__name__)
OutArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[OUT]",
        help="The folder to write. It must not exist, or be empty. Default: runs/a-gguf for runs/a, for example.",
    ),
]


def _beside(folder: Path, suffix: str) -> Path:
    """Return the default folder to write: runs/a-merged for runs/a."""
    folder = folder if folder.name.strip(".") else folder.resolve()
    return folder.with_name(f"{folder.name}-{suffix}")


def merge(
    run: str | Path,
    out: str | Path | None = None,
    *,
    dtype: Literal["base", "float32", "bfloat16", "float16"] = "base",
    max_difference: float | None = None,
    add_system: bool = False,
    base: str | None = None,
    checkpoint: str | None = None,
    overrides: Sequence[str] | Mapping[str, object] = (),
) -> Merged:
    """Merge a run's adapter into its base and compare the result, as `finetune merge` does. In one process.

    Args:
        run: the run's folder, or its name in `runs`.
        out: the folder to write; None: `runs/a-merged` for `runs/a`.
        dtype: the type to store weights in. This and the arguments after it are options of the command.
        max_difference: of logits, relative.
        add_system: to conversations without a system turn.
        base: another place of the base.
        checkpoint: a step or `latest`.
        overrides: keys of the run's configuration.

    Raises:
        FinetuneError: see its subclasses in `finetune.errors`.
    """
    from finetune.config.compose import overrides_of

    folder, options = find_run_folder(Path(run)), {"most_difference": max_difference, "adds_system": add_system}
    target = _beside(folder, "merged") if out is None else Path(out)
    return _merge(folder, target, overrides_of(overrides), dtype, base=base, checkpoint=checkpoint, **options)[1]


def _merge(
    folder: Path,
    out: Path,
    overrides: list[str],
    dtype: str,
    *,
    base: str | None,
    checkpoint: str | None,
    **options: Any,
) -> tuple[FinishedRun, Merged]:
    from finetune.export.out_folder import refuse_taken
    from finetune.inference.finished_run import find_run

    refuse_several_processes("merge")
    configure_logs(rank=0)
    refuse_taken(out)
    run = find_run(folder, overrides, base=base, checkpoint=checkpoint, is_alone=True)

    with importing():
        import torch

        from finetune.export.merge import write_merged

    stored_as = None if dtype == "base" else getattr(torch, dtype)
    with waiting("merging, and comparing the merged model with the run"):
        return run, write_merged(run, out, dtype=stored_as, **options)


def merge_command(
    run_folder: RunFolderArgument,
    out: OutArgument = None,
    dtype: Annotated[
        Literal["base", "float32", "bfloat16", "float16"],
        typer.Option(help="The type to store weights in. `base` takes the base model's."),
    ] = "base",
    max_difference: Annotated[
        float | None,
        typer.Option(help="The largest relative difference of logits. Default: a bound that fits the type.", min=0),
    ] = None,
    add_system: Annotated[
        bool,
        typer.Option(
            "--add-system",
            help="Let the chat template add the training rows' system turn to conversations without one.",
        ),
    ] = False,
    base: BaseOption = None,
    checkpoint: CheckpointOption = None,
    settings: SetOption = None,
) -> None:
    """Merge as the options say, and print how the merged model differs from the run."""
    out = out or _beside(run_folder, "merged")
    options = {"most_difference": max_difference, "adds_system": add_system}
    run, merged = _merge(run_folder, out, settings or [], dtype, base=base, checkpoint=checkpoint, **options)
    embeddings = "embeddings tied" if merged.is_tied else "embeddings not tied"
    say(
        f"Written to {out}: {format_bytes(merged.num_bytes)} of weights as {merged.dtype}, {embeddings}, "
        f"stop ids {merged.stop_ids}"
    )
    against = "the run" if run.is_full else "base and adapter"
    say(f"Reloaded by transformers alone, against {against}: {merged.difference}")
    say(f"Test vectors: {out}/test_vectors.json, SHA-256 {merged.vectors_sha256}")
    _say_system(out)
    say(f"Next: finetune verify {out}, finetune export {out} GGUF_FOLDER --gguf, or finetune push {out} OWNER/NAME")


def export(
    model_folder: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A folder that `finetune merge` wrote; with --lora, --compress, --imatrix or --smallest, a run's.",
            callback=find_run_folder,
        ),
    ],
    out: OutArgument = None,
    gguf: Annotated[bool, typer.Option("--gguf", help="Convert to GGUF with llama.cpp's converter.")] = False,
    lora: Annotated[
        bool, typer.Option("--lora", help="With --gguf: convert a run's adapter, and its base beside it.")
    ] = False,
    adapter_only: Annotated[bool, typer.Option("--adapter-only", help="With --lora: leave out the base.")] = False,
    llama_cpp: Annotated[Path | None, typer.Option(help="A checkout of llama.cpp. Default: LLAMA_CPP_DIR.")] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Build an ONNX model for onnxruntime-genai.")] = False,
    weight_type: Annotated[
        Literal["auto", "f32", "f16", "bf16", "q8_0", "q2_k", "q3_k_m", "q4_0", "q4_k_m", "q5_k_m", "q6_k", "int4"],
        typer.Option(
            "--type",
            metavar="TYPE",
            help="The type of the weights. With --gguf: f32, f16, bf16, q8_0, and by llama.cpp's quantizer q2_k, "
            "q3_k_m, q4_0, q4_k_m, q5_k_m or q6_k. With --onnx: f32 or int4. `auto` is the model's 16-bit type in a "
            "GGUF file, and f32 in an ONNX model.",
        ),
    ] = "auto",
    imatrix: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="For llama.cpp's quantizer: an importance matrix from N training rows of the run MODEL.",
            min=1,
        ),
    ] = None,
    smallest: Annotated[
        bool,
        typer.Option("--smallest", help="Keep the smallest file of all types that still answers as the run MODEL."),
    ] = False,
    keep: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="--smallest: the share of greedy answers that must equal the run's. Default: 0.99.",
            min=0,
            max=1,
        ),
    ] = None,
    compress: Annotated[
        Literal["fp8", "w8a8", "w4a16"] | None,
        typer.Option(metavar="SCHEME", help="Compress a run for vLLM with llm-compressor: fp8, w8a8 or w4a16."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(metavar="N", help="--compress: training rows for calibration. Default: 256.", min=1)
    ] = None,
    max_difference: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="--onnx: the largest relative difference of logits. Default: one that fits the type.",
            min=0,
        ),
    ] = None,
    allow_differences: Annotated[
        bool,
        typer.Option(
            "--allow-differences",
            help="Keep a model that its runtime serves differently from the run, or that reads chats as other tokens.",
        ),
    ] = False,
    base: Annotated[
        Path | None, typer.Option(help="The base's folder, for its tokenizer.model (Phi-3, Phi-3.5), and for --lora.")
    ] = None,
    modelfile: Annotated[bool, typer.Option("--modelfile/--no-modelfile", help="Write an Ollama Modelfile.")] = True,
    settings: SetOption = None,
) -> None:
    """Export a merged model for Ollama, with --gguf for llama.cpp, or with --onnx for onnxruntime-genai.

    With --compress, merge a run, compress it for vLLM, and compare the compressed model with the run.

    With --gguf --lora, export a run's adapter instead: OUT/adapter.gguf, OUT/base.gguf and OUT/Modelfile.

    With --smallest, try all types on a run from small to large, and keep the first that answers as the run does.
    """
    from finetune.export.out_folder import refuse_taken

    refuse_several_processes("export")
    rules = OptionRules(
        {
            "--gguf": gguf,
            "--onnx": onnx,
            "--compress": compress,
            "--rows": rows,
            "--lora": lora,
            "--adapter-only": adapter_only,
            "--llama-cpp": llama_cpp,
            "--base": base,
            "--set": settings or None,
            "--no-modelfile": not modelfile,
            "--max-difference": max_difference,
            "--allow-differences": allow_differences,
            f"--type {weight_type}": weight_type != "auto",
            "--imatrix": imatrix,
            "--smallest": smallest,
            "--keep": keep,
        }
    )
    every = (*_TYPES, "--compress", "--lora", f"--type {weight_type}")
    rules.exclude("--smallest", *every, because="--smallest tries all types and formats. Leave the others out.")
    rules.exclude("--lora", *map("--type {}".format, _QUANTIZED), because="merge the adapter, and export that folder.")
    rules.need("--imatrix", *map("--type {}".format, _QUANTIZED), "--smallest")
    rules.need("--keep", "--smallest")
    for option, others in (("--gguf", ("--onnx", "--compress")), ("--onnx", ("--compress",))):
        rules.exclude(option, *others, because="a folder has one format. Run finetune export twice.")
    rules.need("--rows", "--compress")
    rules.need(f"--type {weight_type}", *(option for option, types in _TYPES.items() if weight_type in types))
    for option in ("--llama-cpp", "--base"):
        rules.need(option, "--gguf", "--smallest")
    for option in ("--lora", "--no-modelfile"):
        rules.need(option, "--gguf")
    rules.need("--adapter-only", "--lora")
    rules.need("--set", "--lora", "--compress", "--imatrix", "--smallest")
    rules.need("--max-difference", "--onnx")
    rules.need("--allow-differences", "--gguf", "--onnx")
    configure_logs(rank=0)
    chosen = {"lora": lora, "gguf": gguf, "onnx": onnx, "smallest": smallest, compress or "ollama": True}
    out = out or _beside(model_folder, next(name for name, is_chosen in chosen.items() if is_chosen))
    refuse_taken(out)
    if compress is not None:
        _export_compressed(model_folder, out, compress, rows or 256, settings or [])
        return
    if onnx:
        int4_or_f32: OnnxType = "int4" if weight_type == "int4" else "f32"
        _export_onnx(model_folder, out, int4_or_f32, max_difference, allow_differences)
        return
    with importing():
        from finetune.export.compress import find_quantizer
        from finetune.export.gguf import Gguf, export_model, export_run, find_converter
        from finetune.export.gguf_lora import export_lora
        from finetune.inference.finished_run import find_run

    conversion, run = None, None
    if lora or smallest or imatrix is not None:
        run = find_run(model_folder, settings or [], is_alone=True)
    if gguf or smallest:
        converter, gguf_type = find_converter(llama_cpp, os.environ), "auto" if weight_type == "int4" else weight_type
        conversion = Gguf(converter=converter, weight_type=gguf_type, base=base, allows_differences=allow_differences)
        if smallest or gguf_type in _QUANTIZED:
            conversion = replace(conversion, quantizer=find_quantizer(converter.parent, run, imatrix))
    if smallest and run and conversion:
        _export_smallest(run, out, conversion, 0.99 if keep is None else keep)
        return
    with waiting(f"exporting to {out}"):
        if lora and run and conversion:
            exported = export_lora(run, out, gguf=conversion, with_base=not adapter_only, with_modelfile=modelfile)
        elif run and conversion:
            exported = export_run(run, out, gguf=conversion, with_modelfile=modelfile)
        else:
            exported = export_model(model_folder, out, gguf=conversion, with_modelfile=modelfile)
    _say_exported(exported, out, is_gguf=gguf)


def push(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A run's folder, or one that `finetune merge` wrote.", callback=find_run_folder
        ),
    ],
    repository: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="The repository on the hub.", callback=refuse_password)
    ],
    private: Annotated[bool, typer.Option("--private/--public", help="Whether a new repository is private.")] = True,
    base: Annotated[
        str | None,
        typer.Option(
            help="The hub id of the adapter's base, if the run loaded it from a local folder.", callback=refuse_password
        ),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a model of another base there.")] = False,
    message: Annotated[str, typer.Option(help="The commit's message.")] = "Upload with finetune",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent, and send nothing.")] = False,
) -> None:
    """Print the upload, then send it unless `dry_run` is set."""
    from finetune.export.push import build_package, plan_upload
    from finetune.export.push import upload_package as send

    refuse_several_processes("push")
    configure_logs(rank=0)
    upload = plan_upload(build_package(source, base=base), repository, private=private, replace=replace)
    say(str(upload))
    sys.stdout.flush()
    if dry_run:
        say("Nothing was sent.")
        return
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    with waiting(f"sending to {repository}"):
        sent = send(upload, message)
    say(f"Sent: {sent}")


def _say_exported(exported: Exported, out: Path, *, is_gguf: bool) -> None:
    """Print the files of a folder for llama.cpp or Ollama, and how to serve it."""
    files = [path for path in sorted(out.expanduser().iterdir()) if path.suffix == ".gguf" or path.name == "Modelfile"]
    say(f"Written to {out}: {', '.join(f'{path.name} ({format_bytes(path.stat().st_size)})' for path in files)}")
    _say_system(out)
    if exported.num_tensors is not None:
        say(f"The GGUF file holds {exported.num_tensors} tensors.")
    if is_gguf:
        say(exported.token_ids)
        say(f"Note: {exported.note}.") if exported.note else None
        say(f"Next: finetune verify {out}")
    if (out.expanduser() / "Modelfile").is_file():
        say(f"Next: cd {out} && ollama create my-model -f Modelfile")


def _say_system(out: Path, instead: str = ", or merge with --add-system") -> None:
    """Print the system turn of the training rows, if a server of this folder has to be sent it."""
    from finetune.export.system_turn import describe_system
    from finetune.export.vectors import VECTORS_FILE, read_vectors

    folder = out.expanduser()
    system = read_vectors(folder).system if (folder / VECTORS_FILE).is_file() else None
    if system is not None:
        say(f"Note: {describe_system(system)}. Send it with each conversation{instead}.")


def _export_onnx(
    model: Path, out: Path, weight_type: OnnxType, max_difference: float | None, allow_differences: bool
) -> None:
    from finetune.cli.verify import show_verified
    from finetune.export.onnx import export_onnx

    with waiting("building an ONNX model, and comparing it with the run"):
        verified = export_onnx(
            model, out, weight_type=weight_type, most_difference=max_difference, allows_differences=allow_differences
        )
    size = sum(path.stat().st_size for path in out.expanduser().glob("model.onnx*"))
    say(f"Written to {out}: an ONNX model of {format_bytes(size)}, matrices as {weight_type}")
    show_verified(verified)
    for mismatch in verified.mismatches:
        _log.warning("kept though it differs: %s", mismatch)
    say(f"Next: finetune verify {out}, or serve it (docs/tasks/serve.md)")


def _export_smallest(run: FinishedRun, out: Path, gguf: Gguf, keep: float) -> None:
    from finetune.errors import RequirementError
    from finetune.export.smallest import find_smallest

    with stop_signals_go_to(raise_at_once):  # SIGTERM too leaves no temporary file behind
        search = find_smallest(run, out, gguf, keep=keep)
    rows = []
    for tried in search.tries:
        change, share = f"{tried.loss / search.loss - 1:+.1%}", f"{tried.equal} of {search.num_answers}"
        holds = "yes, kept" if tried is search.kept else "yes" if tried.holds else "no"
        rows.append([tried.name, format_bytes(tried.size), f"{tried.loss:.4f}", change, share, holds])
    head = ("type", "size", "loss", "change", "equal answers", "holds")
    title = f"{run.folder.path}: loss {search.loss:.4f} on {counted(search.num_rows, 'validation row')}"
    print_table(head, rows, right=head[1:5], title=title)
    if search.kept is None:
        raise RequirementError(
            f"no type has {keep:.0%} equal greedy answers and a loss at most 1 % higher, so nothing was written to "
            f"{out}. Lower --keep, add --imatrix, or serve the merged folder."
        )
    say(f"Written to {out}, with its certificate. Next: finetune verify {out}")


def _export_compressed(
    model_folder: Path, out: Path, scheme: SchemeName, num_rows: int, settings: Sequence[str]
) -> None:
    from finetune.errors import ConfigError, RunFailedError
    from finetune.export.certificate import write_certificate
    from finetune.export.compress import export_compressed
    from finetune.export.vectors import VLLM_CERTIFICATE
    from finetune.export.verifying import refuse_differences, verify_folder
    from finetune.export.vllm_served import InVllm, limits_of_adapter
    from finetune.inference.finished_run import find_run

    run = find_run(model_folder, settings, is_alone=True)
    with waiting(f"compressing as {scheme}, and comparing the compressed model with the run"):
        compressed = export_compressed(run, out, scheme, num_rows)
    verified, verdict = None, "not run here"
    try:
        with waiting("comparing in vLLM"):
            verified = verify_folder(out, vllm=InVllm())
    except (ConfigError, RunFailedError) as error:
        reason = str(error)
    else:
        verdict = str(write_certificate(verified.folder / VLLM_CERTIFICATE, verified)["verdict"])
    rows = [*compressed.rows(), ["certificate in vLLM", "", verdict]]
    calibrated = f", calibrated on {compressed.num_rows} training rows" if compressed.num_rows else ""
    print_table(["", "run", scheme], rows, right=("run", scheme), title=f"{out} against {run.folder.path}{calibrated}")
    _say_system(out, instead="")
    for limit in [] if run.is_full else limits_of_adapter(run.weights):
        say(f"Note: {limit}. In {out}, the adapter is merged.")
    say(f"Stored as before: {', '.join(compressed.kept)}, embeddings and norms.")
    if compressed.losses is None:
        say("Note: the run has no validation split, so losses and answers were not compared.")
    if verified is None:
        say(f"Note: not run in vLLM: {reason}")
    else:
        refuse_differences(verified, verified.folder / VLLM_CERTIFICATE)
    say(f"Next: vllm serve {out}")
