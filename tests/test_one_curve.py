"""One recipe, seed and global batch give one curve, whatever starts the processes and however they share rows.

Every form is started once and trains several times in it, one case after the other. Each process reports that it has
trained. The rows of docs/one-curve.md are these cases; see tests/curve_table.py for how it is written.
"""

import importlib.util
import itertools
import shutil
from typing import NamedTuple

import pytest

from tests.curve_table import Row, keep_rows
from tests.curves import (
    ALONE,
    DROPOUT_SPLITS,
    FULL,
    PLAIN_CASES,
    REFERENCE_BATCH_SIZE,
    SPLITS,
    Case,
    assert_cases,
    assert_one_curve,
    assert_one_world,
    curve_alone,
    read_run,
    recipe_words,
    reference_of,
    reporting_words,
    reports_of_run,
    run_and_report,
    runs_alone,
)
from tests.distributed.test_sharding import ANSWERS, RECIPE, assert_sharded_is_unsharded, sharded
from tests.launches import LAUNCHERS, free_port, launcher_with_port, run_command, run_launched
from tests.tiny_runs import conversation_words

pytestmark = [pytest.mark.slow, pytest.mark.warm]

SHOWN = (Case(2), Case(8), Case(1, 0.1))
"""Those that `pytest` alone runs; the others sweep."""
DDP = "parallel.gradient_sync=ddp"
UNUSED = "parallel.find_unused_parameters=true"
CHECKPOINTED = "training.gradient_checkpointing=true"
OF_TWO = (
    Case(1),
    Case(2, words=(DDP, UNUSED), note="gradient_sync=ddp, find_unused_parameters"),
    Case(8, 0.1, words=(DDP,), note="gradient_sync=ddp"),
    Case(2, recipe=FULL),
    Case(8, recipe=FULL, words=(DDP, CHECKPOINTED), note="gradient_sync=ddp, gradient_checkpointing"),
)
OF_FOUR = (*SPLITS, Case(2, 0.1), Case(2, words=(DDP,), note="gradient_sync=ddp"))
FSDP2, TWICE = "parallel.sharding=fsdp2", "parallel.shard_size=2"
SHARDED = (
    Case(2, words=(FSDP2,), note="sharding=fsdp2"),
    Case(8, 0.1, words=(FSDP2,), note="sharding=fsdp2"),
    Case(2, recipe=FULL, words=(FSDP2,), note="sharding=fsdp2"),
    Case(8, recipe=FULL, words=(FSDP2, CHECKPOINTED), note="sharding=fsdp2, gradient_checkpointing"),
)
SHARDED_BY_FOUR = (
    Case(1, words=(FSDP2,), note="sharding=fsdp2"),
    Case(2, words=(FSDP2, TWICE), note="sharding=fsdp2, shard_size=2"),
    Case(1, recipe=FULL, words=(FSDP2,), note="sharding=fsdp2"),
    Case(2, recipe=FULL, words=(FSDP2, TWICE), note="sharding=fsdp2, shard_size=2"),
)


class Form(NamedTuple):
    """A way to start processes."""

    name: str
    """In the table."""
    command: str
    """In `tests.launches.LAUNCHERS`, or one that is told a port."""
    launcher: str
    """As finetune sees it."""
    world_size: int
    cases: tuple[Case, ...]


SHOWN_FORM = Form("torchrun", "torchrun", "torchrun", 2, SHOWN)
FORMS = (
    Form("torchrun", "torchrun", "torchrun", 2, (*OF_TWO, *SHARDED)),
    Form("torchrun", "torchrun_4", "torchrun", 4, (*OF_FOUR, *SHARDED_BY_FOUR)),
    Form("torchrun, c10d rendezvous", "torchrun_c10d", "torchrun", 2, PLAIN_CASES),
    Form("python -m torch.distributed.launch", "torch.distributed.launch", "torchrun", 2, PLAIN_CASES),
    Form("accelerate launch, config file", "accelerate_config", "accelerate", 2, PLAIN_CASES),
    Form("mpirun", "mpirun", "mpi", 2, PLAIN_CASES),
)
"""`tests/distributed` has more of sharded runs, and of a c10d rendezvous."""
ACCELERATE = Form("accelerate launch", "accelerate", "accelerate", 2, (*PLAIN_CASES, SHARDED[0]))
LOCAL_SPAWN = "finetune train, parallel.num_processes=2"
TORCH_SPAWN = "torch.multiprocessing.spawn"
AS_THE_OTHER_RECIPE = ("model.path=null", "optim.schedule=linear", "optim.warmup_steps=0")
"""What configs/train_ddp.yaml says differently."""
ROWS = [
    *(case.row("python", 1) for case in ALONE),
    *(case.row(form.name, form.world_size) for form in (SHOWN_FORM, *FORMS, ACCELERATE) for case in form.cases),
    *(case.row(LOCAL_SPAWN, 2) for case in (*PLAIN_CASES, SHARDED[0])),
    PLAIN_CASES[1].row(TORCH_SPAWN, 2),
    *(case.row("srun", 2) for case in PLAIN_CASES),
    Row("sbatch, srun on one node", 2, "3x3", "0"),
    Row("sbatch, srun on one node", 2, "3x3", "0", "sharding=fsdp2"),
    Row("sbatch, srun on two nodes", 4, "3x3", "0", "full fine-tuning, sharding=fsdp2, shard_size=2"),
    Row("sbatch, torchrun on two nodes", 2, "3x3", "0"),
    Row("torchrun on two nodes", 2, "3x3", "0"),
    Row("torchrun, ddp=False", 1, "3x3", "0"),
    Row("rank 1 of 2 never comes", 1, "3x3", "0"),
]
"""All of the table: also those of tests/slurm, tests/distributed/test_two_nodes.py and tests/test_launch_forms.py."""


def command_of(form):
    if form.command == "torch.distributed.launch" and importlib.util.find_spec("torch.distributed.launch") is None:
        pytest.skip("this version of torch no longer ships torch.distributed.launch")
    if form.command == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (apt-get install openmpi-bin)")
    return LAUNCHERS[form.command] if form.command in LAUNCHERS else launcher_with_port(form.command)


def variables_of(form):
    """mpirun says nothing about an address: on a machine with several runs each needs a port of its own."""
    return {"MASTER_PORT": str(free_port())} if form.command == "mpirun" else {}


PAIR = (Case(REFERENCE_BATCH_SIZE), sharded(Case(REFERENCE_BATCH_SIZE)))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The folder of the launch under torchrun that `pytest` alone shows: several launches would import all again."""
    folder = tmp_path_factory.mktemp("shown")
    pair = reporting_words(folder, PAIR, "checkpoint.save_every=2", *ANSWERS, recipe=RECIPE)
    done = run_command([*LAUNCHERS["torchrun"], *reporting_words(folder, SHOWN), "--", *pair[2:]], limit_seconds=480)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.promise
def test_torchrun_gives_one_curve(shown):
    assert_cases(SHOWN_FORM.name, shown, SHOWN, world_size=2, launcher="torchrun")


@pytest.mark.promise
def test_a_sharded_run_has_the_bytes_of_one_that_is_not(shown):
    whole, shards = (shown / case.name for case in PAIR)
    for case in PAIR:
        assert_one_world(reports_of_run(shown, case.name), 2)
    assert_sharded_is_unsharded(whole, shards)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.command}-{form.world_size}-{len(form.cases)}")
def test_every_launcher_world_and_split_gives_one_curve(tmp_path, form):
    run_and_report(command_of(form), tmp_path, form.cases, variables=variables_of(form))
    assert_cases(form.name, tmp_path, form.cases, world_size=form.world_size, launcher=form.launcher)
    if form.world_size == 4:
        shares = {case.split: microbatches(tmp_path, case) for case in SPLITS}
        assert shares["8x1"] == [[1, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
        assert shares["2x4"] == [[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 0]]
        assert shares["1x8"] == [[2, 2, 1], [2, 2, 1], [2, 2, 0], [2, 2, 0]]


def microbatches(folder, case):
    """Of each rank, in each step of an epoch."""
    return [report["microbatches"] for report in reports_of_run(folder, case.name)]


@pytest.mark.promise
def test_one_process_gives_one_curve_however_it_computes_it():
    folder = runs_alone(*ALONE)
    assert_cases("python", folder, ALONE, world_size=1, launcher="none")
    first, *others = (read_run(folder / case.name) for case in ALONE)
    assert first.losses == curve_alone().losses, "a process that trains again trains as a new one does"
    assert all(run.losses != first.losses for run in others), "the sums should have been taken in another order"


@pytest.mark.promise
def test_dropout_is_there_and_belongs_to_the_micro_batches():
    curves = [curve_alone().losses, *(reference_of(case).losses for case in DROPOUT_SPLITS)]
    for one, other in itertools.combinations(curves, 2):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-4


def test_accelerate_launch_gives_one_curve(tmp_path):
    """CI runs it each time, and of the other forms a sample."""
    run_and_report(command_of(ACCELERATE), tmp_path, ACCELERATE.cases)
    assert_cases(ACCELERATE.name, tmp_path, ACCELERATE.cases, world_size=2, launcher="accelerate")


def test_the_command_line_starts_processes_itself(tmp_path):
    recipe = ["finetune.cli:main", "train", "task=finetune_lora", "parallel.num_processes=2"]
    cases = (*PLAIN_CASES, SHARDED[0])
    run_and_report(LAUNCHERS["python"], tmp_path, cases, recipe=recipe)
    assert_cases(LOCAL_SPAWN, tmp_path, cases, world_size=2, launcher="spawn")


def test_a_script_starts_processes_through_torch_multiprocessing(tmp_path):
    recipe = ["recipes.train_ddp_standalone:start", "parallel.num_processes=2", f"parallel.master_port={free_port()}"]
    cases = PLAIN_CASES[1:]  # with dropout: its processes are started anew for each case
    run_and_report(LAUNCHERS["python"], tmp_path, cases, *AS_THE_OTHER_RECIPE, recipe=recipe)
    assert_cases(TORCH_SPAWN, tmp_path, cases, world_size=2, launcher="spawn")


def test_each_turn_gives_one_curve_on_two_ranks_and_in_smaller_micro_batches(tmp_path):
    rows = conversation_words(tmp_path / "rows")
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    done = run_launched("python", recipe_words(alone, *rows))
    assert done.returncode == 0, done.stdout
    cut = ["training.batch_size=2", "training.max_tokens_per_microbatch=100"]
    done = run_launched("torchrun", recipe_words(shared, *rows, *cut))
    assert done.returncode == 0, done.stdout
    assert read_run(shared).record["world_size"] == 2
    assert_one_curve(read_run(shared), read_run(alone))


def test_the_page_has_these_rows():
    keep_rows(ROWS)
