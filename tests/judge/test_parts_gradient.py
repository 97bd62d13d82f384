"""The enclosure of the reduced gradient and who must have one, on a few elements."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small import SIZE, held, layout

from zerocheck.case.schema import Case, Model, Training
from zerocheck.contract.semantics import Semantics
from zerocheck.floating_point import BF16, ETA, FP32, U
from zerocheck.judge import bounds
from zerocheck.judge.compare import compare
from zerocheck.judge.expected import Expected, expected, loss_divisor
from zerocheck.judge.layout import ParameterLayout
from zerocheck.judge.local import Passes
from zerocheck.judge.obligations.gradient import check
from zerocheck.judge.precision import path_of

SECOND_ORDER = 1.000001
CASE = Case(mesh=(3,), training=Training(microbatches=2))
RANKS = CASE.axes.data_parallel_size


def _passes(world: int = 3, count: int = 2, *, zero: bool = False) -> Passes:
    """Every local gradient is 1, but for the first rank's last, which is -1."""
    gradients = torch.ones(world, count, SIZE)
    gradients[0, count - 1] = -1.0
    arrived = torch.ones(world, count, 5, dtype=torch.bool)
    return Passes(gradients * (not zero), arrived, [[0.5] * count] * world, [{}] * world)


def _enclosure(semantics: Semantics, **given: object) -> tuple[float, float]:
    passes = given.pop("passes", _passes())
    made = expected(passes, layout(), CASE, semantics, **given).enclosure  # type: ignore[arg-type]
    assert made.exact.unique().numel() == made.bound.unique().numel() == 1
    return float(made.exact[0]), float(made.bound[0])


@pytest.mark.parametrize(
    ("semantics", "divisor", "roundings"),
    [
        (Semantics(), 3, 2 + 1 + 2),
        (Semantics(average="sum"), 1, 2 + 1),
        (Semantics(divide="gradient"), 6, 2 + 1 + 2),
        (Semantics(divide_ranks="loss"), 3, 2 + 1),
        (Semantics(divide_ranks="loss", average="sum"), 1, 2 + 1),
        (Semantics(average="sum", divide="gradient"), 2, 2 + 1),
        (Semantics(accumulate="reduce_each"), 3, 2 * (2 + 2) + 1),
    ],
)
def test_enclosure(semantics: Semantics, divisor: int, roundings: int) -> None:
    exact, bound = _enclosure(semantics)
    assert exact == pytest.approx(4 / divisor, rel=1e-15, abs=0.0)
    k = roundings * U
    assert bound == pytest.approx(k / (1 - k) * 6 / divisor * SECOND_ORDER, rel=1e-9, abs=0.0)


@pytest.mark.parametrize(
    ("scales", "more", "lost"),
    [
        ((), 0, 0.0),
        ((1.0, 1.0, 1.0), 0, 0.0),
        ((1024.0, 512.0, 1024.0), 0, 1 + 3 / 512),
        ((1.0, 1.0, 0.5), 0, 1 + 3 / 0.5),
        ((1.0, 3.0, 4.0), 2, 1 + 5 / 1.0),
    ],
)
def test_loss_scales(scales: tuple[float, ...], more: int, lost: float) -> None:
    semantics = Semantics(average="sum")
    bound = _enclosure(semantics, scales=scales)[1]
    k = (3 + more) * U
    assert bound == pytest.approx(k / (1 - k) * 6 * SECOND_ORDER, rel=1e-9, abs=0.0)
    bound = _enclosure(semantics, scales=scales, passes=_passes(zero=True))[1]
    assert bound == pytest.approx((3 + more) * ETA * SECOND_ORDER + lost * ETA, rel=1e-9, abs=0.0)


def test_what_is_not_finite_must_be_just_that() -> None:
    passes = _passes()
    passes.gradients[1, 0] = math.inf
    assert _enclosure(Semantics(), passes=passes) == (math.inf, 0.0)


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_a_parameter_in_bf16_is_rounded_once_more(reduce: str) -> None:
    """A path ends with the rounding to the parameter's dtype, if its last one is another."""
    semantics = Semantics(compute="bf16", accumulate_dtype="fp32", reduce=reduce)  # type: ignore[arg-type]
    made = expected(_passes(), layout(narrow=True), CASE, semantics)
    path = path_of(CASE, semantics, microbatches=2)
    assert path[0][1] == FP32 and path[-1][1] == (BF16 if reduce == "bf16" else FP32)
    numbers = torch.tensor([4 / 3]).double(), torch.tensor([6 / 3]).double()
    once_more = () if reduce == "bf16" else ((1, BF16),)
    for element, more in ((0, ()), (2, once_more)):
        wanted = bounds.along(*numbers, (*path, *more)).bound
        assert float(made.enclosure.bound[element]) == pytest.approx(float(wanted), rel=1e-9)


def test_loss_divisor() -> None:
    assert loss_divisor(CASE, Semantics()) == 2.0
    assert loss_divisor(CASE, Semantics(divide="gradient")) == 1.0
    assert loss_divisor(CASE, Semantics(divide_ranks="loss")) == 2.0 * RANKS
    assert loss_divisor(CASE, Semantics(divide_ranks="loss", divide="gradient")) == RANKS
    assert loss_divisor(CASE, Semantics(divide_ranks="loss", average="sum")) == 2.0


def _expected(unused: str = "") -> Expected:
    made = expected(_passes(), layout(), CASE, Semantics())
    return made._replace(used=[name not in unused for name in "abcde"])


def _check(
    shown: object, wanted: Expected | None = None, case: Case = CASE, **given: object
) -> tuple[float, tuple[str, ...], tuple[int, ...], tuple[str, ...]]:
    semantics = given.pop("semantics", Semantics())
    frozen = str(given.pop("frozen", ""))
    share, violation = check(
        shown,  # type: ignore[arg-type]
        _expected() if wanted is None else wanted,
        layout(frozen=frozen),
        case,
        semantics,  # type: ignore[arg-type]
        **({"step": 0} | given),  # type: ignore[arg-type]
    )
    if violation is None:
        return share, (), (), ()
    return share, violation.tensors, violation.ranks, violation.causes


RIGHT = [float(torch.tensor(4.0) / 3.0)] * SIZE


def test_a_right_gradient_on_all_ranks() -> None:
    share, *rest = _check(held(RIGHT, RIGHT, RIGHT))
    assert 0.0 < share < 0.2 and rest == [(), (), ()]
    assert _check(None) == (0.0, (), (), ())


@pytest.mark.parametrize("wrong", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_the_ranks_that_are_wrong(wrong: tuple[int, ...]) -> None:
    parts = [[*RIGHT[:5], 1.34, *RIGHT[6:]] if rank in wrong else RIGHT for rank in range(3)]
    share, tensors, ranks, _ = _check(held(*parts))
    assert share > 1.0 and tensors == ("b",) and ranks == wrong


@pytest.mark.parametrize("wrong", [(), (0, 1, 2), (2,)])
def test_ranks_that_share_a_plan_are_compared_once(wrong: tuple[int, ...]) -> None:
    """As observations have it: with bits that rank 0 has too, what holds of it holds."""
    parts = [[*RIGHT[:5], 1.34, *RIGHT[6:]] if rank in wrong else RIGHT for rank in range(3)]
    shown = held(*parts)
    shown = replace(shown, plans=(shown.plans[0],) * 3)
    _, tensors, ranks, _ = _check(shown)
    assert (tensors, ranks) == ((("b",), wrong) if wrong else ((), ()))


def test_shards_with_equal_bits_are_judged_each_where_it_lies() -> None:
    wanted = _expected()
    wanted.enclosure.exact[4:] += 1.0
    shown = held(RIGHT[:4], RIGHT[:4], ranges=(range(4), range(4, 8)))
    assert _check(shown, wanted)[2] == (1,)


def test_a_shard_is_judged_where_it_lies() -> None:
    ranges = (range(5), range(5, 8))
    wanted = _expected()
    wanted.enclosure.exact[5] += 1.0
    parts = [RIGHT[:5], [RIGHT[0] + 1.0, *RIGHT[6:]]]
    share, tensors, _, _ = _check(held(*parts, ranges=ranges), wanted)
    assert share <= 1.0 and tensors == ()
    _, tensors, ranks, _ = _check(held(*parts, ranges=ranges))
    assert (tensors, ranks) == (("b",), (1,))


def test_who_must_have_a_gradient() -> None:
    whole = held(RIGHT, RIGHT)
    assert _check(held(RIGHT, RIGHT, absent="c"))[1:] == (("c",), (0, 1), ("gradient missing",))
    assert _check(held(RIGHT, RIGHT, absent="d"))[1] == (), "nothing is in it"
    assert _check(held(RIGHT, RIGHT, absent="c"), _expected("c"))[1] == ()
    assert _check(held(RIGHT, RIGHT, absent="c"), frozen="c")[1] == ()
    assert _check(whole, _expected("c"))[1:] == (("c",), (0, 1), ("none became zero",))
    assert _check(whole, _expected("c"), semantics=Semantics(unused="zero"))[1] == ()
    assert _check(whole, _expected("c"), frozen="c")[1] == ()


def test_one_rank_without_a_gradient() -> None:
    both, one = held(RIGHT, RIGHT), held(RIGHT, RIGHT, absent="c")
    mixed = replace(both, plans=(both.plans[0], one.plans[1]))
    assert _check(mixed)[1:] == (("c",), (1,), ("gradient missing",))


def test_zeros_that_an_earlier_step_made() -> None:
    kept = Case(mesh=(3,), training=Training(microbatches=2, set_to_none=False))
    whole, wanted = held(RIGHT, RIGHT), _expected("c")
    before = [name == "c" for name in "abcde"]
    other = [name != "c" for name in "abcde"]
    assert _check(whole, wanted, kept, used_before=before)[1] == ()
    assert _check(whole, wanted, kept, used_before=other)[1] == ("c",)
    assert _check(whole, wanted, kept)[1] == ("c",)
    assert _check(whole, wanted, CASE, used_before=before)[1] == ("c",)


def test_unfreezing() -> None:
    model = Model(frozen=("head.bias",))
    case = Case(mesh=(3,), model=model, training=Training(microbatches=2, steps=4, unfreeze=2))
    plain = layout()
    places = [replace(p, name="head.bias") if p.name == "c" else p for p in plain.places]
    by_name = {place.name: place for place in places}
    named = ParameterLayout(tuple(places), SIZE, by_name, plain.trainable, {}, plain.formats)

    def causes(shown: object, step: int, *, used: bool) -> tuple[str, ...]:
        wanted = _expected("" if used else "c")
        violation = check(
            shown,  # type: ignore[arg-type]
            wanted,
            named,
            case,
            Semantics(),
            step=step,
        )[1]
        return () if violation is None else violation.causes

    whole, without = held(RIGHT, RIGHT), held(RIGHT, RIGHT, absent="c")
    names = frozenset((*"abde", "head.bias"))
    whole = replace(whole, plans=tuple(replace(p, present=names) for p in whole.plans))
    assert causes(whole, 1, used=True) == ("gradient of a frozen parameter",)
    assert causes(whole, 2, used=True) == ()
    assert causes(without, 1, used=False) == ()
    assert causes(without, 2, used=True) == ("not unfrozen",)


IN_FP16 = Semantics(compute="fp16", accumulate_dtype="own", reduce="fp16", average="sum")


@pytest.mark.parametrize(
    ("terms", "right", "wrong"),
    [
        # In fp16 the sum of the last two overflows: with infinity it may be anything but a number.
        ((math.inf, -6e4, -6e4), (math.inf, -math.inf, math.nan), (0.0, -6e4)),
        ((6e4, 6e4, -6e4), (6e4, math.inf, math.nan), ()),
        ((math.inf, 1.0, -1.0), (math.inf,), (0.0, 6e4)),
        ((6e3, 6e3, -6e3), (6e3,), (math.inf, math.nan, 7e3)),
    ],
)
def test_partial_sums_that_overflow_fp16(
    terms: tuple[float, ...], right: tuple[float, ...], wrong: tuple[float, ...]
) -> None:
    rows = torch.tensor(terms)[:, None, None].expand(3, 1, SIZE).clone()
    arrived = torch.ones(3, 1, 5, dtype=torch.bool)
    passes = Passes(rows, arrived, [[0.5]] * 3, [{}] * 3)
    made = expected(passes, layout(), Case(mesh=(3,)), IN_FP16).enclosure
    for values, inside in ((right, True), (wrong, False)):
        for value in values:
            _, misfit = compare(torch.full((SIZE,), value, dtype=torch.float64), made)
            assert (misfit is None) == inside, value
