"""Losses, random states, buffers and the agreement on skipping, from a few numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from small import SIZE, layout, state

from zerocheck.case.mesh import mesh_of
from zerocheck.case.schema import Case, Training
from zerocheck.contract.semantics import Semantics
from zerocheck.judge import skip
from zerocheck.judge.obligations import buffers, loss
from zerocheck.judge.step_replay import entering
from zerocheck.protocol.observations import StepObservation
from zerocheck.protocol.verdicts import Violation

RIGHT = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def _loss(observed: Sequence[Sequence[float]]) -> Violation | None:
    violation = loss.check(observed, RIGHT, step=3)
    assert loss.same(observed, RIGHT) is (violation is None)
    return violation


def test_right_losses() -> None:
    assert _loss(RIGHT) is None
    for odd in (math.nan, math.inf, -math.inf):
        assert loss.same([[odd]], [[odd]])
        assert not loss.same([[odd]], [[1.0]]) and not loss.same([[1.0]], [[odd]])


def test_the_first_loss_that_is_wrong_on_each_rank() -> None:
    violation = _loss([[1.0, 2.0], [3.0, 4.5], [5.5, 7.0]])
    assert violation is not None and violation.obligation == "loss" and violation.step == 3
    assert violation.ranks == (1, 2)
    assert (violation.observed, violation.expected) == (4.5, 4.0)
    assert "microbatch 1 on rank 1 " in violation.explanation
    violation = _loss([[1.0, 2.0], [3.5, 4.0], [5.0, 6.0]])
    assert violation is not None and violation.ranks == (1,)
    assert "microbatch 0 on rank 1 " in violation.explanation


def test_nan_is_named_only_where_none_belongs() -> None:
    violation = _loss([[1.0, math.nan], [3.0, 4.0], [5.0, 6.0]])
    assert violation is not None and violation.causes == ("uninitialised memory",)
    violation = loss.check([[1.0]], [[math.nan]], step=0)
    assert violation is not None and violation.causes != ("uninitialised memory",)
    violation = loss.check([[7.0]], [[1.0]], step=0, evaluated=lambda: [[7.0]])
    assert violation is not None and violation.causes == ("evaluation mode",)
    violation = loss.check([[2.0]], [[1.0]], step=0)
    assert violation is not None and violation.causes != ("uninitialised memory",)


def test_too_few_and_too_many_losses() -> None:
    violation = _loss([[1.0, 2.0], [3.0], [5.0, 6.0]])
    assert violation is not None and violation.causes == ("microbatch dropped",)
    assert violation.ranks == (1,)
    violation = _loss([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0, 6.0]])
    assert violation is not None and violation.causes == ("microbatch doubled",)
    assert violation.ranks == (2,)


def test_random_states() -> None:
    mesh = mesh_of((2,))
    assert loss.check_random([[b"a", b"b"], [b"c", b"d"]], mesh, step=0) is None
    assert loss.check_random([[b"a", b"a"], [b"c", b"d"]], mesh, step=0) is None, "one rank's own"
    assert loss.check_random([[], []], mesh, step=0) is None
    violation = loss.check_random([[b"a", b"b"], [b"x"], [b"c", b"b"]], mesh_of((3,)), step=1)
    assert violation is not None and violation.ranks == (0, 2)


NAN = math.nan


def _buffers(
    seen: Sequence[Sequence[float]], semantics: Semantics | None = None
) -> Violation | None:
    wanted = [{"n": torch.tensor([1.0, NAN]), "m": torch.tensor([2.0, 3.0])} for _ in range(3)]
    observed = [
        {"n": wanted[0]["n"].clone(), "m": torch.tensor(numbers), "other": torch.ones(1)}
        for numbers in seen
    ]
    return buffers.check(observed, wanted, semantics or Semantics(), step=1, before=wanted)


def test_buffers() -> None:
    right = [2.0, 3.0]
    assert _buffers([right] * 3) is None, "NaN where NaN belongs"
    violation = _buffers([right, [2.0, 3.5], [2.0, 4.0]])
    assert violation is not None and violation.tensors == ("m",) and violation.ranks == (1, 2)
    assert (violation.observed, violation.expected) == (3.5, 3.0)
    assert (violation.wrong, violation.total, violation.bound) == (1, 2, 0.0)
    violation = _buffers([right, [2.0, NAN], right])
    assert violation is not None and violation.ranks == (1,)
    nan = {"m": torch.tensor([0.0])}, {"m": torch.tensor([NAN])}
    for one, other in (nan, nan[::-1]):
        assert buffers.check([one], [other], Semantics(), step=0, before=[one]) is not None


@pytest.mark.parametrize(("by", "fine"), [(0.5, True), (-0.5, True), (0.625, False)])
def test_the_edge_of_a_buffer_with_a_tolerance(by: float, fine: bool) -> None:
    wanted = [{"m": torch.tensor([2.0, 3.0])}]
    seen = [{"m": torch.tensor([2.0, 3.0 + by])}]
    given = {"step": 0, "before": wanted, "tolerances": {"m": 0.5}}
    assert (buffers.check(seen, wanted, Semantics(), **given) is None) is fine  # type: ignore[arg-type]


def test_whose_buffers_enter_a_step() -> None:
    own = [{"m": torch.zeros(1)}, {"m": torch.ones(1)}]
    assert entering(own, "local") == own
    for sent in ("rank0", "rank0_each"):
        entered = entering(own, sent)
        assert len(entered) == 2 and all(one is own[0] for one in entered)


def _told(*ranks: tuple[bool, float]) -> list[StepObservation]:
    return [
        StepObservation(losses=(1.0,), skipped=skipped, loss_scale=scale)
        for skipped, scale in ranks
    ]


@pytest.mark.parametrize(
    ("answer", "ranks", "cause"),
    [
        ([(False, 1.0), (False, 1.0)], None, ""),
        ([(True, 2.0), (True, 2.0)], None, ""),
        ([(True, 2.0), (False, 2.0)], (0,), "ranks disagree"),
        ([(False, 2.0), (False, 2.0), (True, 2.0)], (2,), "ranks disagree"),
        ([(False, 2.0), (False, 4.0)], (), "ranks disagree"),
        ([(False, 2.0), (False, -2.0)], (1,), "loss scale"),
        ([(False, 0.0), (False, 1.0)], (0,), "loss scale"),
        ([(False, math.inf), (False, 1.0)], (0,), "loss scale"),
        ([(False, math.nan), (False, math.nan)], (0, 1), "loss scale"),
        ([(False, 0.5), (False, 0.5)], None, ""),
    ],
)
def test_what_ranks_report(
    answer: list[tuple[bool, float]], ranks: tuple[int, ...] | None, cause: str
) -> None:
    violation = skip.check_reports(_told(*answer), step=2)
    assert (violation and violation.ranks) == ranks
    if violation is not None:
        assert violation.causes == (cause,) and violation.step == 2


P, M = [1.0] * SIZE, [2.0] * SIZE


@pytest.mark.parametrize(
    ("skipped", "finite", "scaling", "over", "cause"),
    [
        (True, True, True, True, "step skipped"),
        (True, True, False, True, "step skipped"),
        (True, False, True, True, None),
        (True, False, False, True, None),
        (True, None, True, True, None),
        (False, True, True, False, None),
        (False, True, False, False, None),
        (False, False, True, True, "step not skipped"),
        (False, False, False, False, None),
        (False, None, True, False, None),
    ],
)
def test_when_a_step_is_skipped(
    skipped: bool, finite: bool | None, scaling: bool, over: bool, cause: str | None
) -> None:
    one = state(P, exp_avg=M)
    case = Case(mesh=(2,), training=Training(loss_scale=8.0 if scaling else None))
    answer = _told((skipped, 8.0), (skipped, 8.0))
    found, violation = skip.check(one, one, layout(), case, answer, finite=finite, step=1)
    assert found is over
    assert (violation and violation.causes[0]) == cause


@pytest.mark.parametrize("role", ["parameter", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"])
def test_a_skipped_step_leaves_every_bit(role: str) -> None:
    moments = {"exp_avg": M, "exp_avg_sq": M, "max_exp_avg_sq": M}
    before, after = state(P, **moments), state(P, **moments)
    if role == "step":
        after.steps[2] = 2.0
    else:
        vector = after.parameter if role == "parameter" else after.moments[role]
        vector[6] = torch.nextafter(vector[6], torch.tensor(9.0))
    answer = _told((True, 8.0), (True, 8.0))
    case = Case(mesh=(2,), training=Training(loss_scale=8.0))
    over, violation = skip.check(before, after, layout(), case, answer, finite=False, step=1)
    assert over and violation is not None
    assert violation.role == role and violation.tensors == ("c",)
    if role != "step":
        assert (violation.wrong, violation.total, violation.bound) == (1, SIZE, 0.0)
        assert violation.observed == float(vector[6]) != violation.expected
    # Of what is frozen nobody keeps moments or a count.
    frozen = layout(frozen="c")
    over, violation = skip.check(before, after, frozen, case, answer, finite=False, step=1)
    assert over and (violation is None) is (role != "parameter")
    # A step that was not skipped changes what it likes.
    answer = _told((False, 8.0), (False, 8.0))
    assert skip.check(before, after, layout(), case, answer, finite=True, step=1) == (False, None)
