"""Simulations that the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from reserving import exactly

from zerocheck.memory.analyse import SimulatedRank, run
from zerocheck.memory.fit import search
from zerocheck.memory.fit.choices import Choice
from zerocheck.memory.setup import Setup
from zerocheck.memory.source import ModelSource
from zerocheck.memory.verdict import Reserved

Simulations = dict[tuple[Setup, bool], SimulatedRank]


@pytest.fixture(scope="module")
def simulations() -> Simulations:
    return {}


@pytest.fixture
def simulated_once(simulations: Simulations, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches with other limits simulate the same choices: each is simulated once."""

    def simulated(
        setup: Setup, given: ModelSource, *, exact: bool, notify: Callable[[str], None]
    ) -> SimulatedRank:
        key = setup, exact
        if key not in simulations:
            simulations[key] = run(setup, given, exact=exact)
        return simulations[key]

    monkeypatch.setattr(search, "run", simulated)


@pytest.fixture
def nothing_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator that reserves what is held: of small models cuBLAS's workspaces are 64 MiB."""

    def reserved(self: search.FitSearch, choice: Choice, ranks: int) -> tuple[Reserved, str]:
        return exactly(self.point(choice, ranks).peak.total), ""

    monkeypatch.setattr(search.FitSearch, "reserved", reserved)
