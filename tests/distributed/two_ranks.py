"""What two ranks see of each other; started by the tests through a launcher, with a folder to report to."""

import os
import sys

import torch
import torch.distributed as dist

from finetune.config.schema import Config
from finetune.distributed.ddp_init import cleanup_ddp, initialize_ddp
from finetune.distributed.environment import LAUNCH_VARIABLES
from finetune.distributed.launch import launch
from finetune.errors import DataError
from tests.launches import write_report

CONFIG = Config.model_validate({"training": {"device": "cpu", "precision": "fp32"}})


def launch_variables():
    return {name: os.environ.get(name) for name in LAUNCH_VARIABLES}


def what_is_raised(act):
    try:
        act()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "exit_code": getattr(error, "exit_code", 1),
        }
    return None


def see_collectives(runtime):
    rank = runtime.rank
    seen = {
        "rank": rank,
        "is_main_process": runtime.is_main_process,
        "sum": runtime.collectives.sum([rank + 1, 2.0**-40 + rank]),
        "broadcast": runtime.collectives.broadcast_from_main({"from": rank}),
        "one_fails": what_is_raised(
            lambda: runtime.collectives.agree(DataError("row 7") if rank == 1 else None, "reading")
        ),
        "a_bug": what_is_raised(
            lambda: runtime.collectives.agree(ZeroDivisionError("oh") if rank == 0 else None, "saving")
        ),
        "none_fails": what_is_raised(lambda: runtime.collectives.agree(None, "nothing")),
    }
    first, second, third = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(3))
    if rank == 0:  # rank 1 computed nothing, and nobody computed the third
        first.grad, second.grad = torch.full((2, 2), 3.0), torch.arange(4.0).reshape(2, 2)
    else:
        second.grad = torch.ones(2, 2)
    runtime.placement.sync_gradients([first, second, third])
    seen["gradients"] = [p.grad.tolist() for p in (first, second, third)]
    seen["grad_norm"] = float(runtime.placement.clip_grad_norm([first, second, third], None))

    torch.manual_seed(rank)
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad = False
    own_bias = model.bias.tolist()
    runtime.placement.place(model)
    runtime.collectives.barrier()
    return seen | {"placed": model.weight.tolist(), "is_bias_own": model.bias.tolist() == own_bias}


def initialise_and_clean_up_twice():
    before = launch_variables()
    context = initialize_ddp(device="cpu")
    again = initialize_ddp(device="cpu")
    is_up = dist.is_initialized()
    cleanup_ddp()
    cleanup_ddp()
    return {
        "context": [context.distributed, context.rank, context.local_rank, context.world_size, str(context.device)],
        "second_call": again,
        "was_up": is_up,
        "is_up_after": dist.is_initialized(),
        "variables_survive": before == launch_variables() and None not in before.values(),
    }


def main(folder):
    before = launch_variables()
    with launch(CONFIG) as runtime:
        report = see_collectives(runtime)
    report["after_launch"] = {"is_up": dist.is_initialized(), "variables_survive": before == launch_variables()}
    report["twins"] = initialise_and_clean_up_twice()
    write_report(folder, report["rank"], report)


if __name__ == "__main__":
    main(sys.argv[1])
