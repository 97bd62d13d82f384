"""Where elements lie: layout, formats, shards put together, copies compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small import NAMES, SIZE, held, layout, state

from zerocheck.case.schema import Block, Case, Group, Model, Optimizer
from zerocheck.floating_point import BF16, FP32
from zerocheck.judge import manifest_plan, pieces
from zerocheck.judge.assemble import Observation
from zerocheck.judge.layout import Formats, ParameterLayout, ParameterPlace
from zerocheck.judge.manifest_plan import ManifestPlan, plan_of
from zerocheck.judge.obligations import publish
from zerocheck.judge.state import State
from zerocheck.models.network import build_model
from zerocheck.protocol.observations import Entry, RankObservation, Recorded, StepObservation


def test_the_layout_of_a_model() -> None:
    model = Model(
        inputs=3,
        width=4,
        outputs=2,
        blocks=(Block(kind="mlp", hidden=5, dtype="bf16"), Block(kind="batch_norm")),
        frozen=("head.bias",),
    )
    groups = (Group(pattern="*.bias"), Group())
    case = Case(mesh=(2,), model=model, optimizer=Optimizer(groups=groups))
    module = build_model(case)
    found = ParameterLayout.of(module, case)
    start = 0
    for place, (name, parameter) in zip(found.places, module.named_parameters(), strict=True):
        assert (place.name, place.shape) == (name, tuple(parameter.shape))
        assert (place.start, place.stop) == (start, start + parameter.numel())
        assert place.trainable is (name != "head.bias")
        wanted = -1 if name == "head.bias" else 0 if name.endswith("bias") else 1
        assert place.group == wanted
        assert place.format == (BF16 if parameter.dtype == torch.bfloat16 else FP32)
        assert bool(found.trainable[place.start : place.stop].all()) is place.trainable
        start = place.stop
        assert found.by_name[name] is place
    assert found.size == start
    assert int(found.trainable.sum()) == start - 2
    assert "blocks.1.norm.running_mean" in found.buffers
    (wide, narrow) = found.formats.parts
    assert (wide[0], narrow[0]) == (FP32, BF16)
    assert wide[1] is not None and narrow[1] is not None
    for place in found.places:
        part = narrow[1] if place.format == BF16 else wide[1]
        assert set(range(place.start, place.stop)) <= set(part.tolist())
    assert len(wide[1]) + len(narrow[1]) == start


def test_where_an_element_is() -> None:
    one = layout()
    found = [(place.name, index) for place, index in map(one.at, range(SIZE))]
    square = [("b", (i, j)) for i in range(2) for j in range(2)]
    assert found == [("a", (0,)), ("a", (1,)), *square, ("c", ()), ("e", (0,))]
    for wrong in (-1, SIZE):
        with pytest.raises(IndexError):
            one.at(wrong)


def test_an_index_counts_the_last_dim_first() -> None:
    shape = (2, 3, 4)
    place = ParameterPlace("w", shape, 0, 24, True, 0)
    trainable = torch.ones(24, dtype=torch.bool)
    one = ParameterLayout((place,), 24, {"w": place}, trainable, {}, Formats(((FP32, None),), 24))
    for element in range(24):
        index = one.at(element)[1]
        assert torch.arange(24).view(shape)[index] == element


def test_names_come_in_the_order_of_the_model() -> None:
    """Not by how wrong they are, which near ties would make different on another processor."""
    mask = torch.tensor([True, True, False, False, False, True, False, True])
    assert layout().names_of(mask) == ("a", "b", "e")
    assert layout().names_of(mask & False) == ()


def test_memory_order_of_a_transposed_parameter_beside_others() -> None:
    assert layout().memory_order is None
    places = [
        replace(place, strides=(1, 2)) if place.name == "b" else place for place in layout().places
    ]
    order = replace(layout(), places=tuple(places)).memory_order
    assert order is not None and order.tolist() == [0, 1, 2, 4, 3, 5, 6, 7]


def test_flags_are_spread_over_elements() -> None:
    one = layout()
    assert one.spread([True] * 5).tolist() == [True] * SIZE
    flags = one.spread([False, True, False, True, True])
    assert flags.tolist() == [False, False, True, True, True, True, False, True]


def test_segments_share_group_count_and_format() -> None:
    one = layout(frozen="a", narrow=True)
    parts = one.segments([3, 3, 3, 3, None])
    assert [(p.group, p.key, p.format) for p in parts] == [(0, 3, FP32), (0, 3, BF16)]
    assert [p.elements.tolist() for p in parts if p.elements is not None] == [[6], [2, 3, 4, 5]]
    assert one.segments([3, 3, 3, 3, None]) is parts
    plain = layout()
    (whole,) = plain.segments([0] * 5)
    assert whole.elements is None and whole.key == 0
    parts = plain.segments([2, 1, 2, 2, 1])
    assert [(p.key, p.elements.tolist()) for p in parts if p.elements is not None] == [
        (1, [2, 3, 4, 5, 7]),
        (2, [0, 1, 6]),
    ]


def test_segments_are_in_order() -> None:
    parts = layout().segments([5, 4, 3, 1, 2])
    assert [part.key for part in parts] == [1, 2, 3, 4, 5]


def test_formats_of_nothing_and_of_one() -> None:
    one = Formats(((BF16, None),), 5)
    assert one.at(None) is one
    assert one.at(torch.tensor([1, 4])) == Formats(((BF16, None),), 2)
    assert one.narrow == BF16
    two = Formats(((FP32, torch.tensor([0])), (BF16, torch.tensor([1, 2]))), 3)
    empty = two.at(torch.tensor([], dtype=torch.int64))
    assert empty.parts == ((FP32, None),) and empty.size == 0
    assert two.at(torch.tensor([2, 0])).size == 2


def _seen(
    *ranks: Sequence[Entry], steps: Sequence[StepObservation] = (), dtype: str = "float32"
) -> Observation:
    """What ranks hold: element i of the whole holds 10 i, plus the rank."""
    tensors: dict[tuple[int, str], torch.Tensor] = {}
    seen = []
    for rank, entries in enumerate(ranks):
        data = []
        for entry in entries:
            if not entry.present:
                continue
            start = layout().by_name[entry.name].start
            positions = torch.arange(start, layout().by_name[entry.name].stop)
            if entry.box is None:
                positions = positions[entry.start : entry.stop]
            else:
                cut = tuple(slice(*part) for part in entry.box)
                positions = positions.view(entry.shape)[cut].reshape(-1)
            data.append(positions * 10.0 + rank)
        tensors[rank, "parameter"] = torch.cat(data)
        record = Recorded(0, "state", "parameter", 0, 0, len(tensors[rank, "parameter"]), dtype)
        seen.append(
            RankObservation(manifests=(tuple(entries),), records=(record,), steps=tuple(steps))
        )
    return Observation(layout(), seen, lambda rank, record: tensors[rank, record.role])


A, B = Entry("a", (2,), 0, 2), Entry("b", (2, 2), 0, 4)
C, E = Entry("c", (), 0, 1), Entry("e", (1,), 0, 1)


def test_shards_are_put_together() -> None:
    column = Entry("b", (2, 2), 0, 2, ((0, 2), (0, 1)))
    other = Entry("b", (2, 2), 0, 2, ((0, 2), (1, 2)))
    found = _seen([A, column], [other, C, E]).held(0, "state", "parameter")
    assert found is not None
    assert found.whole.tolist() == [0, 10, 20, 31, 40, 51, 61, 71]
    assert [plan.index.tolist() for plan in found.plans if plan.index is not None] == [
        [0, 1, 2, 4],
        [3, 5, 6, 7],
    ]
    assert [sorted(plan.present) for plan in found.plans] == [["a", "b"], ["b", "c", "e"]]
    assert found.present == frozenset("abce") and not found.whole_everywhere
    assert found.covered() is None and found.held_once and found.agree
    assert found.as_of(1) is found.whole


def test_copies_are_compared_and_what_is_held_once_is_not() -> None:
    apart = _seen([A], [C, E]).held(0, "state", "parameter")
    copied = _seen([A, C], [C, E]).held(0, "state", "parameter")
    twice = _seen([A, A], [C, E]).held(0, "state", "parameter")
    assert apart is not None and copied is not None and twice is not None
    assert apart.held_once and apart.agree
    assert not copied.held_once and not copied.agree  # ranks have tens, and tens and one
    assert not twice.held_once
    assert copied.as_of(1)[6] == 61 and copied.as_of(0)[6] == 60


def test_what_each_rank_holds_by_name() -> None:
    halves = Entry("b", (2, 2), 0, 1), Entry("b", (2, 2), 2, 4)
    first, second = _seen([halves[0], A, halves[1]], [C]).by_name(0, "state", "parameter")
    assert list(first) == ["b", "a"]
    assert first["b"].tolist() == [20, 40, 50] and first["a"].tolist() == [0, 10]
    assert {name: data.tolist() for name, data in second.items()} == {"c": [61]}
    assert _seen([A], [C]).by_name(0, "saved", "parameter") == [{}, {}]


def test_the_lowest_rank_counts_and_the_rest_is_nan() -> None:
    found = _seen([A], [A, C], [C, Entry("b", (2, 2), 1, 3)]).held(0, "state", "parameter")
    assert found is not None
    assert found.whole.nan_to_num(nan=-1).tolist() == [0, 10, -1, 32, 42, -1, 61, -1]
    covered = found.covered()
    assert covered is not None and not found.held_once
    assert covered.tolist() == [True, True, False, True, True, False, True, False]
    assert found.values.tolist() == [0, 10, 32, 42, 61]


def test_a_rank_that_holds_all() -> None:
    found = _seen([A, B, C, E], [A]).held(0, "state", "parameter")
    assert found is not None and found.plans[0].index is None and found.plans[0].order is None
    assert found.covered() is None and not found.whole_everywhere
    assert found.values.tolist() == found.whole.tolist() == [10.0 * i for i in range(SIZE)]
    assert found.plans[1].index is not None and found.plans[1].index.tolist() == [0, 1]
    both = _seen([A, B, C, E], [A, B, C, E]).held(0, "state", "parameter")
    assert both is not None and both.whole_everywhere


def test_another_order_is_put_right() -> None:
    found = _seen([C, E, A, B]).held(0, "state", "parameter")
    assert found is not None and found.plans[0].index is None
    assert found.whole.tolist() == [10.0 * i for i in range(SIZE)]
    assert found.parts[0].tolist() == found.whole.tolist()
    # As many elements, but one twice: that is not all of them.
    twice = _seen([A, A, B]).held(0, "state", "parameter")
    assert twice is not None and twice.plans[0].index is not None and not twice.whole_everywhere


def test_boxes_that_are_all_elements_are_put_in_order() -> None:
    columns = [Entry("b", (2, 2), 0, 2, ((0, 2), (n, n + 1))) for n in range(2)]
    found = _seen([A, *columns, C, E]).held(0, "state", "parameter")
    assert found is not None and found.plans[0].index is None
    assert found.parts[0].tolist() == found.whole.tolist() == [10.0 * i for i in range(SIZE)]


def test_a_large_part_that_rank_0_has_too_is_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is widened takes memory, so ranks that hold the same bits share it."""

    def same(rank: int, record: Recorded) -> torch.Tensor:
        return torch.arange(float(SIZE), dtype=torch.bfloat16) + (rank == 2)

    records = (Recorded(0, "state", "parameter", 0, 0, SIZE, "bfloat16"),)
    seen = RankObservation(manifests=((A, B, C, E),), records=records, steps=())
    for at_once, shared in ((SIZE - 1, True), (SIZE, False)):
        monkeypatch.setattr(pieces, "AT_ONCE", at_once)
        found = Observation(layout(), [seen] * 3, same).held(0, "state", "parameter")
        assert found is not None and (found.parts[1] is found.parts[0]) is shared
        assert found.parts[2] is not found.parts[0] and found.parts[2][0] == 1.0


def test_ranks_that_hold_the_same_share_a_plan_and_what_is_forgotten_is_made_anew() -> None:
    one = _seen([A, C], [A, C], [C, A])
    found = one.held(0, "state", "parameter")
    assert found is not None and found.plans[0] is found.plans[1] is not found.plans[2]
    assert found.manifests == ((A, C), (A, C), (C, A))
    assert one.held(0, "state", "parameter") is found
    one.forget(1)
    assert one.held(0, "state", "parameter") is found
    one.forget(0)
    assert one.held(0, "state", "parameter") is not found


def test_the_last_step_that_exposed_a_role() -> None:
    records = tuple(Recorded(step, "state", "parameter", 0, 0, 2, "float32") for step in (1, 3, 2))
    seen = RankObservation(manifests=((A,),), records=records, steps=())
    one = Observation(layout(), [seen], lambda rank, record: torch.zeros(2))
    assert one.last("state", "parameter") == 3
    assert one.last("reduced", "parameter") is None


def test_names_without_a_gradient() -> None:
    gone = Entry("b", (2, 2), 0, 4, None, False)
    found = _seen([A, gone, C, E]).held(0, "state", "parameter")
    assert found is not None and found.plans[0].absent == frozenset("b")
    assert "b" not in found.plans[0].present
    # Another shard of it is there.
    found = _seen([A, gone, Entry("b", (2, 2), 0, 1)]).held(0, "state", "parameter")
    assert found is not None and found.plans[0].absent == frozenset()
    assert _seen([A]).held(1, "state", "parameter") is None


def _scales(*answer: StepObservation) -> list[float]:
    one = _seen([A], steps=answer)
    return [one.loss_scales(index)[0] for index in range(len(answer))]


def test_loss_scales() -> None:
    def answer(scale: float, *, skipped: bool = False, reported: bool = True) -> StepObservation:
        return StepObservation(losses=(), loss_scale=scale, skipped=skipped, reported=reported)

    last = answer(1.0, reported=False)
    assert _scales(answer(8.0), answer(4.0), last) == [8.0, 4.0, 4.0]
    assert _scales(answer(8.0), answer(4.0, skipped=True), last) == [8.0, 4.0, 2.0]
    assert _scales(answer(0.0), answer(-1.0), answer(math.inf), answer(math.nan)) == [1.0] * 4
    assert _scales(answer(2.0, reported=False)) == [2.0]


def test_a_large_part_is_copied_range_by_range(monkeypatch: pytest.MonkeyPatch) -> None:
    by_index = plan_of((C, A), layout())
    monkeypatch.setattr(pieces, "AT_ONCE", 1)
    few = plan_of((C, A), layout())
    assert not by_index.ranges and not few.ranges  # so few elements are as fast by index
    monkeypatch.setattr(manifest_plan, "FEW", 0)
    by_range = plan_of((C, A), layout())
    assert len(by_range.ranges) == 2
    whole = torch.arange(float(SIZE))
    assert torch.equal(by_range.gather(whole), by_index.gather(whole))
    part = -torch.arange(float(len(by_index.gather(whole))))
    wholes, masks = torch.zeros(2, SIZE), torch.zeros(2, SIZE, dtype=torch.bool)
    for plan, into, mask in zip((by_range, by_index), wholes, masks, strict=True):
        plan.scatter(into, part)
        plan.mark(mask)
        assert plan.agrees(into, part)
        for element in range(len(part)):
            wrong = part.clone()
            wrong[element] += 1
            assert not plan.agrees(into, wrong)
    assert torch.equal(*wholes) and torch.equal(*masks) and not masks.all()


def test_gather_and_scatter() -> None:
    whole = torch.arange(4.0)
    plan = ManifestPlan(torch.tensor([3, 1]), NAMES, frozenset())
    assert plan.gather(whole).tolist() == [3.0, 1.0]
    plan.scatter(whole, torch.tensor([7.0, 8.0]))
    assert whole.tolist() == [0.0, 8.0, 2.0, 7.0]
    every = ManifestPlan(None, NAMES, frozenset())
    assert every.gather(whole) is whole
    every.scatter(whole, torch.ones(4))
    assert whole.tolist() == [1.0] * 4


WHOLE = [float(i) for i in range(SIZE)]


def _copies(*parts: list[float], role: str = "parameter") -> publish.Violation | None:
    shown = held(*parts)
    return publish._copies(shown, shown.whole, layout(), role, 2, None)


def test_copies_that_differ() -> None:
    assert _copies(WHOLE, WHOLE) is None
    off, far = [*WHOLE], [*WHOLE]
    off[4], off[7], far[1] = 4.5, 9.0, 5.0
    violation = _copies(WHOLE, WHOLE, off, far)
    assert violation is not None and violation.ranks == (2, 3) and violation.step == 2
    assert violation.tensors[0] == "e" and set(violation.tensors) == {"a", "b", "e"}
    assert (violation.observed, violation.expected) == (9.0, 7.0) and violation.element == (0,)
    assert (violation.wrong, violation.total, violation.bound) == (3, SIZE, 0.0)
    under = _copies(WHOLE, [*WHOLE[:5], 5.5, *WHOLE[6:7], 3.0])
    assert under is not None and (under.observed, under.expected) == (3.0, 7.0)
    assert "copies of parameter differ" in violation.explanation
    minus = [-0.0, *WHOLE[1:]]
    assert _copies(WHOLE, minus) is not None
    violation = _copies(WHOLE, [*WHOLE[:4], math.nan, *WHOLE[5:7], 99.0])
    assert violation is not None and violation.tensors[0] == "b"


def test_copies_of_states_where_no_parameter_is_shown() -> None:
    shown = held(WHOLE, [9.0, *WHOLE[1:]])
    answer = SimpleNamespace(
        layout=layout(),
        states=("exp_avg",),
        held=lambda step, point, role: shown if role == "exp_avg" else None,
    )
    violation = publish.check(answer, state(WHOLE), step=4)  # type: ignore[arg-type]
    assert violation is not None and violation.role == "exp_avg" and violation.ranks == (1,)


def test_a_parameter_is_its_master_rounded() -> None:
    answer = SimpleNamespace(layout=layout(), states=(), held=lambda *_: held(WHOLE, WHOLE))
    owned = replace(
        state(WHOLE),
        rounded=torch.tensor([9.0, *WHOLE[1:]]),
        mastered=torch.ones(SIZE, dtype=torch.bool),
    )
    violation = publish.check(answer, owned, step=4)  # type: ignore[arg-type]
    assert violation is not None and violation.ranks == (0, 1)
    assert violation.explanation.startswith("parameters are not their fp32 masters, rounded")
    right = replace(owned, rounded=torch.tensor(WHOLE))
    assert publish.check(answer, right, step=4) is None  # type: ignore[arg-type]


def test_copies_of_shards() -> None:
    ranges = (range(0, 5), range(4, 8))
    shown = held(WHOLE[:5], WHOLE[4:], ranges=ranges)
    assert publish._copies(shown, shown.whole, layout(), "exp_avg", 0, None) is None
    shown = held(WHOLE[:5], [4.5, *WHOLE[5:]], ranges=ranges)
    violation = publish._copies(shown, shown.whole, layout(), "exp_avg", 0, None)
    assert violation is not None and violation.element == (1, 0) and violation.ranks == (1,)
    assert violation.tensors == ("b",) and violation.role == "exp_avg"


def test_causes_explain_all_ranks() -> None:
    fine = [1.0 + 2.0**-20] * SIZE
    rounded = [1.0, *fine[1:]]
    shown = held(fine, rounded, rounded)
    others = [torch.tensor(one) for one in (fine, fine, rounded)]
    violation = publish._copies(shown, shown.whole, layout(), "parameter", 0, others)
    assert violation is not None and violation.causes == ("copies rounded to bf16",)
    violation = publish._copies(shown, shown.whole, layout(), "parameter", 0, [others[2]] * 3)
    assert violation is not None
    assert violation.causes == ("copies of the previous step", "copies rounded to bf16")


def test_the_owner_is_right() -> None:
    off = [*WHOLE[:6], 6.5, 7.0]
    shown = held(off, WHOLE, WHOLE)
    answer = SimpleNamespace(
        layout=layout(),
        states=(),
        held=lambda step, point, role: shown if role == "parameter" else None,
    )
    owned = state(WHOLE)
    violation = publish.check(answer, owned, step=4)  # type: ignore[arg-type]
    assert violation is not None and violation.ranks == (0,) and violation.step == 4
    assert (violation.observed, violation.expected) == (6.5, 6.0)


def _start(one: State, *, frozen: str = "", moments: bool = True) -> publish.Violation | None:
    wanted = {"exp_avg": torch.ones(SIZE)} if moments else {}
    return publish.check_start(
        one,
        torch.tensor(WHOLE),
        wanted,  # type: ignore[arg-type]
        [1.0] * 5,
        layout(frozen=frozen),
    )


def test_the_base_case() -> None:
    ones = [1.0] * SIZE
    assert _start(state(WHOLE, exp_avg=ones)) is None
    assert _start(state(WHOLE, (1.0, 1.0, 1.0, 7.0, 1.0), exp_avg=ones)) is None, "d is empty"
    violation = _start(state(WHOLE, (1.0, 1.0, 2.0, 1.0, 1.0), exp_avg=ones))
    assert violation is not None and violation.role == "step" and violation.tensors == ("c",)
    assert _start(state(WHOLE, (1.0, 1.0, 2.0, 1.0, 1.0), exp_avg=ones), frozen="c") is None
    assert _start(state(WHOLE, (1.0, 1.0, None, 1.0, 1.0), exp_avg=ones)) is not None


def test_the_base_case_of_vectors() -> None:
    ones = [1.0] * SIZE
    off = [*ones[:6], 1.5, 1.0]
    violation = _start(state(WHOLE, exp_avg=off))
    assert violation is not None and violation.role == "exp_avg" and violation.tensors == ("c",)
    assert (violation.observed, violation.expected) == (1.5, 1.0)
    assert (violation.wrong, violation.total, violation.step) == (1, SIZE, -1)
    assert violation.bound == 0.0
    assert _start(state(WHOLE, exp_avg=off), frozen="c") is None
    assert _start(state(WHOLE)) is not None, "a moment that was restored is gone"
    assert _start(state(WHOLE), moments=False) is None
    assert _start(state(WHOLE, exp_avg=ones), moments=False) is not None
    off = [*WHOLE[:6], 6.5, 7.0]
    violation = _start(state(off, exp_avg=ones), frozen="c")
    assert violation is not None and violation.role == "parameter"
    assert violation.element == () and violation.observed == 6.5
