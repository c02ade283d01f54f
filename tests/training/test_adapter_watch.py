"""A run whose adapters do not train ends after its third step, and names the layers; one that has a reason goes on."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.phi3.modeling_phi3 import Phi3MLP

import finetune
from finetune.config.schema import Config
from finetune.errors import RunFailedError
from finetune.fallbacks import Fallbacks
from finetune.model.lora import add_lora
from finetune.runs.state import TrainerState
from finetune.training.checks import UpdateWatch, refuse_no_update
from finetune.training.step import StepResult
from tests import tiny_training
from tests.tiny_training import break_at, events, record, train, words_for

DOWN = "model.layers.0.mlp.down_proj"


class BypassingMLP(Phi3MLP):
    """A class whose forward multiplies by a base weight itself, and so never reaches the adapter."""

    def forward(self, hidden_states):
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return nn.functional.linear(up * self.activation_fn(gate), self.down_proj.base_layer.weight)


class DetachedLinear(nn.Linear):
    """A layer that computes and does not train."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.detach())


def bypass(model):
    """Change the class of one MLP."""
    model.base_model.model.model.layers[0].mlp.__class__ = BypassingMLP


def detach_b(model):
    """Detach the B matrix of one layer."""
    model.base_model.model.model.layers[0].mlp.down_proj.lora_B["default"].__class__ = DetachedLinear


@pytest.fixture
def change(monkeypatch):
    """Let the runs of a test train a model that a function has changed; None: as it is."""

    def use(function):
        def changed(*args):
            model = add_lora(*args)
            if function is not None:
                function(model)
            return model

        monkeypatch.setattr(tiny_training, "add_lora", changed)

    return use


def words(inputs, run, *more):
    own = ["training.kernels=reference", "lora.r=4", "training.max_steps=6", "optim.learning_rate=1e-2"]
    return [*words_for(inputs, run), *own, *more]


def refused(words):
    with pytest.raises(RunFailedError) as caught:
        train(words)
    assert caught.value.exit_code == 3
    return str(caught.value)


@pytest.mark.parametrize(
    ("function", "more"),
    [
        (bypass, []),
        (detach_b, ["lora.dora=true"]),
        (detach_b, ["lora.init=pissa"]),
    ],
)
def test_an_adapter_that_does_not_train_ends_the_run_after_step_3(change, inputs, tmp_path, function, more):
    change(function)
    message = refused(words(inputs, tmp_path / "run", *more))
    assert f"step 3: 1 of 8 adapters have not changed since the start: {DOWN}. Expected" in message
    assert [event["step"] for event in events(tmp_path / "run", "step")] == [1, 2, 3]
    assert record(tmp_path / "run")["status"] == "failed"
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-000002"]


def test_a_matrix_that_no_update_changes_ends_the_run_unless_the_learning_rate_is_0(inputs, tmp_path):
    sgd = ["optim.optimizer=torch.optim.SGD", "optim.learning_rate=1e-50"]
    message = refused(words(inputs, tmp_path / "run", *sgd))
    assert "8 of 8 adapters have not changed" in message
    assert "(the highest so far was 1e-50)" in message
    train(words(inputs, tmp_path / "none", "optim.learning_rate=0", "training.max_steps=4"))
    assert record(tmp_path / "none")["status"] == "completed"


@pytest.mark.slow
def test_steps_count_from_the_start_of_the_run_and_not_from_a_resume(change, inputs, tmp_path):
    change(bypass)
    with pytest.MonkeyPatch.context() as patch:
        break_at(patch, 3)
        with pytest.raises(RuntimeError, match="power cut"):
            train(words(inputs, tmp_path / "run"))
    assert DOWN in refused(words(inputs, tmp_path / "run"))
    assert "resumed from step=2" in (tmp_path / "run/log.txt").read_text()
    change(None)
    train(words(inputs, tmp_path / "run", "training.max_steps=4", "resume.allow=training"))
    change(bypass)
    train(words(inputs, tmp_path / "run", "resume.allow=training"))
    assert record(tmp_path / "run")["status"] == "completed"
    assert events(tmp_path / "run", "step")[-1]["step"] == 6


# --- single layers --------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A router in miniature: each row goes to the expert that `route` names."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.route = [0, 0, 2]

    def forward(self, x):
        x = self.q_proj(x)
        return torch.stack([self.experts[expert](row) for row, expert in zip(x, self.route, strict=True)])


def result(**changes):
    return StepResult(
        **{"step": 1, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "num_targets": 3, "num_tokens": 3} | changes
    )


def watch_of(adapted, **more):
    return UpdateWatch(adapted, Config(), Fallbacks(), "nothing moves", **more)


def take_steps(model, *, results=None, num_silent=0, **more):
    """Train a model of experts under a watch, for three steps after some in which the optimizer updates nothing."""
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "0", "1", "2"]))
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    watch, state = watch_of(adapted, **more), TrainerState()
    for step in range(1, 4 + num_silent):
        found = (results or {}).get(step, result())
        if found.grad_norm:
            adapted(torch.randn(3, 4)).square().sum().backward()
        if not found.is_skipped and step > num_silent:
            optimizer.step()
        optimizer.zero_grad()
        state = replace(
            state,
            step=step,
            num_skipped_steps=state.num_skipped_steps + found.is_skipped,
            num_without_gradient=state.num_without_gradient + (found.grad_norm == 0),
        )
        watch.after_step(state, found, is_silent=step <= num_silent)


def test_an_expert_without_tokens_is_a_warning_unless_no_expert_trains(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("finetune"), "propagate", True)
    take_steps(Experts())
    assert caplog.messages == ["no token has reached the adapters of experts.1 until step 3: they are not trained yet"]
    model = Experts()
    model.forward = lambda x: model.q_proj(x)
    with pytest.raises(RunFailedError, match=r"step 3: 3 of 4 adapters .*: experts.0, experts.1, experts.2\. Expected"):
        take_steps(model)


def test_steps_without_any_gradient_are_legitimate_only_where_an_objective_says_so():
    flat = {step: result(grad_norm=0.0) for step in (1, 2, 3)}
    take_steps(Experts(), may_lack_gradient=True, results=flat)
    with pytest.raises(
        RunFailedError, match=r"zero in 3 of its 3 steps, and not finite in 0. nothing moves. Checkpoints"
    ):
        take_steps(Experts(), results=flat)
    one = {**flat, 2: result()}
    take_steps(Experts(), may_lack_gradient=True, results=one)


def test_steps_of_an_optimizer_that_updates_nothing_yet_do_not_count():
    take_steps(Experts(), num_silent=5)
    model = Experts()
    model.forward = lambda x: model.q_proj(x)
    with pytest.raises(RunFailedError, match=r"step 8: 3 of 4 adapters"):
        take_steps(model, num_silent=5)


def test_schedule_free_radam_trains(inputs, tmp_path):
    pytest.importorskip("schedulefree")
    radam = ["optim.optimizer=schedulefree.RAdamScheduleFree", "optim.schedule=constant", "training.max_steps=9"]
    train(words(inputs, tmp_path / "run", *radam))
    first, *_, last = events(tmp_path / "run", "validation")
    assert last["loss"] < first["loss"]


def test_skipped_steps_and_frozen_adapters_do_not_count():
    take_steps(Experts(), results={step: result(not_finite="the loss is nan") for step in (1, 2, 3)})
    model = Experts()
    model.forward = lambda x: model.experts[0](model.q_proj(x))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "0"]))
    for part in (model.q_proj.lora_A, model.q_proj.lora_B):
        part.requires_grad_(False)
    watch = watch_of(adapted)
    assert list(watch._b_matrices) == ["experts.0"]


@pytest.mark.slow
def test_equal_pairs_end_the_run_after_its_last_step_or_its_third(tmp_path):
    pairs = [{"prompt": f"Is shop {n} open?", "chosen": "Until six.", "rejected": "Until six."} for n in range(6)]
    overrides = {"training.objective": "dpo", "training.batch_size": 2, "data.cache_dir": tmp_path}
    for steps, last in ((2, 2), (5, 3)):
        run = tmp_path / f"run{steps}"
        with pytest.raises(RunFailedError, match=rf"zero in {last} of its {last} steps.* In each pair, the chosen and"):
            finetune.train(
                model="phi_tiny",
                data=pairs,
                overrides={**overrides, "training.max_steps": steps, "output_dir": run, "training.device": "cpu"},
            )
        assert [event["step"] for event in events(run, "step")] == list(range(1, last + 1))
        assert not (run / "adapter").exists()


def test_a_run_of_skipped_steps_alone_has_made_no_update_and_older_states_have_made_one():
    skipped = TrainerState(step=2, num_skipped_steps=2)
    with pytest.raises(RunFailedError, match=r"not finite in 2\. Lower optim\.learning_rate, or look at the rows\."):
        refuse_no_update(skipped, Config(), "unused")
    older = {name: value for name, value in TrainerState(step=2).as_record().items() if name != "num_without_gradient"}
    for state in (TrainerState(), replace(skipped, step=3), TrainerState.from_record(older, source="here")):
        refuse_no_update(state, Config(), "unused")
