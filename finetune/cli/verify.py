"""`finetune verify`: compare what a runtime serves, and on request recorded losses, with what was trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.run_options import (
    BaseOption,
    CheckpointOption,
    JsonOption,
    OptionRules,
    SetOption,
    find_run_folder,
    refuse_several_processes,
)
from finetune.errors import ConfigError
from finetune.limits import MOST_BYTES
from finetune.logs import configure_logs, importing, waiting
from finetune.terminal import print_json, print_table, say, shown_folder

if TYPE_CHECKING:
    from finetune.export.certificate import Verified


def verify(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER_OR_RUN",
            help="A run's folder, or one that `finetune merge` or `finetune export` wrote.",
            callback=find_run_folder,
        ),
    ],
    vectors: Annotated[
        Path | None,
        typer.Option(
            help="Take the test vectors from this file or folder. Default: those in the folder; a run makes its own."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The certificate to write. Default: certificate.json or certificate-vllm.json beside the weights; "
            "of a checkpoint, a file with its step in the run's folder."
        ),
    ] = None,
    max_difference: Annotated[
        float | None,
        typer.Option(
            help="The largest relative difference of a position's logits. Default: a bound that fits the runtime.",
            min=0,
        ),
    ] = None,
    replay: Annotated[
        int, typer.Option(metavar="N", help="Compute N recorded steps of a run again, and compare their losses.", min=0)
    ] = 0,
    receipt: Annotated[
        bool, typer.Option("--receipt", help="Only check the run's receipt.json against its folder.")
    ] = False,
    runtime: Annotated[
        str | None, typer.Option(help="vllm: compare in vLLM, which is started for it. See also --server.")
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Compare in a vLLM server that runs already, and serves this model or its base."
        ),
    ] = None,
    served_as: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="--server: the name of the model or adapter there. Default: the model, or the run's own adapter.",
        ),
    ] = None,
    base: BaseOption = None,
    checkpoint: CheckpointOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Verify a folder as the options say. Print each comparison, and write the certificate."""
    refuse_several_processes("verify")
    configure_logs(rank=0)
    is_run = (source.expanduser() / "config.yaml").exists()  # find_run says what else than a file it is
    run_options = {"--replay": replay > 0, "--base": base, "--checkpoint": checkpoint, "--set": settings or None}
    others = {"--vectors": vectors, "--out": out, "--max-difference": max_difference, "--runtime": runtime}
    others |= {"--server": server, "--served-as": served_as, "--json": as_json}
    rules = OptionRules({**run_options, **others, "the folder of a run": is_run, "--receipt": receipt})
    alone = "a receipt is compared with the files of its run alone. Run finetune verify once for each."
    rules.exclude("--receipt", *run_options, *others, because=alone)
    if receipt:
        from finetune.report.receipt import check_receipt
        from finetune.runs.recorded_run import open_run

        say(f"The receipt fits its run: {check_receipt(open_run(source))} facts are equal.")
        return
    rules.need("--served-as", "--server")
    for option in run_options:
        rules.need(option, "the folder of a run")
    once = "a replay uses the base and the checkpoints of the run itself. Run finetune verify once with each."
    if runtime not in (None, "vllm"):
        raise ConfigError(f"--runtime is {runtime}, expected vllm. All other runtimes follow from the folder's files.")
    rules.exclude("--replay", "--base", "--checkpoint", because=once)
    if out is not None:
        _refuse_other_file(out)

    with importing():
        from finetune.export.certificate import path_of_certificate, why_kept, write_certificate
        from finetune.export.verifying import refuse_differences, verify_folder, verify_run
        from finetune.export.vllm_served import InVllm
        from finetune.inference.vllm_server import VllmServer
        from finetune.runs.output_files import refuse_unwritable

    beside = source.expanduser() / "adapter" if is_run and checkpoint is None else source.expanduser()
    if out is None and beside.is_dir():
        refuse_unwritable("--out", path_of_certificate(beside, in_vllm=runtime == "vllm" or server is not None))
    if server is not None:
        VllmServer(server, patience_seconds=0)  # refuses an address with a password before anything is computed
    if replay:
        from finetune.replay.steps import replay_losses, steps_to_replay

        steps_to_replay(source, settings or [])  # refuses a run that cannot be replayed before anything is computed
    vllm = None if runtime is None and server is None else InVllm(server, served_as)
    with waiting("comparing with what was trained"):
        if is_run:
            verified = verify_run(
                source,
                settings or [],
                base=base,
                checkpoint=checkpoint,
                vectors=vectors,
                bound=max_difference,
                vllm=vllm,
            )
        else:
            verified = verify_folder(source, vectors=vectors, bound=max_difference, vllm=vllm)
    if replay:
        verified = replace(verified, replay=replay_losses(source, replay, settings or []))
    file = out or path_of_certificate(verified.folder, in_vllm=vllm is not None)
    if not as_json:
        show_verified(verified)
    kept = why_kept(file, verified) if out is None else ""
    content = verified.as_record() if kept else write_certificate(file, verified)
    if as_json:
        print_json(content)
    elif not kept:
        say(f"Written: {shown_folder(file)}")
    refuse_differences(verified, file, kept=kept)


def _refuse_other_file(out: Path) -> None:
    """Refuse to replace a file that is not a certificate, or to write into a folder that takes no file."""
    from finetune.runs.output_files import refuse_unwritable

    refuse_unwritable("--out", out)
    if not out.exists():
        return
    try:
        is_small = out.is_file() and out.stat().st_size <= MOST_BYTES
        is_certificate = is_small and "verdict" in dict(json.loads(out.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        is_certificate = False
    if not is_certificate:
        raise ConfigError(f"--out is {out}, which already exists and is not a certificate. Name a new file.")


def show_verified(verified: Verified) -> None:
    """Print the table of checks, with what the comparison does not show."""
    from finetune.export.served_comparison import rows_of_checks

    content = verified.as_record()
    title = f"{shown_folder(verified.folder)} in {verified.comparison.runtime}, against {verified.source}"
    rows = [list(row) for row in rows_of_checks(content)]
    print_table(("compared", "equal", "apart by at most"), rows, right=("equal",), title=title)
    for note in content["notes"]:
        say(f"Note: {note}.")
    if verified.vectors.sha256:
        say(f"The test vectors have SHA-256 {verified.vectors.sha256}.")
