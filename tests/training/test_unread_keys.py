"""A key that is set and that a run does not read is refused, or named before the run."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune.config import load_config
from finetune.config.keys import fields
from finetune.config.schema import ModelSection
from finetune.errors import ConfigError
from finetune.model.tokens import build_tokenizer
from finetune.training.checks import SOMETIMES_READ, sometimes_read
from finetune.training.setup import check_config
from finetune.training.unread_keys import (
    _OF_ANSWERS,
    _OF_SEVERAL_PROCESSES,
    _RULES,
    OF_SPLITS,
    describe_missing_splits,
    warn_of,
)

WORDS = ["model=phi_tiny", "data=orders"]


def warnings(caplog: pytest.LogCaptureFixture, words: list[str]) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="finetune"):
        check_config(load_config([*WORDS, *words]))
    return [record.getMessage() for record in caplog.records if record.name.endswith("unread_keys")]


@pytest.mark.parametrize(
    ("unread", "read_with"),
    [
        ("lora.r=4", ""),
        ("lora.target_modules=qkv_proj", ""),
        ("model.revision=main", "model.path=org/model"),
        ("model.fp8_layers=upper_half", "model.frozen_precision=fp8 training.precision=bf16"),
        ("data.name=main", "data.path=org/rows"),
        ("data.name=main", f"data.path={Path(__file__).parent}"),
        ("data.revision=main", "data.path=org/rows"),
        ("training.max_skipped_steps=9", "training.on_nonfinite=skip"),
        ("training.packing=false", "training.kernels=auto"),
        ("training.share_prefixes=false", "training.kernels=auto"),
        ("training.fused=true", "training.kernels=auto"),
        ("validation.num_samples=9", "validation.metrics=exact_match"),
        ("validation.max_new_tokens=9", "validation.metrics=exact_match"),
        ("early_stopping.min_delta=0.1", "early_stopping.patience=1"),
        ("resume_allow=seed", "resume=auto"),
        ("parallel.find_unused_parameters=true", "parallel.gradient_sync=ddp"),
        ("parallel.reshard_after_forward=false", "parallel.sharding=fsdp2"),
    ],
)
def test_a_key_that_other_keys_leave_without_effect_is_named(
    caplog: pytest.LogCaptureFixture, unread: str, read_with: str
) -> None:
    without = "training.method=full" if unread.startswith("lora.") else "training.kernels=reference"
    [message] = warnings(caplog, [without, unread])
    assert unread.partition("=")[0] in message
    assert "(overrides), because" in message
    assert warnings(caplog, [unread, *read_with.split()]) == []


def test_keys_of_rewards_are_named_with_the_key_that_they_need(caplog: pytest.LogCaptureFixture) -> None:
    words = ["task=finetune_grpo", "reward.functions=length", "rollout.max_turns=2", "rollout.max_difference=0.1"]
    words += ["grpo.epsilon_high=0.3", "validation.num_samples=4"]
    [message] = warnings(caplog, words)
    without_server = (
        "grpo.epsilon_high=0.3 (overrides), because grpo.num_iterations is 1, so no ratio changes; "
        "rollout.max_difference=0.1 (overrides), because rollout.server is null; "
    )
    assert message == (
        f"set, but without effect in this run: {without_server}"
        "rollout.max_turns=2 (overrides), because rollout.tools and rollout.environment are empty"
    )
    assert warnings(caplog, [*words, "rollout.server=http://localhost:8000"]) == [message.replace(without_server, "")]


def test_the_lower_bound_of_the_ratio_is_named_where_cispo_reads_the_upper_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = ["task=finetune_grpo", "reward.functions=length", "grpo.num_iterations=2", "grpo.loss_type=cispo"]
    assert warnings(caplog, [*words, "grpo.epsilon=0.3"]) == []
    [message] = warnings(caplog, [*words, "grpo.epsilon=0.3", "grpo.epsilon_high=4"])
    assert message.endswith(
        "grpo.epsilon=0.3 (overrides), because grpo.loss_type is cispo, which reads grpo.epsilon_high"
    )


def missing(caplog: pytest.LogCaptureFixture, words: list[str], **splits: object) -> list[str]:
    caplog.clear()
    config = load_config([*WORDS, *words])
    warn_of(describe_missing_splits(config, sometimes_read(config, OF_SPLITS), SimpleNamespace(**splits)))
    return caplog.messages


def test_values_that_are_the_defaults_and_keys_of_shipped_files_are_not_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert warnings(caplog, ["training.method=full", "lora.r=16", "training.max_skipped_steps=5"]) == []
    assert missing(caplog, ["task=debug"], validation=None, test=None) == []


def test_keys_about_rows_that_are_not_there_are_named(caplog: pytest.LogCaptureFixture) -> None:
    words = ["validation.validate_every=2", "testing.metrics=exact_match", "testing.num_samples=0"]
    assert missing(caplog, words, validation=None, test=None) == [
        "set, but without effect in this run: validation.validate_every=2 (overrides), because this run has no "
        'validation rows; testing.metrics=["exact_match"] (overrides), because this run has no test phase (`finetune '
        "evaluate` reads them)"
    ]
    assert missing(caplog, words, validation=[], test=[]) == []
    [message] = missing(caplog, ["task=dpo", "data.test=test.jsonl"], validation=[], test=None)
    assert "data.test=test.jsonl (overrides), because this run has no test phase" in message


def test_rows_that_are_held_out_by_default_are_those_of_the_test_phase(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    words = [f"data.path={tmp_path / 'rows.jsonl'}", "testing.metrics=exact_match"]
    assert missing(caplog, words, validation=[], test=None) == []


def test_a_chat_template_beside_the_own_one_of_a_tokenizer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    build_tokenizer(ModelSection(path="shipped:phi_tiny", chat_template="{{ messages }}"))
    assert "model.chat_template is not used" in caplog.text


@pytest.mark.parametrize("word", ["lora.start_from=runs/first", "lora.quantize=nf4", "lora.new_tokens=['<a>']"])
def test_full_fine_tuning_refuses_a_key_that_asks_for_another_model(word: str) -> None:
    with pytest.raises(ConfigError, match=r"training\.method is full, which trains every weight of model\.path"):
        check_config(load_config([*WORDS, "training.method=full", word]))


def test_each_rule_is_about_keys_that_are_looked_at() -> None:
    keys = [*_OF_ANSWERS, *_OF_SEVERAL_PROCESSES, *(key for rule in _RULES for key in rule.keys)]
    assert [key for key in keys if not key.startswith(SOMETIMES_READ)] == []
    assert [key for key in (*keys, *SOMETIMES_READ) if not any(name.startswith(key) for name in fields())] == []
