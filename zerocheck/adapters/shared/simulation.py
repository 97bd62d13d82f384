"""Traits of an adapter in a simulation of memory (`zerocheck memory`)."""

from __future__ import annotations

from dataclasses import dataclass, field


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

    own_precision: bool = False
    """True if it casts by its own mixed-precision policy; all others run under torch.autocast."""
    on_meta: bool = False
    """True if it shards on the meta device, gets memory afterwards, and makes the optimizer then,
    as torch recommends for models larger than a device. Others get the whole model."""
    prefetch: int = 0
    """`sharding.prefetch` of the simulated case; 0 leaves it to torch."""
    streams: CollectiveStreams = field(default_factory=CollectiveStreams)
    offload: bool = False
    """True if it obeys `sharding.offload` in a simulation: its shards are on the CPU, next to a
    simulated device."""
    frees_late: bool = False
    """True if memory goes back to the allocator when a stream is through, not when it is let go."""


def traits_of(kind: type) -> SimulationTraits:
    """Return the traits that a class declares, or the defaults."""
    declared: SimulationTraits = getattr(kind, "simulated", SimulationTraits())
    return declared
