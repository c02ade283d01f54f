"""Both ways to sum gradients over ranks give one sum, also where a rank has fewer micro-batches than another."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from finetune.config.schema import Config
from finetune.distributed.launch import _record_output_device, launch
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.padded import EMPTY_MICROBATCH
from finetune.errors import ConfigError, LaunchError
from finetune.training.optim import trainable_parameters
from tests.distributed.reducing import CONFIGS, METHODS, SHARES, tiny
from tests.launches import reports_of


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return reports_of("torchrun", Path(__file__).with_name("reducing.py"), tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.warm
def test_the_reducer_sums_as_the_flat_sum_does(two_ranks):
    assert len(two_ranks) == 2
    for seen in two_ranks:
        differences = seen["differences"]
        assert len(differences) == len(CONFIGS) * len(METHODS) * len(SHARES)
        assert {name: value for name, value in differences.items() if not value <= 1e-6} == {}


@pytest.mark.slow
@pytest.mark.warm
def test_each_model_has_a_reducer_that_sums_weights_which_one_rank_leaves_out_and_ends_with_its_launch(two_ranks):
    for seen in two_ranks:
        assert seen["unused"] == [[2.0, 2.0], [3.0, 3.0], None]
        expected, found = seen["two"]
        assert found == pytest.approx(expected, rel=1e-6)
        assert abs(expected[0] - expected[1]) > 1e-3
        assert seen["is_reducer_gone"], "it would keep the threads of the group"


def test_an_output_device_that_does_nothing_is_said_to():
    sections = {"training": {"device": "cpu", "precision": "fp32"}, "parallel": {"output_device": 0}}
    with launch(Config.model_validate(sections), trains=False) as runtime:
        (fallback,) = runtime.fallbacks.as_records()
        assert (fallback["what"], fallback["wanted"], fallback["used"]) == ("parallel.output_device", "0", "cpu")
    with (
        pytest.raises(ConfigError, match=r"parallel\.output_device: wanted 0"),
        launch(Config.model_validate({**sections, "strict": True}), trains=False),
    ):
        pass


def test_an_output_device_beyond_the_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    runtime = SimpleNamespace(device=torch.device("cuda", 1), placement=SimpleNamespace(uses_reducer=True), rank=1)
    _record_output_device(Config.model_validate({"parallel": {"output_device": 1}}), runtime)
    with pytest.raises(LaunchError, match=r"output_device is 2 .* but rank 1 sees 2 GPUs, counted from 0"):
        _record_output_device(Config.model_validate({"parallel": {"output_device": 2}}), runtime)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_an_empty_micro_batch_reaches_every_trained_weight_with_zero(kind, method):
    """torch's reducer waits for the gradient of each of them."""
    model = tiny(kind, method)
    loss = summed_cross_entropy(model, EMPTY_MICROBATCH)
    loss.backward()
    assert loss.item() == 0.0
    gradients = [parameter.grad for parameter in trainable_parameters(model)]
    assert gradients
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
