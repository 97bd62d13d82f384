"""Engine with ZeRO stages 1 to 3, as DeepSpeed has them: it updates fp32 masters in partitions.

Parameters of the model are copies of the masters, in the dtype of the forward. Everything is read
from the local tensors, by their addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...contract.names import unwrapped
from ...contract.partitions import (
    GroupPartition,
    is_gathered,
    of_parts,
    of_whole_groups,
    range_of_part,
)
from ...contract.shard import Shard

CLIPPING = "unscale_and_clip_grads"
"""Method of the engine's optimizer that clips the gradient of one partition or several."""


class ZeroEngine:
    """Partitions of an engine on this rank."""

    def __init__(self, model: Any) -> None:
        self.stage = int(model.zero_optimization_stage())
        self.optimizer: Any = model.optimizer
        self._module: nn.Module = model.module
        self.narrow = bool(model.bfloat16_enabled())

    @property
    def named(self) -> Mapping[str, Any]:
        """Parameters by their name in the unwrapped model."""
        return {unwrapped(name): one for name, one in self._module.named_parameters()}

    @property
    def masters(self) -> Sequence[torch.Tensor]:
        """Masters that the optimizer updates on this rank, one for each of its steps."""
        if self.stage == 3:
            return self.optimizer.fp32_partitioned_groups_flat  # type: ignore[no-any-return]
        return self.optimizer.single_partition_of_fp32_groups  # type: ignore[no-any-return]

    def partitions(self) -> list[GroupPartition]:
        """Return the partitions, in the order of `masters`."""
        one, named = self.optimizer, self.named
        if self.stage == 3:
            rank = dist.get_rank(one.dp_process_group)
            return list(
                of_parts(
                    one.fp16_partitioned_groups_flat,
                    self.masters,
                    named,
                    lambda parameter: range_of_part(parameter, rank),
                )
            )
        ranks = [dist.get_rank(group) for group in one.real_dp_process_group]
        return list(of_whole_groups(one.bit16_groups_flat, self.masters, named, ranks))

    @property
    def optimized(self) -> set[int]:
        """Ids of the parameters that have masters, on this rank or another."""
        one = self.optimizer
        groups = one.fp16_groups if self.stage == 3 else one.bit16_groups
        return {id(parameter) for group in groups for parameter in group}

    def group_of(self, number: int) -> int:
        """Return the parameter group of a partition."""
        return int(self.optimizer.sub_group_to_group_id[number]) if self.stage == 3 else number

    def clipped(self, given: Any) -> list[torch.Tensor]:
        """Return the masters whose gradients are clipped by `CLIPPING` with this first argument."""
        if self.stage == 3:  # the number of one
            return [self.masters[given]]
        grads = [one for part in given for one in (part if isinstance(part, list) else [part])]
        return [one for one in self.masters if any(one.grad is grad for grad in grads)]

    def copies(self, *, parts: bool = False) -> Iterator[Shard]:
        """Iterate over the parameters as the forward uses them: this rank's part, or the whole.

        parts: this rank's parts of those that stage 3 has gathered for now, too.
        """
        rank = dist.get_rank(self.optimizer.dp_process_group)
        for name, parameter in self.named.items():
            if self.stage < 3:
                yield Shard(name, "parameter", parameter.detach(), tuple(parameter.shape))
            elif is_gathered(parameter) and not parts:
                yield Shard(name, "parameter", parameter.detach(), tuple(parameter.ds_shape))
            elif is_gathered(parameter):
                place = slice(*range_of_part(parameter, rank))
                data = parameter.detach().reshape(-1)[place]
                yield Shard(name, "parameter", data, tuple(parameter.ds_shape), place)
            else:
                start, stop = range_of_part(parameter, rank)
                data, place = parameter.ds_tensor.detach()[: stop - start], slice(start, stop)
                yield Shard(name, "parameter", data, tuple(parameter.ds_shape), place)


def zero_stage(model: Any) -> int:
    """Return the stage of an engine; 0 for one that shards nothing, and for any other model."""
    stage = getattr(model, "zero_optimization_stage", None)
    return 0 if stage is None else int(stage())


def zero_engine(model: Any) -> ZeroEngine | None:
    """Return the engine, or None for a model without one, or with one that shards nothing."""
    return ZeroEngine(model) if zero_stage(model) else None


def engine_refusal(model: Any) -> str:
    """Return why an engine cannot be checked, and what can; "" for one that can, or for none."""
    if not hasattr(model, "zero_optimization_stage"):
        return ""
    stage, narrow = int(model.zero_optimization_stage()), bool(model.bfloat16_enabled())
    optimizer = getattr(model, "optimizer", None)
    what = ""
    if getattr(model, "fp16_enabled", bool)():
        what = "fp16"
    elif not stage:
        what = "bf16 at stage 0" if narrow else ""
    elif hasattr(model, "train_batch"):
        what = "a pipeline"
    elif not hasattr(optimizer, CLIPPING):
        what = f"a {type(optimizer).__name__}"
    elif getattr(optimizer, "offload_param", None) or getattr(optimizer, "params_in_nvme", False):
        what = "parameters that are offloaded"
    elif getattr(optimizer, "zero_hpz_partition_size", 1) > 1:
        what = "secondary partitions"
    elif getattr(model, "has_moe_layers", False):
        what = "experts"
    if not what:
        return ""
    return (
        f"attach does not check DeepSpeed with {what} (allowed: fp32, and stages 1 to 3 with bf16, "
        "with the optimizer offloaded or not); `zerocheck run ds_config.json` checks its config"
    )
