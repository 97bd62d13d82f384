"""Random states of a rank, recorded at the entry of a loss and at the end of its forward."""

from __future__ import annotations

import hashlib

import torch

from ..case.schema import Case
from ..case.shapes import draws_random
from ..contract.implementation import seed_all
from ..machine.devices import CPU, drawn_from, random_state
from ..models.batches import carried_seed

ON_CPU = torch.device(CPU)
"""Default device of a case."""


class CarriedRandomness:
    """Recorder of the global generator's states, by number; equal states are kept once.

    A state has 5 KB, and on a GPU 16 bytes more, of the GPU's.

    Off where the case seeds every microbatch: then nothing is started nor recorded.
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
        """Record the state at the entry of a loss."""
        if self.on:
            state = random_state(self._device)
            self._entered.append(self._numbers.setdefault(state, len(self._numbers)))

    def taken(self) -> tuple[int, ...]:
        """Return the numbers of the states recorded since the last call."""
        numbers, self._entered = tuple(self._entered), []
        return numbers


class RandomRecorder:
    """Recorder of a hash of the random state at the end of each forward, for the diagnosis.

    Off where forwards draw no random numbers.
    """

    def __init__(self, case: Case, device: torch.device = ON_CPU) -> None:
        self._on = draws_random(case.model)
        self._device = device
        self._left: list[str] = []

    def note(self) -> None:
        """Record the state at the end of a forward."""
        if self._on:
            state = drawn_from(random_state(self._device), self._device)
            self._left.append(hashlib.blake2b(state, digest_size=8).hexdigest())

    def taken(self) -> tuple[str, ...]:
        """Return the hashes recorded since the last call."""
        hashes, self._left = tuple(self._left), []
        return hashes
