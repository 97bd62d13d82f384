"""Translation of a case to DeepSpeed's configuration."""

from __future__ import annotations

from typing import Any

from ...case.schema import Case
from . import precision
from .options import options_of

memory_efficient_linear = False
"""Key of stage 3, on by default. Then linear layers save their weights as parameters, which a
release empties, and not as views, which keep them gathered until the backward."""


def config_of(case: Case, stage: int) -> dict[str, Any]:
    """Return the `config` argument of `deepspeed.initialize`. Sizes are in elements.

    torch's optimizer is used whether the client or the engine makes it: DeepSpeed's own kernels
    would be compiled first, in every process that uses them. Clipping is off at 0 and would be 1.0
    by default. The reductions of stage 3's linear layers (`memory_efficient_linear`) are off: they
    compute in another order than one device does.
    """
    training = case.training
    config = {
        "train_micro_batch_size_per_gpu": case.data.batch,
        "gradient_accumulation_steps": training.microbatches,
        "gradient_clipping": training.clip or 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
        "checkpoint": {"load_universal": bool(stage) and options_of(case).universal},
        "zero_optimization": {"stage": stage, **_sharding(case, stage)},
        **precision.config_of(case),
    }
    if case.sharding.offload != "none":  # else it wants DeepSpeedCPUAdam, which it compiles
        config["zero_force_ds_cpu_optimizer"] = False
    if options_of(case).own_optimizer:  # every option stands in the groups
        config["optimizer"] = optimizer_section(case)
    return config


def optimizer_section(case: Case) -> dict[str, Any]:
    """Return the section of an optimizer of torch that the engine makes. SGD has no other."""
    if case.optimizer.kind == "sgd":
        return {"type": "SGD", "params": {}}
    if case.optimizer.kind == "adam":
        return {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}
    return {"type": "AdamW", "params": {"torch_adam": True}}


def _sharding(case: Case, stage: int) -> dict[str, Any]:
    sharding, options = case.sharding, options_of(case)
    if stage == 0:
        return {}
    reducing: dict[str, Any] = {
        "reduce_bucket_size": sharding.bucket,
        "overlap_comm": options.overlap_comm,
        "contiguous_gradients": options.contiguous_gradients,
        "reduce_scatter": options.reduce_scatter,
    }
    to_cpu = {"device": "cpu", "pin_memory": sharding.offload == "pinned"}
    if sharding.offload != "none":
        reducing["offload_optimizer"] = to_cpu
    if stage == 3:
        if sharding.offload != "none":
            reducing["offload_param"] = to_cpu
        return {
            **reducing,
            "prefetch_bucket_size": options.prefetch_bucket,
            "param_persistence_threshold": options.persistence_threshold,
            "max_live_parameters": options.max_live_parameters,
            "max_reuse_distance": options.max_live_parameters,
            "memory_efficient_linear": memory_efficient_linear,
        }
    return {
        **reducing,
        "allgather_bucket_size": sharding.bucket + sharding.bucket % 2,  # it wants an even number
        "round_robin_gradients": options.round_robin_gradients,
    }
