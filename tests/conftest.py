"""Tests know nothing of the machine they run on, and leave nothing behind."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tests.tiers", "tests.warm", "tests.crash.tally"]
"""Named here, so that the process which shows the summary of several pytest-xdist workers has them too."""

_LAUNCH_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_LAUNCH_PREFIXES = (
    *("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_"),
    *("OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_"),
)
_CACHE_VARIABLES = {"HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME"}
_FEWER_INSTRUCTIONS = {"default": ("SSE4_2", "SSE41"), "avx2": ("AVX2", "AVX2")}
"""MKL's and oneDNN's names of what ATEN_CPU_CAPABILITY allows. Without them, torch asks oneDNN for instructions that
its own kernels may not use, and its attention in bf16 fails."""
_SECONDS_TO_END = 5.0
_GPU_TESTS = Path(__file__).with_name("gpu")
_SEES_NO_GPU = {"ldconfig", "gcc", "cc", "ld", "objdump"}
"""What ctypes asks where a library is, in an environment of its own. torch for CUDA does so when it is imported."""


def _is_launch_variable(name: str) -> bool:
    return name in _LAUNCH_VARIABLES or name.startswith(_LAUNCH_PREFIXES)


def _isolate() -> None:
    """Before anything heavy is imported, since libraries read the environment then; child processes inherit it."""
    for name in [name for name in os.environ if _is_launch_variable(name) or name in _CACHE_VARIABLES]:
        del os.environ[name]
    home = tempfile.mkdtemp(prefix="finetune-tests-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    # A shell that starts a job in the background, or nohup, has it ignore these, and so every child; tests send them.
    for name in ("SIGINT", "SIGHUP"):
        if signal.getsignal(signal.Signals[name]) is signal.SIG_IGN:
            signal.signal(signal.Signals[name], signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
    # One thread a process: the launch tests run several, and OpenMP collapses when cores are shared. CI runs
    # the numeric tests with more. torch.compile would start processes that stay behind a test.
    threads = os.environ.get("FINETUNE_TEST_THREADS", "1")
    single = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # torchrun makes a folder for its logs in each launch, even where it writes none.
    os.environ |= {"HOME": home, "HF_HUB_OFFLINE": "1", "PET_LOG_DIR": f"{home}/torchrun", **single}
    # Each run asks git whether a file of the repository around it was changed, and git looks at all of them.
    os.environ["GIT_DIR"] = f"{home}/no-repository"
    if allowed := _FEWER_INSTRUCTIONS.get(os.environ.get("ATEN_CPU_CAPABILITY", "")):
        os.environ["MKL_ENABLE_INSTRUCTIONS"], os.environ["ONEDNN_MAX_CPU_ISA"] = allowed


_isolate()


def pytest_configure(config: pytest.Config) -> None:
    """Only tests/gpu may see a GPU: all others compute on the CPU, on every machine."""
    named = [config.invocation_params.dir / path.partition("::")[0] for path in config.option.file_or_dir or ()]
    if not named or not all(path.resolve().is_relative_to(_GPU_TESTS) for path in named):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        sys.addaudithook(_refuse_visible_gpus)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Modules and tests are no garbage, and the search for some takes a sixth of the time of the collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def _refuse_visible_gpus(event: str, args: tuple[Any, ...]) -> None:
    """A test that gives a process an environment of its own hides GPUs there too."""
    if event != "subprocess.Popen" or args[3] is None or Path(os.fsdecode(args[0])).name in _SEES_NO_GPU:
        return
    if args[3].get("CUDA_VISIBLE_DEVICES") != "":
        raise AssertionError(f"a process would see this machine's GPUs: {args[1]}. Give it the tests' environment too")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaks a process group, a launch variable or a thread that would keep the process alive."""
    threads_before = set(threading.enumerate())
    yield
    leaks = [f"variable {name}" for name in sorted(os.environ) if _is_launch_variable(name)]
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        leaks.append("a process group")
    for thread in set(threading.enumerate()) - threads_before:
        if not thread.daemon:
            thread.join(_SECONDS_TO_END)
            leaks += [f"thread {thread.name}"] if thread.is_alive() else []
    for name in [name for name in os.environ if _is_launch_variable(name)]:
        del os.environ[name]
    if leaks:
        pytest.fail(f"the test left behind: {', '.join(leaks)}")


@pytest.fixture(autouse=True, scope="module")
def _modules_are_not_searched_for_garbage() -> None:
    """The end of each run collects garbage, which takes 0.4 s where it visits all of torch and transformers."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _package_log_of_this_module() -> Iterator[None]:
    """What a fixture of one file configures, a run for example, is gone before the next file."""
    logger = logging.getLogger("finetune")
    logger.handlers, logger.level, logger.propagate = [], logging.NOTSET, True
    yield
    logger.handlers, logger.level, logger.propagate = [], logging.NOTSET, True


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The input of tiny runs that do not need rows or a base of their own."""
    from tests.tiny_training import write_inputs  # imports torch

    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(autouse=True)
def _package_log_as_before() -> Iterator[None]:
    """A run configures the package's logger; the next test starts without that."""
    logger = logging.getLogger("finetune")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers, logger.level, logger.propagate = before
    if logs := sys.modules.get("finetune.logs"):  # a command keeps the log that it configured, a script does not
        logs._is_command, logs._log_of_script = False, None
