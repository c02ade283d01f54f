"""Scripts in the form of the earlier guides, which never call close(); the tests start one by its name.

    python guide_scripts.py NAME CONFIG.json

Each process writes what it saw to rank-N.json beside the config.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.multiprocessing as mp

from finetune import TrainerDDP, cleanup_ddp, initialize_ddp
from finetune.training import loop
from tests.launches import write_report


def train_and_test(trainer, rank, *, folder):
    seen = {"rank": rank, "epoch": trainer.epoch, "device": str(trainer.device)}
    train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
    train_results, val_results = trainer.run_training(train_loader, val_loader)
    seen |= {
        "world_size": trainer.runtime.world_size,
        "rows": [len(loader.dataset) for loader in (train_loader, val_loader, test_loader)],
        "step": train_results.state.step,
        "loss": train_results.loss,
        "val_loss": val_results.loss,
        "last_epoch": trainer.epoch,
    }
    if rank == 0:
        seen["num_tested"] = trainer.run_test(test_loader).num_rows
    write_report(folder, rank, seen)


def guide(rank, worldsize, config, folder):
    """The form of the guides, to the letter."""
    initialize_ddp(
        rank=rank, worldsize=worldsize, master_addr="localhost", master_port=config["parallel"]["master_port"]
    )
    train_and_test(TrainerDDP(rank, config), rank, folder=folder)
    cleanup_ddp()


def stops_early(config, folder):
    """Under torchrun: every validation but rank 0's looks better than the one before."""
    rank, worldsize = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    initialize_ddp(rank=rank, worldsize=worldsize)
    trainer = TrainerDDP(rank, config)
    if rank != 0:
        loop.early_stop = lambda *_: None
    train_and_test(trainer, rank, folder=folder)
    cleanup_ddp()


def comes_alone(config, folder):
    """Rank 1 never comes: the script's own initialize_ddp goes on without it."""
    port = config["parallel"]["master_port"]
    initialize_ddp(timedelta(seconds=2), rank=0, worldsize=2, master_addr="localhost", master_port=port)
    train_and_test(TrainerDDP(0, config), 0, folder=folder)
    cleanup_ddp()


def leaves_untested(config, folder):
    trainer = TrainerDDP(0, config)
    train_loader, val_loader, _ = trainer.prepare_dataloaders()
    trainer.run_training(train_loader, val_loader)


def breaks_before_training(config, folder):
    TrainerDDP(0, config).prepare_dataloaders()
    raise ZeroDivisionError("a mistake in the script")


STARTED = {
    "comes_alone": comes_alone,
    "stops_early": stops_early,
    "leaves_untested": leaves_untested,
    "breaks_before_training": breaks_before_training,
}


def main(name, path):
    config, folder = json.loads(Path(path).read_text()), str(Path(path).parent)
    if name == "guide":
        context = mp.spawn(guide, args=(2, config, folder), nprocs=2, join=False)
        while not context.join(grace_period=10):
            pass
    else:
        STARTED[name](config, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
