"""Simulation: the implementation's own code, for one rank of many, on tensors without data."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from ..adapters.shared.simulation import traits_of
from ..case.schema import Case
from ..compat_device import DEVICE, simulated_device
from ..compat_memory import fake_mode, fake_ranks
from ..contract import Implementation, Microbatch, Step
from ..contract.implementation import Call
from ..contract.loading import load
from ..contract.names import unwrapped
from ..errors import UsageError, ZerocheckError
from ..models.parts import block_list, parameter_places, show_blocks, show_sharded_layers, tie
from .allocation_tracker import AllocationTracker
from .fp32_attention import fp32_attention
from .fused_attention import fused_attention
from .fused_norm import fused_norm
from .log import Log
from .optimizer_parts import case_optimizer
from .samples import MicrobatchSamples
from .setup import NUMBERS_READ, Setup
from .source import ModelSource

STEPS = 2
"""In the first the optimizer makes its states and DDP its final buckets; the second is as all
that follow."""
MIDDLE = 2
"""Number of a microbatch from which on each but the last of a step does the same."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """Result of a simulation: the log, and the path of the list of blocks."""

    log: Log
    blocks: str


@dataclass(frozen=True, kw_only=True)
class _Watched(Microbatch):
    """Microbatch whose forward runs in a context and reports its end."""

    tracker: AllocationTracker
    autocast: bool
    first: bool
    device: str

    def loss(self, call: Call) -> torch.Tensor:
        if not self.first:
            self.tracker.enter("forward", self.tracker.step)
        casts = torch.autocast(self.device, torch.bfloat16) if self.autocast else nullcontext()
        with casts:
            loss = super().loss(call)
        self.tracker.forward_over()
        return loss


def simulate(
    setup: Setup,
    source: ModelSource,
    blocks: int | None = None,
    *,
    data: bool = False,
    device: str | None = None,
    notify: Callable[[str], None] = lambda words: None,
) -> Simulation:
    """Build the model and the implementation, and take two steps.

    blocks: with the first blocks of the model only; data: on tensors with data, as the allocator
    counts them, with the same collectives that move nothing; device: `cpu` or `cuda`, without data
    also the simulated one, which is used where shards are offloaded from it to the CPU; notify:
    called with the place in the step whenever an operator allocates.

    Raises UsageError where the implementation or the model's code fails: it says how.
    """
    setup.check_axes()
    if device is None:
        device = "cpu" if setup.offload == "none" else DEVICE
    model, samples = source.build(blocks), source.samples(setup)
    found = block_list(model)
    path, inside = found if found is not None else ("", nn.ModuleList())
    case = setup.case(len(inside), case_optimizer(setup, model))
    if setup.checkpoint:
        if not len(inside):
            raise UsageError(f"{setup.model} has no list of blocks to checkpoint")
        _checkpoint(inside)
    show_blocks(model)
    plan = source.sharded_layers(setup, model)
    show_sharded_layers(model, {path: layer.style for path, layer in plan.items()})
    fake = None if data else fake_mode()
    number = NUMBERS_READ.get(setup.optimizer, 1.0)
    tracker = AllocationTracker(
        fake,
        number,
        setup.traits.streams,
        sharded_layers=setup.tensor_parallel > 1,
        device=device,
        bucket=case.sharding.bucket if setup.traits.whole_bucket else 0,
        notify=notify,
    )
    on = fake or nullcontext()
    with ExitStack() as stack:
        stack.enter_context(_nothing_collected())
        if device == DEVICE:
            simulated_device()
            stack.enter_context(fused_attention())
        if not data:  # as on a GPU
            stack.enter_context(fused_norm())
            stack.enter_context(fp32_attention())
        stack.enter_context(fake_ranks(setup.world_size, setup.rank))
        mesh = init_device_mesh(device, case.axes.sizes, mesh_dim_names=case.axes.names)
        with _errors_of_setup(setup):
            kind = load(setup.implementation)
            stack.enter_context(traits_of(kind).alone(device))
            tracker.enter("built", -1)
            implementation, wrapped = built(kind, model, case, mesh, on, tracker)
            names = [(_path(path), module) for path, module in wrapped.named_modules()]
            tracker.name(names)
            with on, tracker, loss_parallel() if plan else nullcontext():
                tracker.claim(implementation.shards())
                _steps(setup, samples, implementation, tracker, device)
                tracker.enter("closed", STEPS - 1)
            implementation.close()
    return Simulation(tracker.log, path)


def built(
    kind: type[Implementation], model: nn.Module, case: Case, mesh: DeviceMesh,
    on: AbstractContextManager[Any], tracker: AllocationTracker,
) -> tuple[Implementation, nn.Module]:  # fmt: skip
    """Build the implementation with its memory; return it and the wrapped model.

    One that is sharded on the meta device gets memory afterwards; then its optimizer is made.
    """
    if traits_of(kind).on_meta:
        sharder: Any = kind(model, case, mesh)
        with on, tracker:
            materialize(model, mesh.device_type, offload=case.sharding.offload != "none")
            sharder.use(replace(sharder.built, optimizer=sharder.make_optimizer(model, case)), mesh)
        return sharder, model
    with on, tracker:
        materialize(model, mesh.device_type)
        tracker.log.whole = len(tracker.log.storages)
        implementation = kind(model, case, mesh)
    wrapped = implementation.built.model if hasattr(implementation, "built") else model
    return implementation, wrapped


def materialize(model: nn.Module, device: str = "cpu", *, offload: bool = False) -> None:
    """Give a model of the meta device memory, in place. Ties stay, which `to_empty` loses.

    offload: parameters come to the CPU, buffers to the device.
    """
    places = parameter_places(model)
    model.to_empty(device="cpu" if offload else device)
    for module in model.modules() if offload else ():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
    tie(places)


def _steps(
    setup: Setup,
    samples: MicrobatchSamples,
    implementation: Implementation,
    tracker: AllocationTracker,
    device: str,
) -> None:
    samples = samples.on(device, data=tracker.fake is None)
    tracker.claim_rest([*samples.inputs, samples.target], "inputs")
    autocast = setup.autocast
    for index in range(STEPS):
        tracker.enter("forward", index)

        def reached(_: str) -> None:
            tracker.claim(implementation.shards())
            tracker.enter("step", tracker.step)

        microbatches = [
            _Watched(
                inputs=samples.inputs,
                target=samples.target,
                keywords=samples.keywords,
                seed=None,
                loss_of=samples.loss_of,
                tracker=tracker,
                autocast=autocast,
                first=not number,
                device=device,
            )
            for number in range(setup.microbatches)
        ]
        rates = [1e-3]
        implementation.train_step(
            Step(index=index, microbatches=microbatches, lr=rates, reached=reached)
        )
        tracker.claim(implementation.shards())


def _checkpoint(blocks: nn.ModuleList) -> None:
    """Run the forward of each block again in the backward."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, block in enumerate(blocks):
        blocks[index] = checkpoint_wrapper(block)


def _path(wrapped: str) -> str:
    return unwrapped(f"{wrapped}.").rstrip(".")


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Disable Python's garbage collector within the context; collect before and afterwards.

    It frees cycles of earlier runs, and of this one, at any time. Without it a run is the same each
    time.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _errors_of_setup(setup: Setup) -> Iterator[None]:
    """Turn errors of the implementation or the model into a UsageError for the user."""
    try:
        yield
    except ZerocheckError:
        raise
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        raise UsageError(
            f"{setup.model} with {setup.implementation} fails on tensors without data: "
            f"{type(error).__name__}: {message}"
        ) from error
