"""Make the code print each message of docs/troubleshooting.md.

Each function here brings one about and returns all that was printed meanwhile, with the numbers and names that differ
from run to run put as the page has them. `tests/docs/test_messages.py` looks for the page's text among them, whole.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from huggingface_hub import constants
from transformers.utils.peft_utils import check_peft_version

from finetune import build_tokenizer, cleanup_ddp, initialize_ddp, launch, load_config
from finetune.config import hub
from finetune.config.schema import Config, ModelSection
from finetune.data import rendering
from finetune.distributed import accelerate_settings, device, process_group, rank_devices, rendezvous
from finetune.distributed.accelerate_library import AccelerateCommand, forget_accelerate
from finetune.distributed.environment import LaunchEnvironment, read_environment
from finetune.distributed.guardian.faults import Position, describe_late, lost_rank
from finetune.distributed.joined_world import ProcessContext
from finetune.distributed.liveness import explain
from finetune.distributed.rendezvous import Rendezvous, Verdict
from finetune.distributed.runtime import Runtime
from finetune.errors import FinetuneError
from finetune.export.gguf_tokens import find_rules, refuse_other_ids
from finetune.fallbacks import Fallbacks
from finetune.logs import configure_logs
from finetune.runs.folder import RunFolder
from finetune.runs.recorded_run import open_run
from finetune.runs.state import TrainerState
from finetune.training.checks import UpdateWatch, refuse_no_update
from finetune.training.rewards.functions import GeneratedAnswer, Rewards
from finetune.training.rewards.objective import RewardedAnswers
from recipes.finetune_lora import main as finetune_lora
from tests.export.test_gguf_tokens import lowercasing_tokenizer
from tests.launches import free_port, place_variables
from tests.readable_hub import point_to, running_hub
from tests.test_nonfinite import words as words_with_a_bad_row
from tests.test_nonfinite import write_model, write_row
from tests.tiny_runs import write_rows
from tests.training.test_adapter_watch import Experts, result, take_steps

Printed = list[str]
MAKERS: dict[str, Callable[[Path, pytest.MonkeyPatch], Printed]] = {}
_BEFORE_A_MESSAGE = re.compile(r"^\[RANK \d+\] \S+ \S+ [A-Z]+ [\w.]+: ")
_ONE_SECOND = timedelta(seconds=1)
_TORCHRUN = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}
_SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}


def maker(function: Callable[[Path, pytest.MonkeyPatch], Printed]) -> Callable[[Path, pytest.MonkeyPatch], Printed]:
    MAKERS[function.__name__] = function
    return function


def printed_by(call: Callable[[], object]) -> Printed:
    """Return every line that a call logs, and the error that ends it."""
    screen = io.StringIO()
    logging.getLogger("finetune").handlers.clear()
    with redirect_stderr(screen):
        configure_logs(0)
        try:
            call()
            error = ""
        except (FinetuneError, TypeError, ValueError, RuntimeError) as raised:
            error = str(raised)
        finally:
            logging.getLogger("finetune").handlers.clear()
    lines = [_BEFORE_A_MESSAGE.sub("", line) for line in screen.getvalue().splitlines()]
    return [*lines, " ".join(error.split())]


def put(printed: Printed, **words: str) -> Printed:
    """Replace what differs from run to run: `put(printed, **{found: on_the_page})`."""
    for found, on_the_page in words.items():
        printed = [line.replace(found, on_the_page) for line in printed]
    return printed


@contextmanager
def occupied_port() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        yield held.getsockname()[1]


def _config(**sections: object) -> Config:
    return Config.model_validate({"training": {"device": "cpu"}, **sections})


def _enter(config: Config) -> None:
    with launch(config, trains=False):
        pass


def _set(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@maker
def port_in_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    _set(monkeypatch, _SLURM)
    strict = Fallbacks(strict=True)
    with occupied_port() as port:
        printed = printed_by(
            lambda: initialize_ddp(_ONE_SECOND, master_addr="127.0.0.1", master_port=port, fallbacks=strict)
        )
    return put(printed, **{str(port): "29500"})


@maker
def port_in_use_for_torchrun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    with occupied_port() as port:
        printed = printed_by(lambda: dist.TCPStore("127.0.0.1", port, 1, is_master=True))
    return put(printed, **{str(port): "29500"})


def _environment(rank: int, port: int) -> LaunchEnvironment:
    return read_environment(place_variables(rank, 2, port))


@maker
def rank_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    port = free_port()
    first, second = (Rendezvous(_environment(rank, port), _ONE_SECOND) for rank in (0, 1))
    printed = printed_by(lambda: Rendezvous(_environment(1, port), _ONE_SECOND))
    first.leave()
    second.leave()
    return put(printed, **{str(port): "29500"})


@maker
def half_a_launch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    _set(monkeypatch, {"WORLD_SIZE": "2"})
    return printed_by(lambda: _enter(_config()))


@maker
def another_world_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    file = folder / "configs/parallel/lab.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("parallel:\n  world_size: 3\n")
    monkeypatch.chdir(folder)
    _set(monkeypatch, _TORCHRUN)
    return printed_by(lambda: _enter(load_config(["parallel=configs/parallel/lab.yaml"], run="quickstart")))


@maker
def outside_of_srun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    _set(monkeypatch, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"})
    return printed_by(lambda: _enter(_config()))


@maker
def accelerate_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    """Without the launcher itself, which tests/test_launch_forms.py starts."""
    _set(monkeypatch, {"ACCELERATE_USE_CPU": "true"})
    monkeypatch.setattr(accelerate_settings, "read_accelerate_command", lambda _: AccelerateCommand(2, None))
    return printed_by(lambda: _enter(_config()))


@maker
def nobody_came(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    port = free_port()
    printed = printed_by(lambda: initialize_ddp(_ONE_SECOND, rank=0, worldsize=2, master_port=port, device="cpu"))
    cleanup_ddp()
    return put(printed, **{str(port): "29500", "within 1 s": "within 3600 s"})


@maker
def left_to_rank_0(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    port = free_port()
    _set(monkeypatch, _TORCHRUN)
    why = process_group.why_not_wanted(read_environment(os.environ))
    first, second = (Rendezvous(_environment(rank, port), _ONE_SECOND) for rank in (0, 1))
    verdict = threading.Thread(target=first.share_verdict, args=(Verdict("alone", why),))
    verdict.start()

    def leave() -> None:
        with pytest.raises(SystemExit):
            process_group.obey(second, Verdict("together"))

    printed = printed_by(leave)
    verdict.join()
    first.leave()
    return printed


@maker
def too_few_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return printed_by(lambda: rank_devices._pick_device(1))


@maker
def different_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    kinds = ["cuda with nccl"] * 4 + ["cpu with gloo"] * 4
    return printed_by(lambda: rank_devices.refuse_different_devices(dict(enumerate(kinds))))


@maker
def no_such_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return printed_by(lambda: device._resolve_device("cuda:3"))


def _wrapped(device_ids: object) -> Printed:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrap = torch.nn.parallel.DistributedDataParallel
        return printed_by(lambda: wrap(torch.nn.Linear(2, 2), device_ids=device_ids))
    finally:
        dist.destroy_process_group()


WRAPPED = {"device_ids_is_a_number": 0, "device_ids_are_several": [0, 1], "device_ids_on_the_cpu": [0]}
MAKERS.update({name: lambda folder, monkeypatch, ids=ids: _wrapped(ids) for name, ids in WRAPPED.items()})


@maker
def peft_too_old(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    """As `model.add_adapter` of transformers 5.24 asks for PEFT 0.22."""
    return printed_by(lambda: check_peft_version(min_version="0.22.0"))


@maker
def out_of_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    """A run whose memory runs out for real is in tests/test_nonfinite.py."""

    def use_a_petabyte() -> None:
        try:
            torch.empty(1 << 50, dtype=torch.uint8)
        except RuntimeError as error:
            raise explain(error, None) from error

    return printed_by(use_a_petabyte)


class Sleeping(torch.utils.data.Dataset[int]):
    """Rows that do not come in time."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(60)
        return index


@maker
def killed_data_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    def lose_a_worker() -> None:
        rows = iter(torch.utils.data.DataLoader(Sleeping(), num_workers=1))
        (worker,) = multiprocessing.active_children()
        worker.kill()
        worker.join()
        try:
            next(rows)
        except RuntimeError as error:
            raise explain(error, None) from error

    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set", True)
    return [re.sub(r"pid\(s\) \d+", "pid(s) 4711", text) for text in printed_by(lose_a_worker)]


@maker
def stuck_reward_function(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    """A function that only a guardian can end, with the same sentence: tests/training/rewards/test_reward_runs.py."""
    (folder / "my_rewards.py").write_text("import time\ndef solves(**columns):\n    time.sleep(60)\n")
    monkeypatch.syspath_prepend(str(folder))
    reward = ["reward.functions=my_rewards.solves", "reward.functions_from=my_rewards", "reward.timeout_seconds=0.01"]
    config = load_config(["model=phi_tiny", "data.path=orders.jsonl", *reward], task="finetune_grpo")
    place = {"source": "orders.jsonl:12", "prompt": "", "expected": "", "columns": {}}
    answer = GeneratedAnswer(**place, text="", whole="", marked="", ids=(1,))
    printed = printed_by(lambda: Rewards.of(config)([answer] * 16))
    sys.modules.pop("my_rewards", None)
    return put(printed, **{"after 0.01 s": "after 600 s"})


@maker
def who_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    monkeypatch.setattr(rendezvous, "REPORT_SECONDS", 0.1)
    port = free_port()
    waiting = Rendezvous(_environment(0, port), _ONE_SECOND)
    printed = printed_by(waiting.wait_for_all)
    waiting.leave()
    return put(printed, **{str(port): "29500", "for 0 s (limit 1 s)": "for 30 s (limit 3600 s)"})


@maker
def rank_0_not_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    port = free_port()
    monkeypatch.setattr(rendezvous, "MARGIN_SECONDS", 0.0)
    _set(monkeypatch, {**_SLURM, "SLURM_PROCID": "1", "SLURM_LOCALID": "1"})
    printed = printed_by(lambda: initialize_ddp(_ONE_SECOND, master_addr="localhost", master_port=port, device="cpu"))
    return put(printed, **{str(port): "29500", "within 1 s": "within 3600 s"})


@maker
def late_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    waits, works = Position("training", 57, True, "barrier", 3, 1800.0), Position("training", 57, True, None, 3, 1801.0)
    return [str(describe_late({0: waits, 1: works}, 1800.0))]


@maker
def unreachable_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    return [str(lost_rank(1, Position("training", 57), None))]


@maker
def two_worlds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    """Somebody made Accelerate's state before the launch, when this was one process."""
    state = PartialState(cpu=True)
    assert state.num_processes == 1
    _set(monkeypatch, _TORCHRUN)
    context = ProcessContext(True, 0, 0, 2, torch.device("cpu"))
    try:
        return printed_by(lambda: Runtime(context, read_environment(os.environ), Fallbacks(), _config(), {}))
    finally:
        forget_accelerate()


@maker
def holds_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    (folder / "adapter").mkdir()
    (folder / "run.json").write_text("{}")
    return put(printed_by(lambda: RunFolder(folder).check("never")), **{str(folder): "/data/runs/chats"})


@maker
def irregular_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    os.mkfifo(folder / "run.json")
    return put(printed_by(lambda: open_run(folder)), **{str(folder): "/data/runs/chats"})


@maker
def slow_pattern(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    monkeypatch.setattr(rendering, "MATCH_SECONDS", 0.2)
    names, pattern = [f"model.layers.{number}.self_attn.qkv_proj" for number in range(4)], r"(\w+\.?)+!"
    printed = printed_by(lambda: rendering.match_patterns([pattern], names, name="lora.target_modules"))
    return put(printed, **{"longer than 0.2 s": "longer than 2 s"})


@maker
def being_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    with RunFolder(folder).open():
        printed = printed_by(lambda: RunFolder(folder).open())
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    printed = put(printed, **{str(folder): "/data/runs/chats", holder: "process 4711 on node1"})
    return [re.sub(r"since [-0-9]+T[0-9:+]+", "since 2026-03-02T09:30:00+00:00", line) for line in printed]


@maker
def loss_is_nan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    write_model(folder / "base", is_whole=False)
    write_row(write_rows(folder / "rows", train=17, validation=4, test=0) / "train.jsonl", "send ~ to Porto")
    printed = printed_by(lambda: finetune_lora(words_with_a_bad_row(folder, folder / "run")))
    return [re.sub(r"^step \d+: ", "step 57: ", line) for line in put(printed, **{str(folder): "/data"})]


@maker
def untrained_adapter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    model = Experts()
    model.unused = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4)})
    printed = printed_by(lambda: take_steps(model))
    return put(
        printed, **{"1 of 5": "1 of 128", ": unused.q_proj": ": model.layers.0.mlp.down_proj", "was 0.1": "was 0.0003"}
    )


@maker
def no_gradient(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    watch = UpdateWatch(torch.nn.Linear(2, 2), Config(), Fallbacks(), RewardedAnswers.no_gradient)
    return printed_by(lambda: watch.after_step(TrainerState(step=1, num_without_gradient=1), result(grad_norm=0.0)))


@maker
def learned_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    state = TrainerState(step=6, num_without_gradient=6)
    return printed_by(lambda: refuse_no_update(state, Config(), RewardedAnswers.no_gradient))


def _read_from(address: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    point_to(monkeypatch, address)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(hub, "answers_heard", {})
    printed = printed_by(lambda: build_tokenizer(ModelSection(path="microsoft/Phi-4-mini-instruct")))
    return put(printed, **{str(folder): "/data/hf/hub", address: "https://huggingface.co"})


@maker
def no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    printed = _read_from(f"http://127.0.0.1:{free_port()}", folder, monkeypatch)
    return put(printed, **{"[Errno 111] Connection refused": "[Errno -2] Name or service not known"})


@maker
def gated_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with running_hub() as state:
        state.folders["microsoft/Phi-4-mini-instruct"] = folder
        state.gated.add("microsoft/Phi-4-mini-instruct")
        return _read_from(state.address, folder, monkeypatch)


@maker
def no_such_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Printed:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with running_hub() as state:
        return _read_from(state.address, folder, monkeypatch)


CALLS: dict[str, Callable[[], object]] = {
    "no_process_group": dist.barrier,
    "ddp_alone": lambda: _enter(_config(ddp=True)),
    "shared_gpu": lambda: rank_devices.refuse_shared_devices(dict.fromkeys((0, 1), "node1 GPU-5d1a")),
    "nccl_on_the_cpu": lambda: initialize_ddp(rank=0, worldsize=2, backend="nccl", device="cpu"),
    "other_tokens_in_llama_cpp": lambda: refuse_other_ids(find_rules(lowercasing_tokenizer())),
}
"""Calls that print the message of their name without any preparation."""
MAKERS.update({name: lambda folder, monkeypatch, call=call: printed_by(call) for name, call in CALLS.items()})
