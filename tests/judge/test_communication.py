"""The obligation `communication`, on calls made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from zerocheck.case.schema import Block, Case, Model, Sharding, Training
from zerocheck.judge.footprint import trained_bytes
from zerocheck.judge.obligations.communication import check, predicted, volume
from zerocheck.protocol.layout import Call, Layout
from zerocheck.protocol.measurements import Measured
from zerocheck.protocol.verdicts import Violation
from zerocheck.run.records.footprint import in_psi

CASE = Case(
    mesh=(2,),
    model=Model(inputs=4, width=4, blocks=(Block(kind="mlp", hidden=4),), outputs=2),
    training=Training(steps=1, microbatches=3),
)
SIZES = [16 * 4, 4 * 4, 16 * 4, 4 * 4, 16 * 4, 4 * 4, 8 * 4, 2 * 4]
"""Bytes of the parameters: stem, up, down, head, each a weight and a bias."""


def _call(kind: str, size: int, phase: str = "backward", dtype: str = "float32") -> Call:
    return Call(kind, size, 2, dtype, phase, 0)  # type: ignore[arg-type]


STEP = (
    _call("reduce_scatter", 200),
    _call("reduce_scatter", 100),
    _call("all_reduce", 8, "step", "float64"),
    _call("all_gather", 200, "step"),
    _call("all_gather", 100, "step"),
)


def _violation(
    *ranks: Sequence[Call], says: Sequence[Call] | None = STEP, case: Case = CASE
) -> Violation | None:
    layout = None if says is None else Layout(lines=(), calls=tuple(says), last=0)
    measured = [Measured(calls=(tuple(calls),), steps=1, layout=layout) for calls in ranks]
    checked = check(case, measured)
    assert checked.exercised
    return checked.violation


def test_what_is_predicted_holds() -> None:
    assert _violation(STEP, STEP) is None
    assert _violation(STEP, STEP, says=None) is None


def test_without_a_layout_ranks_must_agree() -> None:
    violation = _violation(STEP, (*STEP[:4], _call("all_gather", 102, "step")), says=None)
    assert violation is not None
    assert violation.ranks == (0, 1)
    assert violation.causes == ("ranks call other collectives",)
    assert (violation.observed, violation.expected) == (102.0, 100.0)
    assert "rank 1 calls all_gather of 102 bytes" in violation.explanation
    assert "rank 0 all_gather of 100 bytes" in violation.explanation


def test_a_rank_that_calls_less_is_named() -> None:
    violation = _violation(STEP, STEP[:4], says=None)
    assert violation is not None and violation.ranks == (0, 1)
    assert "rank 1 calls nothing as collective 5" in violation.explanation


def test_messages_between_two_ranks_may_differ() -> None:
    assert _violation(STEP, (*STEP, _call("send", 8)), says=None) is None
    sizes = [(*STEP, _call("all_to_all", size)) for size in (8, 24)]  # rows to each rank's experts
    assert _violation(*sizes, says=None) is None
    assert _violation(sizes[0], STEP, says=None) is not None


def test_stages_call_collectives_of_their_own() -> None:
    two = Case(mesh=(4,), sharding=Sharding(pipeline_parallel=2))
    assert _violation(STEP, STEP, STEP[1:], STEP[1:], says=None, case=two) is None
    violation = _violation(STEP, STEP, STEP[1:], STEP, says=None, case=two)
    assert violation is not None and violation.ranks == (2, 3)


def test_only_ranks_unlike_their_layout_are_blamed() -> None:
    layout, other = (Layout(lines=(), calls=calls, last=0) for calls in (STEP, STEP[1:]))
    measured = [Measured(calls=(STEP,), steps=1, layout=one) for one in (layout, other)]
    violation = check(CASE, measured).violation
    assert violation is not None and violation.ranks == (1,)


@pytest.mark.parametrize("field", ["kind", "bytes", "ranks", "dtype", "phase"])
def test_each_field_counts(field: str) -> None:
    values = {"kind": "broadcast", "bytes": 99, "ranks": 1, "dtype": "int8", "phase": "forward"}
    changed = (msgspec.structs.replace(STEP[0], **{field: values[field]}), *STEP[1:])
    violation = _violation(changed, changed)
    assert violation is not None and violation.ranks == (0, 1)
    assert "as collective 1 of the step" in violation.explanation


def _all_reduced(call: Call) -> Call:
    reduces = call.kind == "reduce_scatter"
    return msgspec.structs.replace(call, kind="all_reduce") if reduces else call


def _twice(call: Call) -> Call:
    return msgspec.structs.replace(call, bytes=2 * call.bytes, dtype="float32")


CHANGES: dict[str, tuple[Callable[[tuple[Call, ...]], tuple[Call, ...]], tuple[str, ...]]] = {
    "all-reduced": (
        lambda calls: tuple(_all_reduced(call) for call in calls),
        ("all_reduce in place of reduce_scatter",),
    ),
    "each microbatch": (
        lambda calls: (*calls[:2], *calls[:2], *calls),
        ("reduced with each microbatch",),
    ),
    "one of them in float64": (
        lambda calls: (calls[0], _call("reduce_scatter", 200, dtype="float64"), *calls[2:]),
        ("sent in float64",),
    ),
    "gathered twice": (lambda calls: (*calls, *calls[3:]), ("gathered twice",)),
    "reduced twice": (lambda calls: (*calls[:2], *calls), ("reduced twice",)),
    "parameters": (
        lambda calls: (*[_call("reduce_scatter", size) for size in SIZES], *calls[2:]),
        ("one collective per parameter",),
    ),
    "another order": (lambda calls: calls[::-1], ("another order",)),
    "one more": (lambda calls: (*calls, _call("barrier", 0, "step", "")), ("called once more",)),
    "more": (lambda calls: (*calls, *[_call("broadcast", 8)] * 2), ("further collectives",)),
    "one less": (lambda calls: calls[1:], ("one left out",)),
    "less": (lambda calls: calls[2:], ("collectives left out",)),
    "pieces": (lambda calls: (_call("reduce_scatter", 300), *calls[2:]), ("in other pieces",)),
    "something else": (lambda calls: (_call("reduce_scatter", 7), *calls[2:]), ()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_causes(name: str) -> None:
    change, causes = CHANGES[name]
    violation = _violation(change(STEP), change(STEP))
    assert violation is not None
    assert violation.causes == causes
    assert (violation.wrong, violation.total) == (len(change(STEP)), len(STEP))


@pytest.mark.parametrize(
    ("unfreeze", "left", "causes"),
    [
        (1, (0, 1), ("not unfrozen",)),
        (1, (1,), ("not unfrozen",)),  # of two units that came with it, one is still frozen
        (1, (2,), ("one left out",)),  # was there before
        (None, (0,), ("one left out",)),
    ],
)
def test_the_calls_from_before_an_unfreezing(
    unfreeze: int | None, left: tuple[int, ...], causes: tuple[str, ...]
) -> None:
    training = Training(steps=2, unfreeze=unfreeze)
    case = msgspec.structs.replace(CASE, model=Model(frozen=("stem.*",)), training=training)
    later = tuple(msgspec.structs.replace(call, step=1) for call in STEP)
    before = STEP[1:] if unfreeze is None else STEP[2:]
    layout = Layout(lines=(), calls=(*before, *later), last=1)
    called = tuple(call for place, call in enumerate(later) if place not in left)
    measured = Measured(calls=(before, called), steps=2, layout=layout)
    violation = check(case, [measured] * 2).violation
    assert violation is not None and violation.step == 1
    assert violation.causes == causes


def test_one_call_rules_a_cause_out() -> None:
    calls = (*(_all_reduced(call) for call in STEP), _call("broadcast", 8))
    violation = _violation(calls, calls)
    assert violation is not None and violation.causes == ()


def test_a_list_of_buckets_is_as_long_as_the_buckets_are_many() -> None:
    """DDP broadcasts it, as whole numbers, when it makes them anew."""
    says = (_call("broadcast", 36, "forward", "int32"), *STEP)
    calls = (
        _call("broadcast", 64, "forward", "int32"),
        *[_call("reduce_scatter", size) for size in SIZES],
        *STEP[2:],
    )
    violation = _violation(calls, calls, says=says)
    assert violation is not None and violation.causes == ("one collective per parameter",)


def test_the_width_of_a_dtype() -> None:
    says = tuple(_call("reduce_scatter", size, dtype="bfloat16") for size in (24, 30))
    violation = _violation(tuple(map(_twice, says)), tuple(map(_twice, says)), says=says)
    assert violation is not None and violation.causes == ("sent in float32",)


def test_steps_that_are_not_told_of_are_as_the_last_one() -> None:
    calls = tuple(
        Call("all_reduce", size, 2, "float32", "backward", step) for step, size in ((0, 8), (2, 12))
    )
    layout = Layout(lines=(), calls=calls, last=2)
    answer = [[call.bytes for call in predicted(layout, step)] for step in range(5)]
    assert answer == [[8], [], [12], [12], [12]]
    quiet = Layout(lines=(), calls=calls[:1], last=1)
    assert predicted(quiet, 0) and not predicted(quiet, 1) and not predicted(quiet, 9)
    always = (Call("all_reduce", 8, 2, "float32", "backward"),)
    assert predicted(Layout(lines=(), calls=always), 7) == always


def test_the_step_of_a_violation() -> None:
    says = tuple(msgspec.structs.replace(call, step=-1) for call in STEP)
    layout = Layout(lines=(), calls=says)
    measured = [Measured(calls=(STEP, STEP, STEP[1:]), steps=3, layout=layout)] * 2
    violation = check(CASE, measured).violation
    assert violation is not None and violation.step == 2


def test_one_rank_sends_nothing() -> None:
    alone = msgspec.structs.replace(CASE, mesh=(1,))
    checked = check(alone, [Measured(calls=((),), steps=1, layout=Layout(lines=(), calls=()))])
    assert checked.exercised and checked.vacuous and checked.violation is None
    assert not check(alone, [Measured()]).exercised


def test_volumes() -> None:
    """An all-reduce is a reduce-scatter and an all-gather; a rank keeps what is its own."""
    assert volume([_call("all_reduce", 100)]) == volume([_call("all_gather", 100)] * 2) == 100
    psi = trained_bytes(CASE)
    assert psi == sum(SIZES)
    assert in_psi(volume([_call("all_reduce", psi)]), psi, 2) == 2
    three = [_call("all_gather", psi)] * 2 + [_call("reduce_scatter", psi)]
    assert in_psi(volume(three), psi, 2) == 3
