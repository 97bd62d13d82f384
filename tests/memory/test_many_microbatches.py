"""Of many microbatches five are simulated; what all of them would give is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_models import own_count
from test_fixed import CONFIG
from test_fixed import setup as of_config

from zerocheck.memory.analyse import TYPICAL, MemoryReport, analyse, run
from zerocheck.memory.setup import Setup
from zerocheck.memory.source import source

MANY = 7


def small(implementation: str) -> Setup:
    return Setup(
        model="small_models:small",
        implementation=implementation,
        world_size=4,
        batch=2,
        sequence=5,
        microbatches=MANY,
    )


def compared(setup: Setup) -> tuple[int, MemoryReport]:
    """Return how many were left out, and the report, which must be that of all."""
    few, every = analyse(setup), analyse(setup, exact=True)
    assert (few.peak, few.lines, few.rows) == (every.peak, every.lines, every.rows)
    assert (few.between, few.host) == (every.between, every.host)
    if few.reserved is not None:  # else blocks were extrapolated
        assert few.reserved == every.reserved
    given = source(setup.model)
    assert run(setup, given).traffic == run(setup, given, exact=True).traffic
    assert every.left_out == 0
    return few.left_out, few


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "name",
    ["ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "deepspeed1", "deepspeed2", "deepspeed3"],
)
def test_the_report_is_that_of_all(name: str) -> None:
    setup = small(name)
    assert compared(setup)[0] == MANY - TYPICAL


def test_those_of_a_config_too(tmp_path: Path) -> None:
    """Its optimizer takes its step after as many as are simulated."""
    config = {**CONFIG, "gradient_accumulation_steps": MANY}
    left_out, report = compared(of_config(tmp_path, config))
    assert left_out == MANY - TYPICAL and report.at_end("step", 1)["optimizer"] > 0


def test_all_are_simulated_where_the_code_counts_itself() -> None:
    name = f"{own_count.__module__}:{own_count.__name__}"
    setup = small(name)
    assert analyse(setup).left_out == 0


def test_those_that_are_not_alike_are_all_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two of stage 3 are not: it learns the order of parameters in them."""
    monkeypatch.setattr("zerocheck.memory.analyse.MIDDLE", 0)
    setup = small("deepspeed3")
    assert analyse(setup).left_out == 0
