import pytest
import torch
from transformers import MambaConfig

from finetune.config.schema import LoraSection
from finetune.data.batches import pad
from finetune.engine.loss import summed_cross_entropy
from finetune.errors import ModelError
from finetune.model.base import checkpoint_gradients
from finetune.model.lora import add_lora, without_adapter
from finetune.model.targets import resolve_targets
from tests.tiny_models import build_tiny, tiny_examples, tiny_phi3_config, tiny_phi_config

CONFIGS = {"phi": tiny_phi_config(), "phi3": tiny_phi3_config()}


@pytest.fixture(params=CONFIGS)
def base(request):
    return build_tiny(CONFIGS[request.param])


def section(**keys):
    return LoraSection(**{"r": 2, "alpha": 4.0, **keys})


def test_only_the_adapter_trains_and_it_is_what_was_asked_for(base):
    model = add_lora(base, section(r=3, alpha=6.0, dropout=0.25))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trainable)
    assert {p.shape[0] for name, p in trainable.items() if "lora_A" in name} == {3}
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout, config.task_type) == (3, 6.0, 0.25, "CAUSAL_LM")


def test_a_regular_expression_takes_exactly_the_layers_it_matches():
    base = build_tiny(CONFIGS["phi3"])
    assert resolve_targets(base, [r"model\.layers\.1\.mlp\..*"]) == [
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp.gate_up_proj",
    ]
    adapted = add_lora(base, section(target_modules=[r".*layers\.0\..*qkv_proj"]))
    with_adapter = [name for name, _ in adapted.named_modules() if name.endswith(".lora_A")]
    assert with_adapter == ["base_model.model.model.layers.0.self_attn.qkv_proj.lora_A"]


def test_a_target_that_matches_nothing_is_refused_with_what_is_there():
    with pytest.raises(ModelError) as caught:
        add_lora(build_tiny(CONFIGS["phi3"]), section(target_modules=["qkv_proj", "q_proj", "v_.*"]))
    message = str(caught.value)
    assert "q_proj, v_.* matches no linear layer of this phi3 model" in message
    assert "down_proj, gate_up_proj, o_proj, qkv_proj" in message


@pytest.mark.parametrize("targets", [[], ["lm_head"], ["embed_tokens"]])
def test_no_target_and_targets_that_are_no_inner_linear_layer_are_refused(targets):
    with pytest.raises(ModelError, match="matches no linear layer"):
        resolve_targets(build_tiny(CONFIGS["phi"]), targets)


def test_a_broken_regular_expression_is_refused():
    with pytest.raises(ModelError, match=r"neither a layer's name nor a regular expression"):
        resolve_targets(build_tiny(CONFIGS["phi"]), ["(q_proj"])


def train_one_step(model, batch):
    loss = summed_cross_entropy(model, batch)
    loss.backward()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_adapter_trains_in_every_layer_with_gradient_checkpointing_too_and_alike(kind):
    batch = pad(list(tiny_examples(4)))
    losses, weights = [], []
    for checkpointing in (False, True):
        model = add_lora(build_tiny(CONFIGS[kind]), section())
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.data.normal_()
        if checkpointing:
            checkpoint_gradients(model)
        model.train()
        losses.append(train_one_step(model, batch))
        trained = {name: p.detach() for name, p in model.named_parameters() if "lora_B" in name}
        assert all(p.abs().max() > 0 for p in trained.values()), "a layer stayed untrained"
        weights.append(trained)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-5, atol=1e-6, msg=name)


def test_the_base_without_its_adapter_is_the_base_and_the_adapter_stays(base):
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    ids = torch.arange(3, 13).reshape(1, -1)
    model = add_lora(base, section())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.3)
    with torch.no_grad():
        tuned = model(input_ids=ids).logits
        bare = without_adapter(model)
        assert bare.state_dict().keys() == before.keys()
        assert all(torch.equal(bare.state_dict()[name], tensor) for name, tensor in before.items())
        assert torch.equal(model(input_ids=ids).logits, tuned)
        assert not torch.allclose(bare(input_ids=ids).logits, tuned)
    assert {p.data_ptr() for p in bare.parameters()} <= {p.data_ptr() for p in model.parameters()}, "weights are shared"


def test_layers_that_peft_refuses_are_named():
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0}
    with pytest.raises(ModelError, match=r"PEFT does not adapt the layers .* mamba model .*training\.method=full"):
        add_lora(build_tiny(MambaConfig(**sizes)), section())
