"""rsLoRA, DoRA, PiSSA and LoRA+: each trains, loads in plain PEFT, and goes on exactly after a break."""

from __future__ import annotations

import json
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model

from finetune.config.compose import load_config
from finetune.config.schema import LoraSection, OptimSection
from finetune.data.batches import pad
from finetune.engine.layout import pack
from finetune.engine.loss import summed_cross_entropy
from finetune.errors import ConfigError, ModelError
from finetune.model.lora import add_lora, without_adapter
from finetune.training.optim import build_optimizer, set_learning_rate
from tests.tiny_models import build_tiny, tiny_examples, tiny_phi3_config, tiny_phi_config
from tests.tiny_training import (
    adapter_tensors,
    contents,
    curve,
    logits_of,
    plain_logits,
    record,
    refuse_to_differ_after_a_break,
    train,
    words_for,
)

KINDS = {
    "lora": ["task=finetune_lora"],
    "rslora": ["lora.rslora=true"],
    "dora": ["lora.dora=true", "lora.dropout=0.2"],
    "pissa": ["lora.init=pissa"],
    "pissa_fast": ["lora.init=pissa_fast"],
    "patterns": ["lora.layers=[1]", "lora.rank_pattern={o_proj: 3}", "lora.alpha_pattern={o_proj: 5, '1.mlp.*': 9}"],
    "whole layers": ["lora.modules_to_save=[embed_tokens, norm]"],
    "lora_plus": ["optim.lora_plus_ratio=16"],
    "neftune": ["training.neftune_alpha=5"],
}


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    """A finished run of each kind, with the logits that it ended with."""
    runs = {}
    for name, words in KINDS.items():
        run = tmp_path_factory.mktemp(name) / "run"
        runs[name] = (run, logits_of(train([*words_for(inputs, run), *_small(words)])))
    return runs


def _small(words):
    return [*words, "lora.r=4", "lora.alpha=6", "optim.learning_rate=1e-2"]


@pytest.mark.slow
def test_every_adapter_gives_its_logits_in_plain_peft_and_merged_on_the_original_base(trained, inputs, tmp_path):
    models = {name: (inputs / "base", run / "adapter", 0) for name, (run, _) in trained.items()}
    plain = plain_logits(tmp_path, {**models, "base": (inputs / "base", None, 0)})
    for name, (_, ours) in trained.items():
        torch.testing.assert_close(plain[name], ours, rtol=1e-5, atol=1e-5, msg=name)
        torch.testing.assert_close(plain[f"{name} merged"], ours, rtol=1e-4, atol=1e-4, msg=name)
        assert not torch.allclose(plain["base"], ours, atol=1e-3), f"{name} learnt nothing"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dora", "lora_plus", "patterns", "pissa_fast", "whole layers"])
def test_a_run_that_broke_ends_with_the_bytes_of_the_whole_one(trained, inputs, tmp_path, name):
    words = [*words_for(inputs, tmp_path), *_small(KINDS[name])]
    refuse_to_differ_after_a_break(words, trained[name][0], tmp_path / "broken")


def test_what_trains_is_what_was_asked_for_and_its_forward_is_told(trained):
    configs = {name: json.loads(contents(run / "adapter")["adapter_config.json"]) for name, (run, _) in trained.items()}
    assert {name for name, config in configs.items() if config["use_rslora"]} == {"rslora"}
    assert {name for name, config in configs.items() if config["use_dora"]} == {"dora"}
    assert {name: config["r"] for name, config in configs.items()} == {
        **dict.fromkeys(KINDS, 4),
        "pissa": 8,
        "pissa_fast": 8,
    }
    assert all(config["init_lora_weights"] is True for config in configs.values()), "PEFT would change the base"
    told = {name for name, (run, _) in trained.items() if record(run)["fallbacks"]}
    assert told == {"dora", "neftune", "whole layers"}, "the engine computes every other kind itself"
    assert len({curve(run)[-1]["loss"] for run, _ in trained.values()}) >= len(KINDS) - 1, "the kinds differ"
    assert curve(trained["lora_plus"][0])[0]["learning_rate"] == 1e-2, "the rate of the first matrices"


# --- ranks by layer ---------------------------------------------------------------------------------------------------


def test_patterns_set_rank_and_scale_of_single_layers(trained):
    model = add_lora(
        build_tiny(tiny_phi3_config()),
        LoraSection(r=4, alpha=6.0, layers=[1], rank_pattern={"o_proj": 3}, alpha_pattern={"o_proj": 5, "1.mlp.*": 9}),
    )
    found = {
        name.partition("layers.")[2]: (len(layer.lora_A["default"].weight), layer.scaling["default"])
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }
    assert found == {
        "1.self_attn.qkv_proj": (4, 6 / 4),
        "1.self_attn.o_proj": (3, 5 / 3),
        "1.mlp.gate_up_proj": (4, 9 / 4),
        "1.mlp.down_proj": (4, 9 / 4),
    }
    saved = adapter_tensors(trained["patterns"][0])
    assert {name.partition("layers.")[2].partition(".")[0] for name in saved} == {"1"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"rank_pattern": {"o_prog": 3}},
            r"lora\.rank_pattern: o_prog matches no adapted layer .*There are: down_proj,",
        ),
        ({"rank_pattern": {"(o": 3}}, r"lora\.rank_pattern: \(o is neither a layer's name nor a regular expression"),
        ({"layers": [1, 2]}, r"lora\.layers is \[1, 2\], and the decoder layers .* are \[0, 1\]"),
        (
            {"modules_to_save": ["lm_hed"]},
            r"lm_hed matches no layer that LoRA leaves as it is .*There are: embed_tokens, .*lm_head",
        ),
    ],
)
def test_patterns_and_layers_that_match_nothing_are_refused(keys, said):
    with pytest.raises(ModelError, match=said):
        add_lora(build_tiny(tiny_phi3_config()), LoraSection(r=4, **keys))


# --- other optimizers ---------------------------------------------------------------------------------------------


# --- rsLoRA -------------------------------------------------------------------------------------------------------


def test_the_update_of_rslora_is_scaled_by_alpha_over_the_root_of_the_rank():
    model = add_lora(build_tiny(tiny_phi3_config()), LoraSection(r=4, alpha=6.0, rslora=True))
    scales = {layer.scaling["default"] for layer in model.modules() if hasattr(layer, "lora_A")}
    assert scales == {6.0 / math.sqrt(4)}


# --- DoRA ---------------------------------------------------------------------------------------------------------


def test_dora_trains_a_magnitude_for_each_output_that_starts_as_the_norm_of_the_base(trained):
    base = build_tiny(tiny_phi3_config())
    norms = {name: module.weight.norm(dim=1) for name, module in base.named_modules() if name.endswith("o_proj")}
    model = add_lora(base, LoraSection(r=2, dora=True))
    for name, norm in norms.items():
        layer = model.get_submodule(f"base_model.model.{name}")
        torch.testing.assert_close(layer.lora_magnitude_vector["default"].weight, norm)
    saved = [name for name in adapter_tensors(trained["dora"][0]) if "magnitude" in name]
    assert len(saved) == 8


# --- PiSSA --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "rslora"), [(tiny_phi3_config(), False), (tiny_phi_config(), True)])
def test_pissa_here_takes_the_steps_of_pefts_own_that_changes_the_base(config, rslora):
    """PEFT moves the singular values out of the base; here base and adapter hold them. The weights must agree."""
    rows = list(tiny_examples(6))
    ours = add_lora(build_tiny(config), LoraSection(r=3, alpha=6.0, init="pissa", rslora=rslora))
    targets = ours.peft_config["default"].target_modules
    theirs = get_peft_model(
        build_tiny(config),
        LoraConfig(r=3, lora_alpha=6.0, init_lora_weights="pissa", target_modules=targets, use_rslora=rslora),
    )
    for model, batch in ((ours, pack(rows)), (theirs, pad(rows))):
        optimizer = build_optimizer(model, OptimSection(learning_rate=1e-3))
        for _ in range(4):
            (summed_cross_entropy(model, batch) / batch.num_targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = theirs.merge_and_unload().state_dict()
    unchanged = build_tiny(config).state_dict()
    merged = ours.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=2e-5, msg=name)
    moved = max((weight - unchanged[name]).abs().max() for name, weight in merged.items())
    assert moved > 1e-3, "nothing was trained"


@pytest.mark.parametrize("init", ["pissa", "pissa_fast"])
def test_pissa_leaves_the_base_alone_and_keeps_the_half_that_it_took_from_it(init):
    base = build_tiny(tiny_phi3_config())
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    model = add_lora(base, LoraSection(r=3, alpha=3.0, init=init))
    first = {name: weight.clone() for name, weight in model.named_parameters() if weight.requires_grad}
    batch = pack(list(tiny_examples(4)))
    optimizer = build_optimizer(model, OptimSection(learning_rate=1e-2))
    for _ in range(2):
        summed_cross_entropy(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            dim = 0 if "lora_A" in name else 1
            assert torch.equal(weight.narrow(dim, 3, 3), first[name].narrow(dim, 3, 3)), name
            assert (weight.narrow(dim, 0, 3) != first[name].narrow(dim, 0, 3)).all(), name
    after = without_adapter(model).state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_what_pissa_cannot_do_is_refused_with_what_to_set():
    small = build_tiny(tiny_phi3_config())
    with pytest.raises(ModelError, match=r"lora\.r is 17, but .* has 16 singular values\. Set lora\.r=16 or less"):
        add_lora(small, LoraSection(r=17, init="pissa"))
    model = add_lora(build_tiny(tiny_phi3_config()), LoraSection(r=2, init="pissa"))
    with pytest.raises(ConfigError, match=r"weight_decay is 0\.1, which would shrink what lora\.init=pissa keeps"):
        build_optimizer(model, OptimSection(weight_decay=0.1))
    for words, said in (
        (["lora.init=pissa", "lora.dropout=0.1"], "pissa needs lora.dropout=0, which is 0.1"),
        (["lora.init=pissa_fast", "lora.dora=true"], "pissa_fast cannot be combined with lora.dora=true"),
        (["lora.init=pissa", "lora.quantize=nf4"], "nf4 cannot be combined with lora.init=pissa"),
        (
            ["lora.init=pissa", "lora.rank_pattern={o_proj: 3}"],
            "pissa has one rank and one alpha: remove lora.rank_patt",
        ),
        (["lora.init=pissa", "lora.start_from=x"], "is not initialised by lora.init"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(["model=phi_tiny", "data=orders", *words])


# --- LoRA+ --------------------------------------------------------------------------------------------------------


def test_with_lora_plus_the_second_matrices_learn_faster_by_the_ratio():
    def first_moves(ratio):
        torch.manual_seed(0)
        model = add_lora(build_tiny(tiny_phi3_config()), LoraSection(r=2))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight)  # at zero it would keep gradients from the first matrices
        before = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
        optimizer = build_optimizer(model, OptimSection(learning_rate=1e-3, lora_plus_ratio=ratio))
        set_learning_rate(optimizer, 5e-4)
        batch = pack(list(tiny_examples(4)))
        summed_cross_entropy(model, batch).backward()
        optimizer.step()
        weights = dict(model.named_parameters())
        return {name: (weights[name].detach() - value) for name, value in before.items()}

    plain, faster = first_moves(1.0), first_moves(8.0)
    for name, move in plain.items():
        expected = move * 8 if "lora_B" in name else move
        torch.testing.assert_close(faster[name], expected, rtol=1e-3, atol=1e-7, msg=name)
    assert {"lora_A" in name for name in plain} == {True, False}


def test_lora_plus_without_an_adapter_is_refused():
    with pytest.raises(ConfigError, match="it applies to LoRA adapters only, and this run trains none"):
        build_optimizer(build_tiny(tiny_phi3_config()), OptimSection(lora_plus_ratio=4.0))
    with pytest.raises(ConfigError, match="lora_plus_ratio"):
        load_config(["model=phi_tiny", "data=orders", "optim.lora_plus_ratio=0.5"])
