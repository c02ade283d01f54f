"""`finetune merge`, `finetune export` and `finetune push`: merge, convert and publish a run's weights."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from finetune.cli.run_options import (
    BaseOption,
    CheckpointOption,
    OptionRules,
    RunFolderArgument,
    SetOption,
    find_run_folder,
    giving_back_logs,
    read_run_arguments,
    refuse_password,
    refuse_several_processes,
)
from finetune.errors import ConfigError, RequirementError, RunFailedError
from finetune.logs import configure_logs, importing, waiting
from finetune.terminal import fold, print_table, say
from finetune.units import counted, format_bytes

if TYPE_CHECKING:
    from finetune.export.gguf import Exported
    from finetune.export.model_card import Merged
    from finetune.inference.finished_run import FinishedRun

_DTYPES = Literal["base", "float32", "bfloat16", "float16"]
_BASES = Literal["base", "nf4-dequantized"]
_QUANTIZED = ("q2_k", "q3_k_m", "q4_0", "q4_k_m", "q5_k_m", "q6_k")
_QUANTIZED_NAMES = f"{', '.join(_QUANTIZED[:-1])} or {_QUANTIZED[-1]}"
_CONVERTED = "f32, f16, bf16, q8_0, or auto, which is the model's 16-bit type"
_FORMER_FLAGS = {"--gguf": "gguf", "--onnx": "onnx", "--compress": "vllm", "--smallest": "smallest"}
"""The flags that chose a format before formats were commands."""
_log = logging.getLogger(__name__)
OutArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[OUT]",
        help="The folder to write. It must not exist, or be empty. Default: beside the run: runs/a-merged, runs/a-gguf",
    ),
]
SourceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run's folder, or its name in runs; or a folder that `finetune merge` wrote.",
        callback=find_run_folder,
    ),
]
LlamaCppOption = Annotated[Path | None, typer.Option(help="A checkout of llama.cpp. Default: LLAMA_CPP_DIR.")]
BaseFolderOption = Annotated[
    Path | None,
    typer.Option(help="A folder with tokenizer.model. Default: the model's own, or made from tokenizer.json."),
]
ImatrixOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Quantize with an importance matrix from N training rows of the run.", min=1),
]
AllowDifferencesOption = Annotated[
    bool,
    typer.Option(
        "--allow-differences",
        help="Keep a model that its runtime serves differently from the run, or that reads chats as other tokens.",
    ),
]
ModelfileOption = Annotated[bool, typer.Option("--modelfile/--no-modelfile", help="Write an Ollama Modelfile.")]


def _beside(folder: Path, suffix: str) -> Path:
    """Return the default folder to write: runs/a-merged for runs/a."""
    folder = folder if folder.name.strip(".") else folder.resolve()
    return folder.with_name(f"{folder.name}-{suffix}")


@giving_back_logs()
def merge(
    run: str | Path,
    out: str | Path | None = None,
    *,
    dtype: _DTYPES = "base",
    max_difference: float | None = None,
    add_system: bool = False,
    into: _BASES = "base",
    base: str | Path | None = None,
    checkpoint: str | int | None = None,
    overrides: Sequence[str] | Mapping[str, object] = (),
) -> Merged:
    """Merge a run's adapter into its base and compare the result, as `finetune merge` does. In one process.

    Args:
        run: the run's folder, or its name in `runs`.
        out: the folder to write; None: `runs/a-merged` for `runs/a`.
        dtype: the type to store weights in; `base`: that of the base model.
        max_difference: the largest relative difference between the logits of the merged model and those of the run;
            None: a bound that fits `dtype`.
        add_system: let the chat template add the training rows' system turn to conversations that have none.
        into: the base as it is on disk, or the 4-bit weights that a QLoRA run trained on.
        base: another place of the base.
        checkpoint: a step or `latest`.
        overrides: keys of the run's configuration.

    Raises:
        FinetuneError: see its subclasses in `finetune.errors`.
    """
    from finetune.config.python_values import overrides_of

    for name, value, argument in (("dtype", dtype, _DTYPES), ("into", into, _BASES)):
        if value not in (expected := get_args(argument)):
            raise ConfigError(f"merge: {name} is {value!r}; expected one of {', '.join(expected)}.")
    if max_difference is not None and not (isinstance(max_difference, (int, float)) and max_difference >= 0):
        raise ConfigError(f"merge: max_difference is {max_difference!r}; expected a number of at least 0.")
    if not isinstance(out, (str, os.PathLike, type(None))):
        raise ConfigError(f"merge: out is {out!r}; expected the path of a folder.")
    folder, base, checkpoint = read_run_arguments(run, base, checkpoint)
    target = _beside(folder, "merged") if out is None else Path(out)
    options: dict[str, Any] = {"most_difference": max_difference, "adds_system": add_system, "into": into}
    return _merge(folder, target, overrides_of(overrides), dtype, base=base, checkpoint=checkpoint, **options)[1]


def _merge(
    folder: Path,
    out: Path,
    overrides: list[str],
    dtype: str,
    *,
    base: str | None,
    checkpoint: str | None,
    into: str,
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

        from finetune.distributed.open_launches import open_launch
        from finetune.export.merge import write_merged
        from finetune.export.merge_effect import load_on_dequantized_base, measure_merge

    stored_as, load = None if dtype == "base" else getattr(torch, dtype), None
    if into != "base":
        load, options["note"] = load_on_dequantized_base, "merged into the dequantized 4-bit weights of the base"
    with open_launch(trains=False):  # refuses a second thread
        with waiting("merging, and comparing the merged model with the run"):
            merged = write_merged(run, out, dtype=stored_as, load=load, **options)
        if run.config.is_quantized:
            with waiting("measuring what merging changes"):
                effect = measure_merge(run, stored_as, load=load and partial(load, run))
            merged = replace(merged, effect=tuple(effect.sentences()))
    return run, merged


def merge_command(
    run_folder: RunFolderArgument,
    out: OutArgument = None,
    dtype: Annotated[
        _DTYPES,
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
    into: Annotated[
        _BASES,
        typer.Option(
            help="The weights to merge into. `nf4-dequantized`: the 4-bit weights that a QLoRA run trained on."
        ),
    ] = "base",
    base: BaseOption = None,
    checkpoint: CheckpointOption = None,
    settings: SetOption = None,
) -> None:
    """Merge as the options say, and print how the merged model differs from the run."""
    out = out or _beside(run_folder, "merged")
    options: dict[str, Any] = {"most_difference": max_difference, "adds_system": add_system, "into": into}
    run, merged = _merge(run_folder, out, settings or [], dtype, base=base, checkpoint=checkpoint, **options)
    embeddings = "embeddings tied" if merged.is_tied else "embeddings not tied"
    say(
        f"Written to {out}: {format_bytes(merged.num_bytes)} of weights as {merged.dtype}, {embeddings}, "
        f"stop ids {merged.stop_ids}"
    )
    against = "the run" if run.is_full else "base and adapter"
    say(f"Reloaded by transformers alone, against {against}: {merged.difference}")
    for sentence in merged.effect:
        say(f"{sentence[0].upper()}{sentence[1:]}.")
    say(f"Test vectors: {out}/test_vectors.json, SHA-256 {merged.vectors_sha256}")
    _say_system(out)
    from finetune.export.gguf_tokens import may_be_read_by_llama_cpp

    model = shlex.quote(str(out))
    exports = f", finetune export gguf {model} GGUF_FOLDER, or" if may_be_read_by_llama_cpp(out) else " or"
    say(f"Next: finetune verify {model}{exports} finetune push {model} OWNER/NAME")


def with_format(arguments: list[str], formats: Collection[str]) -> list[str]:
    """Return the arguments of `finetune export` with the format first. In the older form, flags choose the format.

    Raises:
        ConfigError: flags choose no format, or several.
    """
    if not arguments or arguments[0] in (*formats, "-h", "--help"):
        return arguments
    rest = [part for each in arguments for part in (each.split("=", 1) if each.startswith("--compress=") else [each])]
    chosen = [flag for flag in _FORMER_FLAGS if flag in rest]
    if len(chosen) > 1:
        raise ConfigError(
            f"{' and '.join(chosen)} cannot be given together: a folder has one format, and --smallest tries several. "
            "Run finetune export once for each: finetune export gguf RUN OUT."
        )
    if not chosen and not find_run_folder(Path(arguments[0])).exists():
        return arguments
    if not chosen and any(each.startswith("--") for each in rest):
        raise ConfigError(f"name a format before its options: finetune export {'|'.join(formats)} RUN OUT.")
    if not chosen and (out := next((each for each in rest[1:] if each in formats), None)):
        raise ConfigError(
            f"the format comes first: finetune export {shlex.join([out, rest[0]])}. For an Ollama Modelfile in a "
            f"folder {out}: finetune export {shlex.join(['ollama', rest[0], f'./{out}'])}."
        )
    name = "lora" if "--lora" in rest else _FORMER_FLAGS[chosen[0]] if chosen else "ollama"
    rest = [
        "--type" if each == "--compress" else each for each in rest if each not in ("--gguf", "--onnx", "--smallest")
    ]
    rest = [name, *(each for each in rest if each != "--lora")]
    now = f"finetune: the format comes first now: {shlex.join(['finetune', 'export', *rest])}"
    sys.stderr.write(f"{fold(now, sys.stderr, indent='  ')}\n")
    return rest


def _prepare(source: Path, out: Path | None, suffix: str) -> Path:
    """Return the folder to write, after the checks that every format makes first."""
    from finetune.export.out_folder import refuse_taken

    refuse_several_processes("export")
    configure_logs(rank=0)
    out = out or _beside(source, suffix)
    refuse_taken(out)
    return out


def _run_of(source: Path, settings: list[str] | None, *, is_needed: bool = False) -> FinishedRun | None:
    """Return the run in a folder; None if the folder is a merged model, unless the options need a run."""
    from finetune.config.config_files import SAVED_CONFIG
    from finetune.inference.finished_run import find_run

    is_needed = is_needed or bool(settings) or (source.expanduser() / SAVED_CONFIG).is_file()
    return find_run(source, settings or [], is_alone=True) if is_needed else None


@contextmanager
def _merged(source: Path, run: FinishedRun | None, out: Path) -> Iterator[Path]:
    """Return the merged folder to convert: `source`, or the run merged beside `out`."""
    from finetune.export.merge import merged_beside

    if run is None:
        yield source
    else:
        with merged_beside(run, out) as merged:
            yield merged.folder


def gguf_command(
    source: SourceArgument,
    out: OutArgument = None,
    weight_type: Annotated[
        Literal["auto", "f32", "f16", "bf16", "q8_0", "q2_k", "q3_k_m", "q4_0", "q4_k_m", "q5_k_m", "q6_k"],
        typer.Option(
            "--type", metavar="TYPE", help=f"{_CONVERTED}; llama.cpp's quantizer also writes {_QUANTIZED_NAMES}."
        ),
    ] = "auto",
    imatrix: ImatrixOption = None,
    llama_cpp: LlamaCppOption = None,
    base: BaseFolderOption = None,
    allow_differences: AllowDifferencesOption = False,
    modelfile: ModelfileOption = True,
    settings: SetOption = None,
) -> None:
    """Convert a model with llama.cpp's converter, and quantize it if the type asks for it."""
    rules = OptionRules({"--imatrix": imatrix, f"--type {weight_type}": True})
    rules.need("--imatrix", *map("--type {}".format, _QUANTIZED))
    out = _prepare(source, out, "gguf")
    with importing():
        from finetune.export.compress import find_quantizer
        from finetune.export.gguf import Gguf, export_model, find_converter
        from finetune.export.gguf_tokens import refuse_other_tokenizer
        from finetune.export.ollama import modelfile as text_of_modelfile
        from finetune.model.tokens import build_run_tokenizer

    run = _run_of(source, settings, is_needed=imatrix is not None)
    converter = find_converter(llama_cpp, os.environ)
    if run is not None:  # refuse a tokenizer or a chat template before minutes of merging
        refuse_other_tokenizer(tokenizer := build_run_tokenizer(run.config))
        if modelfile:
            text_of_modelfile(tokenizer, "./model.gguf", [])
    quantizer = find_quantizer(converter.parent, run, imatrix) if weight_type in _QUANTIZED else None
    gguf = Gguf(
        converter=converter,
        weight_type=weight_type,
        quantizer=quantizer,
        base=base,
        allows_differences=allow_differences,
    )
    with waiting(f"exporting to {out}"), _merged(source, run, out) as model:
        exported = export_model(model, out, gguf=gguf, with_modelfile=modelfile)
    _say_exported(exported, out)


def lora_command(
    run_folder: RunFolderArgument,
    out: OutArgument = None,
    weight_type: Annotated[
        Literal["auto", "f32", "f16", "bf16", "q8_0"],
        typer.Option("--type", metavar="TYPE", help=f"The type of the base's weights: {_CONVERTED}."),
    ] = "auto",
    adapter_only: Annotated[bool, typer.Option("--adapter-only", help="Leave out the base.")] = False,
    llama_cpp: LlamaCppOption = None,
    base: BaseOption = None,
    allow_differences: AllowDifferencesOption = False,
    modelfile: ModelfileOption = True,
    settings: SetOption = None,
) -> None:
    """Convert a run's adapter: OUT/adapter.gguf, OUT/base.gguf and OUT/Modelfile."""
    out = _prepare(run_folder, out, "lora")
    with importing():
        from finetune.export.gguf import Gguf, find_converter
        from finetune.export.gguf_lora import export_lora
        from finetune.inference.finished_run import find_run

    run = find_run(run_folder, settings or [], base=base, is_alone=True)
    converter = find_converter(llama_cpp, os.environ)
    gguf = Gguf(converter=converter, weight_type=weight_type, allows_differences=allow_differences)
    with waiting(f"exporting to {out}"):
        exported = export_lora(run, out, gguf=gguf, with_base=not adapter_only, with_modelfile=modelfile)
    _say_exported(exported, out)


def ollama_command(
    model_folder: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A folder that `finetune merge` wrote.", callback=find_run_folder)
    ],
    out: OutArgument = None,
) -> None:
    """Write a Modelfile that names the merged folder, which Ollama imports itself."""
    out = _prepare(model_folder, out, "ollama")
    with importing():
        from finetune.export.gguf import export_model

    with waiting(f"exporting to {out}"):
        exported = export_model(model_folder, out, gguf=None)
    _say_exported(exported, out)


def onnx_command(
    source: SourceArgument,
    out: OutArgument = None,
    weight_type: Annotated[
        Literal["auto", "f32", "int4"],
        typer.Option("--type", metavar="TYPE", help="The type of the weights: f32 or int4. `auto` is f32."),
    ] = "auto",
    max_difference: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="The largest relative difference of logits. Default: a bound that fits the type.",
            min=0,
        ),
    ] = None,
    allow_differences: AllowDifferencesOption = False,
    settings: SetOption = None,
) -> None:
    """Build an ONNX model, and compare it with the run in onnxruntime-genai."""
    out, stored_as = _prepare(source, out, "onnx"), weight_type if weight_type == "int4" else "f32"
    with importing():
        from finetune.cli.verify import show_verified
        from finetune.export.onnx import export_onnx
        from finetune.export.onnx_served import refuse_missing_packages

    refuse_missing_packages(builds=True)  # before the merge, which takes longer
    run = _run_of(source, settings)
    with waiting("building an ONNX model, and comparing it with the run"), _merged(source, run, out) as model:
        verified = export_onnx(
            model, out, weight_type=stored_as, most_difference=max_difference, allows_differences=allow_differences
        )
    size = sum(path.stat().st_size for path in out.expanduser().glob("model.onnx*"))
    say(f"Written to {out}: an ONNX model of {format_bytes(size)}, matrices as {stored_as}")
    show_verified(verified)
    for mismatch in verified.mismatches:
        _log.warning("kept though it differs: %s", mismatch)
    say(f"Next: finetune verify {shlex.quote(str(out))}, or serve it (docs/tasks/serve.md)")


def vllm_command(
    run_folder: RunFolderArgument,
    out: OutArgument = None,
    scheme: Annotated[
        Literal["fp8", "w8a8", "w4a16"],
        typer.Option("--type", metavar="TYPE", help="How linear layers are stored: fp8, w8a8 or w4a16."),
    ] = "fp8",
    num_rows: Annotated[
        int, typer.Option("--rows", metavar="N", help="Training rows for calibration. fp8 needs none.", min=1)
    ] = 256,
    settings: SetOption = None,
) -> None:
    """Merge a run, compress it with llm-compressor, and compare the compressed model with the run."""
    out = _prepare(run_folder, out, scheme)
    from finetune.export.certificate import write_certificate
    from finetune.export.compress import export_compressed
    from finetune.export.vectors import VLLM_CERTIFICATE
    from finetune.export.verifying import refuse_differences, verify_folder
    from finetune.export.vllm_served import InVllm, limits_of_adapter
    from finetune.inference.finished_run import find_run

    run = find_run(run_folder, settings or [], is_alone=True)
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


def smallest_command(
    run_folder: RunFolderArgument,
    out: OutArgument = None,
    keep: Annotated[
        float,
        typer.Option(metavar="X", help="The share of greedy answers that must equal the run's.", min=0, max=1),
    ] = 0.99,
    imatrix: ImatrixOption = None,
    llama_cpp: LlamaCppOption = None,
    base: BaseFolderOption = None,
    settings: SetOption = None,
) -> None:
    """Try the types of all formats on a run from small to large, and keep the first that answers as the run does."""
    out = _prepare(run_folder, out, "smallest")
    with importing():
        from finetune.export.compress import find_quantizer
        from finetune.export.gguf import Gguf, find_converter
        from finetune.export.smallest import find_smallest
        from finetune.inference.finished_run import find_run

    run = find_run(run_folder, settings or [], is_alone=True)
    converter = find_converter(llama_cpp, os.environ)
    quantizer = find_quantizer(converter.parent, run, imatrix)
    gguf = Gguf(converter=converter, weight_type="auto", quantizer=quantizer, base=base)
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
    for difference in search.differences:
        _log.warning("kept though it differs: %s", difference)
    advice = "" if search.differences else f" Next: finetune verify {shlex.quote(str(out))}"
    say(f"Written to {out}, with its certificate.{advice}")


def text_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The hub id or folder of the whole model.", callback=refuse_password)
    ],
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="[OUT]",
            help="The folder to write. It must not exist, or be empty. Default: ./NAME-text for OWNER/NAME.",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="The branch, tag or commit at the hub.")] = None,
) -> None:
    """Write the text model, and print how it was compared with the whole model."""
    from finetune.export.out_folder import refuse_taken
    from finetune.model.text_models import default_folder

    refuse_several_processes("export")
    configure_logs(rank=0)
    out = out or Path(default_folder(model))
    refuse_taken(out)
    with importing():
        from finetune.export.text_model import write_text_model

    with waiting(f"writing the text model of {model}, and comparing it with the whole model"):
        text = write_text_model(model, out, revision)
    say(
        f"Written to {out}: a {text.model_type} model of {text.num_parameters:,} parameters, "
        f"{format_bytes(text.num_bytes)}"
    )
    say(f"Left out of the {text.whole_type} model: {text.num_left_out:,} parameters of its encoders.")
    say(f"Reloaded by transformers alone, against the whole model: {text.difference}")
    place = out.expanduser() if out.is_absolute() or str(out).startswith("~") else f"./{out}"
    say(f"Next: finetune train model={shlex.quote(str(place))} data=chats.jsonl")


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


def _say_exported(exported: Exported, out: Path) -> None:
    """Print the files of a folder for llama.cpp or Ollama, and how to serve it."""
    from finetune.export.gguf_served import find_gguf
    from finetune.export.vectors import VECTORS_FILE

    folder = out.expanduser()
    files = [path for path in sorted(folder.iterdir()) if path.suffix == ".gguf" or path.name == "Modelfile"]
    say(f"Written to {out}: {', '.join(f'{path.name} ({format_bytes(path.stat().st_size)})' for path in files)}")
    _say_system(out)
    if exported.num_tensors is not None:
        say(f"The GGUF file holds {exported.num_tensors} tensors.")
        say(exported.token_ids)
        say(f"Note: {exported.note}.") if exported.note else None
        if find_gguf(folder) and (folder / VECTORS_FILE).is_file():
            say(f"Next: finetune verify {shlex.quote(str(out))}")
    if (folder / "Modelfile").is_file():
        say(f"Next: cd {shlex.quote(str(out))} && ollama create my-model -f Modelfile")


def _say_system(out: Path, instead: str = ", or merge with --add-system") -> None:
    """Print the system turn of the training rows, if a server of this folder has to be sent it."""
    from finetune.export.system_turn import describe_system
    from finetune.export.vectors import VECTORS_FILE, read_vectors

    folder = out.expanduser()
    system = read_vectors(folder).system if (folder / VECTORS_FILE).is_file() else None
    if system is not None:
        say(f"Note: {describe_system(system)}. Send it with each conversation{instead}.")
