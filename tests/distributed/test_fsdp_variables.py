"""What `accelerate launch` asks for with FSDP becomes the run's own, is refused by name, or changes nothing."""

import os
from contextlib import nullcontext

import pytest

from finetune.config.compose import load_config
from finetune.config.render import resolved_yaml
from finetune.distributed import accelerate_settings
from finetune.distributed.accelerate_library import AccelerateCommand
from finetune.distributed.accelerate_settings import refused_settings, settings_of_accelerate
from finetune.distributed.launch import launch
from finetune.errors import LaunchError
from tests.curves import run_words
from tests.distributed.launcher_variables import ACCELERATE

# `accelerate launch --use_fsdp --fsdp_version 2` of accelerate 1.15, with every other value at its default.
DEFAULTS = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
FSDP2 = {**ACCELERATE, **DEFAULTS}
SIZES = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    **{f"PARALLELISM_CONFIG_{kind}_SIZE": "1" for kind in ("TP", "CP", "SP")},
    "PARALLELISM_CONFIG_CP_BACKEND": "torch",
    "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
}
WORDS = ["model=phi_tiny", "data=orders", "training.device=cpu"]


def settled(*words, world_size=4, **variables):
    config = load_config([*WORDS, *words], task="finetune_lora")
    return config.with_values(
        settings_of_accelerate(config, {**FSDP2, **variables}, world_size=world_size, trains=True)
    )


def test_fsdp_2_means_shards_and_says_where_that_is_from():
    loading = {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    config = settled(**loading)  # these change nothing
    assert (config.parallel.sharding, config.parallel.shard_size) == ("fsdp2", None)
    assert config.origin("parallel.sharding") == "accelerate's FSDP_VERSION=2"
    assert config.parallel.reshard_after_forward
    assert config.origin("training.gradient_checkpointing") == "default"


@pytest.mark.parametrize(
    ("variables", "key", "value"),
    [
        ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, "parallel.reshard_after_forward", False),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "training.gradient_checkpointing", True),
        (SIZES, "parallel.shard_size", 2),
    ],
)
def test_its_settings_become_ours(variables, key, value):
    config = settled(**variables)
    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == value
    assert config.origin(key).startswith("accelerate's ")
    assert config.parallel.sharding == "fsdp2"


@pytest.mark.parametrize(
    ("word", "variables", "both"),
    [
        ("parallel.sharding=none", {}, r"parallel\.sharding=fsdp2 \(FSDP_VERSION=2\), but .* is none \(overrides"),
        (
            "training.gradient_checkpointing=false",
            {"FSDP_ACTIVATION_CHECKPOINTING": "true"},
            r"checkpointing=true \(FSDP_ACTIVATION_CHECKPOINTING=true\), but .* is false",
        ),
    ],
)
def test_a_word_that_contradicts_it_is_an_error_that_names_both(word, variables, both):
    with pytest.raises(LaunchError, match=both):
        settled(word, **variables)


def test_shards_of_another_number_of_processes_are_an_error():
    with pytest.raises(LaunchError, match=r"made for 4 processes .* but 8 were started"):
        settled(world_size=8, **SIZES)
    with pytest.raises(LaunchError, match=r"parallel\.shard_size=2 .* is 4"):
        settled("parallel.sharding=fsdp2", "parallel.shard_size=4", **SIZES)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("FSDP_OFFLOAD_PARAMS=true", "does not support it"),
        ("FSDP_NEWEST=7", "does not support it"),
        ("FSDP_SHARDING_STRATEGY=HYBRID_SHARD", "parallel.shard_size"),
        ("FSDP_RESHARD_AFTER_FORWARD=full_shard", "does not support it"),
        ("FSDP_AUTO_WRAP_POLICY=SIZE_BASED_WRAP", "each decoder layer"),
        ("PARALLELISM_CONFIG_TP_SIZE=2", "does not support it"),
        ("PARALLELISM_CONFIG_DP_SHARD_SIZE=1", "no weights are sharded"),
        ("FSDP_VERSION=1", "parallel.sharding=fsdp2"),
    ],
)
def test_what_it_would_be_wrong_to_pass_over_is_refused_by_name(setting, reason):
    name, value = setting.split("=")
    ((found, why), *others) = refused_settings({**FSDP2, **SIZES, name: value})
    if name == "FSDP_VERSION":  # then its sizes are refused too
        assert (found, len(others)) == ("ACCELERATE_USE_FSDP=true", 1)
    else:
        assert (found, others) == (setting, [])
    assert reason in why
    with pytest.raises(LaunchError, match=found):
        settled(**{**SIZES, name: value})


def test_what_only_reads_a_run_is_sharded_whatever_its_training_was(tmp_path):
    (tmp_path / "config.yaml").write_text(resolved_yaml(load_config(WORDS, task="finetune_lora")))
    for words, is_refused in (([], False), (["parallel.sharding=none"], True)):
        config = load_config(words, run=str(tmp_path / "config.yaml"))
        with pytest.raises(LaunchError) if is_refused else nullcontext():
            found = settings_of_accelerate(config, FSDP2, world_size=2, trains=False)
            assert config.with_values(found).parallel.sharding == "fsdp2"
        with pytest.raises(LaunchError, match=r"but parallel\.sharding is none \("):
            settings_of_accelerate(config, FSDP2, world_size=2, trains=True)


@pytest.mark.parametrize(
    ("engine", "instead"), [("FSDP", "Leave out --cpu .* fsdp_version: 2"), ("DEEPSPEED", r"parallel\.sharding=fsdp2")]
)
def test_what_accelerate_drops_because_of_cpu_is_refused(tmp_path, monkeypatch, engine, instead):
    command = AccelerateCommand(2, engine)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(accelerate_settings, "read_accelerate_command", lambda _: command)
    config = load_config(run_words(tmp_path / "run"))
    with pytest.raises(LaunchError, match=f"asked for {engine}.* started one process.* {instead}"), launch(config):
        pass


def test_one_process_is_a_plain_run_in_which_no_library_sees_fsdp(tmp_path, monkeypatch):
    for name, value in DEFAULTS.items():
        monkeypatch.setenv(name, value)
    with launch(load_config(run_words(tmp_path / "run"))) as runtime:
        (fallback,) = runtime.fallbacks.as_records()
        assert (fallback["what"], fallback["used"]) == ("parallel.sharding", "none")
        # With it, transformers would load the weights in the first process of a node alone.
        assert "ACCELERATE_USE_FSDP" not in os.environ
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
