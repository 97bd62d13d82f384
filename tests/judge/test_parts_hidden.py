"""A gradient that is recovered from exp_avg, and a clipping that is judged by it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from small import SIZE, layout, state

from zerocheck.case.schema import Case, Group, Optimizer, Training
from zerocheck.contract.semantics import Semantics
from zerocheck.floating_point import BF16, ETA, Enclosure, U
from zerocheck.judge.bounds import clipped, narrow_norm_relative
from zerocheck.judge.hidden import Clipping, Recovered, check_clip, clipping, recover
from zerocheck.judge.manifest_plan import ManifestPlan
from zerocheck.judge.pieces import Enclosing
from zerocheck.judge.recipe import UpdateRecipe

SECOND_ORDER = 1.000001
GROUP = Group(lr=0.01, beta1=0.75, beta2=0.99)
P = [0.0] * SIZE
M0 = [1.0] * SIZE
M1 = [1.5] * SIZE


def _case(*, maximize: bool = False, clip: float | None = None, norm: str = "2") -> Case:
    return Case(
        mesh=(2,),
        optimizer=Optimizer(groups=(GROUP,), maximize=maximize),
        training=Training(clip=clip, norm=norm),  # type: ignore[arg-type]
    )


def _recovered(
    *, maximize: bool = False, counts: tuple[float | None, ...] = (2.0,) * 5, frozen: str = ""
) -> Recovered:
    before, after = state(P, exp_avg=M0), state(P, counts, exp_avg=M1)
    recipe = UpdateRecipe.of(_case(maximize=maximize))
    return recover(recipe, before, after, layout(frozen=frozen), [GROUP.lr])


@pytest.mark.parametrize("maximize", [False, True])
def test_the_gradient_that_moved_the_moment(maximize: bool) -> None:
    found = _recovered(maximize=maximize)
    # (1.5 - 0.75) / 0.25, of a size of 3.
    assert found.held.whole.tolist() == [-3.0 if maximize else 3.0] * SIZE
    assert torch.equal(found.held.parts[0], found.held.whole)
    # The bound of exp_avg: 3 u w |g - m| or 2 u b1 m + 2 u w g, the larger of 1.5 and 3, and h.
    bound = (3 * U + 2 * ETA + U) * SECOND_ORDER / 0.25 + 3 * U * (3 + 0.75 * 1 / 0.25)
    assert found.error.tolist() == pytest.approx([bound * SECOND_ORDER] * SIZE, rel=1e-9, abs=0.0)
    assert found.held.plans[0].present == frozenset("abcde")


def test_only_where_the_count_went_up() -> None:
    found = _recovered(counts=(2.0, 1.0, None, 2.0, 0.0))
    assert found.held.plans[0].present == frozenset("ad")
    assert found.held.plans[0].absent == frozenset("bce")
    assert found.held.whole[:2].tolist() == [3.0, 3.0]
    assert bool(found.held.whole[2:].isnan().all()) and found.error[2:].tolist() == [0.0] * 6
    assert found.held.parts[0].tolist() == [3.0, 3.0]
    found = _recovered(frozen="c")
    assert found.held.plans[0].present == frozenset("abde")
    assert found.held.plans[0].absent == frozenset()


def test_each_rank_has_it_where_its_states_are() -> None:
    """So that a rank is named for what it was given; copies are compared once."""
    plans = [
        ManifestPlan(torch.tensor(positions), frozenset(), frozenset())
        for positions in ([0, 1, 2], [3, 4, 5, 6, 7])
    ]
    before, after = state(P, exp_avg=M0), state(P, (2.0, 1.0, None, 2.0, 0.0), exp_avg=M1)
    after = replace(after, owners=tuple(plans))
    found = recover(UpdateRecipe.of(_case()), before, after, layout(), [GROUP.lr])
    whole = [value if value == 3.0 else None for value in found.held.whole.tolist()]
    for plan, part, owner in zip(found.held.plans, found.held.parts, plans, strict=True):
        assert plan.index is not None and owner.index is not None
        here = plan.index.tolist()
        assert here == [n for n in owner.index.tolist() if whole[n] is not None]
        assert part.tolist() == [3.0] * len(here)
    assert found.positions.tolist() == [n for n, value in enumerate(whole) if value is not None]


GRADIENT = torch.tensor([1.0, -2.0, 4.0, -4.0, 2.0, 2.0, 2.0, 0.0], dtype=torch.float64)
ERROR = torch.full((SIZE,), 2.0**-30, dtype=torch.float64)
FACTOR = 3.5 / (7 + 1e-6)


def _known(exact: torch.Tensor, bound: torch.Tensor) -> Enclosing:
    return Enclosing.known(Enclosure(exact, bound))


@pytest.mark.parametrize("width", [0.0, 2.0**-22])
def test_the_enclosure_of_a_clipped_gradient(width: float) -> None:
    bound = torch.full((SIZE,), width, dtype=torch.float64)
    made = clipping(_known(GRADIENT, bound), ERROR, layout(), _case(clip=3.5), Semantics())
    assert torch.equal(made.unclipped.whole.exact, GRADIENT)
    assert made.unclipped.whole.bound.tolist() == [width + 2.0**-30] * SIZE
    assert made.clipped.whole.exact.tolist() == pytest.approx(
        (GRADIENT * FACTOR).tolist(), rel=1e-15, abs=0.0
    )
    norm = U * (SIZE / 2 + 4) * SECOND_ORDER + width * math.sqrt(SIZE) / 7 + 4 * U
    for element, x in enumerate(GRADIENT.tolist()):
        wanted = width * FACTOR + norm * abs(x) * FACTOR + ETA + 2.0**-30
        assert float(made.clipped.whole.bound[element]) == pytest.approx(wanted, rel=1e-9, abs=0.0)


@pytest.mark.parametrize("width", [0.0, 2.0**-10])
def test_the_enclosure_of_a_clipped_gradient_in_bf16(width: float) -> None:
    """Elements 2 to 5 are in bf16: coefficient and product are rounded to it, and the norm."""
    bound = torch.full((SIZE,), width, dtype=torch.float64)
    one, case = layout(narrow=True), _case(clip=3.5)
    made = clipping(_known(GRADIENT, bound), ERROR, one, case, Semantics()).clipped.whole
    squares = GRADIENT.square()
    share = float(squares[2:6].sum() / squares.sum()) * (1 + 4 * U)
    norm = narrow_norm_relative(SIZE, share, 2, BF16) + width * math.sqrt(SIZE) / 7 + 4 * U
    for element, x in enumerate(GRADIENT.abs().tolist()):
        wanted = width * FACTOR + norm * x * FACTOR + ETA + 2.0**-30 + norm * FACTOR * width
        if 2 <= element < 6:
            largest = torch.tensor([x + width], dtype=torch.float64)
            wanted += float(clipped(largest, FACTOR * (1 + norm), BF16).bound)
        assert float(made.bound[element]) == pytest.approx(wanted, rel=1e-9, abs=0.0)


def test_the_largest_element_as_norm() -> None:
    bound = torch.full((SIZE,), 2.0**-22, dtype=torch.float64)
    case = _case(clip=2.0, norm="inf")
    made = clipping(_known(GRADIENT, bound), ERROR, layout(), case, Semantics())
    assert float(made.clipped.whole.exact[2]) == pytest.approx(2.0, rel=1e-6, abs=0.0)
    zero = torch.zeros(SIZE, dtype=torch.float64)
    made = clipping(_known(zero, bound), ERROR, layout(), case, Semantics())
    assert made.clipped.whole.exact.tolist() == [0.0] * SIZE
    assert made.clipped.whole.bound.tolist() == pytest.approx(
        [2.0**-22 + 2.0**-30] * SIZE, rel=1e-9, abs=0.0
    )


def _clip_check(found: list[float], *, seen: bool) -> tuple[float, tuple[str, ...] | None]:
    bound = torch.full((SIZE,), 0.25).double()
    one = _known(torch.full((SIZE,), 2.0).double(), bound)
    two = _known(torch.full((SIZE,), 4.0).double(), bound)
    recovered = _recovered()
    part = torch.tensor(found)
    made = recovered._replace(held=type(recovered.held)(part, (part,), recovered.held.plans, ((),)))
    share, violation = check_clip(made, Clipping(one, two), layout(), step=1, exposed=seen)
    return share, None if violation is None else violation.causes


@pytest.mark.parametrize("seen", [True, False])
def test_clipped_and_not_clipped(seen: bool) -> None:
    assert _clip_check([2.125] * SIZE, seen=seen) == (0.5, None)
    share, causes = _clip_check([4.25] * SIZE, seen=seen)
    assert share > 1.0 and causes == ("not clipped",)
    share, causes = _clip_check([3.0] * SIZE, seen=seen)
    assert causes == (() if seen else None)
    assert share == (4.0 if seen else 0.0)
