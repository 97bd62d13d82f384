"""Norm and clipping on a few elements, with errors just inside and just outside of the bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small import SIZE, held, layout

from zerocheck.case.schema import Case, Training
from zerocheck.contract.semantics import Semantics
from zerocheck.floating_point import BF16, ETA, FP32, U
from zerocheck.judge import pieces
from zerocheck.judge.bounds import narrow_norm_relative
from zerocheck.judge.clipping import (
    coefficient,
    elements_of,
    formats_of,
    narrow_only,
    norm_relative,
    true_norm,
)
from zerocheck.judge.diagnose.clip import Norm, norm_causes, sentence_of
from zerocheck.judge.layout import Formats
from zerocheck.judge.obligations.clip import _norm_bound, check_clipped, check_norm
from zerocheck.protocol.verdicts import Violation

SECOND_ORDER = 1.000001
GRADIENT = [1.0, -2.0, 4.0, -4.0, 2.0, 2.0, 2.0, 0.0]
NORM = 7.0
assert math.hypot(*GRADIENT) == NORM


def _case(norm: str = "2", clip: float = 3.5) -> Case:
    return Case(mesh=(2,), training=Training(clip=clip, norm=norm))  # type: ignore[arg-type]


def _norm(
    *reported: float | None, case: Case | None = None, gradient: object = None
) -> tuple[float, Violation | None]:
    shown = held(GRADIENT, GRADIENT) if gradient is None else gradient
    return check_norm(
        reported,
        shown,  # type: ignore[arg-type]
        None,
        layout(),
        case or _case(),
        Semantics(),
        step=0,
    )


RELATIVE = U * (SIZE / 2 + 4) * SECOND_ORDER
WIDTH = NORM * RELATIVE + math.sqrt(SIZE * ETA)


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_the_edge_of_the_norm(side: float) -> None:
    share, violation = _norm(NORM, NORM + side * WIDTH * (1 - 1e-6))
    assert violation is None and share == pytest.approx(1.0, rel=1e-5)
    share, violation = _norm(NORM, NORM + side * WIDTH * (1 + 1e-6))
    assert violation is not None
    assert violation.ranks == (1,) and violation.role == "norm" and violation.obligation == "clip"
    assert share == violation.ratio == pytest.approx(1.0, rel=1e-5)
    assert violation.expected == NORM and violation.bound == pytest.approx(WIDTH, rel=1e-9, abs=0.0)


def test_norms_that_are_not_told_or_not_numbers() -> None:
    assert _norm(None, NORM)[1] is None
    _, violation = _norm(math.nan, NORM)
    assert violation is not None and violation.ranks == (0,) and violation.ratio is None
    _, violation = _norm(None, 1.0)
    assert violation is not None and violation.ranks == (1,)
    # Of a gradient that overflows there is no true norm.
    inf = [math.inf, *GRADIENT[1:]]
    assert _norm(math.inf, math.inf, gradient=held(inf, inf))[1] is None


def test_the_norm_of_zeros_has_the_underflow_of_squares() -> None:
    zeros = held([0.0] * SIZE)
    assert _norm(0.9 * math.sqrt(SIZE * ETA), gradient=zeros)[1] is None
    assert _norm(1.1 * math.sqrt(SIZE * ETA), gradient=zeros)[1] is not None
    share, violation = _norm(0.0, case=_case("inf"), gradient=zeros)
    assert (share, violation) == (0.0, None)


def test_the_largest_element_is_exact() -> None:
    case = _case("inf")
    assert _norm(4.0, case=case)[1] is None
    share, violation = _norm(math.nextafter(4.0, 5.0), case=case)
    assert violation is not None and share == math.inf and violation.bound == 0.0
    assert true_norm(torch.tensor([]), case) == 0.0
    assert true_norm(torch.tensor([-5.0, 4.0]), case) == 5.0


def test_only_the_report_is_wrong() -> None:
    half = [x / 2 for x in GRADIENT]
    shown, clipped = held(GRADIENT, GRADIENT), held(half, half)
    for given, mild in ((clipped, True), (shown, False), (None, False)):
        _, violation = check_norm(
            [9.0, 9.0], shown, given, layout(), _case(clip=3.5000005), Semantics(), step=0
        )
        assert violation is not None and violation.mild is mild
        assert violation.ranks == (0, 1)
        assert ("only the report is wrong" in violation.explanation) is mild


def test_clipped_by_the_right_norm_is_told_within_its_bound() -> None:
    """Of each element 4 u of the coefficient, u / 2 or more of the product and that of a norm."""
    for units, mild in ((0, True), (10, True), (-10, True), (16, False), (-16, False)):
        clipped = held(_times(FACTOR * (1 + units * U)))
        _, violation = check_norm(
            [9.0], held(GRADIENT), clipped, layout(), _case(), Semantics(), step=0
        )
        assert violation is not None and violation.mild is mild, units


def test_causes_explain_all_ranks() -> None:
    _, violation = _norm(4.0, 4.0)
    assert violation is not None and violation.causes
    _, other = _norm(4.0, math.nan)
    assert other is not None and other.causes == () and other.ranks == (0, 1)


@pytest.mark.parametrize(
    ("reported", "causes"),
    [
        (math.sqrt(44.0), True),  # without a
        (3.0, True),  # without b
        (math.sqrt(45.0), True),  # without c
        (math.sqrt(48.0), False),  # without one element of a
        (2.0, False),  # without a and b
    ],
)
def test_the_norm_without_one_parameter(reported: float, causes: bool) -> None:
    _, violation = _norm(reported, reported)
    assert violation is not None
    assert violation.causes == (("norm without some parameters",) if causes else ())
    inside = reported * (1 + RELATIVE * 0.9)
    _, violation = _norm(inside, inside)
    assert violation is not None and bool(violation.causes) is causes
    outside = reported * (1 + RELATIVE + 8 * U)
    _, violation = _norm(outside, outside)
    assert violation is not None and not violation.causes


def _without(reported: float, kind: str = "2", **tensors: float) -> tuple[Norm, tuple[str, ...]]:
    """A norm on one rank, and its causes. tensors: norms; "__" in place of a dot."""
    norms = {name.replace("__", "."): value for name, value in tensors.items()}
    whole = torch.tensor(list(norms.values()), dtype=torch.float64)
    exact = max(norms.values()) if kind == "inf" else math.hypot(*norms.values())
    norm = Norm(
        reported, exact, whole, [whole], 0, True, None, 8 * U, 0.0, {}, by_tensor=norms
    )  # fmt: skip
    return norm, norm_causes([norm], kind)


EXPERTS = {
    "stem__weight": 5.0,
    "blocks__0__experts__0__up": 3.0, "blocks__0__experts__0__down": 1.25,
    "blocks__0__experts__1__up": 7.0, "blocks__0__experts__2__up": 11.0,
    "side__weight": 2.5, "side__bias": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (("side__weight", "side__bias"), "side"),
        (("side__bias",), "side.bias"),
        (("blocks__0__experts__0__up", "blocks__0__experts__0__down"), "blocks.0.experts.0"),
        (
            ("blocks__0__experts__0__up", "blocks__0__experts__0__down",
             "blocks__0__experts__2__up"),
            "blocks.0.experts.0, blocks.0.experts.2",
        ),
        (("blocks__0__experts__0__up", "side__bias"), ""),
    ],
)  # fmt: skip
def test_the_norm_without_one_module_or_several_of_a_list(
    missing: tuple[str, ...], words: str
) -> None:
    reported = math.hypot(*(norm for name, norm in EXPERTS.items() if name not in missing))
    norm, causes = _without(reported, **EXPERTS)
    assert causes == (("norm without some parameters",) if words else ())
    if words:
        assert sentence_of(causes[0], norm, "2") == f"it is the norm without those of {words}"


def test_the_largest_element_without_one_module() -> None:
    assert _without(7.0, "inf", **EXPERTS)[1] == ("norm without some parameters",)
    assert _without(6.0, "inf", **EXPERTS)[1] == ()


def test_what_is_left_out_is_asked_for_last() -> None:
    """The norm of one shard may be that of all parameters but some."""
    assert _without(0.0, a=3.0, b=4.0)[1] == ("norm of nothing",)
    norm, _ = _without(3.0, a=3.0, b=4.0)
    shards = [torch.tensor([3.0]), torch.tensor([4.0])]
    first = norm._replace(shards=shards, complete=False)
    assert norm_causes([first], "2") == ("local norm",)
    # The other rank, whose shard is not that, reports the same.
    assert norm_causes([first, first._replace(rank=1)], "2") == ("norm without some parameters",)


def test_squares_of_bf16_underflow_earlier() -> None:
    case = _case()
    narrow = Formats(((FP32, torch.tensor([0])), (BF16, torch.tensor([1, 2, 3]))), 4)
    _, floor = _norm_bound(torch.zeros(4), narrow, case)
    assert floor == math.sqrt(4 * BF16.eta) > math.sqrt(4 * ETA)
    assert _norm_bound(torch.zeros(4), Formats(((FP32, None),), 4), case)[1] == math.sqrt(4 * ETA)


@pytest.mark.parametrize("at_once", [3, 4, 8])
def test_the_norm_of_pieces(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "AT_ONCE", at_once)
    assert true_norm(torch.tensor(GRADIENT), _case()) == pytest.approx(NORM, rel=1e-15)
    assert true_norm(torch.tensor(GRADIENT[::-1]), _case("inf")) == 4.0


def test_each_rank_by_its_own_gradient() -> None:
    """Where copies differ, which is another finding; shards that came otherwise by the whole."""
    other = [3.0, *GRADIENT[1:]]
    shown = held(GRADIENT, other)
    given = [NORM, NORM], layout(), _case(), Semantics()
    own = held(_times(FACTOR), [3.0 * FACTOR, *_times(FACTOR)[1:]])
    own = replace(own, plans=shown.plans)
    assert check_clipped(own, shown, *given, step=0)[1] is None
    turned = held([*_times(FACTOR)[4:], *_times(FACTOR)[:4]], ranges=([*range(4, 8), *range(4)],))
    assert check_clipped(turned, held(GRADIENT), [NORM], *given[1:], step=0)[1] is None


def test_the_error_of_a_norm_that_is_not_told_is_relative() -> None:
    small = [x / 1024 for x in GRADIENT]
    norm, case = NORM / 1024, _case(clip=NORM / 2048)
    factor = case.training.clip / (norm + 1e-6)  # type: ignore[operator]
    for units, fine in ((0.9, True), (3.0, False)):
        off = [x * factor * (1 + units * RELATIVE) for x in small]
        _, violation = check_clipped(
            held(off), held(small), [None], layout(), case, Semantics(), step=0
        )
        assert (violation is None) is fine, units


@pytest.mark.parametrize(("clipped", "fine"), [(math.inf, True), (3.0, False)])
def test_an_infinite_gradient_stays_infinite(clipped: float, fine: bool) -> None:
    first = (range(1),)
    given = held([clipped], ranges=first), held([math.inf], ranges=first)
    _, violation = check_clipped(*given, [NORM], layout(), _case(), Semantics(), step=0)
    assert (violation is None) is fine


def test_elements_that_somebody_holds() -> None:
    ranges = (range(0, 3), range(3, 6))
    parts = held(GRADIENT[:3], GRADIENT[3:6], ranges=ranges)
    assert elements_of(parts, 0).tolist() == GRADIENT[:6]
    # Copies differ: each rank has its own.
    both = held(GRADIENT[:4], [*GRADIENT[2:3], 9.0, *GRADIENT[4:]], ranges=(range(4), range(2, 8)))
    assert elements_of(both, 0).tolist() == GRADIENT
    assert elements_of(both, 1).tolist() == [*GRADIENT[:3], 9.0, *GRADIENT[4:]]
    whole = held(GRADIENT, [9.0] * SIZE)
    assert elements_of(whole, 1).tolist() == [9.0] * SIZE


def test_the_formats_of_what_is_held() -> None:
    narrow = layout(narrow=True)
    parts = held(GRADIENT[2:4], GRADIENT[4:6], ranges=(range(2, 4), range(4, 6)))
    assert narrow_only(formats_of(parts, narrow))
    assert not narrow_only(formats_of(held(GRADIENT), narrow))
    squares = [x * x for x in GRADIENT]
    share = sum(squares[2:6]) / sum(squares) * (1 + 4 * U)
    found = norm_relative(torch.tensor(GRADIENT), formats_of(held(GRADIENT), narrow), _case())
    assert found == pytest.approx(narrow_norm_relative(SIZE, share, 2, BF16), rel=1e-12, abs=0.0)
    for numbers in ([0.0] * SIZE, [0.0, 0.0, 1.0, *[0.0] * 5]):
        found = norm_relative(torch.tensor(numbers), formats_of(held(numbers), narrow), _case())
        assert found == pytest.approx(narrow_norm_relative(SIZE, 1.0, 2, BF16), rel=1e-12, abs=0.0)


def _clipped(
    *parts: list[float],
    norms: tuple[float | None, ...] = (NORM, NORM),
    clip: float = 3.5,
    rule: str = "min(1, c/(norm+eps))",
    narrow: bool = False,
) -> tuple[float, Violation | None]:
    return check_clipped(
        held(*parts),
        held(GRADIENT, GRADIENT),
        norms,
        layout(narrow=narrow),
        _case(clip=clip),
        Semantics(clip=rule),  # type: ignore[arg-type]
        step=0,
    )


def _times(factor: float, element: int | None = None, by: float = 1.0) -> list[float]:
    return [
        float(torch.tensor(x * factor * (by if i == element else 1.0), dtype=torch.float32))
        for i, x in enumerate(GRADIENT)
    ]


FACTOR = 3.5 / (NORM + 1e-6)


def test_the_edge_of_the_clipped_gradient() -> None:
    right = _times(FACTOR)
    share, violation = _clipped(right, right)
    assert violation is None and 0 < share <= 0.5
    # Of 4 * FACTOR: 4 u of just below 2, and half a unit of that, u.
    for by, fine in ((4, True), (7, False), (-4, True), (-7, False)):
        off = _times(FACTOR, 2, 1 + by * U)
        share, violation = _clipped(right, off)
        assert (violation is None) is fine, by
        if violation is not None:
            assert violation.ranks == (1,) and violation.element == (0, 0) and share > 1.0
            assert violation.tensors == ("b",)


def test_each_rank_by_its_own_norm() -> None:
    right, other = _times(FACTOR), _times(3.5 / (14 + 1e-6))
    assert _clipped(right, other, norms=(NORM, 14.0))[1] is None
    assert _clipped(right, other)[1] is not None
    # Not told: that of the gradient, with the error of a norm.
    assert _clipped(right, right, norms=(None, None))[1] is None
    off = _times(FACTOR * (1 + 0.9 * RELATIVE))
    assert _clipped(off, off)[1] is not None
    assert _clipped(off, off, norms=(None, None))[1] is None
    off = _times(FACTOR * (1 + 3 * RELATIVE))
    assert _clipped(off, off, norms=(None, None))[1] is not None


def test_what_is_not_clipped_keeps_every_bit() -> None:
    assert _clipped(GRADIENT, GRADIENT, clip=8.0)[1] is None
    for by in (2, -2):
        assert _clipped(GRADIENT, _times(1.0, 2, 1 + by * U), clip=8.0)[1] is not None
    # Round-off decides whether it is clipped at 7: what has been multiplied may be off.
    for units, fine in ((0, True), (4, True), (7, True), (9, False)):
        clip = NORM * (1 + units * U) + 1e-6
        off = _times(1.0, 2, 1 + 2 * U)
        assert (_clipped(GRADIENT, off, clip=clip)[1] is None) is fine, units


def test_bf16_decides_only_where_all_is_bf16() -> None:
    off = _times(1.0, 2, 1 + 2 * U)
    assert _clipped(GRADIENT, off, clip=NORM * (1 + 9 * U) + 1e-6, narrow=True)[1] is not None
    only, ranges = GRADIENT[2:6], (range(2, 6),)
    off = [only[0] * (1 + 2.0**-9), *only[1:]]
    norm = math.hypot(*only)
    for units, fine in ((7, True), (9, False)):
        case = _case(clip=norm * (1 + units * 2.0**-8) + 1e-6)
        _, violation = check_clipped(
            held(off, ranges=ranges),
            held(only, ranges=ranges),
            [norm],
            layout(narrow=True),
            case,
            Semantics(),
            step=0,
        )
        assert (violation is None) is fine, units


def test_rules() -> None:
    plain = Semantics(clip="c/norm if norm>c")
    assert coefficient(NORM, _case(), plain) == 0.5
    assert coefficient(NORM, _case(), Semantics()) == FACTOR
    half = _times(0.5)
    assert _clipped(half, half, rule="c/norm if norm>c")[1] is None


def test_bf16_among_fp32() -> None:
    """`b` may be off by its own roundings, and no other."""
    right = _times(FACTOR)
    for by, fine in ((1.5, True), (-1.5, True), (4.0, False), (-4.0, False)):
        share, violation = _clipped(right, _times(FACTOR, 2, 1 + by * 2**-8), narrow=True)
        assert (violation is None) is fine, (by, share)
    assert _clipped(right, _times(FACTOR, 0, 1 + 2**-8), narrow=True)[1] is not None
