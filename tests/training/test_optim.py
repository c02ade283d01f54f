import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from finetune.config.compose import compose
from finetune.config.schema import OptimSection
from finetune.errors import ConfigError
from finetune.training.optim import (
    build_optimizer,
    check_optimizer,
    describe_short_schedule,
    learning_rate_at,
    resolve_optimizer,
    set_learning_rate,
    trainable_parameters,
)


def section(**keys):
    return OptimSection(**{"learning_rate": 0.1, **keys})


def rates(num_steps, **keys):
    return [learning_rate_at(step, num_steps, section(**keys)) for step in range(1, num_steps + 1)]


def test_the_default_is_adamw_over_the_trainable_weights_alone():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].weight.requires_grad = False
    optimizer = build_optimizer(model, section(weight_decay=0.5))
    assert type(optimizer) is torch.optim.AdamW
    groups = {group["weight_decay"]: [tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups}
    assert groups == {0.5: [(1, 3)], 0.0: [(3,), (1,)]}
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}


def test_other_optimizers_and_their_arguments_are_taken():
    adam = build_optimizer(nn.Linear(2, 2), section(optimizer="torch.optim.Adam", args={"betas": [0.8, 0.9]}))
    assert type(adam) is torch.optim.Adam
    assert adam.defaults["betas"] == (0.8, 0.9)
    assert build_optimizer(nn.Linear(2, 2), section(optimizer="torch.optim.Rprop"))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"optimizer": "torch.optim.Rprop", "weight_decay": 0.1}, "Rprop has no weight decay"),
        ({"args": {"weight_decay": 0.1}}, r"^optim\.args sets weight_decay\. Set optim\.weight_decay"),
        (
            {"args": {"bettas": [0.9, 0.9]}},
            r"^with optim\.args=.*, optim\.optimizer=torch\.optim\.AdamW cannot be built",
        ),
        ({"args": {"eps": -1.0}}, r"^with optim\.args=.*, optim\.optimizer=torch\.optim\.AdamW cannot be built"),
    ],
)
def test_arguments_that_do_not_go_with_an_optimizer_are_refused(keys, said):
    with pytest.raises(ConfigError, match=said):
        build_optimizer(nn.Linear(2, 2), section(**keys))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_an_optimizer_is_checked_without_a_model_and_without_random_numbers(method):
    words = [f"training.method={method}", "optim.optimizer=muon"]
    before = torch.get_rng_state()
    refused = r"matrices only.*Set optim.optimizer=adamw.*method=lora"
    with nullcontext() if method == "lora" else pytest.raises(ConfigError, match=refused):
        check_optimizer(compose(words, complete=False))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_factory_that_returns_no_optimizer_is_named():
    given = section().with_factory(lambda groups, lr: None, "mine")
    with pytest.raises(ConfigError, match=r"script:mine returned NoneType; expected a torch\.optim\.Optimizer"):
        build_optimizer(nn.Linear(2, 2), given)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [0.1, 0.075, 0.05, 0.025]),
        ({"warmup_steps": 2}, [0.05, 0.1, 0.1, 0.05]),
        ({"min_learning_rate": 0.02}, [0.1, 0.08, 0.06, 0.04]),
        ({"schedule": "constant", "warmup_steps": 8}, [0.0125, 0.025, 0.0375, 0.05]),
        ({"schedule": "cosine"}, [0.1 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]),
        ({"schedule": "wsd", "warmup_steps": 2, "decay_steps": 9}, [0.05, 0.1, 0.1, 0.05]),
        ({"schedule": "wsd", "decay_steps": 2, "min_learning_rate": 0.02}, [0.1, 0.1, 0.1, 0.06]),
        ({"schedule": "wsd"}, [0.1] * 37 + [0.075, 0.05, 0.025]),  # a tenth falls
    ],
)
def test_the_rate_of_each_step_follows_from_the_schedule(keys, expected):
    assert rates(len(expected), **keys) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"min_learning_rate": 0.2}, "0.2 is above optim.learning_rate=0.1"),
        ({"schedule": "constant", "min_learning_rate": 0.01}, "with optim.schedule=constant the rate does not fall"),
        ({"decay_steps": 3}, "only optim.schedule=wsd has such steps, and it is linear"),
    ],
)
def test_a_key_of_a_schedule_without_effect_is_refused(keys, said):
    with pytest.raises(ValueError, match=said):
        section(**keys)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("os.system", "must come from"),
        ("torch.optim.lr_scheduler.StepLR", "must come from"),
        ("torch.optim.NoSuch", "no such optimizer"),
        ("torch.optim.lr_scheduler", "no such optimizer"),
        ("torch.optim.LBFGS", "needs a closure"),
        ("torch.optim.SparseAdam", "sparse gradients"),
    ],
)
def test_what_is_no_usable_optimizer_is_refused(name, words):
    with pytest.raises(ConfigError, match=words):
        resolve_optimizer(name)


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match=r"bitsandbytes\.optim is not installed"):
        resolve_optimizer("bitsandbytes.optim.AdamW8bit")


def test_a_warm_up_may_be_a_share_of_the_steps_rounded_up_by_its_decimal_digits():
    assert rates(10, warmup_steps=0.35) == rates(10, warmup_steps=4)
    assert rates(100, warmup_steps=0.07) == rates(100, warmup_steps=7)  # 0.07 * 100 is above 7 in binary
    assert rates(10, warmup_steps=0.0) == rates(10, warmup_steps=0)
    assert rates(10, warmup_steps=1)[0] == 0.1


def test_setting_the_rate_reaches_every_group_and_keeps_a_tensor():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([{"params": [first], "lr": torch.tensor(1.0)}, {"params": [second]}], lr=1.0)
    tensor = optimizer.param_groups[0]["lr"]
    set_learning_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is tensor
    assert float(tensor) == optimizer.param_groups[1]["lr"] == 0.25


def test_trainable_parameters_are_in_the_models_order_and_tied_ones_come_once():
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2), nn.Linear(2, 2, bias=False)])
    model[2].weight = model[0].weight
    model[1].bias.requires_grad = False
    assert trainable_parameters(model) == [model[0].weight, model[1].weight]


@pytest.mark.parametrize(("warmup_steps", "is_said"), [(9, False), (10, False), (11, True)])
def test_a_warmup_longer_than_the_run_is_said(warmup_steps, is_said):
    said = describe_short_schedule(section(warmup_steps=warmup_steps), 10)
    assert said.endswith("never reaches 0.1") if is_said else said == ""
    assert (max(rates(10, warmup_steps=warmup_steps)) < 0.1) is is_said


@pytest.mark.parametrize(("num_steps", "decay_steps"), [(10, None), (11, None), (10, 2), (30, 1), (30, 2), (1, None)])
def test_a_rate_that_has_one_step_to_fall_in_never_falls_and_this_is_said(num_steps, decay_steps):
    keys = {"schedule": "wsd", "decay_steps": decay_steps, "warmup_steps": 0}
    said = describe_short_schedule(section(**keys), num_steps)
    is_said = num_steps > 1 and rates(num_steps, **keys)[-1] == 0.1
    assert said.endswith("set optim.decay_steps=2") if is_said else said == ""
    assert num_steps == 1 or rates(num_steps, **keys | {"decay_steps": 2})[-1] < 0.1
