"""The reported norm, from what ranks tell of their shards; and ranks that disagree."""

from __future__ import annotations

import msgspec
import pytest
from summaries import summary

from zerocheck.attached.checks.norms import Norms
from zerocheck.attached.record.step_record import Clip, RankVerdict, ShardPiece
from zerocheck.protocol.observations import Entry


def report(rank: int, norms: list[float], *, low: int, high: int, square: float) -> RankVerdict:
    """A rank that holds the elements [low, high) of one parameter of four."""
    piece = ShardPiece(Entry("w", (4,), low, high), (high - low,), "torch.float32", 0)
    told = summary(
        piece,
        rank=rank,
        before=(0.0,),
        after=(1.0,),
        clips=tuple(Clip(1.0, "2", norm, (0,)) for norm in norms),
    )
    return RankVerdict(summary=told, hashes=({},), squares=(square,), peaks=(square**0.5,))


def sharded(*norms: float) -> list[RankVerdict]:
    """Halves of (3, 0, 4, 0): the norm is 5."""
    return [
        report(0, [norms[0]], low=0, high=2, square=9.0),
        report(1, [norms[1]], low=2, high=4, square=16.0),
    ]


def copied(*norms: float) -> list[RankVerdict]:
    """Two copies of it."""
    return [report(r, [norm], low=0, high=4, square=25.0) for r, norm in enumerate(norms)]


@pytest.mark.parametrize("ranks", [sharded(5.0, 5.0), copied(5.0, 5.0)])
def test_the_right_norm(ranks: list[RankVerdict]) -> None:
    assert Norms(ranks).check() == (0.0, None)
    share, violation = Norms(sharded(5.000001, 5.0)).check()
    assert 0.5 < share < 1 and violation is None


@pytest.mark.parametrize(
    ("ranks", "wrong", "cause"),
    [
        (sharded(3.0, 4.0), (0, 1), "local norm"),
        (sharded(5.0, 4.0), (1,), "local norm"),
        (sharded(7.0, 7.0), (0, 1), "sum of local norms"),
        (sharded(3.5, 3.5), (0, 1), "mean of local norms"),
        (sharded(4.0, 4.0), (0, 1), "largest local norm"),
        (copied(50**0.5, 50**0.5), (0, 1), "norm x sqrt(W)"),
        (copied(25.0, 25.0), (0, 1), "norm without root"),
        (sharded(0.0, 0.0), (0, 1), "norm of nothing"),
    ],
)
def test_a_wrong_norm(ranks: list[RankVerdict], wrong: tuple[int, ...], cause: str) -> None:
    violation = Norms(ranks).check()[1]
    assert violation is not None and violation.obligation == "clip"
    assert violation.ranks == wrong and cause in violation.causes


def named(rank: int, norm: float, name: str, square: float) -> RankVerdict:
    """A rank that holds the whole of one parameter."""
    one = report(rank, [norm], low=0, high=4, square=square)
    piece = ShardPiece(Entry(name, (4,), 0, 4), (4,), "torch.float32", 0)
    held = msgspec.structs.replace(one.summary, pieces=(piece,))
    return msgspec.structs.replace(one, summary=held)


def test_a_norm_without_one_parameter() -> None:
    squares = {"a": 4.0, "b": 16.0, "c": 25.0}
    reported = 29.0**0.5
    ranks = [named(r, reported, *one) for r, one in enumerate(squares.items())]
    violation = Norms(ranks).check()[1]
    assert violation is not None and violation.causes == ("norm without some parameters",)
    assert violation.explanation.endswith("it is the norm without those of b")


def test_ranks_that_clip_differently() -> None:
    ranks = sharded(5.0, 5.0)
    ranks[1] = report(1, [5.0, 5.0], low=2, high=4, square=16.0)
    violation = Norms(ranks).check()[1]
    assert violation is not None and violation.causes == ("ranks disagree",)
