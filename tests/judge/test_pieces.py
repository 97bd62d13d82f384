"""A large model is judged piece by piece: the same is said of it, and its memory is held."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
import torch
from slices import sliced

from zerocheck.case.schema import Block, Case, Data, Model, Optimizer, Start, Training
from zerocheck.compat_memory import Allocation, AllocatorLog
from zerocheck.floating_point import Enclosure
from zerocheck.judge import pieces, vectors
from zerocheck.judge.compare import Misfit, compare, compare_pieces
from zerocheck.judge.pieces import Enclosing, Positions, split
from zerocheck.protocol.verdicts import Judgement, Violation
from zerocheck.run.execute.host_memory import need

CASE = Case(
    mesh=(3,),
    seed=5,
    model=Model(
        inputs=5, width=6, outputs=3, blocks=(Block(kind="mlp", hidden=7),), frozen=("stem.bias",)
    ),
    data=Data(batch=2),
    start=Start(step=2, moments="typical"),
    training=Training(steps=2, microbatches=2, clip=0.01),
)
MIXED = msgspec.structs.replace(
    CASE,
    model=Model(inputs=5, width=6, outputs=3, blocks=(Block(kind="mlp", hidden=7, dtype="bf16"),)),
)
SMALL = 20
"""Elements of a piece here: shards have several."""
NORM = 148 * 2.0**-53
"""Relative difference of two norms over the 148 elements of a model: n - 1 additions of squares in
fp64 lose at most (n - 1) 2^-53 each way, which the root halves."""


@pytest.fixture(params=["memory", "files"])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Called, all is judged in small pieces; with vectors in files too, as if memory were short."""

    def call(elements: int = SMALL) -> None:
        monkeypatch.setattr(pieces, "AT_ONCE", elements)
        if request.param == "files":
            _short_of_memory(monkeypatch)

    return call


@pytest.mark.parametrize("processors", [1, 4])
def test_pieces_in_threads_come_in_their_order(
    monkeypatch: pytest.MonkeyPatch, processors: int
) -> None:
    """In each as in the caller: without gradients, and on one processor."""
    monkeypatch.setattr(pieces, "AT_ONCE", 10)
    monkeypatch.setattr(pieces, "processors", lambda: processors)
    threads = set()

    def make(here: slice, there: Positions) -> tuple[slice, bool, int]:
        threads.add(threading.get_ident())
        assert here == there
        time.sleep(0.02)
        return here, torch.is_grad_enabled(), torch.get_num_threads()

    with torch.no_grad():
        found = [*pieces.of_each(make, pieces.pieces(None, 95))]
    assert [here for here, _, _ in found] == split(95)
    assert not any(enabled for _, enabled, _ in found)
    assert {count for _, _, count in found[1:]} == ({1} if processors > 1 else {found[0][2]})
    assert len(threads) == (1 if processors == 1 else 5), "the first one in the caller's"


def test_an_error_in_a_thread_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what has not begun is left, as after a break."""
    monkeypatch.setattr(pieces, "AT_ONCE", 1)
    monkeypatch.setattr(pieces, "processors", lambda: 2)
    begun = []

    def make(here: slice, _: Positions) -> int:
        begun.append(here.start)
        if here.start == 5:
            raise ValueError("of the sixth")
        time.sleep(0.001)
        return here.start

    with pytest.raises(ValueError, match="of the sixth"):
        [*pieces.of_each(make, pieces.pieces(None, 1000))]
    assert len(begun) < 100
    begun.clear()
    assert next(one for one in pieces.of_each(make, pieces.pieces(None, 1000)) if one == 3) == 3
    assert len(begun) < 100


@pytest.mark.parametrize(
    ("elements", "there"),
    [
        ([3, 4, 5, 6], slice(3, 7)),
        ([3], slice(3, 4)),
        ([3, 5, 4, 6], None),  # ends where a range would
        ([4, 3], None),
        ([3, 3, 5, 6], None),
        ([], None),
    ],
)
def test_positions_that_follow_one_another_are_a_range(
    elements: list[int], there: slice | None
) -> None:
    given = torch.tensor(elements, dtype=torch.int64)
    ((_, found),) = pieces.pieces(given, 9)
    assert found == there if there is not None else torch.equal(found, given)  # type: ignore[arg-type]


def _short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "LARGE_BYTES", 1)
    monkeypatch.setattr(vectors, "AT_ONCE", 1 << 16)
    monkeypatch.setattr(vectors, "leaves", lambda *_: False)


def _without_attribution(judged: Judgement) -> Judgement:
    replace = msgspec.structs.replace
    violations = tuple(
        replace(v, attribution="", parts=tuple(replace(p, attribution="") for p in v.parts))
        for v in judged.violations
    )
    return replace(judged, violations=violations)


def _alike(one: Judgement, other: Judgement) -> bool:
    """The same verdicts, causes and shares, bit for bit.

    But for attribution, which looks at the first piece and not at a gradient of several; for later
    violations, which are not diagnosed where a vector has several pieces, and what
    the norm decides, whose squares are added up in another order: the clip, of a bound that is 4 u
    of it at least, and a gradient that is recovered by dividing by the clip coefficient.
    """
    one, other = (_without_attribution(judged) for judged in (one, other))
    hidden = one.tier == "state only"
    shares = ["clip", "gradient"] if hidden else ["clip"]
    plain = [
        msgspec.structs.replace(
            judged,
            share={**judged.share, **dict.fromkeys(shares, 0.0)},
            violations=tuple(map(_without_norm, judged.violations))
            if hidden
            else judged.violations,
            further=(),
        )
        for judged in (one, other)
    ]
    return (
        plain[0] == plain[1]
        and all(
            abs(one.share.get(name, 0.0) - other.share.get(name, 0.0)) <= NORM / (4 * 2.0**-24)
            for name in shares
        )
        and all(map(_near, one.violations, other.violations))
    )


def _without_norm(violation: Violation) -> Violation:
    return msgspec.structs.replace(violation, expected=None, bound=None, ratio=None)


def _near(one: Violation, other: Violation) -> bool:
    """The same numbers but for the norm's error; that of the ratio follows from the others."""
    if one.expected is None or one.bound is None or one.ratio is None:
        return one == other
    assert other.expected is not None and other.bound is not None and other.ratio is not None
    apart = abs(one.ratio * one.bound)
    return (
        abs(one.expected - other.expected) <= NORM * abs(one.expected)
        and abs(one.bound - other.bound) <= NORM * one.bound
        and abs(one.ratio - other.ratio) <= one.ratio * NORM * (2 + abs(one.expected) / apart)
    )


@pytest.mark.parametrize(
    ("implementation", "case"), [("ddp", CASE), ("fsdp2", CASE), ("zero3", CASE), ("zero1", MIXED)]
)
def test_what_holds(
    observe: Callable, small_pieces: Callable, implementation: str, case: Case
) -> None:
    observed = observe(implementation, case)
    whole = observed.judge()
    assert not whole.violations and whole.share["gradient"] > 0 < whole.share["update"]
    small_pieces()
    assert _alike(observed.judge(), whole)


FAULTS = [
    ("zero2+rank-counted-twice", "rank counted twice"),
    ("zero2+half-group", "reduced in smaller groups"),
    ("zero2+reduced-in-bf16", "reduced in bf16"),
    ("zero2+result-rounded", "reduced gradient rounded to bf16"),
    ("zero2+last-element-local", "part not reduced"),
    ("zerocheck.faults.gradient:ShardOfTheNext", "shard of another rank"),
    ("zerocheck.faults.gradient:ShardOffByOne", "shifted"),
    ("zerocheck.faults.gradient:TailTakenForPadding", "tail left out"),
    ("zerocheck.faults.gradient:ReducedTwice", "reduced twice"),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("fault", "cause"), FAULTS)
def test_what_is_violated(
    observe: Callable, small_pieces: Callable, fault: str, cause: str
) -> None:
    observed = observe(fault, CASE)
    whole = observed.judge()
    assert cause in whole.violations[0].causes
    small_pieces()
    assert _alike(observed.judge(), whole)


@pytest.mark.every(2)
@pytest.mark.parametrize("subject", ["fsdp2", "zero2", "zero2+rank-counted-twice"])
@pytest.mark.parametrize("case", [CASE, MIXED])
def test_a_gradient_that_is_hidden(
    observe: Callable, small_pieces: Callable, case: Case, subject: str
) -> None:
    observed = observe(subject, case).without_gradients()
    whole = observed.judge()
    assert whole.tier == "state only" and bool(whole.violations) == ("+" in subject)
    small_pieces()
    assert _alike(observed.judge(), whole)


@pytest.mark.every(2)
@pytest.mark.parametrize("role", ["exp_avg", "exp_avg_sq", "parameter"])
def test_one_wrong_element_of_the_update(
    observe: Callable, small_pieces: Callable, role: str
) -> None:
    """Also where a later piece is wrong in an earlier role: the first role is told."""
    observed = observe("fsdp2", CASE)
    places = observed.places(role, "state", 0, "blocks.0.up.weight")
    places[-1][1][-1] *= 1.001
    first = observed.places("parameter", "state", 0, "stem.weight")[0][1]
    first[0] += 1.0
    whole = observed.judge()
    assert whole.violations[0].role == role
    small_pieces()
    assert _alike(observed.judge(), whole)


def test_pieces_of_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares and misfits are those of the whole, at positions that are no range too."""
    monkeypatch.setattr(pieces, "AT_ONCE", 4)
    assert [part.stop - part.start for part in split(11)] == [3, 4, 4]
    exact = torch.arange(12.0, dtype=torch.float64)
    bound = torch.full((12,), 0.5, dtype=torch.float64)
    some = torch.tensor([11, 3, 4, 5, 0, 1, 9, 8, 7])
    made = Enclosing(12, lambda there: Enclosure(exact[there], bound[there]))
    for wrong, elements in itertools.product(((), (0,), (8,), (2, 6)), (some, None)):
        positions = slice(None) if elements is None else elements
        observed = exact[positions] + 0.25
        observed[list(wrong)] += 1.0

        def at(
            here: slice, there: Positions, observed: torch.Tensor = observed
        ) -> tuple[torch.Tensor, Enclosure]:
            return observed[here], made.at(there)

        whole = compare(observed, Enclosure(exact[positions], bound[positions]))
        found = compare_pieces(at, elements, 12)
        assert found[0] == whole[0] == (0.5 if not wrong else 2.5)
        for one, other in zip(found[1] or (), whole[1] or (), strict=True):
            assert torch.equal(one, other)
        assert isinstance(found[1], Misfit) == bool(wrong)


LARGE = Case(
    mesh=(2,),
    seed=3,
    model=Model(inputs=8, width=512, outputs=4, blocks=(Block(kind="mlp", hidden=2048),)),
    start=Start(step=2, moments="typical"),
    optimizer=Optimizer(),
    training=Training(steps=2, clip=0.01),
)
"""Two million parameters."""

TEMPORARIES = 24
"""float64 vectors of a piece that live at once, in the update of AdamW: 5 inputs, 3 enclosures of 2
vectors, and what one formula makes on its way; one piece is a thirtieth of the model here."""


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("subject", "hidden"),
    [
        ("fsdp2", False),
        ("fsdp2+rank-counted-twice", True),
        *sliced(
            [
                ("ddp", False),
                ("fsdp2", True),
                ("zerocheck.faults.gradient:ShardOffByOne", False),
                ("fsdp2+rank-counted-twice", False),
            ],
            [],
        ),
    ],
)
def test_the_memory_of_the_judge(
    observe: Callable, monkeypatch: pytest.MonkeyPatch, subject: str, hidden: bool
) -> None:
    """Where memory is short: no more than `run/execute/host_memory.py` promises, and the pieces.

    Vectors in files, and those that the arenas hold, make way.
    """
    observed = observe(subject, LARGE)
    observed = observed.without_gradients() if hidden else observed
    monkeypatch.setattr(pieces, "AT_ONCE", 1 << 16)
    _short_of_memory(monkeypatch)
    log = AllocatorLog()
    log.start()
    judgement = observed.judge()
    events = log.stop("no mark")
    assert bool(judgement.violations) == ("fault" in subject or "+" in subject)
    held = peak = largest = 0
    for event in events:
        assert isinstance(event, Allocation)
        held += event.bytes
        peak, largest = max(peak, held), max(largest, event.bytes)
    elements = 2 * 512 * 2048

    assert peak > 8 * elements  # the log saw the judge
    assert peak <= need(LARGE).memory + TEMPORARIES * 8 * pieces.AT_ONCE
    assert largest == 4 * 512 * 2048  # the largest tensor, not the model
