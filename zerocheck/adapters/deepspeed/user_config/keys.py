"""All keys of DeepSpeed 0.19.8's configuration, and their treatment in a check.

    said      a field of cases holds it, or what the implementation declares
    size      in elements: taken where it is small, else drawn (see `zero`)
    passed    the engine is given it as it stands, and every obligation must hold all the same
    left out  nothing that is checked depends on it, or a case decides it
    refused   with any other value than those allowed
    removed   DeepSpeed itself refuses a config with it

`tests/adapters/deepspeed/user_config/test_keys.py` has DeepSpeed say which keys it reads.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple


class Key(NamedTuple):
    """Treatment of a key of DeepSpeed's config.

    why: a key is left out or refused; allowed: values that a refused key may have; off: a refused
    key that is an object may have this switch at false, such as `enabled`.
    """

    kind: Literal["said", "size", "passed", "left out", "refused", "removed"]
    why: str = ""
    allowed: tuple[Any, ...] = ()
    off: str = ""


SAID = Key("said")
SIZE = Key("size")
PASSED = Key("passed")
SILENT = Key("left out")
"""What only prints, logs or profiles, and what has no effect without something that is refused."""
REMOVED = Key("removed", "DeepSpeed 0.19.8 removed it, and refuses a config that has the key")


def _off(why: str, switch: str = "enabled") -> Key:
    return Key("refused", why, off=switch)


def _only(why: str, *allowed: Any) -> Key:
    return Key("refused", why, allowed)


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
    "compile": _off("DeepCompile rewrites the model", "deepcompile"),
    "torch_autocast": _off("zerocheck runs DeepSpeed in fp32, or with bf16.enabled"),
    "hybrid_engine": _off("it is for generation between steps"),
    "data_efficiency": _off("it changes the samples of a step"),
    "expert_parallel": _off("expert parallelism is out of scope"),
    "weight_quantization": _only(QUANTIZED),
    "pipeline": _only("pipeline parallelism is out of scope"),
    "tensor_parallel": _off("it cuts layers over ranks", "autotp_size"),
    "sequence_parallel_size": _only("sequence parallelism is out of scope", 1),
    "data_parallel_size": _only("each case has a number of ranks of its own"),
    "managed_gradient_accumulation": _only(
        "the engine then takes a step where the loop says so", True
    ),
    "datastates_ckpt": _only("checkpoints are those of torch.save"),
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
    "elastic_checkpoint": _only("DeepSpeed has universal checkpoints in its place", False),
    "legacy_stage1": _only("DeepSpeed itself refuses it", False),
    "zero_hpz_partition_size": _only("secondary partitions (hpZ) are not modelled", 0, 1),
    "zero_quantized_weights": _only(QUANTIZED, False),
    "zero_quantized_nontrainable_weights": _only(QUANTIZED, False),
    "zero_quantized_gradients": _only(QUANTIZED, False),
    "zenflow": _only("it updates some parameters later than others"),
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
    "ratio": _only("a part of the states is then updated by another kernel", 1, 1.0),
    "super_offload": _only("another optimizer takes the steps", False),
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
    "bf16_master_weights_and_grads": _only("masters are then no fp32 copies", False),
    "bf16_optimizer_states": _only("moments are then in bf16", False),
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
    "buffer_dtype": _only("buffers are judged in the dtype in which the model has them"),
    "keep_in_fp32_modules": PASSED,
}
"""Keys of `data_types`."""

CHECKPOINT: dict[str, Key] = {
    "load_universal": SAID,
    "tag_validation": PASSED,
    "use_node_local_storage": PASSED,
    "parallel_write": PASSED,
    "checkpoint_serialization": PASSED,
    "writer": _only("checkpoints are those of torch.save"),
}
"""Keys of `checkpoint`."""
