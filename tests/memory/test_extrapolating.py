"""What is extrapolated is what all blocks give, event by event; refused where it is not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from slices import sliced

from zerocheck.memory.analyse import analyse, run
from zerocheck.memory.extrapolate import TRIED, NotUniform, extrapolate
from zerocheck.memory.setup import Setup
from zerocheck.memory.simulate import simulate
from zerocheck.memory.source import alike, source
from zerocheck.memory.timeline import AllocatingOperator, Timeline, timeline
from zerocheck.models.parts import block_list


def setup(model: str, name: str = "fsdp2", **more: object) -> Setup:
    options = {"world_size": 8, "batch": 2, "sequence": 13, **more}
    return Setup(model=f"small_models:{model}", implementation=name, **options)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize(
    "given",
    [
        setup("deep"),
        setup("deep", "fsdp1-grad-op"),
        *sliced(
            [setup("deep", precision="fp32", checkpoint=True), setup("deep", wrap="layer")], []
        ),
    ],
    ids=lambda given: f"{given.implementation}-{given.wrap}-{given.precision}",
)
def test_event_by_event(given: Setup) -> None:
    model = source(given.model)
    few, exact = run(given, model), run(given, model, exact=True)
    assert exact.simulated == () and few.counts == exact.counts
    assert few.timeline.events == exact.timeline.events
    if given.implementation == "fsdp2":
        assert few.simulated == TRIED


@pytest.mark.long
def test_a_model_that_needs_all_of_its_blocks_says_so() -> None:
    report = analyse(setup("wider_inside"))
    assert report.simulated == () and report.reason == "block 9 differs from block 0 in up.bias"


@pytest.mark.long
def test_blocks_with_equal_parameters_that_keep_different_activations() -> None:
    model = source("small_models:uneven")
    found = block_list(model.build())
    assert found is not None and alike(found[1]) is None
    done = run(setup("uneven"), model)
    assert done.simulated == () and "blocks differ" in done.reason
    assert done.timeline.events == run(setup("uneven"), model, exact=True).timeline.events


def test_a_number_that_counts_is_no_difference_and_others_are() -> None:
    """`layer_idx` grows by one; 8 in block 8 and 8 in block 0 is the same, too."""
    found = block_list(source("small_models:deep").build())
    assert found is not None
    blocks = found[1]
    for block in blocks:
        block.heads = 8
    assert alike(blocks) is None
    blocks[5].heads = 4
    assert alike(blocks) == "block 5 differs from block 0 in heads"


@cache
def timelines() -> tuple[Timeline, ...]:
    """Of a few blocks, from which the rest is extrapolated."""
    given = setup("deep")
    model = source(given.model)
    runs = [simulate(given, model, count) for count in TRIED]
    return tuple(timeline(one.log, one.blocks) for one in runs)


def changed(line: Timeline, place: int, **new: object) -> Timeline:
    events = list(line.events)
    events[place] = replace(events[place], **new)  # type: ignore[arg-type]
    return Timeline(events)


@pytest.mark.long
def test_one_byte_is_seen() -> None:
    """In a block in the middle, at an edge, and outside."""
    lines = timelines()
    extrapolate(lines, "layers", 16)
    most = lines[2].events
    for block in (0, 3, TRIED[2] - 1, -1):
        place = next(n for n, e in enumerate(most) if e.block == block and e.phase == "backward")
        more = tuple(size + 1 for size in most[place].allocated)
        wrong = [*lines[:2], changed(lines[2], place, allocated=more)]
        with pytest.raises(NotUniform):
            extrapolate(wrong, "layers", 16)


def test_another_operator_is_seen() -> None:
    lines = timelines()
    place = next(n for n, e in enumerate(lines[1].events) if e.block == 2)
    with pytest.raises(NotUniform):
        extrapolate([lines[0], changed(lines[1], place, operator="x"), lines[2]], "layers", 16)


def test_events_name_their_block() -> None:
    lines = timelines()
    whole = extrapolate(lines, "layers", 16)
    named = [e for e in whole.events if e.block == 11 and e.module]
    assert named and all(e.module.startswith("layers.11") for e in named)


def event(**more: object) -> AllocatingOperator:
    nothing = (0,) * 8
    plain = AllocatingOperator(0, "forward", "", "x", False, -1, nothing, nothing)
    return replace(plain, **more)  # type: ignore[arg-type]


def test_blocks_that_are_visited_out_of_order() -> None:
    orders = [[*range(2, count), 0, 1] for count in TRIED]
    lines = [Timeline([event(block=number) for number in order]) for order in orders]
    with pytest.raises(NotUniform, match="not gone through one after the other"):
        extrapolate(lines, "layers", 16)
