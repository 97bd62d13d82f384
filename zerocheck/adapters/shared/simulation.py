"""Traits of an adapter in a simulation of memory (`zerocheck memory`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ...case.mesh import AxisName
from ...case.option_set import OptionValue
from ...case.schema import Precision

DDP_BUCKET = 25 * 2**20 // 4
"""Elements of fp32 in 25 MiB, torch's default bucket of DDP."""

FP32_REDUCTION = Precision(compute="bf16", reduce="fp32")
"""Compute in bf16, gradients reduced in fp32: what torch recommends for FSDP."""


@dataclass(frozen=True)
class CollectiveStreams:
    """Streams of a GPU on which buffers of collectives are allocated; 0 is that of the model.

    Each stream has memory of its own in the caching allocator. As recorded on a GPU.
    """

    gather_input: int = 0
    gather_output: int = 0
    reduce_output: int = 0


@dataclass(frozen=True)
class SimulationTraits:
    """Class attribute `simulated` of an adapter; a class without one has the defaults."""

    mixed: Precision | None = None
    """Precision of the simulated case where it casts by its own policy; all others have fp32 there
    and run under torch.autocast."""
    masters: bool = False
    """True if, in mixed precision, it holds weights and gradients in bf16, and an fp32 master among
    the states, as in the ZeRO paper. Others hold fp32 weights and gradients."""
    wide_gradients: bool = False
    """True if gradients are in fp32 next to bf16 weights."""
    on_meta: bool = False
    """True if it shards on the meta device, gets memory afterwards, and makes the optimizer then,
    as torch recommends for models larger than a device. Others get the whole model."""
    prefetch: int = 0
    """`sharding.prefetch` of the simulated case; 0 leaves it to torch."""
    bucket: int = DDP_BUCKET
    """`sharding.bucket` of the simulated case, in elements: the default of its library."""
    whole_bucket: bool = False
    """True if it allocates a bucket of that size, however little is in it."""
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    """Options of the simulated case: the defaults of its library."""
    alone: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """Context in which it runs as one rank without the others, on tensors with or without data;
    given the type of the device."""
    streams: CollectiveStreams = field(default_factory=CollectiveStreams)
    axes: frozenset[AxisName] = frozenset()
    """Axes that it has in a simulation only; the model has `shard_placement` for `fully_shard`."""
    offload: bool = False
    """True if it obeys `sharding.offload` in a simulation: its shards are on the CPU, next to a
    simulated device."""
    pinned: bool = False
    """True if the memory of the host is pinned where it fixes that it offloads."""
    obeys_microbatches: bool = False
    """True if a step has as many microbatches as the case says, whatever the class fixes."""
    frees_late: bool = False
    """True if memory goes back to the allocator when a stream is through, not when it is let go."""


def traits_of(kind: type) -> SimulationTraits:
    """Return the traits that a class declares, or the defaults."""
    declared: SimulationTraits = getattr(kind, "simulated", SimulationTraits())
    return declared
