"""What is said of the bytes that ranks hold, from lines written by hand."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from zerocheck.case.schema import Case, Model, Optimizer, Sharding, Training
from zerocheck.judge.measurements import judge_measured, merged
from zerocheck.judge.obligations import persistent, release
from zerocheck.protocol.layout import Category, Layout, Line, Phase
from zerocheck.protocol.measurements import HARNESS, LOCAL, UNEXPLAINED, Measured
from zerocheck.protocol.replies import MemoryReply
from zerocheck.protocol.verdicts import MEMORY, Judgement

CASE = Case(mesh=(2,), training=Training(steps=3))
PHASES: tuple[Phase, ...] = ("forward", "backward", "step")


def lines(**more: Iterable[Line]) -> tuple[Line, ...]:
    """A rank with 100 bytes of parameters, and 100 of gradients from the backward on."""
    held = [Line("built", -1, "parameter", 100, "w")]
    for step in range(3):
        for phase in PHASES:
            held.append(Line(phase, step, "parameter", 100, "w"))
            if phase != "forward":
                held.append(Line(phase, step, "gradient", 100, "w"))
    return (*held, *(line for some in more.values() for line in some))


LAYOUT = Layout(
    lines=(
        Line("built", -1, "parameter", 100),
        *(Line(phase, 0, "parameter", 100) for phase in PHASES),
        *(Line(phase, 0, "gradient", 100) for phase in PHASES[1:]),
    )
)


def ranks(*some: tuple[Line, ...], layout: Layout | None = LAYOUT) -> list[Measured]:
    return [Measured(lines=one, layout=layout, steps=3) for one in some]


def test_the_last_step_that_a_layout_tells_of_stands_for_those_after_it() -> None:
    checked = persistent.check(CASE, ranks(lines(), lines()))
    assert checked.exercised and checked.violation is None and not checked.vacuous
    assert persistent.check(Case(mesh=(1,)), ranks(lines())).vacuous
    assert persistent.check(CASE, ranks(lines(), lines(), layout=Layout(lines=()))).vacuous


@pytest.mark.parametrize("count", [1, -1])
def test_one_byte_is_too_much(count: int) -> None:
    other = Line("step", 1, "gradient", count, "kept")
    violation = persistent.check(CASE, ranks(lines(), lines(more=[other]))).violation
    assert violation is not None
    assert (violation.step, violation.role, violation.ranks) == (1, "gradient", (1,))
    assert (violation.observed, violation.expected, violation.bound) == (100 + count, 100, 0)
    assert ("kept" in violation.explanation) == (count > 0)
    assert "after the step of step 1 rank 1" in violation.explanation


def test_a_category_that_the_layout_has_and_nobody_holds() -> None:
    without = tuple(line for line in lines() if (line.step, line.category) != (2, "gradient"))
    violation = persistent.check(CASE, ranks(without, lines())).violation
    assert violation is not None and violation.causes == ("held by nobody",)
    assert (violation.step, violation.ranks) == (2, (0,))


@pytest.mark.parametrize(
    "line",
    [
        Line("forward", 0, "activation", 7, "aten::linear"),
        Line("forward", 0, "other", 7, HARNESS),
        Line("backward", 0, "other", 7, f"{LOCAL} loss of train_step"),
    ],
)
def test_what_is_not_the_implementations_is_not_compared(line: Line) -> None:
    assert persistent.check(CASE, ranks(lines(more=[line]))).violation is None


def test_a_phase_that_a_layout_never_tells_of_is_not_predicted() -> None:
    built = Layout(lines=(Line("built", -1, "parameter", 100),))
    assert persistent.check(CASE, ranks(lines(), layout=built)).violation is None


def test_what_nobody_holds_is_a_violation_without_a_layout_too() -> None:
    lost = Line("backward", 1, "other", 12, f"{UNEXPLAINED} in aten::empty")
    violation = persistent.check(CASE, ranks(lines(), lines(more=[lost]), layout=None)).violation
    assert violation is not None and violation.role == UNEXPLAINED
    assert (violation.step, violation.ranks, violation.observed) == (1, (1,), 12)
    assert violation.causes == ("the ledger does not close",)


@pytest.mark.parametrize(
    ("category", "factor", "cause"),
    [
        ("optimizer", 2, "optimizer state replicated"),
        ("gradient", 1, "whole gradients kept"),
        ("gathered", 1, "gathered parameters kept"),
    ],
)
def test_causes_are_named_by_sizes(category: Category, factor: int, cause: str) -> None:
    model = Model(inputs=3, width=2, outputs=5)  # 8 + 15 parameters of 4 bytes
    case = Case(mesh=(2,), model=model, optimizer=Optimizer())
    more = Line("step", 0, category, 4 * 23 * factor, "kept")
    violation = persistent.check(case, ranks(lines(more=[more]))).violation
    assert violation is not None and cause in violation.causes
    less = Line("step", 0, category, 4 * 23 * factor - 4, "kept")
    violation = persistent.check(case, ranks(lines(more=[less]))).violation
    assert violation is not None
    assert (cause in violation.causes) == (category == "gathered")


@pytest.mark.parametrize(("unfreeze", "cause"), [(1, "not unfrozen"), (2, "held by nobody")])
def test_the_bytes_from_before_an_unfreezing_name_the_cause(unfreeze: int, cause: str) -> None:
    training = Training(steps=3, unfreeze=unfreeze)
    case = msgspec.structs.replace(CASE, model=Model(frozen=("stem.*",)), training=training)
    more = tuple(
        Line(phase, 1, category, size)
        for phase in PHASES
        for category, size in (("parameter", 100), ("gradient", 150))
        if phase != "forward" or category == "parameter"
    )
    layout = Layout(lines=(*LAYOUT.lines, *more))
    violation = persistent.check(case, ranks(lines(), lines(), layout=layout)).violation
    assert violation is not None and violation.step == 1
    assert violation.causes == (cause,)


def test_growth_is_seen_from_the_step_after_the_settled_one_on() -> None:
    def kept(*counts: int) -> list[Line]:
        return [Line("step", step, "other", n, "list") for step, n in enumerate(counts) if n]

    assert release.check(CASE, ranks(lines(more=kept(0, 4, 4)))).violation is None
    assert release.check(CASE, ranks(lines(more=kept(4, 8, 8)))).violation is None
    violation = release.check(CASE, ranks(lines(), lines(more=kept(4, 8, 12)))).violation
    assert violation is not None and violation.causes == ("grows",)
    assert (violation.step, violation.ranks, violation.tensors) == (2, (1,), ("list",))
    assert (violation.observed, violation.expected) == (12, 8)


def test_gradients_may_grow_where_batches_use_their_own_parameters() -> None:
    more = [Line("step", 2, "gradient", 8, "an expert")]
    assert release.check(CASE, ranks(lines(more=more))).violation is not None
    side = Case(mesh=(2,), model=Model(side=True), training=Training(steps=3))
    assert release.check(side, ranks(lines(more=more))).violation is None
    more = [Line("step", 2, "bucket", 8, "a reducer")]
    assert release.check(side, ranks(lines(more=more))).violation is not None
    views = Case(mesh=(2,), model=Model(side=True), sharding=Sharding(bucket_view=True))
    assert release.check(views, ranks(lines(more=more))).violation is None


def test_what_moves_from_one_category_to_another_does_not_grow() -> None:
    def moved(more: int) -> list[Line]:
        after = [Line(p, 2, "gradient", -40) for p in PHASES[1:]]
        return [*after, *(Line(p, 2, "bucket", 40 + more, "a reducer") for p in PHASES[1:])]

    assert release.check(CASE, ranks(lines(more=moved(0)))).violation is None
    violation = release.check(CASE, ranks(lines(more=moved(1)))).violation
    assert violation is not None and (violation.role, violation.observed) == ("bucket", 41)


def test_nothing_may_survive_close() -> None:
    alive = Line("closed", 2, "optimizer", 16, "registry")
    violation = release.check(CASE, ranks(lines(), lines(more=[alive]))).violation
    assert violation is not None and violation.causes == ("alive after close",)
    assert "after close() rank 1 still holds 16 bytes of optimizer" in violation.explanation


def test_both_are_one_judgement_and_merge_with_that_of_the_steps() -> None:
    seen = [MemoryReply(measured=one) for one in ranks(lines(), lines())]
    judgement = judge_measured(CASE, seen, digest=True)
    assert set(judgement.statuses) == set(MEMORY)
    assert judgement.statuses["persistent"] == judgement.statuses["release"] == "holds"
    alive = Line("closed", 2, "optimizer", 16, "registry")
    wrong = judge_measured(CASE, [MemoryReply(measured=ranks(lines(more=[alive]))[0])])
    assert wrong.statuses["release"] == "violated" and wrong.digest != judgement.digest
    both = merged([Judgement(statuses={"update": "holds"}, digest="ab"), wrong])
    assert both.statuses == {"update": "holds", **wrong.statuses}
    assert both.violations == wrong.violations and both.digest == f"ab{wrong.digest}"
