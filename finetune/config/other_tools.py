"""The settings of axolotl, LLaMA-Factory, Transformers, PEFT, TRL and DeepSpeed by name, and what each is here.

Each name has our key, or a sentence if there is no such key. None of these libraries is imported. For
`finetune init --from`, `config/translation.py` converts the values.
"""

from __future__ import annotations

from collections.abc import Collection

NOTHING = "Nothing to set"
"""The beginning of a sentence about a setting that needs no counterpart."""
MISSING = "No counterpart"
"""The beginning of a sentence about something that finetune does not do."""

KEYS = {
    "output_dir": "output_dir",
    "seed": "seed",
    "resume": "resume_from_checkpoint=auto auto_resume_from_checkpoints=auto",
    "model.path": "model_name_or_path base_model base_model_name_or_path",
    "model.revision": "model_revision revision_of_model revision",
    "model.tokenizer": "tokenizer_config",
    "model.attention": "attn_implementation",
    "model.trust_remote_code": "trust_remote_code",
    "data.path": "dataset_name dataset",
    "data.mixture": "datasets",
    "data.name": "dataset_config",
    "data.train": "dataset_train_split",
    "data.validation": "dataset_test_split eval_dataset test_datasets val_set_size val_size",
    "data.columns": "dataset_text_field",
    "data.train_on": "mask_history=last",
    "data.max_length": "max_length max_seq_length sequence_len cutoff_len",
    "data.max_rows": "max_samples",
    "data.on_long_row": "excess_length_strategy",
    "data.num_processes": "dataset_num_proc dataset_processes preprocessing_num_workers",
    "data.chat_template": "chat_template chat_template_jinja chat_template_path template",
    "lora.r": "r lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.target_modules": "target_modules lora_target_modules lora_target lora_target_linear=auto",
    "lora.layers": "layers_to_transform peft_layers_to_transform",
    "lora.rank_pattern": "rank_pattern lora_rank_pattern",
    "lora.alpha_pattern": "alpha_pattern lora_alpha_pattern",
    "lora.rslora": "use_rslora peft_use_rslora",
    "lora.dora": "use_dora peft_use_dora",
    "lora.init": "init_lora_weights peft_init_lora_weights pissa_init=pissa_fast",
    "lora.start_from": "lora_model_dir adapter_name_or_path",
    "lora.quantize": "load_in_4bit=nf4 quantization_bit",
    "lora.new_tokens": "trainable_token_indices add_tokens add_special_tokens tokens",
    "lora.modules_to_save": "modules_to_save lora_modules_to_save additional_target",
    "optim.optimizer": "optim optimizer optimizer.type use_muon=torch.optim.Muon",
    "optim.learning_rate": "learning_rate lr optimizer.params.lr scheduler.params.warmup_max_lr",
    "optim.weight_decay": "weight_decay optimizer.params.weight_decay",
    "optim.args": "optim_args adam_beta1 adam_beta2 adam_epsilon optimizer.params.betas optimizer.params.eps",
    "optim.schedule": "lr_scheduler_type lr_scheduler scheduler.type",
    "optim.min_learning_rate": "cosine_min_lr_ratio lr_scheduler_kwargs.min_lr lr_scheduler_kwargs.min_lr_rate "
    "lr_scheduler_kwargs.min_lr_ratio scheduler.params.cos_min_ratio",
    "optim.decay_steps": "lr_scheduler_kwargs.num_decay_steps",
    "optim.warmup_steps": "warmup_steps warmup_ratio scheduler.params.warmup_num_steps",
    "optim.lora_plus_ratio": "loraplus_lr_ratio",
    "optim.max_grad_norm": "max_grad_norm gradient_clipping",
    "training.method": "adapter finetuning_type use_peft",
    "training.objective": "rl stage pref_loss",
    "training.batch_size": "per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu",
    "training.global_batch_size": "batch_size train_batch_size",
    "training.num_epochs": "num_train_epochs num_epochs",
    "training.max_steps": "max_steps",
    "training.precision": "bf16 bfloat16=bf16 pure_bf16=bf16 bf16.enabled=bf16 fp16=fp16 float16=fp16 "
    "fp16.enabled=fp16",
    "training.gradient_checkpointing": "gradient_checkpointing activation_checkpointing",
    "training.neftune_alpha": "neftune_noise_alpha",
    "training.fused": "torch_compile",
    "training.device": "use_cpu=cpu no_cuda=cpu",
    "training.deterministic": "full_determinism",
    "training.log_every": "logging_steps steps_per_print",
    "training.report_to": "report_to wandb_project=wandb use_wandb=wandb use_tensorboard=tensorboard "
    "use_mlflow=mlflow use_trackio=trackio",
    "training.drop_last": "dataloader_drop_last",
    "training.num_workers": "dataloader_num_workers",
    "training.pin_memory": "dataloader_pin_memory",
    "training.prefetch_factor": "dataloader_prefetch_factor",
    "preference.beta": "rl_beta dpo_beta orpo_alpha pref_beta",
    "preference.gamma": "simpo_gamma",
    "preference.desirable_weight": "desirable_weight kto_desirable_weight kto_chosen_weight",
    "preference.undesirable_weight": "undesirable_weight kto_undesirable_weight kto_rejected_weight",
    "rollout.server": "vllm_server_base_url",
    **{f"rollout.{name}": name for name in ("num_generations", "max_completion_length", "temperature")},
    **{f"rollout.{name}": name for name in ("top_p", "top_k")},
    **{f"grpo.{name}": name for name in ("epsilon", "epsilon_high", "num_iterations", "scale_rewards")},
    **{f"grpo.{name}": name for name in ("importance_sampling_level", "mask_truncated_completions")},
    "validation.validate_every": "eval_strategy evaluation_strategy eval_steps evals_per_epoch",
    "validation.batch_size": "per_device_eval_batch_size eval_batch_size",
    "early_stopping.patience": "early_stopping_patience early_stopping_steps",
    "checkpoint.save_every": "save_steps",
    "checkpoint.save_every_epochs": "save_strategy saves_per_epoch",
    "checkpoint.save_total_limit": "save_total_limit",
    "checkpoint.best_metric": "metric_for_best_model",
    "parallel.backend": "ddp_backend",
    "parallel.find_unused_parameters": "ddp_find_unused_parameters",
    "parallel.sharding": "fsdp=fsdp2 fsdp_version=fsdp2 deepspeed zero_optimization.stage",
    "parallel.reshard_after_forward": "fsdp_config.reshard_after_forward fsdp_config.fsdp_reshard_after_forward",
}
"""The names elsewhere for each key; one with dots is nested. `name=value`: our value if that setting is on."""

VALUES = {
    "optim.schedule": "linear cosine constant cosine_with_min_lr=cosine constant_with_warmup=constant "
    "warmup_stable_decay=wsd warmuplr=constant warmupdecaylr=linear warmupcosinelr=cosine",
    "optim.optimizer": "adamw=torch.optim.AdamW adamw_hf=torch.optim.AdamW adamw_torch=torch.optim.AdamW "
    "adamw_torch_fused=torch.optim.AdamW adam=torch.optim.Adam sgd=torch.optim.SGD muon=torch.optim.Muon "
    "adagrad=torch.optim.Adagrad rmsprop=torch.optim.RMSprop adamw_8bit=bitsandbytes.optim.AdamW8bit "
    "adamw_bnb_8bit=bitsandbytes.optim.AdamW8bit paged_adamw=bitsandbytes.optim.PagedAdamW32bit "
    "paged_adamw_32bit=bitsandbytes.optim.PagedAdamW32bit paged_adamw_8bit=bitsandbytes.optim.PagedAdamW8bit "
    "schedule_free_adamw=schedulefree.AdamWScheduleFree",
    "training.objective": "sft dpo kto orpo simpo grpo sigmoid=dpo",
    "training.method": "lora full qlora=lora true=lora false=full none=full",
    "training.precision": "true=bf16 auto false=",
    "training.fused": "true false=",
    "training.report_to": "none= tensorboard wandb trackio mlflow",
    "grpo.scale_rewards": "group batch none true=group false=none",
    "lora.init": "true=default default pissa pissa_niter_4=pissa_fast pissa_niter_16=pissa_fast",
    "lora.quantize": "4=nf4",
    "data.on_long_row": "drop truncate=warn raise=refuse",
    "data.chat_template": "alpaca chatml llama3 gemma gemma2=gemma gemma3=gemma mistral mistral_v2v3=mistral "
    "jinja= tokenizer_default=",
    "model.attention": "sdpa eager flash_attention_2= flash_attention_3= flex_attention=",
    "checkpoint.best_metric": "loss eval_loss=loss",
    "checkpoint.save_every_epochs": "epoch=1 no=null false=null steps= best=",
}
"""The values elsewhere for some keys, as `theirs=ours`; without `ours`, nothing need be set."""

_SENTENCES = """\
Set training.global_batch_size: the examples of an optimizer step over all processes, cut into micro-batches.
    gradient_accumulation_steps
Set preference.beta and training.objective: dpo, kto, orpo or simpo.
    beta
The loss is next-token cross-entropy. training.objective chooses another: dpo, kto, orpo, simpo or grpo.
    loss_type label_smoothing label_smoothing_factor
Only answers carry loss. data.train_on=last leaves out all but the last of a conversation.
    train_on_inputs train_on_prompt
Set training.batch_size: it counts rows. `finetune plan` says how many rows a packed sequence elsewhere has.
    packing sample_packing neat_packing
Set reward.functions and reward.weights: a run file does not import functions of other tools.
    reward_funcs reward_weights reward_model_name_or_path
Set rollout.max_turns: the answers in a conversation, one more than the calls. rollout.tools names the functions.
    max_tool_calling_iterations
Set rollout.server to the address of a vLLM server. Without it, the run generates the answers itself.
    use_vllm vllm_mode vllm_server_host vllm_server_port
Set rollout.max_difference: a run ends if the server's log-probabilities differ from its own by more on average.
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_cap
    vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max
Set training.global_batch_size, the prompts of an optimizer step, and grpo.num_iterations, the steps on each answer.
    generation_batch_size steps_per_generation
Set validation.num_samples, the prompts of a validation. Each gets one answer.
    num_generations_eval
Set data.max_length, which counts a prompt and its answer together.
    max_prompt_length
Set optim.min_learning_rate or optim.decay_steps.
    lr_scheduler_kwargs
Set training.max_steps: the rate falls until the last step of the run.
    scheduler.params.total_num_steps
Set optim.args for the optimizer of optim.optimizer.
    optimizer.params optim_target_modules
Set validation.validate_every, in optimizer steps.
    eval_delay eval_on_start
Set data.mixture: the weight of a source says how often its rows appear in an epoch. It is no probability.
    mix_strategy interleave_probs
Set data.max_rows: only these rows of a hub data set are downloaded.
    dataset_streaming streaming
Set model.revision or model.attention.
    model_init_kwargs
Set training.gradient_checkpointing=false.
    disable_gradient_checkpointing
Set parallel.shard_size and parallel.sharding=fsdp2.
    dp_shard_size dp_replicate_size
Name the layers in lora.target_modules; it takes regular expressions.
    exclude_modules layers_pattern target_parameters lora_target_parameters
Biases are not trained with LoRA. training.method=full trains every weight.
    bias lora_bias
Name new tokens in lora.new_tokens. Special tokens of the tokenizer are used as they are.
    special_tokens eos_token pad_token eot_tokens added_tokens_overrides
Put the system prompt into the rows, as a turn of the role system.
    default_system default_system_message
Nothing to set: only answers carry loss. data.train_on=last leaves out all but the last of a conversation.
    completion_only_loss assistant_only_loss
Nothing to set: trackers of training.report_to read their own environment variables, such as WANDB_PROJECT.
    project wandb_name wandb_entity wandb_run_id wandb_mode wandb_watch wandb_log_model trackio_space_id
    trackio_bucket_id trackio_static_space_id trackio_project_name trackio_run_name mlflow_tracking_uri
    mlflow_experiment_name mlflow_run_name use_swanlab
Nothing to set: the engine has its own attention and kernels. training.kernels=reference turns them off.
    use_liger_kernel liger_kernel_config torch_compile_backend torch_compile_mode flash_attention sdp_attention
    eager_attention xformers_attention flex_attention flash_attn flash_attn_cross_entropy flash_attn_rms_norm
    flash_attn_fuse_mlp cut_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel liger_rope liger_rms_norm
    liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy enable_liger_kernel use_unsloth
    upcast_layernorm
Nothing to set: `finetune plan` says what fits. training.memory=least takes as little memory as possible.
    auto_find_batch_size gradient_checkpointing_kwargs activation_checkpointing_kwargs torch_empty_cache_steps
    use_cache precompute_ref_log_probs precompute_ref_batch_size activation_offloading low_cpu_mem_usage lora_on_cpu
    use_unsloth_gc use_reentrant_gc
Nothing to set: publish a finished run with `finetune push`. For private repositories, set HF_TOKEN.
    push_to_hub hub_model_id hub_token hub_private_repo hub_strategy hub_always_push hub_revision hf_use_auth_token
    hf_hub_token
Nothing to set: the rate rises from 0 to optim.learning_rate, and falls until the last step.
    scheduler.params
Nothing to set: with optim.schedule=wsd, the rate falls linearly.
    lr_scheduler_kwargs.decay_type
Nothing to set: DeepSpeed's Adam is AdamW unless adam_w_mode is false.
    optimizer.params.adam_w_mode
Nothing to set: rows are shuffled by seed, never padded, cut at data.max_length, and cached in data.cache_dir.
    data_seed train_sampling_strategy length_column_name shuffle_dataset shuffle_merged_datasets padding_free
    packing_strategy eval_packing pad_to_multiple_of special_tokens.pad_token group_by_length eval_sample_packing
    pad_to_sequence_len remove_unused_columns dataset_kwargs ignore_bias_buffers dataset_prepared_path
    skip_prepare_dataset dataset_dir overwrite_cache tokenized_path dataloader_persistent_workers
    dataloader_multiprocessing_context dataloader_in_order dataset_exact_deduplication truncation_mode
Nothing to set: a run trains, validates and tests, and metrics.jsonl has every step and the mean over all target tokens.
    logging_first_step log_on_each_node logging_strategy logging_nan_inf_filter include_num_input_tokens_seen
    log_level log_level_replica disable_tqdm skip_memory_metrics debug run_name include_for_metrics plot_loss
    wall_clock_breakdown dump_state do_train do_eval do_predict prediction_loss_only eval_do_concat_batches
    eval_use_gather_object eval_accumulation_steps batch_eval_metrics label_names average_tokens_across_devices
Nothing to set: training.on_nonfinite says what happens to a loss that is NaN or infinite.
    loss_watchdog_threshold loss_watchdog_patience
Nothing to set: a checkpoint has all that resuming needs, adapter/ has the best weights, and no run is overwritten.
    save_only_model save_on_each_node save_safetensors load_best_model_at_end ignore_data_skip enable_jit_checkpoint
    create_new_adapter restore_callback_states_from_checkpoint pissa_convert pissa_iter greater_is_better
    overwrite_output_dir
Nothing to set: the launcher starts the processes, and parallel.sharding=fsdp2 needs no such setting.
    device_map max_memory local_rank ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph accelerator_config
    fsdp_config zero_optimization fsdp_final_state_dict_type zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    communication_data_type ddp_timeout
Nothing to set: the model and training.precision say this. lora.quantize=nf4 is NF4.
    task_type peft_type auto_mapping peft_version inference_mode fan_in_fan_out runtime_config ensure_weight_tying
    megatron_config megatron_core lora_task_type model_type type_of_model tokenizer_type tokenizer_use_fast strict
    use_fast_tokenizer resize_token_embeddings_to_32x tf32 bf16_full_eval fp16_full_eval dtype torch_dtype
    fp16.loss_scale fp16.loss_scale_window fp16.initial_scale_power fp16.hysteresis fp16.min_loss_scale fp16.auto_cast
    bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage quantization_method quantization_type
    double_quantization
No counterpart: a warm-up that begins above 0. The rate rises from 0 in optim.warmup_steps.
    scheduler.params.warmup_min_lr scheduler.params.warmup_min_ratio
No counterpart: a base in 8 bits. Choose lora.quantize=nf4 (4 bits), or none.
    load_in_8bit
No counterpart: weights and optimizer stay on the devices. Use more devices, LoRA, or lora.quantize=nf4.
    zero_optimization.offload_optimizer zero_optimization.offload_param fsdp_config.offload_params
    fsdp_config.fsdp_offload_params
No counterpart: adapters are LoRA, losses are those of training.objective, models are text models, without plugins.
    loftq_config eva_config corda_config lora_ga_config velora_config alora_invocation_tokens use_qalora
    qalora_group_size monteclora_config layer_replication use_bdlora arrow_config kasa_config use_galore use_apollo
    use_badam use_adam_mini use_llama_pro unfrozen_parameters cpo_alpha pref_ftx dpo_label_smoothing loss_weights
    ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau sync_ref_model ref_model_mixup_alpha
    ref_model_sync_steps router_aux_loss_coef disable_dropout use_dft_loss parallelism_config plugins
    context_parallel_size sequence_parallel_degree tensor_parallel_size expert_parallel_size
No counterpart: answers are sampled with rollout.temperature, rollout.top_p and rollout.top_k.
    min_p repetition_penalty do_sample generation_kwargs
No counterpart: the loss of rewards has the settings grpo.* and no others.
    delta sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
    multi_objective_aggregation top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min
    entropy_coef_max entropy_coef_delta entropy_target off_policy_mask_threshold
No counterpart: the divergence that grpo.beta weighs is not multiplied by the ratio of a token, as TRL does by default.
    use_bias_correction_kl
Nothing to set: a run generates answers in its own way, with the weights in their precision, and records all of them.
    cast_lm_head_to_fp32 ds3_gather_for_generation cache_implementation use_transformers_continuous_batching
    transformers_continuous_batching_config use_transformers_paged log_completions log_multimodal
    num_completions_to_print log_unique_prompts log_completions_hub_repo
Nothing to set: `vllm serve` gets the options of the server.
    vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_timeout vllm_group_port
    vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size
"""
"""The names elsewhere, indented, of what is no key here. The sentence above them says what to do instead."""


def _by_sentence(text: str) -> dict[str, str]:
    table: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith(" "):
            table[next(reversed(table))] += line
        else:
            table[line] = ""
    return table


SENTENCES = _by_sentence(_SENTENCES)
_NAMES = [(name, meaning) for meaning, names in (*KEYS.items(), *SENTENCES.items()) for name in names.split()]
OUR_NAME = {name.partition("=")[0]: meaning for name, meaning in _NAMES}
"""What each name is here."""
_SOME_SETTINGS = 3
SWITCHES = dict(name.split("=") for name, _ in _NAMES if "=" in name)
"""What the key of a name becomes if the setting is on."""


def settings_among(names: Collection[str]) -> list[str]:
    """Return the settings of other tools among the names in a file, if they are several or all of them."""
    known = {name.partition(".")[0] for name in OUR_NAME}
    settings = [name for name in names if name in known]
    return settings if len(settings) >= _SOME_SETTINGS or len(settings) == len(names) else []
