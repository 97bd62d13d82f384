"""Parameters of a run, put together from the reports of its ranks."""

from __future__ import annotations

from summaries import summary

from zerocheck.attached.record.run_parameters import layout_of, run_parameters
from zerocheck.attached.record.step_record import ShardPiece
from zerocheck.protocol.observations import Entry


def piece(name: str, group: int, *, low: int = 0, high: int = 4) -> ShardPiece:
    return ShardPiece(Entry(name, (4,), low, high), (high - low,), "torch.bfloat16", group)


def test_a_parameter_trains_if_the_optimizer_of_any_rank_has_it() -> None:
    """ZeRO-1: rank 0 holds a whole copy of `b`, and only rank 1's optimizer has it."""
    ranks = [
        summary(piece("a", 0), piece("b", -1), piece("frozen", -1)),
        summary(piece("a", -1), piece("b", 0), piece("frozen", -1), rank=1),
    ]
    found = run_parameters(ranks)
    assert [(one.name, one.trains) for one in found] == [
        ("a", True),
        ("b", True),
        ("frozen", False),
    ]
    assert [place.trainable for place in layout_of(found).places] == [True, True, False]


def test_whole_is_what_every_rank_holds() -> None:
    ranks = [
        summary(piece("a", 0), piece("b", 0, high=2), piece("c", 0)),
        summary(piece("a", 0), piece("b", 0, low=2), piece("c", 0, high=0), rank=1),
    ]
    found = run_parameters(ranks)
    assert [(one.name, one.whole) for one in found] == [("a", True), ("b", False), ("c", False)]
    places = layout_of(found).places
    assert [(place.start, place.stop) for place in places] == [(0, 4), (4, 8), (8, 12)]
