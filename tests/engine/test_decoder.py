"""The engine's forward and backward pass against the model's own, one row at a time."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import (
    Exaone4Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    SeedOssConfig,
)

from finetune.engine import decoder
from finetune.engine.decoder import FAMILIES, Decoder, layer_windows, logit_scale
from finetune.engine.layout import pack
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.loss_head import summed_head_loss
from finetune.engine.supported import called_layers, unsupported_reason
from tests.docs.pages import DOCS
from tests.tiny_models import (
    LLAMA_KIN,
    SIZES,
    VARIANTS,
    VOCABULARY,
    WIDE_HEADS,
    build_tiny,
    tiny_gemma2_config,
    tiny_phi3_config,
    tiny_phi_config,
)

LORA_TARGETS = {
    "phi": ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    **{kind: ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"] for kind in (*LLAMA_KIN, *VARIANTS)},
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
LONGROPE = {
    **PARTIAL,
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FOUR_MINI = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True}
CONFIGS = {
    "phi": tiny_phi_config(),
    "phi3": tiny_phi3_config(
        num_key_value_heads=4, tie_word_embeddings=False, rope_parameters={**PARTIAL, "partial_rotary_factor": 1.0}
    ),
    "phi-4-mini": tiny_phi3_config(**FOUR_MINI, rope_parameters=PARTIAL, num_hidden_layers=3),
    "longrope": tiny_phi3_config(**FOUR_MINI, rope_parameters=LONGROPE, sliding_window=None),
    "gelu": LlamaConfig(**SIZES, num_key_value_heads=2, hidden_act="gelu"),
    "llama3": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=LLAMA3),
    **LLAMA_KIN,
    **VARIANTS,
    "exaone4 without windows": Exaone4Config(
        **WIDE_HEADS, sliding_window=None, layer_types=["full_attention", "full_attention"]
    ),
}
LENGTHS = (7, 1, 12, 3)


def plain_attention(q, k, v, layout, *, queries, window, scale):
    """Causal attention inside each document; the layout is their lengths."""
    starts = torch.tensor([0, *layout]).cumsum(0)
    tokens = torch.arange(len(k))
    rows = tokens if queries is None else queries
    document = torch.bucketize(tokens, starts, right=True)
    distance = rows[:, None] - tokens
    seen = (distance >= 0) & (document[rows][:, None] == document)
    if window is not None:
        seen &= distance < window
    q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True, scale=scale)[0].transpose(0, 1)


def with_lora(model, *, dropout=0.0, **settings):
    """An adapter that does something: its B is not zero."""
    targets = LORA_TARGETS[model.config.model_type]
    config = LoraConfig(r=4, lora_alpha=6, lora_dropout=dropout, target_modules=targets, **settings)
    torch.manual_seed(1)
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def some_rows(lengths=LENGTHS):
    torch.manual_seed(2)
    return [torch.randint(3, VOCABULARY, (length,)) for length in lengths]


def some_targets(rows):
    """For each row the positions that predict a target; the one-token row has none."""
    torch.manual_seed(3)
    return [(torch.rand(len(row) - 1) < 0.5).nonzero().squeeze(1) for row in rows]


def own_loss(model, rows, targets):
    """What transformers and PEFT make of it."""
    total = torch.zeros((), dtype=torch.float64)
    for row, at in zip(rows, targets, strict=True):
        logits = model(input_ids=row[None], use_cache=False).logits[0, at]
        total = total + functional.cross_entropy(logits.double(), row[at + 1], reduction="sum")
    return total


def engine_loss(model, rows, targets, **options):
    lengths = [len(row) for row in rows]
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    at = torch.cat([start + own for start, own in zip(starts, targets, strict=True)])
    ids = torch.cat(rows)
    positions = torch.cat([torch.arange(length) for length in lengths])
    hidden = Decoder(model, plain_attention, **options).hidden_states(ids, positions, lengths, at)
    head = decoder.bare_model(model).get_output_embeddings()
    return summed_head_loss(hidden, head.weight, ids[at + 1], bias=head.bias)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(model, **options):
    """Loss to 1e-6 and gradients to 1e-5, relative."""
    assert unsupported_reason(model) is None
    rows = some_rows()
    targets = some_targets(rows)
    got, expected = engine_loss(model, rows, targets, **options), own_loss(model, rows, targets)
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(expected.item(), rel=1e-6)
    ours, theirs = gradients(model, got), gradients(model, expected)
    assert ours
    assert ours.keys() == theirs.keys()
    whole = torch.cat([gradient.flatten() for gradient in theirs.values()])
    difference = torch.cat([(ours[name] - theirs[name]).flatten() for name in theirs])
    assert difference.norm() <= 1e-5 * whole.norm()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_adapters_step_equals_the_models_own(kind):
    model = with_lora(build_tiny(CONFIGS[kind]))
    assert_same_step(model)
    model.enable_input_require_grads()  # as transformers' own checkpointing does
    assert_same_step(model, checkpoint_layers=True)


@pytest.mark.parametrize(
    "settings", [{"use_rslora": True}, {"layers_to_transform": [1]}], ids=lambda it: next(iter(it))
)
def test_other_scales_and_a_few_layers(settings):
    assert_same_step(with_lora(build_tiny(CONFIGS["phi-4-mini"]), **settings))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_step_of_all_weights_equals_the_models_own(kind):
    assert_same_step(build_tiny(CONFIGS[kind]).train())


@pytest.mark.parametrize("state", ["disabled", "merged"])
def test_a_silent_adapter_is_silent(state):
    model = with_lora(build_tiny(CONFIGS["phi3"]))
    rows = some_rows()
    targets = some_targets(rows)
    heard = engine_loss(model, rows, targets).item()
    if state == "merged":
        model.merge_adapter()
    with nullcontext() if state == "merged" else model.disable_adapter():
        silent = engine_loss(model, rows, targets).item()
        assert silent == pytest.approx(own_loss(model, rows, targets).item(), rel=1e-6)
    assert (heard == pytest.approx(silent, rel=1e-4)) is (state == "merged")


@pytest.mark.parametrize("kind", CONFIGS)
def test_all_hidden_states_equal_the_models_own(kind):
    model = build_tiny(CONFIGS[kind]).eval()
    ids = some_rows((9,))[0]
    with torch.no_grad():
        ours = Decoder(model, plain_attention).hidden_states(ids, torch.arange(9), [9])
        theirs = model.get_decoder()(ids[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs * logit_scale(model.config))


def test_dropout_draws_the_masks_that_peft_draws():
    model = with_lora(build_tiny(tiny_phi3_config(num_hidden_layers=1)), dropout=0.3)
    (row,) = some_rows((12,))
    head = model.get_base_model().lm_head
    torch.manual_seed(4)
    expected = model(input_ids=row[None], use_cache=False).logits[0]
    torch.manual_seed(4)
    decoder = Decoder(model, plain_attention)
    hidden = decoder.hidden_states(row, torch.arange(12), [12])
    torch.testing.assert_close(head(hidden), expected)
    assert not torch.equal(decoder.hidden_states(row, torch.arange(12), [12]), hidden)


def test_layers_computed_again_drop_the_same():
    model = with_lora(build_tiny(CONFIGS["phi-4-mini"]), dropout=0.3)
    rows = some_rows()
    targets = some_targets(rows)  # which seeds torch
    found = []
    for seed, checkpoint_layers in ((4, False), (4, True), (5, True)):
        torch.manual_seed(seed)
        loss = engine_loss(model, rows, targets, checkpoint_layers=checkpoint_layers)
        found.append(gradients(model, loss))
    kept, again, other = found
    torch.testing.assert_close(again, kept)
    assert any(not torch.allclose(other[name], gradient) for name, gradient in again.items()), "nothing is dropped"


@pytest.mark.few(6)
@pytest.mark.parametrize(("kind", "settings"), [*((kind, {}) for kind in CONFIGS), ("phi3", {"use_dora": True})])
def test_a_bf16_base_comes_close_to_fp32(kind, settings):
    dtypes = (torch.float32, torch.bfloat16)
    exact, rounded = (with_lora(build_tiny(CONFIGS[kind], dtype=dtype), **settings) for dtype in dtypes)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    assert_close_steps(exact, rounded)


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", CONFIGS)
def test_autocast_computes_in_its_type_with_weights_in_fp32(kind):
    model = build_tiny(CONFIGS[kind])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = Decoder(model, plain_attention).hidden_states(some_rows()[0], torch.arange(7), [7])
    assert hidden.dtype == torch.bfloat16
    assert_close_steps(model, model, autocast=True)


def assert_close_steps(exact, rounded, *, autocast=False):
    rows = some_rows()
    expected = engine_loss(exact, rows, some_targets(rows))
    theirs = gradients(exact, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        got = engine_loss(rounded, rows, some_targets(rows))
    ours = gradients(rounded, got)
    assert got.item() == pytest.approx(expected.item(), rel=0.02)
    whole, difference = (
        torch.cat([gradient.flatten() for gradient in values])
        for values in (theirs.values(), [ours[name] - theirs[name] for name in theirs])
    )
    assert all(gradient.dtype == torch.float32 for gradient in ours.values())
    assert 0 < difference.norm() < 0.1 * whole.norm()


@pytest.mark.few(23)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_rows_that_begin_alike_give_each_gradient_of_the_models_own(kind, method):
    """In float64: what is left are the norms, which the model's own forward computes in fp32, several in each layer."""
    model = build_tiny(CONFIGS[kind])
    model = (with_lora(model) if method == "lora" else model).double().train()
    rows = some_rows((22, 23, 19, 5))
    for row in rows[1:3]:
        row[:17] = rows[0][:17]
    marks = [torch.arange(len(row)) > 3 for row in rows]
    expected = own_loss(model, rows, [torch.arange(3, len(row) - 1) for row in rows])
    theirs = gradients(model, expected)
    assert method == "full" or len(theirs) == 2 * len(LORA_TARGETS[model.config.model_type]) * len(layer_windows(model))
    for share_prefixes in (True, False):
        packed = pack(list(zip(rows, marks, strict=True)), share_prefixes=share_prefixes)
        assert packed.num_computed == (35 if share_prefixes else 69)
        got = summed_cross_entropy(model, packed)
        assert got.item() == pytest.approx(expected.item(), rel=1e-6)
        ours = gradients(model, got)
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert (ours[name] - gradient).norm() <= 5e-6 * gradient.norm(), name


def test_each_layer_has_its_own_window():
    assert {kind: layer_windows(build_tiny(config)) for kind, config in LLAMA_KIN.items()} == {
        "llama": [None, None],
        "mistral": [5, 5],
        "qwen2": [None, None, 5],
        "qwen3": [5, None],
        "smollm3": [None, 5, None],
    }
    assert layer_windows(build_tiny(CONFIGS["phi"])) == [None, None]
    assert layer_windows(build_tiny(CONFIGS["phi3"])) == [5, 5]


def test_rows_without_a_target_weigh_nothing():
    model = with_lora(build_tiny(CONFIGS["phi3"]))
    packed = pack([(row, torch.zeros(len(row), dtype=torch.bool)) for row in some_rows()])
    loss = summed_cross_entropy(model, packed)
    assert loss.item() == 0
    found = gradients(model, loss)
    assert found
    assert all(not gradient.any() for gradient in found.values())


def test_the_page_names_the_types_of_models_that_the_engine_knows():
    table = (DOCS / "engine.md").read_text(encoding="utf-8").split("## Models")[1].split("\n\n")[2]
    assert sorted(line.split("`")[1] for line in table.splitlines()[2:]) == COMPUTED


COMPUTED = sorted(name for name, family in decoder.FAMILIES.items() if family.is_computed)


def hooked(model):
    model.get_base_model().model.layers[0].mlp.register_forward_hook(lambda *_: None)
    return model


def patched(model):
    layer = model.get_base_model().model.layers[1]
    layer.forward = layer.forward
    return model


def replaced(model):
    class Quantized(nn.Linear):
        pass

    model.get_base_model().model.layers[1].mlp.down_proj = Quantized(2, 2)
    return model


def second_adapter(model):
    model.add_adapter("second", LoraConfig(r=2, target_modules=LORA_TARGETS[model.config.model_type][1:2]))
    return model


def tiny(**changes):
    return build_tiny(tiny_phi3_config(**changes))


def layered(**changes):
    return build_tiny(Qwen2Config(**SIZES, num_key_value_heads=2, **changes))


UNSUPPORTED = {
    f"its model type is gpt2; the engine supports {', '.join(COMPUTED)}": lambda: build_tiny(
        GPT2Config(vocab_size=8, n_embd=4, n_head=1, n_layer=1)
    ),
    "its attention scores are capped (attn_logit_softcapping 50.0)": lambda: build_tiny(tiny_gemma2_config()),
    "its logits are capped (final_logit_softcapping 30.0)": lambda: build_tiny(
        Gemma3TextConfig(**WIDE_HEADS, final_logit_softcapping=30.0)
    ),
    "its layers choose among experts (num_experts 2)": lambda: build_tiny(
        MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2)
    ),
    "its attention has sinks (model.layers.0.self_attn.sinks)": lambda: build_tiny(
        GptOssConfig(**WIDE_HEADS, num_local_experts=0)
    ),
    "it has layers of the type conv (layer_types)": lambda: build_tiny(
        Lfm2Config(**SIZES, num_key_value_heads=2, layer_types=["conv", "full_attention"])
    ),
    "it applies dropout to residuals (residual_dropout 0.1)": lambda: build_tiny(
        SeedOssConfig(**WIDE_HEADS, attention_dropout=0.0)
    ),
    "it applies dropout to attention weights (attention_dropout 0.1)": lambda: tiny(attention_dropout=0.1),
    "it applies dropout to residuals (resid_pdrop 0.1)": lambda: tiny(resid_pdrop=0.1),
    "its feed-forward part is gated by relu, not by silu, gelu, gelu_pytorch_tanh": lambda: tiny(hidden_act="relu"),
    "it normalizes queries and keys by LayerNorm (qk_layernorm)": lambda: build_tiny(
        tiny_phi_config(qk_layernorm=True)
    ),
    "its layers attend in ways that the engine lacks (layer_types: chunked_attention)": lambda: layered(
        layer_types=["chunked_attention", "full_attention"]
    ),
    "some of its layers have a sliding window (layer_types) whose size is not set (sliding_window)": lambda: layered(
        layer_types=["sliding_attention", "full_attention"]
    ),
    "layers.0.mlp has hooks": lambda: hooked(with_lora(tiny())),
    "layers.1 has a forward that was replaced": lambda: patched(with_lora(tiny())),
    "layers.1.mlp.down_proj is a Quantized": lambda: replaced(with_lora(tiny())),
    "layers.0.self_attn.o_proj is a LoRA layer with ALoraLinearVariant": lambda: with_lora(
        tiny(), alora_invocation_tokens=[1], task_type="CAUSAL_LM"
    ),
    "its head is a ModulesToSaveWrapper": lambda: with_lora(
        tiny(tie_word_embeddings=False), modules_to_save=["lm_head"]
    ),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_what_the_engine_leaves_to_the_models_own_forward_is_named(reason):
    assert unsupported_reason(UNSUPPORTED[reason]()) == reason


def hooked_layers(model):
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "dense", "down_proj", "fc2")):
            module.register_forward_hook(lambda module, inputs, output: output * 1.5)
    return model


OWN = {
    "DoRA": lambda model: with_lora(model, use_dora=True),
    "several adapters, or one that is not active": lambda model: second_adapter(with_lora(model)),
    "hooks": lambda model: hooked_layers(with_lora(model)),
    "an adapter with a bias (lora_bias)": lambda model: with_lora(model, lora_bias=True),
}


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")
@pytest.mark.parametrize("what", OWN)
@pytest.mark.parametrize(("kind", "checkpoint_layers"), [("phi", False), ("phi3", True), ("olmo2", False)])
def test_layers_with_a_way_of_their_own_are_called_and_named(kind, what, checkpoint_layers):
    model = OWN[what](build_tiny(CONFIGS[kind]))
    names = called_layers(model)[what]
    assert 0 < len(names) <= 3 * len(LORA_TARGETS[model.config.model_type])
    assert_same_step(model, checkpoint_layers=checkpoint_layers)


@pytest.mark.parametrize("key", ["resid_pdrop", "embd_pdrop"])
def test_dropout_of_phi_is_the_models_own(key):
    model = build_tiny(tiny_phi_config(**{key: 0.5}, num_hidden_layers=1)).train()
    assert unsupported_reason(model) is None
    (row,) = some_rows((9,))
    torch.manual_seed(4)
    expected = model.get_decoder()(row[None], use_cache=False).last_hidden_state[0]
    torch.manual_seed(4)
    ours = Decoder(model, plain_attention).hidden_states(row, torch.arange(9), [9])
    torch.testing.assert_close(ours, expected)


def test_a_norm_in_16_bits_adds_its_offset_in_fp32():
    """In bf16, 1 + 0.50390625 is 1.5. Single values are rounded more coarsely than that, and their sum is not."""
    layers = build_tiny(CONFIGS["gemma"]).bfloat16().get_decoder()
    h = torch.randn(50, layers.norm.weight.shape[0], generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        layers.norm.weight.fill_(0.50390625)
        made = decoder._read_norm(layers, "norm", FAMILIES["gemma"]).apply(h)
        whole = layers.double().norm(h.double())
    assert made.double().abs().sum().item() == pytest.approx(whole.abs().sum().item(), rel=2**-10)


def test_layers_are_prepared_once():
    prepared = []

    def prepare(layers, dtype):
        prepared.append(dtype)
        return layers

    model = build_tiny(CONFIGS["phi3"]).eval()
    engine = Decoder(model, plain_attention, prepare=prepare)
    with torch.no_grad():
        for _ in range(2):
            engine.hidden_states(torch.tensor([5, 6]), torch.arange(2), [2])
    assert len(prepared) == 4 * model.config.num_hidden_layers
