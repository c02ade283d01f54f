"""`finetune receipt`: write what a finished run was trained on, with how much computation, and with which result."""

from __future__ import annotations

import logging

from finetune.cli.run_options import RunFolderArgument, refuse_several_processes
from finetune.logs import configure_logs
from finetune.terminal import say, shown_folder


def receipt(run_folder: RunFolderArgument) -> None:
    """Write receipt.json and receipt.html into the run's folder."""
    refuse_several_processes("receipt")
    configure_logs(0, level=logging.WARNING)
    from finetune.report.receipt import write_receipt
    from finetune.runs.recorded_run import open_run

    written, page = write_receipt(open_run(run_folder))
    say(f"Written: {shown_folder(written)}, and the same as a page: {shown_folder(page)}")
