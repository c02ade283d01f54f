import logging
import os
import signal
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from finetune.config.compose import compose, load_config
from finetune.config.listing import list_configs
from finetune.config.schema import Config
from finetune.distributed import accelerate_library, accelerate_settings
from finetune.distributed import liveness as liveness_module
from finetune.distributed.accelerate_library import forget_accelerate
from finetune.distributed.collectives import Collectives
from finetune.distributed.device import best_precision
from finetune.distributed.environment import read_environment
from finetune.distributed.joined_world import ProcessContext
from finetune.distributed.launch import (
    _check_world,
    _folder_of_kernels,
    _record_output_device,
    _refuse_what_mps_lacks,
    _signals_of_run,
    launch,
    refuse_another_launch,
    wished_device,
)
from finetune.distributed.liveness import Liveness, explain, in_a_line
from finetune.distributed.runtime import Runtime
from finetune.errors import (
    ConfigError,
    DataError,
    Fault,
    FinetuneError,
    LaunchError,
    PeerFailedError,
    PreemptedError,
    RunFailedError,
)
from finetune.fallbacks import Fallbacks
from finetune.signals import Terminated, received_stop_signal
from tests.launches import free_port, place_variables, reports_of

CPU = {"training": {"device": "cpu", "precision": "fp32"}}


def config(**keys):
    return Config.model_validate({**CPU, **keys})


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return reports_of("torchrun", Path(__file__).with_name("two_ranks.py"), tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.warm
def test_collectives_give_both_ranks_the_same_values(two_ranks):
    first, second = two_ranks
    assert [seen["is_main_process"] for seen in two_ranks] == [True, False]
    expected = [[[3.0, 3.0], [3.0, 3.0]], [[1.0, 2.0], [3.0, 4.0]], [[0.0, 0.0], [0.0, 0.0]]]
    for seen in (first, second):
        assert seen["sum"] == [3.0, 1 + 2.0**-39], "in float64"
        assert seen["broadcast"] == {"from": 0}
        assert seen["gradients"] == expected, "rank 1 has none of its own"
        assert seen["grad_norm"] == pytest.approx(66**0.5)
        assert seen["is_bias_own"], "only trained weights are copied"
    assert first["placed"] == second["placed"]


@pytest.mark.slow
@pytest.mark.warm
def test_an_error_of_one_rank_is_raised_on_both(two_ranks):
    first, second = two_ranks
    assert [seen["none_fails"] for seen in (first, second)] == [None, None]
    assert (second["one_fails"]["type"], second["one_fails"]["text"]) == ("DataError", "row 7")
    assert first["one_fails"]["type"] == "PeerFailedError"
    assert first["one_fails"]["text"] == "rank 1 failed during reading: DataError: row 7"
    assert first["one_fails"]["exit_code"] == 2
    assert first["a_bug"]["type"] == "ZeroDivisionError"
    assert (second["a_bug"]["type"], second["a_bug"]["exit_code"]) == ("PeerFailedError", 1)


@pytest.mark.slow
@pytest.mark.warm
def test_joining_and_leaving_respect_the_launchers_variables(two_ranks):
    for seen in two_ranks:
        rank = seen["rank"]
        assert seen["after_launch"] == {"is_up": False, "variables_survive": True}
        assert seen["twins"] == {
            "context": [True, rank, rank, 2, "cpu"],
            "second_call": None,
            "was_up": True,
            "is_up_after": False,
            "variables_survive": True,
        }


def test_alone_every_verb_answers_without_a_group():
    with launch(config(parallel={"gradient_sync": "ddp"})) as runtime:
        assert not runtime.placement.needs_equal_microbatches, "torch's reducer needs a group"
        assert (runtime.rank, runtime.world_size, runtime.is_main_process) == (0, 1, True)
        assert (runtime.collectives.backend, runtime.environment.launcher) == ("none", "none")
        assert not torch.distributed.is_initialized()
        assert runtime.collectives.sum([1, 2.5]) == [1.0, 2.5]
        assert runtime.collectives.broadcast_from_main("x") == "x"
        runtime.collectives.agree(None, "nothing")
        runtime.collectives.barrier()
        with pytest.raises(DataError, match="mine"):
            runtime.collectives.agree(DataError("mine"), "reading")


def test_of_several_failing_ranks_the_first_is_named_and_equal_errors_are_reported_once(monkeypatch):
    """Three ranks; this one is the last."""
    context = ProcessContext(True, 2, 2, 3, torch.device("cpu"))
    liveness = SimpleNamespace(context=context, collective=lambda activity: nullcontext())
    own = []

    def agree(error, *others):
        monkeypatch.setattr(
            "finetune.distributed.collectives.gather_object", lambda mine: own.extend(mine) or [*others, *mine]
        )
        with pytest.raises(FinetuneError) as raised:
            Collectives(liveness).agree(error, "reading")
        return raised.value

    bad_row, bad_disk = (0, 2, "DataError: row 7", True), (1, 4, "RunFailedError: the disk is full", False)
    peer = agree(None, None, bad_disk)
    assert (str(peer), peer.exit_code) == ("rank 1 failed during reading: RunFailedError: the disk is full", 4)
    assert [agree(None, *ranks).saves_first for ranks in ([bad_row], [bad_row, bad_disk], [bad_disk])] == [1, 0, 0]
    assert not agree(DataError("row 7"), bad_row).saves_first, "all ranks that fail must agree"
    assert str(agree(None, bad_row, bad_disk)).startswith("rank 0 failed during reading: DataError: row 7")
    assert agree(DataError("row 7"), bad_row, bad_disk).is_reported_elsewhere
    assert not agree(DataError("row 8"), bad_row, None).is_reported_elsewhere
    assert not agree(DataError("row 7"), None, None).is_reported_elsewhere, "this rank is the first"
    assert own[-1] == (2, DataError.exit_code, "DataError: row 7", False)


def test_the_guardian_of_one_process_learns_the_phase_without_a_time_limit(monkeypatch):
    told = []

    class Watchdog:
        def enter_phase(self, phase, step, *, timed):
            told.append((phase, step, timed))

        def deadline(self, *_):
            return nullcontext()

        def close(self):
            """Nothing to close."""

    monkeypatch.setattr("finetune.distributed.liveness.Liveness._make_watchdog", lambda *_, **__: Watchdog())
    with launch(Config.model_validate({"training": {"device": "cpu"}})) as runtime:
        runtime.liveness.enter_phase("rollout", 1)
        with runtime.liveness.deadline(9.0, "late"):
            pass
        runtime.liveness.enter_phase("training", 1)
    assert told == [("rollout", 1, False), ("training", 1, False)]


def test_gradients_are_unscaled_and_those_that_are_missing_are_zeros():
    here, missing = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    here.grad = torch.tensor([8.0, 16.0])
    with launch(config(training={"device": "cpu", "precision": "fp16"})) as runtime:
        for scale in (8, 1):
            runtime.placement.unscale_gradients([here, missing], scale)
            assert (here.grad.tolist(), missing.grad) == ([1.0, 2.0], None)
        runtime.placement.sync_gradients([here, missing])
        assert (here.grad.tolist(), missing.grad.tolist()) == ([1.0, 2.0], [0.0, 0.0])
        with runtime.placement.autocast():
            assert torch.get_autocast_dtype("cpu") == torch.float16


@pytest.mark.parametrize(("shard_size", "expected"), [(2, 2), (None, 4)])
def test_weights_are_sharded_over_all_ranks_or_as_many_as_asked_for(shard_size, expected):
    with launch(config(parallel={"sharding": "fsdp2", "shard_size": shard_size})) as runtime:
        assert runtime.placement.shard_size is None
        alone, runtime.context = runtime.context, runtime.context._replace(distributed=True, world_size=4)
        assert runtime.placement.shard_size == expected
        assert runtime.placement.needs_equal_microbatches
        runtime.context = alone


def test_the_gradient_norm_is_measured_and_clipped():
    parameter = torch.nn.Parameter(torch.zeros(2))
    with launch(config()) as runtime:
        parameter.grad = torch.tensor([3.0, 4.0])
        assert runtime.placement.clip_grad_norm([parameter], None) == 5.0
        assert parameter.grad.tolist() == [3.0, 4.0]
        assert runtime.placement.clip_grad_norm([parameter], 1.0) == 5.0
        assert parameter.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)


def test_the_gradient_norm_of_many_values_is_that_of_float64():
    many, few = (torch.nn.Parameter(torch.zeros(number)) for number in (1_000_000, 3))
    torch.manual_seed(0)
    many.grad, few.grad = 1 + torch.rand(many.shape), torch.full((3,), 1e3)
    exact = float(sum(weight.grad.double().square().sum() for weight in (many, few))) ** 0.5
    with launch(config()) as runtime:
        assert runtime.placement.clip_grad_norm([many, few], 1.0).item() == pytest.approx(exact, rel=1e-12)
    assert float(many.grad.double().norm() ** 2 + few.grad.double().norm() ** 2) == pytest.approx(1.0, rel=1e-5)


def test_trained_weights_are_fp32_and_frozen_ones_take_the_precision():
    model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    model.bias.requires_grad = False
    with launch(config()) as runtime:
        runtime.placement.place(model)
        assert (model.weight.dtype, model.bias.dtype) == (torch.float32, torch.float32)
    with launch(config(training={"device": "cpu", "precision": "bf16"})) as runtime:
        runtime.placement.place(model)
        assert (model.weight.dtype, model.bias.dtype) == (torch.float32, torch.bfloat16)


def test_ranks_that_would_train_in_different_precisions_are_refused(monkeypatch):
    """Beside a newer GPU, auto on an older one means fp32: their sums would be those of neither."""
    with launch(config(training={"device": "cpu"})) as runtime:
        alone, runtime.context = runtime.context, runtime.context._replace(distributed=True, world_size=2)
        other = {"fp32": ["bf16"]}
        monkeypatch.setattr("finetune.distributed.collectives.gather_object", lambda own: own + other.get(own[0], own))
        with pytest.raises(LaunchError, match=r"precision.*=auto.* of rank 1 differs.*training\.precision=fp32"):
            _check_world(config(training={"device": "cpu"}), runtime, trains=False)
        runtime.context = alone


def test_ranks_may_differ_in_what_belongs_to_a_rank_and_in_nothing_else(monkeypatch, capsys):
    compared = []
    monkeypatch.setattr(
        Collectives, "refuse_differences", lambda self, what, value, **_: compared.append((what, value))
    )
    sections = [
        {},
        {"parallel": {"rank": 0}},
        {"parallel": {"output_device": 0}},
        {"data": {"cache_dir": "x"}},
        {"seed": 1},
        {"data": {"max_length": 7}},
    ]
    with launch(config()) as runtime:
        compared.clear()
        for section in sections:
            _check_world(config(**section), runtime, trains=False)
    digests = [value for what, value in compared if what == "the configuration"]
    assert [digests.index(digest) for digest in digests] == [0, 0, 0, 0, 4, 5]
    assert "Process 0/1 started\n" in capsys.readouterr().err


def test_a_quiet_command_logs_nothing_unless_the_run_is_debugged(capsys):
    for debug in (False, True):
        with launch(config(training={"device": "cpu", "debug": debug}), trains=False, log_level=logging.WARNING):
            pass
        assert ("Process 0/1 started" in capsys.readouterr().err) == debug


def test_an_address_of_ones_own_is_taken_where_the_launcher_gave_none_or_there_is_one_process(monkeypatch):
    two = replace(read_environment(place_variables(0, 2, 1)), is_address_missing=True)
    refuse_another_launch(config(parallel={"master_addr": "node1"}), two)
    with pytest.raises(LaunchError, match=r"started 2 processes on several nodes.*parallel\.master_addr"):
        refuse_another_launch(config(), two)
    monkeypatch.setenv("MASTER_ADDR", "node2")
    refuse_another_launch(config(parallel={"master_addr": "node1"}), read_environment({}))


def test_only_the_command_line_chooses_the_folder_of_compiled_kernels(tmp_path):
    """They are code, and a file may be that of others."""
    (tmp_path / "theirs.yaml").write_text("data: {cache_dir: theirs}\n")
    words = ["model=phi_tiny", "data=orders"]
    usual = _folder_of_kernels(load_config(words))
    assert _folder_of_kernels(load_config([*words, f"run={tmp_path}/theirs.yaml"])) == usual
    assert _folder_of_kernels(load_config([*words, f"data.cache_dir={tmp_path}"])) == tmp_path / "kernels"


def test_deterministic_holds_inside_and_not_after(monkeypatch):
    """On CUDA, products need a fixed workspace."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with launch(config(training={"device": "cpu", "deterministic": True})):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)  # by a script, before its run
    try:
        with launch(config(training={"device": "cpu", "deterministic": True})):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_closing_actions_run_last_first_and_are_told_the_error():
    heard, handlers = [], []

    def fail():
        with launch(config()) as runtime:
            runtime.liveness.on_close(lambda error: heard.append(("first", error)))
            runtime.liveness.on_close(lambda error: heard.append(("second", error)))
            runtime.liveness.on_close(lambda _: handlers.append(signal.getsignal(signal.SIGTERM)))
            raise DataError("bad")

    with pytest.raises(DataError, match="bad"):
        fail()
    assert [(name, str(error)) for name, error in heard] == [("second", "bad"), ("first", "bad")]
    assert handlers == [signal.SIG_IGN], "a launcher sends SIGTERM to the ranks that outlive another"
    with launch(config()) as runtime:
        runtime.liveness.on_close(heard.append)
    assert heard[-1] is None


def test_the_error_of_a_loaders_worker_is_one_line_with_its_cause():
    text = "Caught ValueError in worker 0.\nTraceback (most recent call last):\n  File, line 3\nValueError: torn row\n"
    assert in_a_line(ValueError(text)) == "ValueError: Caught ValueError in worker 0. ValueError: torn row"
    assert in_a_line(ValueError()) == "ValueError"


def test_accumulation_asked_of_accelerate_is_refused_and_the_next_launch_is_clean(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    refusal = pytest.raises(LaunchError, match=r"ACCELERATE_GRADIENT_ACCUMULATION_STEPS=2: training\.batch_size")
    with refusal, launch(config()):
        pass
    monkeypatch.delenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    with launch(config(training={"device": "cpu"})) as runtime:
        assert runtime.precision == "fp32"


def test_another_precision_asked_of_accelerate_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    automatic = config(training={"device": "cpu"})
    with pytest.raises(LaunchError, match=r"bf16 .*but training\.precision auto means fp32"), launch(automatic):
        pass
    with launch(config(training={"device": "cpu", "precision": "bf16"})) as runtime:
        assert runtime.precision == "bf16"


@pytest.mark.parametrize(
    ("launcher", "keys", "words"),
    [
        ("torchrun", {"parallel": {"world_size": 3}}, "parallel.world_size is 3 .* torchrun .* RANK=0, WORLD_SIZE=2"),
        ("torchrun", {"parallel": {"rank": 3}}, "parallel.rank is 3 .* RANK=0"),
        ("torchrun", {"parallel": {"num_processes": 3}}, "is 3 .* but torchrun started this process .* Remove the key"),
        (
            *("torchrun", {"parallel": {"master_addr": "10.0.0.9", "timeout_minutes": 0.02}}),
            "parallel.master_addr is 10.0.0.9 .* but torchrun set MASTER_ADDR=.* Remove the key, or tell the launcher",
        ),
        ("", {"parallel": {"world_size": 3}}, "this process was started without a launcher, as RANK=0, WORLD_SIZE=1"),
        ("", {"ddp": False, "parallel": {"num_processes": 2}}, "ddp is false .* but parallel.num_processes is 2"),
    ],
)
def test_a_wish_that_the_launch_does_not_meet_is_refused(monkeypatch, launcher, keys, words):
    if launcher:
        for name, value in {**place_variables(0, 2, free_port()), "TORCHELASTIC_RUN_ID": "x"}.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=words), launch(config(**keys)):
        pass


def test_a_strict_run_refuses_fewer_processes_than_accelerate_was_asked_for(monkeypatch):
    asked = accelerate_library.AccelerateCommand(num_processes=2, engine=None)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(accelerate_settings, "read_accelerate_command", lambda environ: asked)
    words = r"(?s)accelerate launch was asked for 2 processes on the CPU and started one.*The run is strict"
    with pytest.raises(ConfigError, match=words), launch(config(strict=True)):
        pass


def test_auto_precision_is_fp16_where_a_gpu_only_emulates_bf16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert best_precision(torch.device("cuda", 0)) == "fp16"


@pytest.fixture
def apple_gpu(monkeypatch):
    """What torch says on a Mac; there is no Apple GPU here, and nothing computes."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: major < 14)
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: torch.device("mps") if check_available else None,
    )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("deterministic", True, r"training\.deterministic is true .*Apple GPU \(mps\).*training\.device=cpu"),
        ("precision", "fp16", r"training\.precision is fp16 .*does not compute in it.*precision=bf16"),
        ("precision", "bf16", r"training\.precision is bf16 .*needs macOS 14.*training\.precision=fp32"),
    ],
)
def test_what_an_apple_gpu_cannot_do_is_refused_by_name(apple_gpu, key, value, words):
    with pytest.raises(ConfigError, match=words), launch(config(training={"device": "mps", key: value})):
        pass
    with launch(config(training={"device": "cpu", key: value})):
        pass


def test_no_task_asks_for_what_an_apple_gpu_cannot_do(apple_gpu):
    tasks = dict(list_configs()["task"])
    assert "debug" in tasks
    for task in tasks:
        _refuse_what_mps_lacks(compose([f"task={task}"], complete=False), torch.device("mps"))


def test_several_processes_do_without_an_apple_gpu_and_say_so(apple_gpu, monkeypatch):
    """In a group that is up already."""
    for name, value in place_variables(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group("gloo")
    try:
        with launch(config(training={"device": "auto"})) as runtime:
            [taken] = runtime.fallbacks.as_records()
        with pytest.raises(LaunchError, match="one process alone"), launch(config(training={"device": "mps"})):
            pass
    finally:
        torch.distributed.destroy_process_group()
    assert (taken["what"], taken["wanted"], taken["used"]) == ("training.device", "mps", "cpu")


def test_an_accelerator_that_finetune_does_not_know_is_missed_aloud(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu", 0))
    with launch(config(training={"device": "auto"})) as runtime:
        [taken] = runtime.fallbacks.as_records()
    assert (taken["what"], taken["wanted"], taken["used"]) == ("training.device", "xpu", "cpu")
    assert "finetune does not compute on xpu" in taken["why"]
    with pytest.raises(ConfigError, match="strict"), launch(config(training={"device": "auto"}, strict=True)):
        pass
    with launch(config()) as runtime:  # training.device=cpu
        assert runtime.fallbacks.as_records() == []


class Recorder:
    """A watchdog and a GPU's stream that write down when they are called."""

    is_reported_elsewhere = False

    def __init__(self):
        self.heard = []

    @contextmanager
    def waiting(self, collective):
        self.heard.append(f"enter {collective}")
        yield
        self.heard.append("leave")

    def first_fault(self, wait_seconds):
        self.heard.append("ask for the fault")

    def fail(self, error):
        self.heard.append(f"failed: {error.partition(':')[0]}")

    def close(self):
        self.heard.append("closed")

    def synchronize(self):
        self.heard.append("the device is done")


def test_ranks_are_watched_while_their_cpus_are_connected(monkeypatch):
    """A rank that dies then would be waited for until the group's timeout, which is an hour."""
    recorder = Recorder()
    monkeypatch.setattr(Runtime, "_compare_worlds", lambda self: None)
    watchdog = Mock(return_value=recorder)
    monkeypatch.setattr("finetune.distributed.watchdog.Watchdog", watchdog)
    monkeypatch.setattr(Collectives, "backend", "nccl")
    new_group = Mock(side_effect=RuntimeError("no network"))
    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    context = ProcessContext(True, 0, 0, 2, torch.device("cpu"))
    with pytest.raises(LaunchError, match=r"gloo does not connect their CPUs \(no network\)"):
        Runtime(
            context,
            read_environment({}),
            Fallbacks(),
            config(parallel={"timeout_minutes": 7, "step_timeout_minutes": 3}),
            {},
        )
    assert watchdog.call_args.kwargs["step_timeout_seconds"] == 180
    forget_accelerate()
    assert new_group.call_args.kwargs == {"backend": "gloo", "timeout": timedelta(minutes=7)}
    connecting = "enter connecting the CPUs of all ranks"
    assert recorder.heard == [connecting, "ask for the fault", "failed: LaunchError", "closed"]


def test_a_gpu_finishes_its_work_before_a_rank_waits_and_before_it_waits_no_more(monkeypatch):
    """nccl only queues a collective: without this a rank would block where a fault takes it for the culprit."""
    recorder = Recorder()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: recorder)
    with launch(config()) as runtime:
        there, runtime.liveness.watchdog = runtime.context, recorder
        runtime.collectives.barrier()
        assert recorder.heard == ["enter barrier", "leave"]  # on the CPU, no call returns early
        recorder.heard.clear()
        runtime.context = there._replace(device=torch.device("cuda", 0))
        runtime.collectives.barrier()
        runtime.context, runtime.liveness.watchdog = there, None
    done = "the device is done"
    assert recorder.heard == [done, "enter barrier", done, "leave"]


def test_only_the_last_backward_pass_of_a_step_waits_for_other_ranks():
    recorder, weight = Recorder(), torch.nn.Parameter(torch.ones(2))
    with launch(config()) as runtime:
        runtime.liveness.watchdog, runtime.placement._reducer = recorder, object()
        runtime.placement.backward(weight.sum(), is_last=False)
        assert recorder.heard == []
        runtime.placement.backward(weight.sum(), is_last=True)
        assert recorder.heard == ["enter backward", "leave"]
        runtime.liveness.watchdog = runtime.placement._reducer = None
    assert weight.grad.tolist() == [2.0, 2.0]


def test_a_world_that_accelerate_sees_otherwise_is_refused():
    """Here it sees one process, which is rank 0, as after a launch that it does not know."""
    context = ProcessContext(True, 1, 1, 2, torch.device("cpu"))
    with pytest.raises(
        LaunchError, match=r"see different worlds .*world size: ours 2, Acc.*'s 1; rank: ours 1, Acc.*'s 0"
    ):
        Runtime(context, read_environment({}), Fallbacks(), config(), {})
    forget_accelerate()


ALONE = ProcessContext(False, 0, 0, 1, torch.device("cpu"))


def test_only_an_error_of_this_rank_is_told_to_the_others():
    told = {
        DataError("mine"): ["failed: DataError", "closed"],
        PreemptedError("as asked"): ["closed"],
        PeerFailedError("another's", exit_code=2): ["closed"],
        None: ["closed"],
    }
    for error, heard in told.items():
        liveness = Liveness(ALONE)
        liveness.watchdog = recorder = Recorder()
        with liveness.leaving(error):
            pass
        assert recorder.heard == heard


def test_a_connection_that_breaks_in_a_collective_means_a_lost_rank_and_other_errors_stay():
    liveness = Liveness(ALONE)
    liveness.watchdog = Recorder()
    for text, error, said in (
        ("Connection reset by peer", RunFailedError, "^another rank left during sum: Connection reset by peer"),
        ("shapes differ", RuntimeError, "^shapes differ"),
    ):
        with pytest.raises(error, match=said) as caught, liveness.collective("sum"):
            raise RuntimeError(text)
        assert type(caught.value) is error


def test_a_rank_ends_with_the_cause_if_it_is_known(monkeypatch):
    fault = Fault(rank=0, summary="rank 0 was killed")
    watchdog = SimpleNamespace(first_fault=lambda seconds: fault, whereabouts="rank 1, during training, step 3")
    in_wrapper = RuntimeError("a library's")
    in_wrapper.__cause__ = Terminated()
    for error in (Terminated(), in_wrapper):
        named = explain(error, watchdog)
        assert (type(named), named.fault) == (RunFailedError, fault)
    own, of_peer, of_fault = DataError("bad"), PeerFailedError("bad", exit_code=2), RunFailedError("bad", fault=fault)
    for error, notes in ((own, [watchdog.whereabouts]), (of_peer, []), (of_fault, [])):
        assert explain(error, watchdog) is error
        assert getattr(error, "__notes__", []) == notes
    stopped = RunFailedError("rank 0 failed", fault=Fault(rank=0, summary="rank 0 failed", error="KeyboardInterrupt"))
    assert explain(stopped, watchdog) is stopped
    monkeypatch.setattr(liveness_module, "received_stop_signal", lambda: signal.SIGINT)
    assert isinstance(explain(stopped, watchdog), KeyboardInterrupt), "Ctrl-C was for this rank too"


def test_a_loader_without_open_files_has_lost_no_worker():
    def _try_get_data(text):  # as torch names it
        raise RuntimeError(text)

    for text, is_lost in (("DataLoader worker exited", True), ("Too many open files", False)):
        with pytest.raises(RuntimeError) as caught:
            _try_get_data(text)
        assert ("a data worker was killed" in str(explain(caught.value, None))) == is_lost


def test_a_signal_ends_the_set_up_of_one_process_and_is_noted_by_one_of_several_ranks():
    one, two = (replace(read_environment({}), world_size=world_size) for world_size in (1, 2))
    with pytest.raises(Terminated), _signals_of_run(one, trains=True):
        signal.raise_signal(signal.SIGTERM)
    with _signals_of_run(two, trains=True):
        signal.raise_signal(signal.SIGTERM)
        assert received_stop_signal() == signal.SIGTERM


def test_a_run_that_is_stopped_in_its_set_up_says_so():
    with pytest.raises(PreemptedError, match="stopped during set-up as asked by SIGTERM"), launch(config()):
        signal.raise_signal(signal.SIGTERM)


def test_accelerate_may_ask_for_the_cpu(monkeypatch):
    automatic = config(training={"device": "auto"})
    assert wished_device(automatic) is None
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert wished_device(automatic) == "cpu"


def test_an_output_device_is_one_of_the_gpus_that_a_rank_sees(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    there = SimpleNamespace(device=torch.device("cuda", 0), placement=SimpleNamespace(uses_reducer=True), rank=3)
    _record_output_device(config(parallel={"output_device": 1}), there)
    with pytest.raises(LaunchError, match=r"output_device is 2 .* but rank 3 sees 2 GPUs, counted from 0"):
        _record_output_device(config(parallel={"output_device": 2}), there)
