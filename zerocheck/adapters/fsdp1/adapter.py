"""torch's FullyShardedDataParallel, by its sharding strategy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy, size_based_auto_wrap_policy

from ...case.schema import Case
from ...case.traits import reduced_precision
from ...contract import (
    Built,
    BuiltImplementation,
    Loader,
    Saving,
    Semantics,
    groups,
    torch_optimizer,
)
from ...contract.checkpoint import other_states, take_over
from ...contract.implementation import Stage
from ...contract.refusals import torch_refusals
from ...machine.devices import placed
from ...models.blocks import DTYPES
from ...protocol.layout import Layout
from ..shared.casting import computing
from ..shared.compiling import compile_model, forget
from ..shared.limits import one_axis
from ..shared.meshes import replicate_group, shard_group
from ..shared.scaling import sharded_scaler_of
from ..shared.schedules import with_schedule, without_schedule
from ..shared.simulation import FP32_REDUCTION, SimulationTraits
from ..shared.sync import accumulation, synchronized
from . import checkpoint
from . import collectives as predicted_calls
from .layout import fsdp1_layout
from .refusals import refusal, wrapped_units

# All of it is what the case asks for.
for _expected in (
    "FSDP is switching to use `NO_SHARD`",
    ".*has both parameters with requires_grad=True and False",
    "The `NO_SHARD` sharding strategy is deprecated",
    "Called FSDP.clip_grad_norm_.. on rank .* with no gradients",
    "An FSDP instance with no parameters",
    "When using ``NO_SHARD`` for ``ShardingStrategy``",
    "FSDP.state_dict_type\\(\\) and FSDP.set_state_dict_type\\(\\) are being deprecated",
    "Please use DTensor instead",
    "`_get_pg_default_device` will be deprecated",
):
    warnings.filterwarnings("ignore", message=_expected)

BACKWARD_PREFETCH = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}


HYBRID = {
    ShardingStrategy.FULL_SHARD: ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.SHARD_GRAD_OP: ShardingStrategy._HYBRID_SHARD_ZERO2,
}
"""Name of a strategy on a mesh with a replicate axis."""


class Fsdp1(BuiltImplementation):
    """FullyShardedDataParallel with FULL_SHARD: parameters, gradients and states are sharded.

    Units are those of `sharding.wrap`; `size` is torch's own size_based_auto_wrap_policy with
    `sharding.bucket` elements. Gradients are reduced once, under no_sync until the last microbatch,
    or with each. A parameter that was not used has the gradient 0 where it shares a flat parameter
    with one that was; a unit that was not used has none.

    What is shown is read from the local shards. With `use_orig_params` the optimizer sees views of
    them, else the flat parameters.

    With a replicate axis it is HYBRID_SHARD: gradients are reduce-scattered over the shard axis,
    then all-reduced over the replicate axis.

    Roundings of the gradient: it is divided by a power of two f before the sum, which is exact, and
    by W / f after it: no more than the one division by W that the judge counts. W are all ranks of
    both axes, so that there is one division for both.

    With `sharding.offload` shards, gradients and states lie in pinned memory of the CPU, and the
    optimizer runs there. It needs an accelerator.

    Not supported, with a reason: scalar and empty parameters; parameters shared by units (`size`
    with a tied head); mixed dtypes in a unit; an optimizer made first, frozen parameters or several
    parameter groups in a unit, without `use_orig_params`.

    Checkpoints (`sharding.checkpoint`): see checkpoint.py for FSDP1's own state-dict types.
    """

    strategy: ClassVar[ShardingStrategy] = ShardingStrategy.FULL_SHARD
    semantics = Semantics(accumulate="local", unused="skip", buffers="local", weight="token")
    """Of a case without gradients that are reduced each, or are 0 in a flat parameter."""
    stage: Stage | None = 3
    options = (
        "wrap",
        "bucket",
        "prefetch",
        "backward_prefetch",
        "sync",
        "use_orig_params",
        "optimizer_first",
        "checkpoint",
        "device_mesh",
        "export_offload",
        "offload",
    )
    simulated = SimulationTraits(mixed=FP32_REDUCTION, frees_late=True)
    without = without_schedule()
    capabilities = frozenset({"loss_scale", "unfreeze", "compile", "precision"})
    axes = frozenset({"replicate", "shard"})
    avoids_torch_faults = False

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None."""
        return refusal(case, shards=cls._shards())

    @classmethod
    def _shards(cls) -> bool:
        """Return False for NO_SHARD."""
        return cls.strategy != ShardingStrategy.NO_SHARD

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> Layout | None:
        """Return a rank's predicted memory layout (see `fsdp1_layout`) and collectives.

        None, or no collectives, where they are not known.
        """
        if case.precision.compute != "fp32":
            return None
        keeps = cls.strategy == ShardingStrategy.SHARD_GRAD_OP
        held = fsdp1_layout(model, case, rank, shards=cls._shards(), keeps=keeps)
        if reduced_precision(case):  # gradients are cast back once they are reduced
            return held
        return with_schedule(held, predicted_calls.fsdp1(model, case, cls.strategy), case)

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        declared = synchronized(self.semantics, case)
        self.semantics = of_fsdp1(declared, case, shards=self._shards())

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        """Wrap the model by the units of the case."""
        sharding = case.sharding
        made = torch_optimizer(case)
        first = made(groups(model, case)) if sharding.optimizer_first else None
        policy: Callable[..., bool] | CustomPolicy | None = None
        if sharding.wrap == "size":
            policy = partial(size_based_auto_wrap_policy, min_num_params=sharding.bucket)
        elif sharding.wrap != "whole":
            chosen = set(wrapped_units(model, sharding))
            policy = CustomPolicy(chosen.__contains__)
        # Given a mesh, its state dicts have DTensors, else ShardedTensors.
        by_mesh = sharding.checkpoint == "distributed" and sharding.device_mesh
        strategy = self.strategy
        process_groups: Any = shard_group(mesh)
        replicas = replicate_group(mesh)
        if replicas is not None:
            strategy = HYBRID[strategy]
            process_groups = process_groups, replicas
        wrapped = FullyShardedDataParallel(
            model,
            process_group=None if by_mesh else process_groups,
            device_mesh=mesh if by_mesh else None,
            sharding_strategy=strategy,
            auto_wrap_policy=policy,
            backward_prefetch=BACKWARD_PREFETCH[sharding.backward_prefetch],
            forward_prefetch=sharding.prefetch > 0,
            device_id=placed(mesh.device_type),
            use_orig_params=sharding.use_orig_params,
            mixed_precision=fsdp1_policy(case),
            cpu_offload=CPUOffload(offload_params=sharding.offload != "none"),
        )
        compile_model([wrapped], case)
        optimizer = first or made(groups(wrapped, case))
        return Built(
            wrapped,
            optimizer,
            accumulate=accumulation(case),
            # torch.nn.utils.clip_grad_norm_ would clip each rank by its own norm.
            clip=wrapped.clip_grad_norm_,
            scaler=sharded_scaler_of(case, mesh),
        )

    def save(self, directory: str, loader: Loader) -> Saving | None:
        kind = self.case.sharding.checkpoint
        if kind == "distributed":
            return super().save(directory, loader)
        states = other_states(loader, self.built.scaler)
        model, optimizer = self.built.model, self.built.optimizer
        with torch_refusals():
            if kind == "full":
                offload = self.case.sharding.export_offload
                checkpoint.save_full(model, optimizer, states, directory, offload=offload)
            else:
                checkpoint.save_sharded(model, optimizer, states, directory)
        return None

    def load(self, directory: str, loader: Loader) -> None:
        kind = self.case.sharding.checkpoint
        if kind == "distributed":
            super().load(directory, loader)
            return
        read = checkpoint.load_full if kind == "full" else checkpoint.load_sharded
        states = other_states(loader, self.built.scaler)
        with torch_refusals():
            read(self.built.model, self.built.optimizer, states, directory)
        take_over(states, loader, self.built.scaler)

    def export(self) -> Mapping[tuple[str, str], torch.Tensor]:
        if self.case.sharding.checkpoint == "distributed":
            return super().export()
        offload = self.case.sharding.export_offload
        return checkpoint.export(
            self.built.model, self.built.optimizer, self.names, offload=offload
        )

    def close(self) -> None:
        forget(self.case)
        super().close()


class Fsdp1GradOp(Fsdp1):
    """FullyShardedDataParallel with SHARD_GRAD_OP: the whole parameters stay from the forward to
    the end of the backward (ZeRO-2). Between steps it holds what FULL_SHARD does. With a
    replicate axis it is _HYBRID_SHARD_ZERO2."""

    strategy = ShardingStrategy.SHARD_GRAD_OP


class Fsdp1NoShard(Fsdp1):
    """FullyShardedDataParallel with NO_SHARD: replicated flat parameters, all-reduced gradients."""

    strategy = ShardingStrategy.NO_SHARD
    stage = 0
    axes = frozenset({"shard"})

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None."""
        return one_axis(case) or super().supports(case)


def fsdp1_policy(case: Case) -> MixedPrecision | None:
    """Return FSDP1's mixed-precision policy: the compute and the reduction dtype; None in fp32."""
    if reduced_precision(case):
        compute, reduce = DTYPES[case.precision.compute], DTYPES[case.precision.reduce]
        return MixedPrecision(param_dtype=compute, reduce_dtype=reduce)
    return None


def of_fsdp1(semantics: Semantics, case: Case, *, shards: bool) -> Semantics:
    """Return the semantics of a mixed-precision step of FSDP1.

    Under no_sync autograd sums whole gradients in the compute dtype; with a reduction they are cast
    to the reduction dtype (`_post_backward_hook`). Shards of microbatches that are reduced one by
    one are cast to the parameter's dtype and summed in it (`_accumulate_sharded_grad`). With
    NO_SHARD, and with one rank on the shard axis, FSDP1 does not shard: it casts and reduces the
    running sum with each microbatch (`_reduce_grad_no_shard`).
    """
    if not reduced_precision(case):
        return semantics
    each = semantics.accumulate == "reduce_each"
    words: Any = {"accumulate_dtype": "fp32" if each else "own"}
    if each and (not shards or case.axes.size("shard") == 1):
        words["accumulate"] = "reduce_again"
    return replace(computing(semantics, case), reduce=case.precision.reduce, **words)
