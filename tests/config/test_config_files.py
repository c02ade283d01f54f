"""Every shipped config composes; the keys there are; what is listed."""

import re

import pytest

from finetune.config.compose import compose
from finetune.config.config_files import shipped_folder
from finetune.config.keys import fields
from finetune.config.listing import list_configs, list_model_families, other_models

SHIPPED = {
    "run": ["grpo_quickstart", "grpo_tools_quickstart", "quickstart", "train_ddp"],
    "model": [
        *("gemma2_2b", "gemma2_9b", "gemma3_1b", "gemma3_270m", "granite4_1b", "granite4_micro"),
        *("llama3_1_8b", "llama3_2_1b", "llama3_2_3b", "llama3_3_70b", "mistral_7b", "olmo3_7b"),
        *("phi1", "phi1_5", "phi2", "phi3_5_mini", "phi3_5_moe"),
        *("phi3_medium", "phi3_medium_128k", "phi3_mini", "phi3_mini_128k"),
        *("phi4", "phi4_mini", "phi4_mini_reasoning", "phi4_reasoning", "phi4_reasoning_plus", "phi_tiny"),
        *("qwen2_5_0_5b", "qwen2_5_14b", "qwen2_5_1_5b", "qwen2_5_3b", "qwen2_5_7b"),
        *("qwen3_0_6b", "qwen3_14b", "qwen3_1_7b", "qwen3_4b", "qwen3_4b_instruct_2507", "qwen3_4b_thinking_2507"),
        "qwen3_8b",
        *("smollm2_135m", "smollm2_1_7b", "smollm2_360m", "smollm3_3b"),
    ],
    "data": ["orders", "phi4", "sums"],
    "task": [
        *("continue_pretraining", "debug", "finetune_full", "finetune_grpo", "finetune_kto", "finetune_lora"),
        *("finetune_new_tokens", "finetune_orpo", "finetune_preferences", "finetune_qlora", "finetune_simpo"),
    ],
    "parallel": ["auto", "ddp", "sharded", "sharded_by_node", "single"],
}

LOADER_KEYS = "batch_size num_workers pin_memory prefetch_factor drop_last"
KEYS = {
    "": "ddp seed output_dir resume resume_allow strict",
    "parallel": "num_processes world_size rank master_addr master_port backend timeout_minutes step_timeout_minutes "
    "gradient_sync output_device find_unused_parameters share_gpus sharding shard_size reshard_after_forward",
    "model": "path revision init config tokenizer chat_template attention frozen_precision fp8_layers "
    "trust_remote_code",
    "data": "path mixture name revision train validation test split_seed split_rule format separator columns train_on "
    "max_length max_rows on_bad_row on_long_row on_no_target on_truncated_answer on_doubled_bos on_untrained_end "
    "on_overlap on_ignored_key chat_template template_date num_processes cache_dir "
    "keep keep_prompts",
    "lora": (
        "r alpha dropout target_modules layers rank_pattern alpha_pattern rslora dora init start_from "
        "start_from_any_base quantize new_tokens modules_to_save"
    ),
    "optim": (
        "optimizer learning_rate weight_decay args schedule min_learning_rate decay_steps warmup_steps lora_plus_ratio "
        "max_grad_norm"
    ),
    "training": f"{LOADER_KEYS} method objective max_steps num_epochs global_batch_size max_tokens_per_microbatch "
    "packing share_prefixes kernels fused graphs neftune_alpha precision gradient_checkpointing memory memory_fraction "
    "device deterministic debug "
    "log_every profile report_to on_nonfinite max_skipped_steps",
    "preference": "beta gamma desirable_weight undesirable_weight",
    "grpo": "loss_type scale_rewards epsilon epsilon_high importance_sampling_level beta num_iterations "
    "mask_truncated_completions",
    "rollout": "num_generations max_completion_length temperature top_p top_k batch_size server max_difference "
    "server_timeout_minutes tools tools_from tool_schemas environment environment_from "
    "max_turns tool_timeout_seconds max_result_tokens",
    "reward": "functions functions_from weights pattern timeout_seconds",
    "validation": f"{LOADER_KEYS} validate_every by metrics metrics_from num_samples max_new_tokens",
    "testing": f"{LOADER_KEYS} metrics compare_base max_new_tokens num_samples general_prompts",
    "early_stopping": "patience min_delta metric max_forgotten",
    "checkpoint": "save_every save_every_epochs save_total_limit best_metric background on_disk_failure",
}


def test_no_key_comes_or_goes_unnoticed():
    expected = [f"{section}.{key}".lstrip(".") for section, keys in KEYS.items() for key in keys.split()]
    assert sorted(fields()) == sorted(expected)


def test_every_shipped_config_composes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = set()
    for group, names in SHIPPED.items():
        for name in names:
            words = {"model": "phi_tiny", "data": "orders"} | {group: name}
            tokens = ["lora.new_tokens=['<order>']"] if name == "finetune_new_tokens" else []
            config = compose([f"{key}={value}" for key, value in words.items()] + ["data.path=rows.jsonl", *tokens])
            below = "" if group == "run" else f"{group}/"
            seen.add(f"{below}{name}.yaml")
            origin = f"shipped configs/{below}{name}.yaml:"
            assert [key for key in fields() if config.origin(key).startswith(origin)], f"{origin} sets nothing"
    assert seen == {str(path.relative_to(shipped_folder("configs"))) for path in shipped_folder("configs").rglob("*.*")}


def test_every_file_is_described():
    listed = list_configs()
    assert {group: [name for name, _ in entries] for group, entries in listed.items()} == SHIPPED
    for entries in listed.values():
        for name, description in entries:
            assert re.fullmatch(r"[A-Z].{10,100}[.]", description), (name, description)


def test_models_are_listed_by_family_with_phi_first_and_those_here_last(tmp_path, monkeypatch):
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "configs" / "model" / "acme.yaml").write_text("model.path: acme\n")
    monkeypatch.chdir(tmp_path)
    families = list_model_families()
    assert [family.partition(",")[0] for family in families] == [
        *("Phi", "SmolLM", "Qwen", "Llama", "Mistral", "Gemma", "OLMo", "Granite"),
        "others in ./configs",
    ]
    assert sorted(name for models in families.values() for name, _ in models) == sorted([*SHIPPED["model"], "acme"])
    assert other_models()[-2:] == ["Granite: granite4_1b, granite4_micro", "others in ./configs: acme"]


def test_the_template_of_phi2():
    jinja2 = pytest.importorskip("jinja2")
    text = compose(["model=phi2"], complete=False).model.chat_template
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because."},
        {"role": "user", "content": "So?"},
    ]
    for options in ({}, {"trim_blocks": True, "lstrip_blocks": True}):
        template = jinja2.Environment(**options).from_string(text)
        rendered = template.render(messages=messages, eos_token="<eos>")
        assert rendered == "Be brief.\nInstruct: Why?\nOutput: Because.<eos>\nInstruct: So?\nOutput:"
        assert template.render(messages=messages[:1] + messages[1:3], eos_token="<eos>").endswith(" Because.<eos>")
