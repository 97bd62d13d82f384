"""The random states of a rank, noted where a loss is entered and where its forward is over."""

from __future__ import annotations

import hashlib

import torch

from ..case.schema import Case
from ..case.shapes import draws_random
from ..contract.implementation import seed_all
from ..devices import CPU, drawn_from, random_state
from ..models.batches import carried_seed

ON_CPU = torch.device(CPU)
"""Where a case runs unless it is said."""


class CarriedRandomness:
    """Notes the state of the global generator by number; equal states are kept once. It has 5 KB,
    and on a GPU 16 bytes more, of the GPU's.

    Off where the case seeds every microbatch: then nothing is started nor noted.
    """

    def __init__(self, case: Case, rank: int, device: torch.device = ON_CPU) -> None:
        self.on = case.data.rng == "carried"
        self._device = device
        self._seed = carried_seed(case, rank)
        self._numbers: dict[bytes, int] = {}
        self._entered: list[int] = []

    @property
    def states(self) -> tuple[bytes, ...]:
        """All states, in the order of their numbers."""
        return tuple(self._numbers)

    def start(self) -> None:
        """Seed this rank's generator, differently on every rank."""
        if self.on:
            seed_all(self._seed)

    def note(self) -> None:
        """A loss is entered now."""
        if self.on:
            state = random_state(self._device)
            self._entered.append(self._numbers.setdefault(state, len(self._numbers)))

    def taken(self) -> tuple[int, ...]:
        """Numbers of the states noted since it was asked last."""
        numbers, self._entered = tuple(self._entered), []
        return numbers


class RandomLeft:
    """Notes a hash of the random state at the end of each forward, for the diagnosis.

    Off where forwards draw no random numbers.
    """

    def __init__(self, case: Case, device: torch.device = ON_CPU) -> None:
        self._on = draws_random(case.model)
        self._device = device
        self._left: list[str] = []

    def note(self) -> None:
        """A forward is over."""
        if self._on:
            state = drawn_from(random_state(self._device), self._device)
            self._left.append(hashlib.blake2b(state, digest_size=8).hexdigest())

    def taken(self) -> tuple[str, ...]:
        """The hashes noted since it was asked last."""
        hashes, self._left = tuple(self._left), []
        return hashes
