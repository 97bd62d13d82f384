"""The peak that is predicted is the one of torch's allocator, on ranks of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from zerocheck.case.schema import Sharding
from zerocheck.ranks.pool import Pool
from zerocheck.report.peaks import markdown, picture
from zerocheck.run.peaks import CASE, Point, Terms, measured, pool, predicted, stages


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    with pool() as found:
        yield found


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["zero3", "fsdp2"])
def test_predicted_within_two_percent(ranks: Pool, name: str) -> None:
    case = replace(CASE, sharding=Sharding(wrap="layer", prefetch=2))
    seen = measured(ranks, name, case)
    last = [one for one in seen.peaks if one.step == seen.peaks[-1].step]
    most = max(one.total for one in last)
    assert abs(predicted(seen) - most) < 0.02 * most
    assert seen.layout is not None
    for one in last:
        for answer in seen.layout.highest or ():
            if (answer.step, answer.phase) == (seen.layout.last, one.phase):
                assert one.highest.get(answer.term, 0) == answer.bytes, (one.phase, answer.term)


@pytest.mark.long
def test_activations_are_the_same_and_checkpointing_lowers_them_alone(ranks: Pool) -> None:
    found = list(stages(ranks, ("zero1", "zero3")))
    for (plain, again), (other, its) in [(found[0::2], found[1::2])]:
        assert plain.activation == other.activation > again.activation == its.activation
        assert plain.lasting == again.lasting and other.lasting == its.lasting
        assert again.peak <= plain.peak and its.peak <= other.peak


def test_the_page_states_the_largest_difference() -> None:
    windows = [Point("zero3", "layer", n, 100, 100 + n, {"gathered": 7}) for n in (0, 1, 2)]
    buckets = [Point("zero2", "buckets", 2**n, 50, 50, {"bucket": 9}) for n in (10, 12)]
    page = markdown(windows, buckets, [Terms("ddp", True, 5, 6, 7)])
    assert "is 1.961%** of the measured peak" in page.replace("\n", " ")
    assert "3 of 5 are equal to the byte" in page
    image = picture(windows, buckets)
    assert image.count("<polyline") == 2 and image.count("<circle") == 5
