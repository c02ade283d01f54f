"""A process may be in several launches: an inner one changes nothing of an outer one, or is refused."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

import finetune
from finetune import logs
from finetune.config.schema import Config
from finetune.distributed.device import refuse_modes
from finetune.distributed.launch import launch
from finetune.engine.fused import is_fused, replays_answers, switch_fused, switch_replays
from finetune.errors import CheckpointError, LaunchError
from finetune.logs import hear_libraries
from finetune.signals import begin_steps


def config(folder, **training):
    keys = {"device": "cpu", "precision": "fp32", **training}
    return Config.model_validate({"output_dir": str(folder), "training": keys})


def test_a_launch_in_another_one_gives_back_what_it_changed(tmp_path):
    with launch(config(tmp_path), trains=False) as runtime:
        switch_fused(True)
        switch_replays(True)
        before = torch.get_rng_state()
        with launch(config(tmp_path, precision="bf16"), trains=False, log_level=logging.ERROR) as inner:
            assert inner.precision == "bf16"
            assert not is_fused()
            assert not replays_answers()
            torch.rand(1)
        assert torch.equal(torch.get_rng_state(), before)
        assert is_fused()
        assert replays_answers()
        assert logging.getLogger("finetune").level == logging.INFO
        with runtime.placement.autocast():
            assert not torch.is_autocast_enabled("cpu")
        runtime.placement.prepare_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    assert not is_fused()


@pytest.mark.parametrize("fails", [False, True])
def test_a_launch_gives_a_script_its_log_back(tmp_path, monkeypatch, fails):
    log, own, added = logging.getLogger("finetune"), logging.NullHandler(), logging.NullHandler()
    monkeypatch.setattr(logs, "_log_of_script", None)
    monkeypatch.setattr(logs, "_is_command", False)
    log.handlers, log.propagate = [own], True
    log.setLevel(logging.ERROR)
    logs.configure_logs(0)  # as some functions do before they launch
    with suppress(ZeroDivisionError), launch(config(tmp_path), trains=False):
        log.addHandler(added)
        assert not fails or 1 / 0
    assert (log.level, log.propagate, log.handlers) == (logging.ERROR, True, [own, added])


@pytest.mark.parametrize("name", ["evaluate", "generate", "merge"])
def test_a_refused_function_gives_a_script_its_log_back(name, tmp_path, monkeypatch):
    """It is refused before a launch, which would do so, begins."""
    log = logging.getLogger("finetune")
    monkeypatch.setattr(logs, "_log_of_script", None)
    monkeypatch.setattr(logs, "_is_command", False)
    log.handlers, log.propagate = [], True
    log.setLevel(logging.ERROR)
    with pytest.raises(CheckpointError, match="is not the folder of a run"):
        getattr(finetune, name)(tmp_path, *(["Hello"] if name == "generate" else []))
    assert (log.level, log.propagate, log.handlers) == (logging.ERROR, True, [])


@pytest.mark.parametrize("fails", [False, True])
def test_a_launch_gives_the_random_generator_back(tmp_path, fails):
    before = torch.get_rng_state()
    with suppress(ZeroDivisionError), launch(config(tmp_path), trains=False):
        torch.rand(1)
        assert not fails or 1 / 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_in_the_steps_of_another_one_is_refused_by_name(tmp_path):
    with launch(config(tmp_path / "outer")):
        begin_steps()
        with pytest.raises(LaunchError, match="A second run cannot begin inside a callback"):
            launch(config(tmp_path / "inner")).__enter__()
        with launch(config(tmp_path / "inner"), trains=False):
            pass


def test_a_launch_in_a_second_thread_is_refused(tmp_path):
    def enter(trains):
        with launch(config(tmp_path / "second"), trains=trains):
            pass

    with ThreadPoolExecutor(1) as pool:
        for first in (True, False):
            with launch(config(tmp_path / "first"), trains=first):
                torch.set_default_dtype(torch.bfloat16)  # as transformers does while it loads a model
                try:
                    for second in (True, False):
                        with pytest.raises(LaunchError, match="another thread of this process is in a run"):
                            pool.submit(enter, second).result()
                finally:
                    torch.set_default_dtype(torch.float32)
        pool.submit(enter, True).result()


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), r"torch\.autocast"),
        (lambda: torch.device("meta"), r"torch\.set_default_device\('meta'\)"),
    ],
)
def test_a_mode_that_changes_the_numbers_is_refused(tmp_path, mode, name, trains):
    with mode(), pytest.raises(LaunchError, match=f"{name} is in force"):
        launch(config(tmp_path), trains=trains).__enter__()


def test_another_default_type_is_refused(tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(LaunchError, match=r"torch\.set_default_dtype\(torch\.float64\) is in force"):
            launch(config(tmp_path)).__enter__()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_only_training_needs_gradients(tmp_path, mode):
    with mode():
        with pytest.raises(LaunchError, match=rf"torch\.{mode.__name__} is in force"):
            launch(config(tmp_path)).__enter__()
        with launch(config(tmp_path), trains=False):
            pass


def read_precision() -> tuple[str, str, str]:
    try:
        of_all = torch.get_float32_matmul_precision()
    except RuntimeError:
        of_all = "differs"
    return of_all, torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture
def exact_products():
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("by_device", [False, True])
def test_a_launch_does_not_round_products_and_gives_the_setting_back(tmp_path, by_device, capsys):
    if by_device:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    else:
        torch.set_float32_matmul_precision("medium")
    before = read_precision()
    for trains in (True, False):
        with launch(config(tmp_path), trains=trains):
            assert read_precision() == ("highest", "ieee", "ieee")
        assert read_precision() == before
        assert "bf16 on cpu). This run does not" in capsys.readouterr().err


@pytest.mark.usefixtures("exact_products")
def test_a_launched_run_refuses_rounded_products(tmp_path):
    with launch(config(tmp_path)):
        refuse_modes(trains=True, is_launched=True)
        torch.set_float32_matmul_precision("high")
        with pytest.raises(LaunchError, match=r"torch\.set_float32_matmul_precision is in force"):
            refuse_modes(trains=True, is_launched=True)


def test_a_launch_gives_libraries_their_handlers_back(tmp_path):
    logger, mine, own = logging.getLogger("peft"), logging.NullHandler(), logging.NullHandler()
    logger.addHandler(mine)
    before = list(logger.handlers)
    try:
        with launch(config(tmp_path / "outer")):
            hear_libraries()
            assert mine not in logger.handlers
            with launch(config(tmp_path / "inner"), trains=False):
                hear_libraries()
            assert mine not in logger.handlers
            logger.addHandler(own)
        assert logger.handlers == [*before, own]
    finally:
        logger.removeHandler(mine)
        logger.removeHandler(own)
