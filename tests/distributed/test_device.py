import types

import pytest
import torch

from finetune.distributed.device import _resolve_device
from finetune.distributed.process_group import choose_backend
from finetune.distributed.rank_devices import (
    _pick_device,
    device_identity,
    device_of_rank,
    refuse_different_devices,
    refuse_shared_devices,
)
from finetune.errors import LaunchError

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.fixture
def gpus(monkeypatch):
    """A machine with some number of GPUs: there is none here, and what is chosen needs none."""
    for name in VISIBLE:
        monkeypatch.delenv(name, raising=False)

    def set_count(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)

    return set_count


def test_a_device_that_is_not_there_becomes_the_cpu_with_a_warning(gpus, caplog):
    gpus(0)
    assert _resolve_device("cpu") == _resolve_device(torch.device("cpu", 0)) == torch.device("cpu")
    assert not caplog.records
    for wish in ("cuda", "gpu", "cuda:1", 0, torch.device("cuda", 3)):
        caplog.clear()
        assert _resolve_device(wish) == torch.device("cpu")
        assert "the CPU is used" in caplog.text


def test_a_gpu_is_taken_by_its_name_or_number(gpus):
    gpus(2)
    wishes = {"cuda": 0, "gpu": 0, "cuda:1": 1, "gpu:1": 1, 1: 1, torch.device("cuda", 1): 1, "CUDA:1": 1}
    assert {wish: _resolve_device(wish).index for wish in wishes} == wishes
    assert _resolve_device("cuda:2") == torch.device("cpu")
    assert _resolve_device(None) == _resolve_device("auto") == torch.device("cuda", 0)


def test_an_apple_gpu_is_for_one_process_alone(gpus, monkeypatch):
    gpus(0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(LaunchError, match=r"training\.device=mps computes in one process alone.*training\.device=cpu"):
        device_of_rank(0, "mps")
    assert device_of_rank(0, None) == device_of_rank(1, "cpu") == torch.device("cpu")


@pytest.mark.parametrize("wish", ["tpu", "cuda:-1", True, torch.device("meta")])
def test_a_wish_that_is_no_device_is_refused_with_those_that_are(wish, gpus):
    gpus(2)
    with pytest.raises(LaunchError, match=r"is not known; expected auto, cpu, cuda .*training\.device"):
        _resolve_device(wish)


def test_each_local_rank_has_its_own_gpu_or_the_launch_is_refused(gpus):
    gpus(2)
    assert [_pick_device(rank) for rank in (0, 1)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(LaunchError, match="local rank 2 needs GPU 2, but this node shows 2 GPU"):
        _pick_device(2)
    gpus(0)
    assert _pick_device(5) == torch.device("cpu")


def test_local_ranks_take_the_gpus_in_turn_if_they_may_share_them(gpus):
    gpus(2)
    assert [device_of_rank(rank, None, shares_gpus=True).index for rank in range(4)] == [0, 1, 0, 1]
    assert device_of_rank(1, "cpu", shares_gpus=True) == torch.device("cpu")
    gpus(1)
    assert device_of_rank(1, "cuda", shares_gpus=True) == torch.device("cuda", 0)
    assert choose_backend("auto", torch.device("cuda", 0), shares_gpus=True) == "gloo"
    assert choose_backend("nccl", torch.device("cuda", 0), shares_gpus=True) == "nccl"


@pytest.mark.parametrize("name", VISIBLE)
def test_a_process_that_is_shown_one_gpu_takes_that_one(name, gpus, monkeypatch):
    gpus(1)
    monkeypatch.setenv(name, "3")
    assert _pick_device(3) == torch.device("cuda", 0)
    gpus(2)
    with pytest.raises(LaunchError, match="needs GPU 3"):
        _pick_device(3)


def test_a_gpu_is_known_by_its_uuid_whatever_its_index(gpus, monkeypatch):
    uuids = ["11111111-2222", "33333333-4444"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=uuids[index]))
    gpus(2)
    first, second = (device_identity(torch.device("cuda", index)) for index in (0, 1))
    assert first.endswith(" GPU-11111111-2222")
    assert second.endswith(" GPU-33333333-4444")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert device_identity(torch.device("cuda")) == first
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aa, MIG-bb")  # two slices of one GPU are two devices
    assert device_identity(torch.device("cuda", 1)).endswith(" MIG-bb")
    assert device_identity(torch.device("cpu")) is None


def test_ranks_on_different_kinds_of_device_are_refused_by_kind():
    kinds = ["cuda with nccl", "cpu with gloo", "cuda with nccl", "cpu with gloo"]
    with pytest.raises(LaunchError) as caught:
        refuse_different_devices(dict(enumerate(kinds)))
    for part in ("cuda with nccl (ranks 0, 2), cpu with gloo (ranks 1, 3)", "training.device", "finetune doctor"):
        assert part in str(caught.value)


def test_two_ranks_on_one_gpu_are_refused_by_name_and_no_others():
    twice = ["node1 GPU-a", "node1 GPU-b", "node2 GPU-c", "node1 GPU-a", "container GPU-b"]
    identities = [*twice, None, None, "node2 MIG-d", "node2 MIG-e"]
    with pytest.raises(LaunchError) as caught:
        refuse_shared_devices(dict(enumerate(identities)))
    for part in ("ranks 0, 3 (node1 GPU-a)", "ranks 1, 4 (node1 GPU-b)", "CUDA_VISIBLE_DEVICES", "training.device=cpu"):
        assert part in str(caught.value)
    for part in ("GPU-c", "None", "5", "MIG"):
        assert part not in str(caught.value)
