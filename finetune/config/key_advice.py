"""Say which key may be meant, and which values a key takes, for messages about keys and values that are wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from finetune.config.keys import fields, section_class, takes
from finetune.config.older_spelling import RENAMED
from finetune.config.other_tools import OUR_NAME
from finetune.config.schema import Config

OTHER_WORDS = {
    "seed": "random_seed",
    "resume": "resume_from resume_training continue_from",
    "output_dir": "out_dir save_dir checkpoint_dir logging_dir",
    "model.path": "model_name model_id model_path pretrained_model_name_or_path pretrained_model pretrained model.name "
    "model.id model.name_or_path model.base model.model",
    "model.revision": "model.branch",
    "data.path": "dataset_path dataset_id data_path data_files data_dir",
    "data.mixture": "data.sources",
    "data.name": "subset config_name",
    "data.train": "train_file train_files train_data train_split train_path train_dataset train_dataset_path",
    "data.validation": "validation_file validation_split valid_data val_data val_file val_split eval_data eval_file "
    "eval_split eval_size validation_size",
    "data.test": "test_file test_files test_data test_split test_size test_path",
    "data.columns": "text_column text_field prompt_column response_column messages_column input_column output_column "
    "column_mapping field_messages",
    "data.max_length": "max_seq_len max_sequence_length seq_length seq_len sequence_length block_size context_length "
    "model_max_length max_len truncation max_input_length max_source_length data.max_tokens",
    "data.max_rows": "max_train_samples limit num_rows",
    "data.train_on": "data.mask_history",
    "data.chat_template": "prompt_template prompt_style",
    "data.num_processes": "num_proc",
    "lora.r": "lora.rank rank lora_dim",
    "lora.target_modules": "targets target",
    "lora.quantize": "quantization bits quantization_bits load_in_4_bit",
    "training.method": "use_lora qlora",
    "optim.optimizer": "optimizer_type optimizer_name optim.name optim.type",
    "optim.learning_rate": "base_lr peak_lr max_lr",
    "optim.min_learning_rate": "min_lr end_lr final_lr",
    "optim.weight_decay": "wd",
    "optim.args": "betas eps momentum adam_beta adam_eps optimizer_args optimizer_kwargs",
    "optim.schedule": "lr_schedule lr_decay_style",
    "optim.decay_steps": "lr_decay_steps decay_ratio cooldown_steps num_decay_steps",
    "optim.warmup_steps": "warmup warmup_epochs num_warmup_steps lr_warmup_steps warmup_iters warmup_proportion",
    "optim.max_grad_norm": "clip_grad grad_clip clip_grad_norm gradient_clip_val gradient_clip grad_norm max_norm",
    "training.num_epochs": "epochs n_epochs max_epochs epoch",
    "training.max_steps": "steps num_steps total_steps train_steps max_train_steps num_train_steps max_iters iters "
    "num_training_steps",
    "training.batch_size": "microbatch_size mini_batch_size",
    "training.global_batch_size": "effective_batch_size total_batch_size",
    "training.max_tokens_per_microbatch": "training.max_tokens tokens_per_batch max_tokens_per_batch",
    "gradient_accumulation_steps": "grad_accum grad_accum_steps accumulation_steps gradient_accumulation "
    "accumulate_grad_batches",
    "training.precision": "mixed_precision amp half_precision",
    "training.fused": "compile",
    "training.objective": "loss loss_fn algorithm trainer trainer_type",
    "training.neftune_alpha": "neftune noise_alpha",
    "training.gradient_checkpointing": "grad_checkpoint checkpointing use_gradient_checkpointing",
    "training.packing": "pack",
    "training.log_every": "log_interval logging_interval log_steps log_freq",
    "training.report_to": "wandb logger tracker trackers tensorboard mlflow trackio use_trackers",
    "training.device": "cpu use_gpu",
    "training.num_workers": "dataloader_workers",
    "data_seed": "shuffle shuffle_seed",
    "train_on_inputs": "mask_prompt mask_inputs train_on_completions train_on_responses_only only_train_on_responses",
    "default_system": "system_prompt system system_message",
    "flash_attn": "use_flash_attention use_flash_attn",
    "ref_model_sync_steps": "ref_model reference_model ref_model_name",
    "dpo_label_smoothing": "sft_weight rpo_alpha reference_free",
    "preference.beta": "preference.kl_coef",
    "grpo.beta": "kl_coef kl_coeff kl_beta init_kl_coef kl_penalty kl_weight kl rollout.beta reward.beta",
    "grpo.epsilon": "clip_range cliprange clip_ratio clip_eps",
    "grpo.epsilon_high": "clip_ratio_high clip_higher",
    "grpo.num_iterations": "ppo_epochs mu num_ppo_epochs",
    "rollout.num_generations": "group_size num_return_sequences num_rollouts rollout_n n_generations num_completions "
    "samples_per_prompt num_samples_per_prompt rollout.n rollout.num_samples grpo.n grpo.num_samples",
    "rollout.max_completion_length": "max_new_tokens max_response_length response_length max_gen_length max_gen_tokens "
    "max_completion_tokens max_tokens rollout.max_length grpo.max_length max_generation_length",
    "rollout.temperature": "temp",
    "rollout.server": "vllm_server_url vllm_url server_url base_url vllm_base_url vllm rollout.address",
    "reward.functions": "reward_fn reward_function reward_functions rewards reward_model reward.name verifier",
    "checkpoint.save_every": "save_interval save_freq checkpoint_every checkpoint_steps checkpoint_interval "
    "checkpointing_steps",
    "checkpoint.save_total_limit": "keep_last max_checkpoints keep_checkpoints num_checkpoints",
    "validation.validate_every": "eval_every eval_interval eval_freq val_every val_interval val_check_interval "
    "evaluate_every",
    "validation.metrics": "eval_metrics compute_metrics",
    "parallel.num_processes": "nproc nproc_per_node num_gpus gpus n_gpus n_gpu devices num_devices",
    "parallel.sharding": "zero_stage strategy fsdp2 sharding_strategy",
    "local_rank": "num_nodes nnodes node_rank machine_rank num_machines",
    "tensor_parallel_size": "tensor_parallel tp_size pipeline_parallel pp_size",
}
"""Common words for a key, or for a name in `other_tools.py`, that none of those tools has. A dot: in that section."""
_MEANING = {word: OUR_NAME.get(key, key) for key, words in OTHER_WORDS.items() for word in words.split()}
_CLOSE_IN_OTHER_SECTIONS = 0.75


def expected(dotted: str) -> str:
    """Describe the values that a key takes: ``a whole number above 0``."""
    section, _, key = dotted.rpartition(".")
    return _describe((section_class(section) or Config).model_json_schema()["properties"][key])


def did_you_mean(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``Did you mean a?`` with the closest choice, or nothing if none is close. `cutoff`: 1 is equal."""
    close = closest(name, choices, cutoff)
    return f"Did you mean {close}?" if close else ""


def closest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the choice that is most like a name, or nothing if none is close. `cutoff`: 1 is equal."""
    return next(iter(difflib.get_close_matches(name, list(choices), n=1, cutoff=cutoff)), "")


def advise_on_run_file(name: str, *, exists: bool, override: str) -> str:
    """Say what to write for an argument that names no run file. Empty if nothing is known.

    `exists` says whether it is a path that exists, and `override` is the one that chooses a file of this name.
    """
    if override:
        return f"Did you mean {override}?"
    if name == "-" or name.startswith("/dev/"):
        return "A run file is not read from a pipe: write it to a file that ends in .yaml."
    return f"For rows write data={name}, for a model model={name}." if exists else ""


def named_elsewhere(name: str) -> str:
    """Return the key that other tools, or people, call by this name, or what to do instead. Empty if it is unknown."""
    return OUR_NAME.get(name) or _MEANING.get(name, "")


def did_you_mean_key(dotted: str) -> str:
    """Suggest a key in place of an unknown one, or say what to do instead.

    A renamed key comes first, then a key with the same last part in another section, then the name's meaning in
    the other tools, then a key that is spelled almost alike.
    """
    if dotted in RENAMED:
        return f"Did you mean {RENAMED[dotted]}?"
    section, _, last = dotted.rpartition(".")
    same = [key for key in fields() if key.rpartition(".")[2] == last]
    known = OUR_NAME.get(last) or OUR_NAME.get(f"{section}_{last}")
    also = "" if known else _MEANING.get(last, "")
    for meaning in filter(None, (section and _MEANING.get(dotted), known, also)):
        if not same or section == meaning.partition(".")[0]:
            return f"Did you mean {meaning}?" if meaning in fields() else meaning
    close = also if same else _closest_keys(section, last)
    keys = [*same, close] if close else same
    return f"Did you mean {' or '.join(keys)}?" if keys else ""


def _closest_keys(section: str, last: str) -> str:
    """Return the key of this section that is spelled almost like `last`. If there is none, look in all sections."""
    own = section_class(section)
    if own and (close := closest(last, own.model_fields)):
        return f"{section}.{close}"
    close = closest(last, [key.rpartition(".")[2] for key in fields()], _CLOSE_IN_OTHER_SECTIONS)
    return " or ".join(key for key in fields() if close and key.rpartition(".")[2] == close)


def how_to_write(override: str, before: str, choice: str) -> str:
    """Complete a message about an override without a key.

    `before` is the override before it, and `choice` the override that chooses a file of its name, if there is one.
    """
    if override.startswith("-"):
        name = override.lstrip("-").partition("=")[0]
        return f"there is no such option. A key is set by {name}=VALUE or --{name} VALUE."
    key, _, value = before.partition("=")
    if takes(key, list):
        items = f"{value},{override}".replace(",,", ",").strip("[],")
        return f"expected key=value. Write a list in brackets: '{key}=[{items}]'."
    if choice:
        return f"expected key=value. Did you mean {choice}?"
    return "expected key=value, such as model=phi_tiny or optim.learning_rate=1e-4."


def _describe(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        kinds = [_describe(kind) for kind in schema["anyOf"]]
        wider = [kind.replace("a whole number", "a number") for kind in kinds]  # a number above 0 may be a whole one
        return " or ".join(kind for kind, wide in zip(kinds, wider, strict=True) if kind == wide or wide not in kinds)
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if choices:
        return f"one of {', '.join(choices)}" if len(choices) > 1 else f"'{choices[0]}'"
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _limits(schema)
    if kind == "array":
        return f"a list ([a, b]), each {_describe(schema['items'])}"
    words = {"string": "text", "boolean": "true or false", "null": "null", "object": "keys with values ({a: 1})"}
    return words[str(kind)]


def _limits(schema: Mapping[str, Any]) -> str:
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']} to {schema['maximum']}"
    words = {
        "minimum": "of at least",
        "exclusiveMinimum": "above",
        "maximum": "of at most",
        "exclusiveMaximum": "and below",
    }
    return "".join(f" {word} {schema[name]}" for name, word in words.items() if name in schema)
