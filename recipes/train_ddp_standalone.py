"""Train with several processes on this machine that the script starts itself, through torch.multiprocessing.

One process for each GPU, or two on the CPU, unless `parallel.num_processes` says how many. The config is
configs/train_ddp.yaml; arguments after the command override it:

    python recipes/train_ddp_standalone.py
    python recipes/train_ddp_standalone.py parallel.num_processes=4 parallel.master_port=12356 output_dir=runs/again
"""

import sys
from datetime import timedelta

import torch
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from finetune import TrainerDDP, cleanup_ddp, command, initialize_ddp, load_config
from finetune.config import Config


def main(rank: int, worldsize: int, config: Config) -> None:
    """Train in one process with the others; rank 0 tests alone."""
    parallel, device = config.parallel, config.training.device
    initialize_ddp(
        timedelta(minutes=parallel.timeout_minutes),
        rank=rank,
        worldsize=worldsize,
        master_addr="localhost",
        master_port=parallel.master_port or "12355",
        backend=parallel.backend,
        shares_gpus=parallel.share_gpus,
        device=None if device == "auto" else device,
    )

    # Builds the tokenizer, the rows and the model as the config says.
    trainer = TrainerDDP(rank, config)
    train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
    trainer.run_training(train_loader, val_loader)
    if rank == 0:
        trainer.run_test(test_loader)

    cleanup_ddp()


def run_process(rank: int, worldsize: int, config: Config) -> None:
    """Run one process: a mistake in the config or the data ends it with a message, not a traceback."""
    command(lambda _: main(rank, worldsize, config), arguments=[])


def start(overrides: list[str]) -> None:
    """Start the processes, wait for them, and exit with their code."""
    config = load_config(overrides, run="train_ddp")
    worldsize = config.parallel.num_processes or torch.cuda.device_count() or 2
    processes = spawn(run_process, args=(worldsize, config), nprocs=worldsize, join=False)  # type: ignore[no-untyped-call]
    try:
        # If one fails, the others get time to notice and to record how the run ended.
        while not processes.join(grace_period=10):
            pass
    except ProcessExitedException as ended:
        sys.exit(ended.exit_code)


if __name__ == "__main__":
    command(start)
