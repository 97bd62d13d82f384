"""How small an error is seen: the distribution over random cases is printed and bounded."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

import pytest
import torch
from slices import sliced

from zerocheck.case.drawing import draw
from zerocheck.case.schema import Case
from zerocheck.errors import Unsupported
from zerocheck.protocol.verdicts import Obligation

CASES = sliced(200, 12)
FACTOR = sliced(2**0.25, 2**0.5)
"""Between one size that is tried and the next."""

IMPLEMENTATIONS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


def _cases() -> list[Case]:
    return draw(
        CASES, seed=20, world_sizes=(1, 2, 3), fixed={"training": {"microbatches": 1, "steps": 1}}
    )


def _element(observed, role: str, point: str, choose: random.Random) -> list[torch.Tensor] | None:
    """All copies, as views, of one element that is not 0; None if there is no such."""
    names = sorted(
        {
            entry.name
            for rank, record in observed.records(role, point, 0)
            for entry in observed.seen[rank].manifests[record.manifest]
            if entry.present and entry.stop > entry.start
        }
    )
    choose.shuffle(names)
    for name in names:
        shards = observed.places(role, point, 0, name)
        start, view = choose.choice(shards)
        nonzero = (view.abs() > 1e-30).nonzero().reshape(-1)
        if len(nonzero) == 0:
            continue
        element = start + int(nonzero[choose.randrange(len(nonzero))])
        return [
            part[element - first : element - first + 1]
            for first, part in shards
            if first <= element < first + len(part)
        ]
    return None


def _smallest(
    observed, copies: Sequence[torch.Tensor], unit: float, obligation: Obligation
) -> float:
    """The smallest relative error, in units of `unit`, that the obligation flags."""
    original = float(copies[0])

    def flagged(relative: float) -> bool:
        for copy in copies:
            copy.fill_(original + relative * unit)
        found = observed.judge().statuses[obligation] == "violated"
        for copy in copies:
            copy.fill_(original)
        return found

    low, high = 2.0**-26, 1.0
    if not flagged(high):
        return 1.0
    while high / low > FACTOR:
        middle = (low * high) ** 0.5
        if flagged(middle):
            high = middle
        else:
            low = middle
    return high


def _distribution(errors: list[float]) -> str:
    deciles = statistics.quantiles(errors, n=10)
    return f"median {statistics.median(errors):.1e}, p10 {deciles[0]:.1e}, p90 {deciles[8]:.1e}"


@pytest.fixture(scope="module")
def smallest(observe: Callable) -> dict[str, list[float]]:
    """Smallest flagged errors by what was tampered with."""
    choose = random.Random(3)
    found: dict[str, list[float]] = {"gradient": [], "exp_avg": [], "exp_avg_sq": []}
    for number, case in enumerate(_cases()):
        try:
            observed = observe(IMPLEMENTATIONS[number % len(IMPLEMENTATIONS)], case)
        except Unsupported:
            continue
        copies = _element(observed, "gradient", "reduced", choose)
        if copies is not None:
            # An error in one rank's gradient reaches the mean divided by W.
            unit = float(copies[0]) / case.world_size
            found["gradient"].append(_smallest(observed, copies, unit, "gradient"))
        role = choose.choice(["exp_avg", "exp_avg_sq"])
        copies = _element(observed, role, "state", choose)
        if copies is not None:
            found[role].append(_smallest(observed, copies, float(copies[0]), "update"))
    return found


def test_median_error_that_is_seen(
    smallest: dict[str, list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print("\nsmallest relative error that is flagged")
        for what, errors in smallest.items():
            print(f"  one element of {what:11} {_distribution(errors)} ({len(errors)} cases)")
    moments = smallest["exp_avg"] + smallest["exp_avg_sq"]
    assert len(smallest["gradient"]) >= 0.75 * CASES
    assert len(moments) >= 0.75 * CASES
    assert statistics.median(smallest["gradient"]) <= 5e-6
    assert statistics.median(moments) <= 5e-7
