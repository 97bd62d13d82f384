"""All fields of transformers 5.23.0's TrainingArguments, and their treatment in a check.

`tests/field/test_configs.py` compares them with transformers.
"""

from __future__ import annotations

from ...deepspeed.user_config.keys import RATES
from ...shared.user_config.treatment import PASSED, SAID, SILENT, Key, only

ROUNDS = "its kernels round in another order"

FIELDS: dict[str, Key] = {
    "optim": SAID,
    "learning_rate": SAID,
    "weight_decay": SAID,
    "adam_beta1": SAID,
    "adam_beta2": SAID,
    "adam_epsilon": SAID,
    "gradient_accumulation_steps": SAID,
    "max_grad_norm": SAID,
    "per_device_train_batch_size": SAID,
    "bf16": SAID,
    "fsdp": SAID,
    "fsdp_config": SAID,
    "deepspeed": SAID,
    "accelerator_config": PASSED,
    "average_tokens_across_devices": PASSED,
    "ddp_find_unused_parameters": PASSED,
    "ddp_bucket_cap_mb": PASSED,
    "ddp_broadcast_buffers": PASSED,
    "ddp_static_graph": PASSED,
    "fp16": only("the CPU has no fp16", False),
    "tf32": only("the CPU has no tf32", False),
    "torch_compile": only(ROUNDS, False),
    "torch_compile_backend": only(ROUNDS),
    "torch_compile_mode": only(ROUNDS),
    "use_liger_kernel": only(ROUNDS, False),
    "parallelism_config": only("meshes of more than one axis are set up by the training code"),
    "optim_args": only("they are options of optimizers that zerocheck does not judge"),
    "optim_target_modules": only("they are for optimizers that zerocheck does not judge"),
    "lr_scheduler_type": Key("left out", RATES),
    "lr_scheduler_kwargs": Key("left out", RATES),
    "warmup_steps": Key("left out", RATES),
    "label_smoothing_factor": Key("left out", "the loss is that of a case"),
    "neftune_noise_alpha": Key("left out", "it adds noise to the embeddings of a PreTrainedModel"),
    **dict.fromkeys(
        (
            "activation_checkpointing",
            "activation_checkpointing_kwargs",
            "gradient_checkpointing",
            "gradient_checkpointing_kwargs",
        ),
        Key("left out", "a PreTrainedModel checkpoints itself; cases draw which blocks do"),
    ),
    **dict.fromkeys(
        (
            "output_dir", "num_train_epochs", "max_steps", "bf16_full_eval", "fp16_full_eval",
            "liger_kernel_config", "use_cache", "torch_empty_cache_steps", "auto_find_batch_size",
            "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node",
            "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level",
            "log_level_replica", "disable_tqdm", "report_to", "run_name", "project",
            "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "eval_strategy",
            "eval_steps", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only",
            "eval_on_start", "eval_do_concat_batches", "eval_use_gather_object",
            "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics",
            "save_only_model", "save_strategy", "save_steps", "save_on_each_node",
            "save_total_limit", "enable_jit_checkpoint", "push_to_hub", "hub_token",
            "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision",
            "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
            "ignore_data_skip", "restore_callback_states_from_checkpoint", "full_determinism",
            "seed", "data_seed", "use_cpu", "dataloader_drop_last", "dataloader_num_workers",
            "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns",
            "label_names", "train_sampling_strategy", "length_column_name", "ddp_backend",
            "ddp_timeout", "debug", "skip_memory_metrics", "do_train", "do_eval", "do_predict",
            "resume_from_checkpoint", "local_rank",
        ),
        SILENT,
    ),
}  # fmt: skip
"""Fields of TrainingArguments."""

FSDP = (
    "version",
    "cpu_offload",
    "auto_wrap_policy",
    "min_num_params",
    "transformer_layer_cls_to_wrap",
    "cpu_ram_efficient_loading",
    "state_dict_type",
    "activation_checkpointing",
    "reshard_after_forward",
    "forward_prefetch",
    "backward_prefetch",
    "use_orig_params",
    "sync_module_states",
    "limit_all_gathers",
)
"""Keys of `fsdp_config`, which may have the prefix `fsdp_`."""

FSDP_OF_XLA = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")
"""Keys of `fsdp_config` for TPUs."""

LEGACY = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""Words of an `fsdp` that is a string, which say what is sharded."""
