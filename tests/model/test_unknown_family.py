"""A type of model without a record is computed by the engine if a tiny model agrees with transformers."""

import logging

import pytest
from transformers import AutoConfig, StableLmConfig

from finetune.config.schema import ModelSection
from finetune.engine import adapted, decoder
from finetune.engine.supported import unsupported_reason
from finetune.model import base, unknown_family
from finetune.model.base import build_base_model
from tests.engine.test_decoder import CONFIGS, assert_same_step
from tests.tiny_models import SIZES, WIDE_HEADS, build_tiny


@pytest.fixture
def families(monkeypatch):
    """The table, which forgets after the test what it has learned."""
    table = dict(decoder.FAMILIES)
    monkeypatch.setattr(unknown_family, "tried_families", {})
    for module in (decoder, unknown_family):
        monkeypatch.setattr(module, "FAMILIES", table)
    monkeypatch.setattr("finetune.engine.supported.FAMILIES", table)
    return table


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["gemma3_text", "cohere2", "granite", "olmo3", "exaone4", "smollm3", "phi3", "qwen2"])
def test_the_layers_of_a_known_type_are_read_as_its_record_says(families, kind):
    record = families.pop(kind)
    model = build_tiny(CONFIGS[kind])
    unknown_family.learn_family(model)
    assert_same_step(model)
    for part in (
        "projections",
        "attention_norms",
        "mlp_norms",
        "norm_offset",
        "head_norms",
        "is_interleaved",
        "window",
    ):
        assert getattr(families[kind], part) == getattr(record, part), part


def test_a_run_learns_an_unknown_type_and_tries_it_again_with_another_configuration(families, caplog):
    caplog.set_level(logging.INFO)
    keys = {"model_type": "cwm", **WIDE_HEADS, "layer_types": ["sliding_attention", "full_attention"]}
    for window in (5, 7):
        keys["sliding_window"] = window
        model = build_base_model(ModelSection(init="random", config=keys))
        assert_same_step(model.train())
    assert caplog.text.count("the engine computes cwm: a tiny random model of it agrees with transformers") == 2
    assert "cwm" not in base._RECORDED


@pytest.mark.parametrize("model_type", ["glm4", "ernie4_5"])
def test_rotations_of_neighbours_are_found(families, model_type):
    """Their angles have another order than Cohere's. glm4 rotates half of each head, and has four norms."""
    model = build_base_model(ModelSection(init="random", config={"model_type": model_type, **WIDE_HEADS}))
    assert_same_step(model.train())


@pytest.mark.parametrize("is_parallel", [False, True])
def test_layer_norms_before_both_parts_are_computed(families, is_parallel):
    """StableLM has gates, and its norms subtract the mean."""
    keys = {"model_type": "stablelm", **SIZES, "num_key_value_heads": 2, "partial_rotary_factor": 0.5}
    config = {**keys, "use_parallel_residual": is_parallel}
    model = build_base_model(ModelSection(init="random", config=config))
    assert unsupported_reason(model) is None
    assert_same_step(model.train())


def test_a_type_with_longrope_is_tried_with_rows_on_both_sides_of_its_boundary(families):
    """A run never packs them together, and neither may the trial."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **factors}
    keys = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 256}
    keys["rope_parameters"] = {**rope, "original_max_position_embeddings": 64}
    unknown_family.learn_family(build_tiny(StableLmConfig(**keys, original_max_position_embeddings=64)))
    assert families["stablelm"].is_computed, families["stablelm"].why_not


def test_a_part_of_a_layer_that_the_engine_lacks_is_named(families):
    model = build_base_model(ModelSection(init="random", config={"model_type": "hunyuan_v1_dense", **WIDE_HEADS}))
    expected = "the engine does not know these parts of its layers: self_attn.key_layernorm, self_attn.query_layernorm"
    assert unsupported_reason(model) == expected


def test_dropout_that_no_key_announces_is_a_difference(families, monkeypatch):
    config = AutoConfig.for_model("cwm", **SIZES, num_key_value_heads=2, layer_types=["full_attention"] * 2)
    model = build_tiny(config)
    own = type(model.model.layers[0].mlp).forward
    monkeypatch.setattr(
        type(model.model.layers[0].mlp), "forward", lambda self, x: own(self, x) * (1.1 if self.training else 1)
    )
    monkeypatch.setattr(adapted, "_PACKAGES", (*adapted._PACKAGES, "tests."))  # as if transformers had written it
    unknown_family.learn_family(model)
    assert "differs from transformers' forward by" in unsupported_reason(model)
