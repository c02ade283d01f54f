"""Train with the processes that torchrun started, which RANK and WORLD_SIZE describe.

The config is configs/train_ddp.yaml; arguments after the script override it:

    torchrun --nproc_per_node 2 recipes/train_ddp_torchrun.py
    torchrun --nproc_per_node 2 recipes/train_ddp_torchrun.py optim.learning_rate=1e-3 output_dir=runs/slower
"""

import os
from datetime import timedelta

from finetune import TrainerDDP, cleanup_ddp, command, initialize_ddp, load_config


def main(overrides: list[str]) -> None:
    """Train in one process with the others; rank 0 tests alone."""
    config = load_config(overrides, run="train_ddp")
    rank, worldsize = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    parallel, device = config.parallel, config.training.device
    initialize_ddp(
        timedelta(minutes=parallel.timeout_minutes),
        rank=rank,
        worldsize=worldsize,
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


if __name__ == "__main__":
    command(main)
