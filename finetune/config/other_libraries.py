"""The settings of Transformers, PEFT and TRL by name: each with our key, or with a sentence if we have no such key.

The names are written down, so that none of these libraries is imported. A name that is also the name of a key of ours,
such as `learning_rate`, is not listed.
"""

from __future__ import annotations

_BETAS = "Write optim.args={betas: [0.9, 0.999]}."
_BEST = "Nothing to set: adapter/ holds the best weights, by checkpoint.best_metric."
_COMMANDS = "Nothing to set: `finetune train` trains, validates and tests; `finetune evaluate` measures a finished run."
_LOSS = "The loss is next-token cross-entropy. training.objective chooses another: dpo, kto, orpo, simpo or grpo."
_LOSS_ON = "Nothing to set: only answers carry loss. data.train_on=last leaves out all but the last of a conversation."
_PUSH = "Publish a finished run with `finetune push`."
_SHARDING = "Write parallel.sharding=fsdp2, which shares the model among the processes."
_WHICH_LAYERS = "Name the layers in lora.target_modules; it takes regular expressions."

TRAINING_ARGUMENTS = {
    "data_seed": "The order of rows follows from seed.",
    "per_device_train_batch_size": "training.batch_size",
    "gradient_accumulation_steps": "Set training.global_batch_size: the examples of an optimizer step over all "
    "processes. They are cut into micro-batches of training.batch_size, so there is no number of accumulation steps.",
    "auto_find_batch_size": "`finetune plan` says which training.batch_size fits.",
    "num_train_epochs": "training.num_epochs",
    "lr_scheduler_type": "optim.schedule",
    "optim": "optim.optimizer",
    "optim_args": "optim.args",
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "adam_epsilon": "Write optim.args={eps: 1e-8}.",
    "average_tokens_across_devices": "Nothing to set: the loss is the mean over all target tokens of the global batch.",
    "label_smoothing_factor": _LOSS,
    "bf16": "Write training.precision=bf16.",
    "fp16": "Write training.precision=fp16.",
    "fp16_full_eval": "A run validates and tests in training.precision.",
    "neftune_noise_alpha": "training.neftune_alpha",
    "use_liger_kernel": "training.kernels",
    "torch_compile": "training.fused",
    "use_cpu": "Write training.device=cpu.",
    "full_determinism": "training.deterministic",
    "logging_steps": "training.log_every",
    "logging_strategy": "training.log_every",
    "run_name": "A run is named by its folder: output_dir.",
    "eval_strategy": "validation.validate_every",
    "eval_steps": "validation.validate_every",
    "per_device_eval_batch_size": "validation.batch_size",
    "do_train": _COMMANDS,
    "do_eval": _COMMANDS,
    "do_predict": _COMMANDS,
    "save_strategy": "Set checkpoint.save_every (optimizer steps) or checkpoint.save_every_epochs.",
    "save_steps": "checkpoint.save_every",
    "load_best_model_at_end": _BEST,
    "metric_for_best_model": "checkpoint.best_metric",
    "greater_is_better": "Nothing to set: of a loss, lower is better, of all other metrics, higher.",
    "resume_from_checkpoint": "resume",
    "push_to_hub": _PUSH,
    "hub_model_id": _PUSH,
    "hub_token": "Set HF_TOKEN in the environment.",
    "dataloader_drop_last": "training.drop_last",
    "dataloader_num_workers": "training.num_workers",
    "dataloader_pin_memory": "training.pin_memory",
    "dataloader_prefetch_factor": "training.prefetch_factor",
    "remove_unused_columns": "Nothing to set: columns that are not used are left out, and the log names them.",
    "local_rank": "Nothing to set: the launcher gives each process its rank.",
    "ddp_backend": "parallel.backend",
    "ddp_find_unused_parameters": "parallel.find_unused_parameters",
    "ddp_timeout": "Set parallel.timeout_minutes, in minutes.",
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "deepspeed": _SHARDING,
}
"""The names of `transformers.TrainingArguments`."""

LORA_CONFIG = {
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "exclude_modules": _WHICH_LAYERS,
    "layers_to_transform": "lora.layers",
    "layers_pattern": _WHICH_LAYERS,
    "use_rslora": "lora.rslora",
    "use_dora": "lora.dora",
    "init_lora_weights": "lora.init",
    "trainable_token_indices": "lora.new_tokens",
    "modules_to_save": "lora.modules_to_save",
    "bias": "Biases are not trained with LoRA. training.method=full trains every weight.",
    "task_type": "Nothing to set: models are causal language models.",
    "fan_in_fan_out": "Nothing to set: it follows from the model's layers.",
    "base_model_name_or_path": "model.path",
}
"""The names of `peft.LoraConfig`."""

TRL = {
    "simpo_gamma": "preference.gamma",
    "cpo_alpha": "Nothing to set: training.objective=simpo has no term for the chosen answer alone.",
    "loss_type": _LOSS,
    "label_smoothing": _LOSS,
    "padding_free": "training.packing",
    "completion_only_loss": _LOSS_ON,
    "assistant_only_loss": _LOSS_ON,
    "chat_template_path": "data.chat_template",
    "dataset_text_field": "Name the column in data.columns: {text: NAME}.",
    "dataset_num_proc": "data.num_processes",
    "dataset_name": "data.path",
    "dataset_config": "data.name",
    "dataset_train_split": "data.train",
    "dataset_test_split": "data.test",
    "dataset_streaming": "Set data.max_rows: only these rows of a hub data set are downloaded.",
    "model_name_or_path": "model.path",
    "model_revision": "model.revision",
    "attn_implementation": "model.attention",
    "use_peft": "training.method",
    "load_in_4bit": "Write lora.quantize=nf4.",
    "lora_r": "lora.r",
    "lora_target_modules": "lora.target_modules",
}
"""The names of TRL's `SFTConfig`, `DPOConfig`, `KTOConfig`, `ORPOConfig`, `CPOConfig`, `ModelConfig` and
`ScriptArguments`."""

EARLIER = {
    "evaluation_strategy": "validation.validate_every",
    "group_by_length": "training.packing",
    "max_seq_length": "data.max_length",
    "no_cuda": "Write training.device=cpu.",
    "overwrite_output_dir": "Runs are not overwritten: choose another output_dir, or resume=auto to go on.",
    "warmup_ratio": "Set optim.warmup_steps, in optimizer steps.",
}
"""Names that only earlier versions of these libraries have."""

OUR_NAME = {**EARLIER, **TRL, **LORA_CONFIG, **TRAINING_ARGUMENTS}
