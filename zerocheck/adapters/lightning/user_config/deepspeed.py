"""DeepSpeed config that Lightning's DeepSpeedStrategy makes of its arguments."""

from __future__ import annotations

import copy
from typing import Any

from ....errors import UsageError
from ...shared.user_config.section import AUTO, Section
from ...shared.user_config.text import plain

DEFAULTS = {
    "sub_group_size": 1_000_000_000_000,
    "contiguous_gradients": True,
    "overlap_comm": True,
    "allgather_partitions": True,
    "reduce_scatter": True,
    "allgather_bucket_size": 200_000_000,
    "reduce_bucket_size": 200_000_000,
}
"""Keys of `zero_optimization` that Lightning sets, with its defaults."""


def deepspeed_of(given: Section, *, clip: float | None, bf16: bool) -> dict[str, Any]:
    """Return the DeepSpeed config of the arguments of a DeepSpeedStrategy.

    clip: `gradient_clip_val` of the Trainer. Raises UsageError for a config that Lightning refuses.
    """
    values = _given(given)
    if "gradient_accumulation_steps" in values:
        raise UsageError(
            f"{given.source}: Lightning refuses gradient_accumulation_steps in a DeepSpeed config; "
            "accumulate_grad_batches of the Trainer is what it takes"
        )
    values["gradient_accumulation_steps"] = 1
    values.setdefault("train_micro_batch_size_per_gpu", AUTO)
    values.setdefault("gradient_clipping", clip or 0.0)
    if bf16:
        values.setdefault("bf16", {"enabled": True})
    return values


def _given(given: Section) -> dict[str, Any]:
    """Return the user's own config, or that of the arguments."""
    if given.says("config"):
        config = given.values["config"]
        read = plain(config, "DeepSpeed") if isinstance(config, str) else copy.deepcopy(config)
        if not isinstance(read, dict):
            raise given.wrong("config", "the path of a DeepSpeed config, or an object")
        return read
    if not given.flag("zero_optimization", True):
        return {}
    zero: dict[str, Any] = {"stage": given.whole("stage", 2)}
    zero |= {key: given.values.get(key, default) for key, default in DEFAULTS.items()}
    for part, key, device in (
        ("optimizer", "offload_optimizer", "offload_optimizer_device"),
        ("param", "offload_parameters", "offload_params_device"),
    ):
        if given.flag(key, False):
            word = given.word(device, "cpu", ("cpu", "nvme"))
            zero[f"offload_{part}"] = {
                "device": word,
                "pin_memory": given.flag("pin_memory", False),
            }
    return {"zero_optimization": zero}
