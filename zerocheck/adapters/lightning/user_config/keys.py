"""All keys of lightning 2.6.6's Trainer and strategies, and their treatment in a check.

`tests/field/test_lightning.py` compares them with lightning.
"""

from __future__ import annotations

from ...shared.user_config.treatment import PASSED, SAID, SILENT, Key, only

IGNORED = "LightningCLI refuses the config"

TOP: dict[str, Key] = {
    "trainer": SAID,
    "seed_everything": SILENT,  # a note is made of it
    "model": Key("left out", "cases draw models; --model takes your own"),
    "data": Key("left out", "cases draw the data"),
    "optimizer": Key("left out", "cases draw the optimizer and its learning rates"),
    "lr_scheduler": Key("left out", "cases draw the optimizer and its learning rates"),
    "ckpt_path": SILENT,
    "verbose": SILENT,
    "weights_only": SILENT,
}
"""Keys of the file itself. A CLI of the user's own may have others, which are left out."""

TRAINER: dict[str, Key] = {
    "strategy": SAID,
    "precision": SAID,
    "accelerator": SAID,
    "accumulate_grad_batches": SAID,
    "gradient_clip_val": SAID,
    "gradient_clip_algorithm": SAID,
    "sync_batchnorm": only(
        "its batch norms have statistics of all ranks, and those of cases have their own", False
    ),
    "plugins": only("plugins replace parts of what is checked", []),
    "callbacks": Key("left out", "cases take the steps, and call no callbacks"),
    **dict.fromkeys(
        (
            "devices",
            "num_nodes",
            "logger",
            "fast_dev_run",
            "max_epochs",
            "min_epochs",
            "max_steps",
            "min_steps",
            "max_time",
            "limit_train_batches",
            "limit_val_batches",
            "limit_test_batches",
            "limit_predict_batches",
            "overfit_batches",
            "val_check_interval",
            "check_val_every_n_epoch",
            "num_sanity_val_steps",
            "log_every_n_steps",
            "enable_checkpointing",
            "enable_progress_bar",
            "enable_model_summary",
            "deterministic",
            "benchmark",
            "inference_mode",
            "use_distributed_sampler",
            "profiler",
            "detect_anomaly",
            "barebones",
            "reload_dataloaders_every_n_epochs",
            "default_root_dir",
            "enable_autolog_hparams",
            "model_registry",
        ),
        SILENT,
    ),
}
"""Arguments of the Trainer."""

_OF_RANKS: dict[str, Key] = {
    **dict.fromkeys(
        ("parallel_devices", "cluster_environment", "process_group_backend", "timeout"), SILENT
    ),
    "accelerator": only("the Trainer says which accelerator it is"),
    "precision_plugin": only("plugins replace parts of what is checked"),
}
"""Arguments of every strategy. The ranks are those of zerocheck."""

_HOOKS = (
    "Lightning registers hooks on CUDA alone, and what they round is not within the bounds of a "
    "step"
)
_OBJECTS = "it takes objects of your own program; give the strategy as path/to/file.py:NAME"

_CHECKPOINT_IO = only("plugins replace parts of what is checked")

DDP: dict[str, Key] = {
    **_OF_RANKS,
    "checkpoint_io": _CHECKPOINT_IO,
    "start_method": SILENT,
    **dict.fromkeys(("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper"), only(_HOOKS)),
    "model_averaging_period": only("between averages the ranks' models differ on purpose"),
    **dict.fromkeys(
        (
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "static_graph",
            "bucket_cap_mb",
            "broadcast_buffers",
            "init_sync",
            "dim",
            "check_reduction",
            "skip_all_reduce_unused_params",
            "bucket_cap_mb_list",
            "batched_grad_copy",
        ),
        PASSED,
    ),
    "mixed_precision": only("precision of the Trainer is what zerocheck checks"),
    **dict.fromkeys(
        (
            "device_ids",
            "output_device",
            "process_group",
            "device_mesh",
            "delay_all_reduce_named_params",
            "param_to_hook_all_reduce",
            "forward_sync_buffers",
        ),
        only(_OBJECTS),
    ),
}
"""Arguments of DDPStrategy, with those of torch's DDP."""

FSDP: dict[str, Key] = {
    **_OF_RANKS,
    "checkpoint_io": _CHECKPOINT_IO,
    "sharding_strategy": SAID,
    "state_dict_type": SAID,
    "auto_wrap_policy": SAID,
    "activation_checkpointing": SAID,
    "activation_checkpointing_policy": SAID,
    "use_orig_params": SAID,
    "cpu_offload": SAID,
    "sync_module_states": SAID,
    "backward_prefetch": SAID,
    "mixed_precision": only("precision of the Trainer is what zerocheck checks"),
    "device_mesh": only("its groups are those of nodes, which ranks of a CPU are not"),
    **dict.fromkeys(("forward_prefetch", "limit_all_gathers"), PASSED),
    **dict.fromkeys(
        ("process_group", "ignored_modules", "ignored_states", "param_init_fn", "device_id"),
        only(_OBJECTS),
    ),
}
"""Arguments of FSDPStrategy, with those of torch's FSDP."""

DEEPSPEED: dict[str, Key] = {
    **_OF_RANKS,
    **dict.fromkeys(
        (
            "zero_optimization",
            "stage",
            "offload_optimizer",
            "offload_parameters",
            "offload_params_device",
            "offload_optimizer_device",
            "pin_memory",
            "sub_group_size",
            "contiguous_gradients",
            "overlap_comm",
            "allgather_partitions",
            "reduce_scatter",
            "allgather_bucket_size",
            "reduce_bucket_size",
            "config",
            "load_full_weights",
            "exclude_frozen_parameters",
        ),
        SAID,
    ),
    **dict.fromkeys(
        (
            "remote_device",
            "nvme_path",
            "params_buffer_count",
            "params_buffer_size",
            "max_in_cpu",
            "optimizer_buffer_count",
            "block_size",
            "queue_depth",
            "single_submit",
            "overlap_events",
            "thread_count",
            "zero_allow_untested_optimizer",
            "logging_batch_size_per_gpu",
            "logging_level",
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "min_loss_scale",
            "partition_activations",
            "cpu_checkpointing",
            "contiguous_memory_optimization",
            "synchronize_checkpoint_boundary",
        ),
        SILENT,
    ),
}
"""Arguments of DeepSpeedStrategy."""
