"""What is simulated without data is what torch's allocator counts with data, byte for byte."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from slices import paired

from zerocheck.catalogue import BUILT_IN
from zerocheck.contract.loading import load
from zerocheck.memory.analyse import run
from zerocheck.memory.formulas import STAGES
from zerocheck.memory.setup import OPTIMIZERS, Setup
from zerocheck.memory.simulate import simulate
from zerocheck.memory.source import source
from zerocheck.memory.tables import AllocatorBytes, measure
from zerocheck.memory.timeline import Timeline, timeline

RNG_STATE = torch.get_rng_state().numel()
"""Bytes that checkpointing keeps of a block's random state, on the CPU: it is made unseen by
dispatch modes, and is no memory of a GPU."""


def setup(name: str, **more: object) -> Setup:
    options = {"world_size": 4, "precision": "fp32", "batch": 3, "sequence": 29, **more}
    return Setup(model="small_models:small", implementation=name, **options)  # type: ignore[arg-type]


@cache
def both(given: Setup) -> tuple[Timeline, AllocatorBytes]:
    model = source(given.model)
    run = simulate(given, model)
    return timeline(run.log, run.blocks), measure(given, model)


def peaks(line: Timeline) -> dict[tuple[int, str], int]:
    """The most in each phase of each step."""
    most: dict[tuple[int, str], int] = {}
    for event, held, _ in line.instants():
        key = event.step, event.phase
        most[key] = max(most.get(key, 0), sum(held))
    return most


def test_every_built_in_implementation_has_a_stage() -> None:
    assert all(Setup(model="small", implementation=name).stage in STAGES for name in BUILT_IN)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", BUILT_IN)
def test_to_the_byte(name: str) -> None:
    check_to_the_byte(setup(name))


REPLICATED = [name for name in BUILT_IN if "replicate" in load(name).axes]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_to_the_byte(name: str) -> None:
    check_to_the_byte(setup(name, replicas=2, world_size=6))


def test_collectives_of_replicas_have_the_ranks_of_their_axis() -> None:
    """Reduce-scatters of 3 ranks send 2/3 of all P, and all-reduces of 2 replicas all of P / 3."""
    given = setup("fsdp2", replicas=2, world_size=6)
    sent = run(given, source(given.model), exact=True).traffic.parts
    shards = sent["backward", "reduce-scatter"] / 2
    assert shards > 0 and sent["backward", "all-reduce"] == shards
    gathered = [size for (_, kind), size in sent.items() if kind == "all-gather"]
    assert 2 * shards < sum(gathered) < 4 * shards  # the root once, others twice


def check_to_the_byte(given: Setup) -> None:
    line, measured = both(given)
    check_ends(line, measured)
    check_peaks(line, measured)
    assert line.peak().total == measured.peak


def check_ends(line: Timeline, measured: AllocatorBytes) -> None:
    for (step, phase), held in measured.ends.items():
        assert sum(line.at_end(phase, step).values()) == held, (step, phase)  # type: ignore[arg-type]


def check_peaks(line: Timeline, measured: AllocatorBytes) -> None:
    simulated = peaks(line)
    for key in ((0, "forward"), (0, "backward"), (1, "forward"), (1, "backward")):
        assert simulated[key] == measured.peaks[key], key


@pytest.mark.every(6)
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_optimizer_makes_a_few_scalars_unseen(name: str) -> None:
    line, measured = both(setup(name))
    for step in (0, 1):
        assert 0 <= measured.peaks[step, "step"] - peaks(line)[step, "step"] <= 16


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["fsdp2", "ddp", "zero2"])
def test_in_mixed_precision_what_is_held_is_the_same(name: str) -> None:
    """Its kernels allocate more inside, on the CPU, so the peaks are not."""
    check_ends(*both(setup(name, precision="mixed")))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["fsdp2", "zero3", "fsdp1"])
def test_with_checkpointing(name: str) -> None:
    line, measured = both(setup(name, checkpoint=True))
    for (step, phase), held in measured.ends.items():
        more = 3 * RNG_STATE if phase == "forward" else 0
        assert sum(line.at_end(phase, step).values()) + more == held, (step, phase)  # type: ignore[arg-type]


def test_a_tied_model() -> None:
    given = Setup(model="small_models:tied", world_size=3, precision="fp32", batch=3, sequence=29)
    line, measured = both(given)
    assert sum(line.at_end("step", 1).values()) == measured.ends[1, "step"]
    assert line.peak().total == measured.peak


REFUSED = (("rprop", "fsdp2"), ("adafactor", "fsdp2"))
"""Optimizers whose steps of DTensors torch refuses."""

SIMULATED = [
    one
    for one in paired([one for one in OPTIMIZERS if one != "adamw"], ("zero1", "fsdp2", "ddp"))
    if one not in REFUSED
]


@pytest.mark.every(3)
@pytest.mark.parametrize(("optimizer", "name"), SIMULATED)
def test_other_optimizers_hold_what_the_allocator_counts(optimizer: str, name: str) -> None:
    """Their temporaries within a step are of foreach kernels, and depend on the step count."""
    line, measured = both(setup(name, optimizer=optimizer))
    for (step, phase), held in measured.ends.items():
        assert sum(line.at_end(phase, step).values()) == held, (step, phase)  # type: ignore[arg-type]
