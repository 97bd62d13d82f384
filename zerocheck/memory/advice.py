"""Advice on what would fit: each alternative is simulated before it is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..catalogue import RECOMMENDED
from ..errors import UsageError
from .result import Alternative
from .setup import Setup
from .verdict import MemoryVerdict

Change = tuple[str, Setup]
Judge = Callable[[Setup], MemoryVerdict]
"""Simulates a setup and judges whether it fits."""
MOST_RANKS = 1024
DOUBLINGS = 4


def advise(setup: Setup, judge: Judge) -> Iterator[Alternative]:
    """Try one change at a time; if none is enough, one after the other on top of the previous.

    A change that grows by steps (fewer samples, more ranks) is taken as far as is needed.
    """
    fits = False
    for change in (_checkpointed, _smaller, _higher, _finer, _offloaded, _more_ranks):
        one = _first_that_fits([*change(setup)], judge)
        if one is not None:
            yield one
            fits = fits or one.fits
    if not fits:
        yield from _combined(setup, judge)


def _first_that_fits(steps: list[Change], judge: Judge) -> Alternative | None:
    """Return the first of growing steps that fits, or the last one.

    The last is tried first: it shows whether the others are worth it.
    """
    if not steps:
        return None
    last = _tried(*steps[-1], judge)
    if last is None or not last.fits:
        return last
    for words, other in steps[:-1]:
        found = _tried(words, other, judge)
        if found is not None and found.fits:
            return found
    return last


def _tried(words: str, other: Setup, judge: Judge) -> Alternative | None:
    try:
        verdict = judge(other)
    except UsageError:
        return None  # it cannot be run so
    return Alternative(change=words, command=other.command(), verdict=verdict)


def _combined(setup: Setup, judge: Judge) -> Iterator[Alternative]:
    """Combine changes, those that need no more machines first."""
    words: list[str] = []
    for change in (_higher, _checkpointed, _smaller, _finer, _offloaded, _more_ranks):
        last: Change | None = None
        steps = [*change(setup)]
        for step in steps[-1:] if change in (_higher, _smaller) else steps:
            last = step
            found = _tried(" + ".join([*words, step[0]]), step[1], judge)
            if found is None:
                continue
            if len(words):
                yield found
            if found.fits:
                return
        if last is not None:
            words.append(last[0])
            setup = last[1]


def _checkpointed(setup: Setup) -> Iterator[Change]:
    if not setup.checkpoint:
        yield "activation checkpointing", replace(setup, checkpoint=True)


def _smaller(setup: Setup) -> Iterator[Change]:
    batch = setup.batch
    while batch > 1:
        batch //= 2
        yield f"a microbatch of {batch}", replace(setup, batch=batch)


def _higher(setup: Setup) -> Iterator[Change]:
    if setup.stage is None:
        return
    for stage, name in RECOMMENDED.items():
        if stage > setup.stage:
            yield f"stage {stage} ({name})", replace(setup, implementation=name)


def _finer(setup: Setup) -> Iterator[Change]:
    if setup.stage == 3 and setup.wrap == "whole":
        yield "units of one block", replace(setup, wrap="block")
    elif setup.stage == 3 and setup.wrap == "block":
        yield "units of one layer", replace(setup, wrap="layer")


def _offloaded(setup: Setup) -> Iterator[Change]:
    if setup.stage == 3 and setup.traits.offload and setup.offload == "none":
        yield "shards in pinned memory of the host", replace(setup, offload="pinned")


def _more_ranks(setup: Setup) -> Iterator[Change]:
    ranks = setup.world_size
    for _ in range(DOUBLINGS):
        ranks *= 2
        if setup.stage == 0 or ranks > MOST_RANKS:
            return
        yield f"{ranks} ranks", replace(setup, world_size=ranks)
