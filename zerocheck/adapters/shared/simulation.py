"""Traits of an adapter in a simulation of memory (`zerocheck memory`)."""

from __future__ import annotations

from dataclasses import dataclass


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


def traits_of(kind: type) -> SimulationTraits:
    """Return the traits that a class declares, or the defaults."""
    declared: SimulationTraits = getattr(kind, "simulated", SimulationTraits())
    return declared
