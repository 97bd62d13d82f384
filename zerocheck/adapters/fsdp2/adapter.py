"""torch's FSDP2 (`fully_shard`) with an optimizer over DTensors: ZeRO-3."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from ...case.schema import Case
from ...case.shapes import sometimes_used
from ...case.traits import reduced_precision
from ...contract import (
    Built,
    BuiltImplementation,
    Loader,
    Saving,
    Semantics,
    groups,
    make_optimizer,
    torch_optimizer,
)
from ...contract.checkpoint import other_states, take_over
from ...errors import Unsupported
from ...models.blocks import DTYPES
from ...protocol.layout import Layout
from ..shared import full_checkpoint as file
from ..shared.casting import computing
from ..shared.compiling import compile_model, forget
from ..shared.limits import elementwise
from ..shared.scaling import scaler_of
from ..shared.schedules import with_schedule, without_schedule
from ..shared.simulation import FP32_REDUCTION, CollectiveStreams, SimulationTraits
from ..shared.sync import accumulation, deferred, synchronized
from ..shared.units import in_order_of_calls, unit_modules
from . import collectives as predicted_calls
from .layout import fsdp2_layout
from .refusals import refusal
from .tensor_parallel import by_mesh, clip, parallelized, split_groups

# Our models write to no output in place; the warning would come for every Linear of every case.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


MEMORY_SINCE = "2.13"
"""Since then FSDP2 bounds how many inputs of reduce-scatters it keeps."""


class Fsdp2(BuiltImplementation):
    """`fully_shard` on each unit of `sharding.wrap` and on the root, which stays gathered.

    Gradients of microbatches are accumulated unsharded and reduced with the last one, or each is
    reduced. With `sharding.prefetch` units name the ones to gather ahead. An optimizer that is made
    first (`optimizer_first`) trains nothing, and torch does not say so.

    With a replicate axis (HSDP) gradients are reduce-scattered over the shard axis, then
    all-reduced over the replicate axis. That may wait for the last microbatch (`sync` "shards").
    torch averages over each axis, so that it divides once per axis.

    Where a parameter is used on some ranks only, ranks would reduce-scatter different sets of
    gradients, so `set_reduce_scatter_unused_params` is on: a parameter that no rank used then has
    the gradient 0, and still decays. Where it is off, it has none and is left alone.

    With `sharding.offload` the shards, their gradients and states lie on the CPU, and the optimizer
    runs there; units are copied to the device of the mesh to be gathered. On a mesh of the CPU
    nothing is copied, and memory cannot be pinned where there is no accelerator.

    With `sharding.tensor_parallel` layers are sharded over the axis tp first. What each rank then
    has is sharded over the shard axis, over which gradients are averaged: see tensor_parallel.py.

    Refused by torch, and declared here: parameters of two dtypes in one unit; 0-d and
    non-contiguous parameters; those without elements (at the first backward: `_chunk_cat expects
    non-empty tensor`); clipping by the
    inf-norm where a rank has an empty shard (`_foreach_norm cannot compute the infinity norm on an
    empty tensor`, while the other ranks wait). A parameter that is tied across units would be
    refused too; units.py keeps both of its users in the root.

    Checkpoints (`sharding.checkpoint`): `full` is a file that rank 0 writes with torch.save, of the
    whole state dicts, which are broadcast from it at the load.
    """

    semantics = Semantics(accumulate="local", unused="skip", buffers="local", weight="token")
    stage = 3
    options: ClassVar[tuple[str, ...]] = (
        "wrap",
        "bucket",
        "reshard",
        "prefetch",
        "sync",
        "optimizer_first",
        "checkpoint",
        "offload",
        "tensor_parallel",
    )
    simulated = SimulationTraits(
        mixed=FP32_REDUCTION,
        on_meta=True,
        axes=frozenset({"ep", "pp"}),
        offload=True,
        streams=CollectiveStreams(gather_input=1, gather_output=1, reduce_output=2),
    )
    without = without_schedule(memory_since=MEMORY_SINCE)
    capabilities = frozenset({"loss_scale", "unfreeze", "compile", "precision"})
    axes = frozenset({"replicate", "shard", "tp"})
    avoids_torch_faults = False

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.semantics = of_fsdp2(synchronized(self.semantics, case), case)

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None."""
        return refusal(case)

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> Layout | None:
        """Return a rank's predicted memory layout (see `fsdp2_layout`) and collectives.

        None, or no collectives, where they are not known.
        """
        if case.axes.has("tp"):
            return None
        held = fsdp2_layout(model, case, rank)
        if elementwise(case) is not None:
            return held  # products of DTensors have collectives of their own
        calls = predicted_calls.fsdp2(model, case)
        return with_schedule(held, calls, case, memory_since=MEMORY_SINCE)

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        """Shard the model in place, then make the optimizer over its sharded parameters.

        Raises Unsupported for a torch without `set_reduce_scatter_unused_params`, if it is needed.
        """
        reshard = case.sharding.reshard
        first = None
        if case.sharding.optimizer_first and "optimizer_first" in self.options:
            first = make_optimizer(model, case)
        if case.axes.has("tp"):
            self.shard_layers(model, case, mesh)
            mesh = mesh["shard"]
        units = unit_modules(model, case.sharding)
        wrap = partial(
            fully_shard,
            mesh=mesh,
            mp_policy=fsdp2_policy(case),
            offload_policy=_offloading(case),
            shard_placement_fn=getattr(model, "shard_placement", None),
        )
        compile_model(
            units or [model], case
        )  # unit by unit, beneath what fully_shard hooks around them
        for module in units:
            wrap(module, reshard_after_forward=reshard)
        wrap(model, reshard_after_forward=None if reshard else False)
        _prefetch(in_order_of_calls(model, units, case), case.sharding.prefetch)
        if sometimes_used(case.model):
            reduce_unused(model)
        optimizer = first or self.make_optimizer(model, case)
        accumulate = _over_replicas(model) if deferred(case) else accumulation(case)
        return Built(
            model,
            optimizer,
            accumulate=accumulate,
            clip=partial(clip, model) if case.axes.has("tp") else None,
            scaler=scaler_of(case, mesh),
        )

    def shard_layers(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        """Shard layers of the model over the tp axis of the mesh, before FSDP2 shards it."""
        parallelized(model, case, mesh)

    def make_optimizer(self, model: nn.Module, case: Case) -> Any:
        if not case.axes.has("tp") and len(by_mesh(model.parameters())) == 1:
            return make_optimizer(model, case)
        return torch_optimizer(case)(split_groups(groups(model, case)))

    def save(self, directory: str, loader: Loader) -> Saving | None:
        if self.case.sharding.checkpoint != "full":
            return super().save(directory, loader)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        held, moments = get_state_dict(self.built.model, self.built.optimizer, options=options)
        states = other_states(loader, self.built.scaler)
        file.write(directory, {"model": held, "optimizer": moments}, states)
        return None

    def load(self, directory: str, loader: Loader) -> None:
        if self.case.sharding.checkpoint != "full":
            super().load(directory, loader)
            return
        model, optimizer = self.built.model, self.built.optimizer
        found = file.read(directory)
        set_model_state_dict(
            model,
            found["model"],
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
        set_optimizer_state_dict(
            model,
            optimizer,
            found["optimizer"],
            options=StateDictOptions(
                full_state_dict=True,
                broadcast_from_rank0=True,
                # As torch's message says, where parameters had no gradient yet.
                strict=len(found["optimizer"]["state"]) == _trained(self.optimizers.inner),
            ),
        )
        take_over(found, loader, self.built.scaler)

    def close(self) -> None:
        forget(self.case)
        super().close()


def _trained(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Parameters that require gradients, in all groups."""
    groups = [group for one in optimizers for group in one.param_groups]
    return sum(p.requires_grad for group in groups for p in group["params"])


def reduce_unused(model: nn.Module, *, enable: bool = True) -> None:
    """Have each rank reduce zeros for parameters that it did not use.

    Raises Unsupported for a torch that has no `set_reduce_scatter_unused_params`.
    """
    switch: Any = getattr(model, "set_reduce_scatter_unused_params", None)
    if switch is None:
        raise Unsupported(
            f"FSDP2 of torch {torch.__version__} cannot reduce the gradients of parameters that "
            "only some ranks use: it has no set_reduce_scatter_unused_params"
        )
    switch(enable)


def _offloading(case: Case) -> OffloadPolicy:
    """Return FSDP2's offload policy: shards on the device of the mesh, or on the CPU."""
    if case.sharding.offload == "none":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=case.sharding.offload == "pinned")


def _over_replicas(model: nn.Module) -> Callable[[bool], AbstractContextManager[None]]:
    """Defer the reduction over the replicate axis to the last microbatch."""
    sharded: Any = model

    def accumulate(last: bool) -> AbstractContextManager[None]:
        sharded.set_requires_all_reduce(last)
        return nullcontext()

    return accumulate


def _prefetch(units: list[Any], ahead: int) -> None:
    """Have each unit prefetch the next `ahead` units, in the forward and in the backward.

    With 0 it is left to torch: the next one only, in the backward only.
    """
    if not ahead:
        return
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + ahead])
        unit.set_modules_to_backward_prefetch(units[:place][::-1][:ahead])


def fsdp2_policy(case: Case) -> MixedPrecisionPolicy:
    """Return FSDP2's mixed-precision policy: the compute and the reduction dtype; fp32: default."""
    if reduced_precision(case):
        compute, reduce = DTYPES[case.precision.compute], DTYPES[case.precision.reduce]
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    return MixedPrecisionPolicy()


def of_fsdp2(semantics: Semantics, case: Case) -> Semantics:
    """Return the semantics of a mixed-precision step of FSDP2.

    Whole gradients of microbatches are summed in the dtype of reduction
    (`FSDPParam.to_accumulated_grad_if_needed`; where it is the dtype of compute, by autograd, in
    it), and so are shards that wait for their reduction over replicas (`foreach_reduce`). Shards of
    microbatches that are reduced each are cast to the parameter's dtype first. From torch 2.15 on
    gradients that are reduced in a wider dtype than that of compute come as kernels give them
    (`FSDPParamGroup._set_unsharded_grad_dtypes`): fp32 is not rounded.
    """
    if not reduced_precision(case):
        return semantics
    each = semantics.accumulate == "reduce_each"
    words: Any = {"accumulate_dtype": "fp32" if each else case.precision.reduce}
    if case.precision.reduce == "fp32" and hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes"):
        words["gradient_dtype"] = "kernel"
    return replace(computing(semantics, case), reduce=case.precision.reduce, **words)
