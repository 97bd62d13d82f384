"""Simulations that the tests of a module share."""

from __future__ import annotations

import pytest

from zerocheck.memory.analyse import SimulatedRank, run
from zerocheck.memory.fit import search
from zerocheck.memory.setup import Setup
from zerocheck.memory.source import ModelSource

Simulations = dict[tuple[Setup, bool], SimulatedRank]


@pytest.fixture(scope="module")
def simulations() -> Simulations:
    return {}


@pytest.fixture
def simulated_once(simulations: Simulations, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches with other limits simulate the same choices: each is simulated once."""

    def simulated(setup: Setup, given: ModelSource, *, exact: bool) -> SimulatedRank:
        key = setup, exact
        if key not in simulations:
            simulations[key] = run(setup, given, exact=exact)
        return simulations[key]

    monkeypatch.setattr(search, "run", simulated)
