"""All keys of accelerate 1.15.0's config, and their treatment in a check.

`tests/field/test_configs.py` has accelerate say which keys it reads.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ...shared.user_config.treatment import SAID, SILENT, Key, only

OUT_OF_SCOPE = "it is out of scope"

TOP: dict[str, Key] = {
    "compute_environment": only("SageMaker is out of scope", "LOCAL_MACHINE"),
    "distributed_type": SAID,
    "mixed_precision": SAID,
    "fp16": SAID,
    "fsdp_config": SAID,
    "deepspeed_config": SAID,
    "dynamo_config": SAID,
    "dynamo_backend": only("compiled kernels round in another order", "NO"),
    "fp8_config": only("what is quantized is far outside of the bounds of a step", {}),
    "megatron_lm_config": only(OUT_OF_SCOPE, {}),
    "parallelism_config": only("meshes of more than one axis are set up by the training code", {}),
    **dict.fromkeys(
        (
            "num_processes",
            "machine_rank",
            "num_machines",
            "gpu_ids",
            "main_process_ip",
            "main_process_port",
            "rdzv_backend",
            "same_network",
            "main_training_function",
            "enable_cpu_affinity",
            "mpirun_config",
            "downcast_bf16",
            "tpu_name",
            "tpu_zone",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "command_file",
            "commands",
            "tpu_vm",
            "tpu_env",
            "use_cpu",
            "debug",
        ),
        SILENT,
    ),
}
"""Keys of the config itself."""

Versions = Literal["both", "1", "2"]


class FsdpKey(NamedTuple):
    """Key of `fsdp_config`.

    read_by: versions of FSDP for which accelerate reads it; instead: what does it for the other.
    """

    read_by: Versions = "both"
    instead: str = ""


FSDP: dict[str, FsdpKey] = {
    "fsdp_version": FsdpKey(),
    "fsdp_sharding_strategy": FsdpKey("1", "fsdp_reshard_after_forward"),
    "fsdp_reshard_after_forward": FsdpKey("2", "fsdp_sharding_strategy"),
    "fsdp_offload_params": FsdpKey(),
    "fsdp_auto_wrap_policy": FsdpKey(),
    "fsdp_transformer_layer_cls_to_wrap": FsdpKey(),
    "fsdp_min_num_params": FsdpKey(),
    "fsdp_backward_prefetch": FsdpKey("1"),
    "fsdp_forward_prefetch": FsdpKey("1"),
    "fsdp_state_dict_type": FsdpKey(),
    "fsdp_use_orig_params": FsdpKey("1"),
    "fsdp_cpu_ram_efficient_loading": FsdpKey(),
    "fsdp_sync_module_states": FsdpKey("1"),
    "fsdp_activation_checkpointing": FsdpKey(),
    "fsdp_activation_checkpointing_offload": FsdpKey("2"),
    "fsdp_ignored_modules": FsdpKey(),
}
"""Keys of `fsdp_config`, which `accelerate launch` hands on by the environment."""

DEEPSPEED: dict[str, Key] = dict.fromkeys(
    (
        "deepspeed_config_file",
        "zero_stage",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "offload_optimizer_device",
        "offload_param_device",
        "offload_optimizer_nvme_path",
        "offload_param_nvme_path",
        "zero3_save_16bit_model",
        "zero3_init_flag",
    ),
    SAID,
) | dict.fromkeys(
    (
        "deepspeed_hostfile",
        "deepspeed_exclusion_filter",
        "deepspeed_inclusion_filter",
        "deepspeed_multinode_launcher",
        "deepspeed_moe_layer_cls_names",
    ),
    SILENT,
)
"""Keys of `deepspeed_config`."""
