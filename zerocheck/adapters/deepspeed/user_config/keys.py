"""All keys of DeepSpeed 0.19.8's configuration, and their treatment in a check.

`tests/adapters/deepspeed/user_config/test_keys.py` has DeepSpeed say which keys it reads.
"""

from __future__ import annotations

from ...shared.user_config.treatment import PASSED, SAID, SILENT, SIZE, Key, only, switched_off

REMOVED = Key("removed", "DeepSpeed 0.19.8 removed it, and refuses a config that has the key")

RANKS_DRAWN = "cases draw the ranks and the samples of a microbatch"
RATES = "each case sets the learning rate of each step itself"
QUANTIZED = "what is quantized is far outside of the bounds of a step in fp32 or bf16"

TOP: dict[str, Key] = {
    "zero_optimization": SAID,
    "gradient_clipping": SAID,
    "gradient_accumulation_steps": SAID,
    "bf16": SAID,
    "bfloat16": SAID,
    "fp16": SAID,
    "communication_data_type": SAID,
    "data_types": SAID,
    "optimizer": SAID,
    "checkpoint": SAID,
    "gradient_allreduce_op": SAID,
    "gradient_predivide_factor": SAID,
    "prescale_gradients": PASSED,
    "zero_allow_untested_optimizer": SILENT,  # it is on: torch's AdamW is one
    "zero_force_ds_cpu_optimizer": SILENT,  # it is off: DeepSpeed's CPU kernel is not compiled
    "train_batch_size": Key("left out", RANKS_DRAWN),
    "train_micro_batch_size_per_gpu": Key("left out", RANKS_DRAWN),
    "scheduler": Key("left out", RATES),
    "activation_checkpointing": Key(
        "left out", "it is for models that call deepspeed.checkpointing"
    ),
    "compile": switched_off("DeepCompile rewrites the model", "deepcompile"),
    "torch_autocast": switched_off("zerocheck runs DeepSpeed in fp32, or with bf16.enabled"),
    "hybrid_engine": switched_off("it is for generation between steps"),
    "data_efficiency": switched_off("it changes the samples of a step"),
    "expert_parallel": switched_off("expert parallelism is out of scope"),
    "weight_quantization": only(QUANTIZED),
    "pipeline": only("pipeline parallelism is out of scope"),
    "tensor_parallel": switched_off("it cuts layers over ranks", "autotp_size"),
    "sequence_parallel_size": only("sequence parallelism is out of scope", 1),
    "data_parallel_size": only("each case has a number of ranks of its own"),
    "managed_gradient_accumulation": only(
        "the engine then takes a step where the loop says so", True
    ),
    "datastates_ckpt": only("checkpoints are those of torch.save"),
    # No effect without what is refused, or none on what is computed.
    "seq_parallel_communication_data_type": SILENT,
    "use_data_before_expert_parallelism": SILENT,
    "disable_allgather": SILENT,
    "dataloader_drop_last": SILENT,
    "disable_python_gc": SILENT,
    "vocabulary_size": SILENT,
    "aio": SILENT,
    "steps_per_print": SILENT,
    "wall_clock_breakdown": SILENT,
    "memory_breakdown": SILENT,
    "dump_state": SILENT,
    "log_level": SILENT,
    "timers": SILENT,
    "tensorboard": SILENT,
    "wandb": SILENT,
    "csv_monitor": SILENT,
    "comet": SILENT,
    "comms_logger": SILENT,
    "flops_profiler": SILENT,
    "autotuning": SILENT,
    **dict.fromkeys(
        (
            "nebula",
            "compression_training",
            "amp",
            "quantize_training",
            "sparse_gradients",
            "eigenvalue",
            "sparse_attention",
            "elasticity",
            "graph_harvesting",
            "curriculum_learning",
            "progressive_layer_drop",
        ),
        REMOVED,
    ),
}
"""Keys of the config itself."""

ZERO: dict[str, Key] = {
    "stage": SAID,
    "overlap_comm": SAID,
    "contiguous_gradients": SAID,
    "reduce_scatter": SAID,
    "round_robin_gradients": SAID,
    "offload_optimizer": SAID,
    "offload_param": SAID,
    "cpu_offload": SAID,
    "cpu_offload_param": SAID,
    "reduce_bucket_size": SIZE,
    "allgather_bucket_size": SIZE,
    "stage3_prefetch_bucket_size": SIZE,
    "stage3_param_persistence_threshold": SIZE,
    "stage3_max_live_parameters": SIZE,
    "stage3_max_reuse_distance": SIZE,
    "sub_group_size": PASSED,
    "stage3_model_persistence_threshold": PASSED,
    "stage3_module_granularity_threshold": Key(
        "left out", "the models of cases are smaller than what it is for: each would be one unit"
    ),
    "stage3_use_all_reduce_for_fetch_params": PASSED,
    "stage3_allgather_sequential": PASSED,
    "stage3_gather_16bit_weights_on_model_save": PASSED,
    "use_multi_rank_bucket_allreduce": PASSED,
    "allgather_partitions": PASSED,
    "parameter_alignment": PASSED,
    "compute_grad_norm": PASSED,
    "load_from_fp32_weights": PASSED,
    "ignore_unused_parameters": PASSED,
    "pipeline_loading_checkpoint": PASSED,
    "override_module_apply": PASSED,
    "enable_sanity_checks": PASSED,
    "leaf_module": PASSED,
    "memory_efficient_linear": Key(
        "left out", "its linear layers compute in another order than one device does"
    ),
    "elastic_checkpoint": only("DeepSpeed has universal checkpoints in its place", False),
    "legacy_stage1": only("DeepSpeed itself refuses it", False),
    "zero_hpz_partition_size": only("secondary partitions (hpZ) are not modelled", 0, 1),
    "zero_quantized_weights": only(QUANTIZED, False),
    "zero_quantized_nontrainable_weights": only(QUANTIZED, False),
    "zero_quantized_gradients": only(QUANTIZED, False),
    "zenflow": only("it updates some parameters later than others"),
    "cpu_offload_use_pin_memory": SILENT,  # DeepSpeed takes it from nowhere
    "stage3_gather_fp16_weights_on_model_save": SILENT,
    "log_trace_cache_warnings": SILENT,
    "save_muon_momentum_buffer_in_memory": SILENT,
    **dict.fromkeys(
        ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"), REMOVED
    ),
}
"""Keys of `zero_optimization`."""

ALIASES = {
    name.removeprefix("stage3_"): name
    for name in ZERO
    if name.startswith("stage3_") and name != "stage3_gather_fp16_weights_on_model_save"
}
"""Names of stage 3's keys that DeepSpeed takes too, and those that are written."""

OFFLOAD: dict[str, Key] = {
    "device": SAID,
    "ratio": only("a part of the states is then updated by another kernel", 1, 1.0),
    "super_offload": only("another optimizer takes the steps", False),
    "pin_memory": SILENT,  # no memory can be pinned without an accelerator, and no value changes
    # Of NVMe, which is refused.
    "nvme_path": SILENT,
    "buffer_count": SILENT,
    "buffer_size": SILENT,
    "max_in_cpu": SILENT,
    "pipeline_read": SILENT,
    "pipeline_write": SILENT,
    "fast_init": SILENT,
    "cpuadam_cores_perc": SILENT,
}
"""Keys of `offload_optimizer` and `offload_param`."""

BF16: dict[str, Key] = {
    "enabled": SAID,
    "immediate_grad_update": PASSED,
    "check_grad_overflow": PASSED,
    "bf16_master_weights_and_grads": only("masters are then no fp32 copies", False),
    "bf16_optimizer_states": only("moments are then in bf16", False),
}
"""Keys of `bf16`."""

FP16 = (
    "enabled",
    "auto_cast",
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
    "fp16_master_weights_and_grads",
)
"""Keys of `fp16`, which has no effect but where it is enabled: then it is refused."""

DATA_TYPES: dict[str, Key] = {
    "grad_accum_dtype": SAID,
    "param_dtype": SAID,
    "buffer_dtype": only("buffers are judged in the dtype in which the model has them"),
    "keep_in_fp32_modules": PASSED,
}
"""Keys of `data_types`."""

CHECKPOINT: dict[str, Key] = {
    "load_universal": SAID,
    "tag_validation": PASSED,
    "use_node_local_storage": PASSED,
    "parallel_write": PASSED,
    "checkpoint_serialization": PASSED,
    "writer": only("checkpoints are those of torch.save"),
}
"""Keys of `checkpoint`."""
