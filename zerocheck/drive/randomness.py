"""Random numbers that a rank carries on: started once, noted wherever a loss is entered."""

from __future__ import annotations

import torch

from ..case.schema import Case
from ..models.batches import carried_seed


class CarriedRandomness:
    """Notes the state of the global generator (5 KB) by number; equal states are kept once.

    Off where the case seeds every microbatch: then nothing is started nor noted.
    """

    def __init__(self, case: Case, rank: int) -> None:
        self.on = case.data.rng == "carried"
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
            torch.manual_seed(self._seed)

    def note(self) -> None:
        """A loss is entered now."""
        if self.on:
            state = torch.get_rng_state().numpy().tobytes()
            self._entered.append(self._numbers.setdefault(state, len(self._numbers)))

    def taken(self) -> tuple[int, ...]:
        """Numbers of the states noted since it was asked last."""
        numbers, self._entered = tuple(self._entered), []
        return numbers
