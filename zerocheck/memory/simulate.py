"""Simulation: the implementation's own code, for one rank of many, on tensors without data."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from ..adapters.shared.simulation import traits_of
from ..case.schema import Case
from ..compat_device import DEVICE, simulated_device
from ..compat_memory import fake_mode, fake_ranks, placed_over
from ..contract import Implementation, Microbatch, Step
from ..contract.implementation import Call
from ..contract.loading import load
from ..errors import UsageError, failing
from ..machine.signals import die_with
from ..models.parts import block_list, parameter_places, show_blocks, show_sharded_layers, tie
from .allocation_tracker import AllocationTracker
from .experts import MixtureOfExperts, expert_parameters
from .gpu_kernels import fp32_attention, fused_attention, fused_norm
from .log import Log
from .optimizer_parts import case_optimizer
from .pipeline import Pipeline, between_stages
from .samples import MicrobatchSamples
from .setup import NUMBERS_READ, Setup
from .source import ModelSource
from .source import source as source_of

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
    model, samples = source.held(setup, blocks), source.samples(setup)
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
    if setup.pipeline_parallel > 1:
        with failing(f"{setup.model} fails on the meta device"):
            hidden = between_stages(setup, source.build(1), samples)
    fake = None if data else fake_mode()
    number = NUMBERS_READ.get(setup.optimizer, 1.0)
    tracker = AllocationTracker(
        fake,
        number,
        setup.traits.streams,
        sharded_layers=setup.tensor_parallel * setup.expert_parallel > 1,
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
        stack.enter_context(fake_ranks(setup.world_size, setup.rank or 0))
        sizes, names = case.axes.sizes, case.axes.names
        if setup.pipeline_parallel > 1:
            sizes, names = (setup.pipeline_parallel, *sizes), ("pp", *names)
        ranks = init_device_mesh(device, sizes, mesh_dim_names=names)
        mesh = ranks[case.axes.names] if setup.pipeline_parallel > 1 else ranks
        if setup.expert_parallel > 1:
            _place_experts(setup, model, device)
        with failing(f"{setup.model} with {setup.implementation} fails on tensors without data"):
            kind = load(setup.implementation)
            stack.enter_context(traits_of(kind).alone(device))
            tracker.enter("built", -1)
            implementation, wrapped = built(kind, model, case, mesh, on, tracker)
            if setup.pipeline_parallel > 1:
                pipeline = Pipeline(setup, wrapped, hidden, ranks, tracker)
                sharder: Any = implementation
                sharder.built = replace(sharder.built, forward_backward=pipeline)
            tracker.name(wrapped.named_modules())
            with on, tracker, loss_parallel() if plan else nullcontext():
                tracker.claim(implementation.shards())
                _steps(setup, samples, implementation, tracker, device)
                tracker.enter("closed", STEPS - 1)
            implementation.close()
    return Simulation(tracker.log, path)


def built(
    kind: type[Implementation],
    model: nn.Module,
    case: Case,
    mesh: DeviceMesh,
    on: AbstractContextManager[Any],
    tracker: AllocationTracker,
) -> tuple[Implementation, nn.Module]:
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
    parts = setup.microbatches if setup.pipeline_parallel > 1 else 1
    samples = samples.on(device, data=tracker.fake is None, times=parts)
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


def _place_experts(setup: Setup, model: nn.Module, device: str) -> None:
    """Give the experts of a model their ranks, and FSDP2 those that have the same experts."""
    count = setup.expert_parallel
    sizes = setup.pipeline_parallel, setup.stage_ranks // count, count
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("pp", "shard", "ep"))
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.group = mesh.get_group("ep")
    vars(model)["shard_placement"] = placed_over(expert_parameters(model), mesh["shard"])


def _checkpoint(blocks: nn.ModuleList) -> None:
    """Run the forward of each block again in the backward."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, block in enumerate(blocks):
        blocks[index] = checkpoint_wrapper(block)


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


def simulate_apart(
    setup: Setup, blocks: int | None = None, notify: Callable[[str], None] = lambda words: None
) -> Simulation:
    """Simulate with the model's first blocks, or all, in another process, kept for the next one.

    It has an accelerator from then on: compat_device.py. What torch's autograd cannot pass on as an
    error ends that process, and not this one.

    notify: called with words while it runs, often.

    Raises UsageError as `simulate`, and where the process ends.
    """
    try:
        future = _process().submit(_simulate, setup, blocks)
        while not wait([future], timeout=1.0).done:
            notify("in a process of its own")
        return future.result()
    except BrokenProcessPool as error:
        _process.cache_clear()
        raise UsageError(
            f"{setup.model} with {setup.implementation} and --offload {setup.offload} ends the "
            "process that simulates it: its own lines stand above"
        ) from error


@cache
def _process() -> ProcessPoolExecutor:
    spawn = get_context("spawn")
    return ProcessPoolExecutor(1, spawn, initializer=die_with, initargs=(os.getpid(),))


@cache
def _source(name: str) -> ModelSource:
    return source_of(name)


def _simulate(setup: Setup, blocks: int | None) -> Simulation:
    return simulate(setup, _source(setup.model), blocks)
