"""Joins the world it was started in and reports each rank's place; started by tests through a launcher."""

import os
import sys
import time
from pathlib import Path

from finetune.config.schema import Config
from finetune.distributed.launch import launch
from tests.launches import write_report

CONFIG = Config.model_validate({"training": {"device": "cpu", "precision": "fp32"}})
_LONGEST_STAY_SECONDS = 60.0


def main(folder, other_folder=None):
    """Write `rank-N.json` into a folder; then stay until another world has reported to its own."""
    with launch(CONFIG, trains=False) as runtime:
        environment = runtime.environment
        runtime.collectives.agree_set_up()
        report = {
            "rank": runtime.rank,
            "local_rank": runtime.context.local_rank,
            "local_world_size": environment.local_world_size,
            "world_size": runtime.world_size,
            "launcher": environment.launcher,
            "backend": runtime.collectives.backend,
            "address": environment.master_addr,
            "port": environment.master_port,
            "ranks_met": runtime.collectives.sum([2**runtime.rank])[0],
            "slurm_rank": os.environ.get("SLURM_PROCID"),
            "slurm_node": os.environ.get("SLURMD_NODENAME"),
            "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
        write_report(folder, runtime.rank, report)
        if other_folder is not None:
            wait_for_report(Path(other_folder))
        runtime.collectives.barrier()


def wait_for_report(folder):
    deadline = time.monotonic() + _LONGEST_STAY_SECONDS
    while not any(folder.glob("rank-*.json")) and time.monotonic() < deadline:
        time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
