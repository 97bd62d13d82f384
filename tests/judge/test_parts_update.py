"""The update on a few elements: steps, parts that must stand still, readings, and all roles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import SIZE, layout, state

from zerocheck.case.schema import Case, Group, Optimizer
from zerocheck.judge.recipe import Update, UpdateRecipe
from zerocheck.judge.state import State
from zerocheck.judge.update import UpdateJudge
from zerocheck.optimizers.adamw import bounds as adamw
from zerocheck.optimizers.adamw.optimizer import AdamW
from zerocheck.protocol.verdicts import Violation

GROUP = Group(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-3, weight_decay=0.1)
P = [1.0, -1.0, 0.5, 2.0, 0.0, -0.25, 3.0, 1.5]
M = [0.1, 0.2, -0.1, 0.0, 0.3, 0.1, -0.2, 0.1]
V = [0.01, 0.04, 0.02, 0.01, 0.09, 0.01, 0.05, 0.02]
G = [0.3, -0.1, 0.2, 0.5, -0.4, 0.1, 0.2, -0.3]
TOP = [0.02, 0.03, 0.05, 0.01, 0.01, 0.2, 0.01, 0.3]


def _case(*, amsgrad: bool = False, maximize: bool = False, group: Group = GROUP) -> Case:
    return Case(mesh=(2,), optimizer=Optimizer(groups=(group,), amsgrad=amsgrad, maximize=maximize))


def _before(steps: Sequence[float | None] = (4.0,) * 5, *, amsgrad: bool = False) -> State:
    more = {"max_exp_avg_sq": TOP} if amsgrad else {}
    return state(P, steps, exp_avg=M, exp_avg_sq=V, **more)


def _after(case: Case, before: State, *, single: bool = False, still: Sequence[int] = ()) -> State:
    """One step of torch's own AdamW; elements in `still` stay as they were."""
    options = case.optimizer.groups[0]
    parameter = before.parameter.clone().requires_grad_()
    parameter.grad = torch.tensor(G)
    numbers: list[Any] = [options.lr, options.beta1, options.beta2]
    if single:
        numbers = [float(torch.tensor(x, dtype=torch.float32)) for x in numbers]
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=numbers[0],
        betas=(numbers[1], numbers[2]),
        eps=options.eps,
        weight_decay=options.weight_decay,
        amsgrad=case.optimizer.amsgrad,
        maximize=case.optimizer.maximize,
    )
    optimizer.state[parameter] = {
        "step": torch.tensor(4.0),
        **{role: vector.clone() for role, vector in before.moments.items()},
    }
    optimizer.step()
    moments = {role: optimizer.state[parameter][role] for role in before.moments}
    flat = parameter.detach()
    for element in still:
        flat[element] = before.parameter[element]
        for role, vector in moments.items():
            vector[element] = before.moment(role)[element]
    return state(flat.tolist(), (5.0,) * 5, **{r: v.tolist() for r, v in moments.items()})


def _judge(
    before: State,
    after: State,
    case: Case | None = None,
    *,
    frozen: str = "",
    has: Sequence[bool] = (True,) * 5,
    error: torch.Tensor | float = 0.0,
) -> tuple[float, Violation | None]:
    judge = UpdateJudge(layout(frozen=frozen), UpdateRecipe.of(case or _case()))
    update = Update(before, after, torch.tensor(G), error, [GROUP.lr], has)
    return judge.check(update, step=3)


def test_who_has_no_elements_needs_no_step_count() -> None:
    before = _before((4.0, 4.0, 4.0, None, 4.0))
    after = replace(_after(_case(), before), steps=[5.0, 5.0, 5.0, None, 5.0])
    share, violation = _judge(before, after)
    assert violation is None and 0.05 < share <= 1.0


class CountedInGroup(AdamW):
    """Counts the steps of a group of parameters once, as users' optimizers do."""

    counts_in_group = True


def test_a_group_counts_without_those_that_have_no_gradient() -> None:
    before = _before()
    recipe = UpdateRecipe.of(_case())._replace(optimizer=CountedInGroup())
    for steps, fine in (([5.0] * 5, True), ([4.0, *[5.0] * 4], False)):
        after = replace(_after(_case(), before, still=range(2, 6)), steps=steps)
        has = [True, False, True, True, True]
        update = Update(before, after, torch.tensor(G), 0.0, [GROUP.lr], has)
        violation = UpdateJudge(layout(), recipe).check(update, step=3)[1]
        assert (violation is None) is fine
        assert violation is None or (violation.role, violation.tensors) == ("step", ("a",))


def test_only_what_kept_every_bit_was_never_updated() -> None:
    before = _before()
    after = _after(_case(), before, still=[0, 1])
    # Of `b` the count alone stands still, and of `e` the values alone.
    after = replace(after, steps=[4.0, 4.0, 5.0, 5.0, 5.0])
    for vector, old in (
        (after.parameter, before.parameter),
        *((after.moments[role], before.moments[role]) for role in after.moments),
    ):
        vector[7] = old[7]
    _, violation = _judge(before, after)
    assert violation is not None and violation.causes == ("never updated",)
    assert violation.tensors == ("a",)


MUON = Case(mesh=(2,), optimizer=Optimizer(kind="muon"))
"""Muon updates `b`, the only matrix, and AdamW the rest."""


@pytest.mark.parametrize(
    ("buffers", "moments", "wrong"),
    [("b", "acde", ()), ("ab", "acde", ("a",)), ("b", "abcde", ("b",))],
)
def test_states_of_the_optimizer_that_updates_others(
    buffers: str, moments: str, wrong: tuple[str, ...]
) -> None:
    present = {"momentum_buffer": frozenset(buffers), "exp_avg": frozenset(moments)}
    after = replace(_after(_case(), _before()), present=present)
    update = Update(_before(), after, torch.tensor(G), 0.0, [GROUP.lr], [True] * 5)
    violation = UpdateJudge(layout(), UpdateRecipe.of(MUON))._of_others(update, 3)
    assert (violation.tensors if violation else ()) == wrong


def test_one_rule_that_is_left_with_an_estimate_makes_the_judgement_one() -> None:
    judge = UpdateJudge(layout(), UpdateRecipe.of(MUON))
    assert not judge.estimated
    judge.readings["Muon"] = ["estimated"]
    assert judge.estimated


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_a_right_step(amsgrad: bool, maximize: bool) -> None:
    case = _case(amsgrad=amsgrad, maximize=maximize)
    before = _before(amsgrad=amsgrad)
    share, violation = _judge(before, _after(case, before), case)
    assert violation is None and 0.05 < share <= 1.0
    # Of the other sign, the first moment is the first to be wrong.
    other = _case(amsgrad=amsgrad, maximize=not maximize)
    share, violation = _judge(before, _after(case, before), other)
    assert violation is not None and violation.role == "exp_avg" and share > 1.0
    assert share == violation.ratio


@pytest.mark.parametrize("role", ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "parameter"])
@pytest.mark.parametrize("element", [0, 4, 7])
def test_one_element_off(role: str, element: int) -> None:
    case, before = _case(amsgrad=True), _before(amsgrad=True)
    after = _after(case, before)
    vector = after.parameter if role == "parameter" else after.moments[role]
    vector[element] *= 1 + 2**-18
    _, violation = _judge(before, after, case)
    assert violation is not None
    assert (violation.role, violation.wrong, violation.total) == (role, 1, SIZE)
    assert violation.obligation == "update" and violation.step == 3
    place, index = layout().at(element)
    assert violation.tensors == (place.name,) and violation.element == index


def test_a_decay_by_hand_after_the_update_is_a_second_one() -> None:
    case, before = _case(), _before()
    after = _after(case, before)
    decayed = after.parameter * (1 - GROUP.lr * GROUP.weight_decay)
    after = state(
        decayed.tolist(), after.steps, **{r: v.tolist() for r, v in after.moments.items()}
    )
    _, violation = _judge(before, after, case)
    assert violation is not None and violation.causes == ("weight decay twice",)
    after.parameter[2] += 1e-5  # one element that it does not explain
    _, violation = _judge(before, after, case)
    assert violation is not None and "weight decay twice" not in violation.causes


def test_the_maximum_is_exact() -> None:
    case, before = _case(amsgrad=True), _before(amsgrad=True)
    after = _after(case, before)
    top = after.moments["max_exp_avg_sq"]
    assert bool((top > after.moments["exp_avg_sq"]).any())
    assert bool((top == after.moments["exp_avg_sq"]).any())
    top[5] = torch.nextafter(top[5], torch.tensor(9.0))
    _, violation = _judge(before, after, case)
    assert violation is not None and violation.role == "max_exp_avg_sq"


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((5.0,) * 5, None),
        ((5.0, 6.0, 5.0, 5.0, 5.0), "b"),
        ((5.0, 5.0, 4.0, 5.0, 5.0), "c"),
        ((5.0, 5.0, 5.0, 9.0, 5.0), None),  # d is empty
        ((5.0, 5.0, 5.0, 5.0, None), "e"),
    ],
)
def test_the_count_of_steps(counts: Sequence[float | None], message: str | None) -> None:
    before = _before()
    right = _after(_case(), before)
    after = State(right.parameter, right.per_rank, right.moments, right.present, list(counts))
    _, violation = _judge(before, after)
    assert (violation and violation.tensors[0]) == message
    if violation is not None:
        assert violation.role == "step" and violation.causes == ("step count",)


def test_a_whole_step_that_is_left_out() -> None:
    before = _before()
    _, violation = _judge(before, before)
    assert violation is not None and violation.role == "parameter"
    assert violation.causes == ("step skipped", "never updated")
    assert "no parameter was updated" in violation.explanation


def test_the_count_differs_before() -> None:
    before = _before((4.0, None, 4.0, 4.0, 4.0))
    _, violation = _judge(before, _after(_case(), before))
    assert violation is not None and violation.role == "step" and violation.tensors == ("b",)


def test_no_optimizer_has_it() -> None:
    before = _before()
    after = _after(_case(), before, still=(6,))
    after.steps[2] = 4.0
    _, violation = _judge(before, after)
    assert violation is not None and violation.causes == ("never updated",)
    assert violation.role == "parameter" and violation.tensors == ("c",)
    assert "c was not updated" in violation.explanation
    # One of its moments moved: it has an optimizer, which does not count.
    after.moments["exp_avg"][6] += 1.0
    _, violation = _judge(before, after)
    assert violation is not None and violation.causes == ("step count",)


def test_without_a_gradient_every_bit_stands_still() -> None:
    has = [name != "c" for name in "abcde"]
    before = _before()
    after = _after(_case(), before, still=(6,))
    after.steps[2] = 4.0
    assert _judge(before, after, has=has)[1] is None
    for role in ("parameter", "exp_avg", "exp_avg_sq"):
        after = _after(_case(), before, still=(6,))
        after.steps[2] = 4.0
        vector = after.parameter if role == "parameter" else after.moments[role]
        vector[6] = torch.nextafter(vector[6], torch.tensor(9.0))
        _, violation = _judge(before, after, has=has)
        assert violation is not None and violation.role == role
        assert violation.causes == ("untouched parameter changed",)
        assert violation.tensors == ("c",) and (violation.wrong, violation.total) == (1, 1)
        assert violation.observed == float(vector[6])
        assert violation.bound == 0.0 and violation.expected != violation.observed
    after = _after(_case(), before, still=(6,))
    _, violation = _judge(before, after, has=has)
    assert violation is not None and violation.role == "step", "counted without a gradient"


def test_what_is_frozen_stands_still() -> None:
    before = _before()
    after = _after(_case(), before, still=(6,))
    assert _judge(before, after, frozen="c")[1] is None
    after.moments["exp_avg"][6] += 1.0
    assert _judge(before, after, frozen="c")[1] is None, "nobody has moments of it"
    after.parameter[6] += 1.0
    _, violation = _judge(before, after, frozen="c")
    assert violation is not None and violation.role == "parameter"
    assert violation.tensors == ("c",)


def test_one_reading_for_the_whole_case() -> None:
    case, before = _case(), _before()
    double, single = _after(case, before), _after(case, before, single=True)
    judge = UpdateJudge(layout(), UpdateRecipe.of(case))

    def check(after: State) -> Violation | None:
        update = Update(before, after, torch.tensor(G), 0.0, [GROUP.lr], (True,) * 5)
        return judge.check(update, step=0)[1]

    assert judge.readings["AdamW"][0] == "double" and check(double) is None
    assert judge.readings["AdamW"][0] == "double" and check(single) is None
    assert judge.readings["AdamW"] == ["single"]
    assert check(double) is not None and check(single) is None


def test_a_gradient_that_is_not_known_exactly() -> None:
    before = _before()
    after = _after(_case(), before)
    for element in (1, 6):
        wrong = torch.zeros(SIZE, dtype=torch.float64)
        wrong[element] = 1e-3
        w = 1 - GROUP.beta1
        after.moments["exp_avg"][element] += 0.9e-3 * w
        _, violation = _judge(before, after)
        assert violation is not None and violation.role == "exp_avg"
        _, violation = _judge(before, after, error=wrong)
        assert violation is None or violation.role != "exp_avg"
        assert violation is not None and violation.role == "parameter", "judged by exp_avg"
        after = _after(_case(), before)


def test_two_counts_have_two_corrections() -> None:
    """`b` starts later than the rest; its bias corrections are its own."""
    case = _case()
    before = _before((4.0, 0.0, 4.0, 4.0, 4.0))
    after = _after(case, before)
    after.steps[1] = 1.0
    _, violation = _judge(before, after)
    assert violation is not None and violation.role == "parameter"
    assert violation.tensors == ("b",) and (violation.wrong, violation.total) == (4, 4)
    s = adamw.scalars(
        lr=0.01, beta1=0.9, beta2=0.99, eps=1e-3, weight_decay=0.1, step=1, reading="double"
    )
    made = adamw.parameter(
        before.parameter.double(),
        after.moments["exp_avg"].double(),
        after.moments["exp_avg_sq"].double(),
        s,
    )
    after.parameter[2:6] = made.exact[2:6].float()
    assert _judge(before, after)[1] is None


def test_nan_is_memory_that_was_never_written() -> None:
    before = _before()
    after = _after(_case(), before)
    after.parameter[3] = math.nan
    _, violation = _judge(before, after)
    assert violation is not None and violation.causes == ("uninitialised memory",)
