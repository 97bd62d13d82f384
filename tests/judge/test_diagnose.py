"""A cause is named if it explains what was observed, and not if one element speaks against it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from slices import sliced
from small import layout
from test_case import CASE
from torch.utils.checkpoint import CheckpointError

from zerocheck.case.schema import Block, Case, Data, Model, Precision, Sharding, Training
from zerocheck.judge.diagnose.gradient import _drawn_again
from zerocheck.judge.diagnose.loss import causes as causes_of_losses
from zerocheck.judge.diagnose.ownership import Tiling, of_nothing, of_shapes, of_tiling
from zerocheck.judge.diagnose.placement import _spans
from zerocheck.judge.flat import NOBODY, FlatBuffer, flat_buffers
from zerocheck.judge.layout import ParameterLayout
from zerocheck.judge.local import Passes
from zerocheck.models.network import build_model
from zerocheck.protocol.observations import Entry, Lie, RankObservation
from zerocheck.protocol.verdicts import Explanation, Violation

SUBJECTS = str(Path(__file__).with_name("uses_in_bf16.py"))

USED_BY_SOME = msgspec.structs.replace(
    CASE,
    model=Model(
        inputs=5,
        width=6,
        outputs=3,
        blocks=(Block(kind="experts", hidden=5, experts=4), Block(kind="mlp", hidden=7)),
    ),
    data=Data(batch=1, length=2),
    training=msgspec.structs.replace(CASE.training, microbatches=1),
)
"""Two tokens go to two of four experts at most, so that no rank uses all of them."""

TWO_EXPERTS = msgspec.structs.replace(
    USED_BY_SOME,
    seed=7,
    sharding=Sharding(wrap="whole"),
    model=msgspec.structs.replace(
        USED_BY_SOME.model, blocks=(Block(kind="experts", hidden=5, experts=2),)
    ),
)
"""Some ranks use both of them, others one; all parameters are in one flat buffer."""

FOUR_MICROBATCHES = msgspec.structs.replace(CASE, training=Training(microbatches=4))

GRADIENTS = [
    ("gradient:ReducedTwice", "reduced twice", CASE),
    ("gradient:PartitionsMisordered", "shards exchanged", CASE),
    ("gradient:ShardOffByOne", "shifted", CASE),
    ("gradient:ShardOfTheNext", "shard of another rank", CASE),
    ("gradient:TailTakenForPadding", "tail left out", USED_BY_SOME),
    ("gradient:RootOfWorld", "gradient x sqrt(W)", CASE),
    ("unused:AveragedOverUsers", "averaged over users", USED_BY_SOME),
    ("gradient:NoneGradientShifts", "offset not moved", USED_BY_SOME),
    ("unused:NoneEndsUnit", "left out after an unused one", TWO_EXPERTS),
    ("zero2+rank-counted-twice", "rank counted twice", CASE),
    ("zero2+half-group", "reduced in smaller groups", CASE),
    ("zero2+reduced-in-bf16", "reduced in bf16", CASE),
    ("zero2+result-rounded", "reduced gradient rounded to bf16", CASE),
    ("elsewhere.gradients:BoundaryMicrobatchLocal", "one microbatch not reduced", CASE),
    ("elsewhere.gradients:MiddleMicrobatchesDropped", "microbatch dropped", FOUR_MICROBATCHES),
    ("precision:ReducedIntoBf16", "reduced gradient rounded to bf16", CASE),
]


@pytest.mark.parametrize(("fault", "cause", "case"), sliced(GRADIENTS, GRADIENTS[::8]))
def test_one_element_rules_a_cause_out(
    observe: Callable, fault: str, cause: str, case: Case
) -> None:
    observed = observe(fault if "+" in fault else f"zerocheck.faults.{fault}", case)
    first = observed.judge().violations[0]
    assert first.obligation == "gradient"
    assert first.causes == (cause,), first.explanation
    _, data = observed.places("gradient", "reduced", 0, first.tensors[0])[0]
    at = int(data.abs().argmax())
    kept = float(data[at])
    data[at] = kept * (1 + 1e-3) if kept else 1e-3
    assert cause not in observed.judge().violations[0].causes
    data[at] = kept
    assert cause in observed.judge().violations[0].causes


def test_ranks_that_are_left_out(observe: Callable) -> None:
    """One tensor lacks rank 1, another rank 2: no candidate with a reason explains both."""
    case = msgspec.structs.replace(CASE, training=msgspec.structs.replace(CASE.training, clip=None))
    observed = observe("ddp", case)
    alone = {}
    for rank in (1, 2):
        local = observe("zerocheck.faults.gradient:SyncFirstStepOnly", case)
        for name in ("head.weight", "stem.weight"):
            shards = local.places("gradient", "reduced", 1, name)
            alone[rank, name] = shards[rank][1].clone()
    right = {
        name: observed.places("gradient", "reduced", 1, name)[0][1].clone()
        for name in ("head.weight", "stem.weight")
    }
    # The parameters of step 1 are the same in both runs, as are its local gradients.
    for name, rank in (("head.weight", 1), ("stem.weight", 2)):
        for _, data in observed.places("gradient", "reduced", 1, name):
            data.copy_(right[name] - alone[rank, name] / 3)
    first = observed.judge().violations[0]
    assert (first.obligation, first.causes) == ("gradient", ("ranks left out",))
    assert "ranks 1, 2" in first.explanation


def test_ranks_that_hold_other_sums_are_not_left_out(observe: Callable) -> None:
    """Each rank has another sum: no rank's gradient is missing from a sum of all."""
    case = msgspec.structs.replace(CASE, training=msgspec.structs.replace(CASE.training, clip=None))
    local = observe("zerocheck.faults.gradient:SyncFirstStepOnly", case)
    observed = observe("ddp", case)
    for name in ("head.weight", "stem.weight"):
        alone = [data.clone() / 3 for _, data in local.places("gradient", "reduced", 1, name)]
        # Ranks 0 and 1 have a local gradient each: no cause with a reason explains this.
        for rank, (_, data) in enumerate(observed.places("gradient", "reduced", 1, name)):
            data.copy_(alone[min(rank, 1)])
    first = observed.judge().violations[0]
    assert first.obligation == "gradient"
    assert "ranks left out" not in first.causes, first.explanation


def test_losses_of_other_parameters(observe: Callable) -> None:
    observed = observe("zerocheck.faults.forward:ShardsMisordered", CASE)
    first = observed.judge().violations[0]
    assert (first.obligation, first.causes) == ("loss", ("shards exchanged",))
    assert "ranks 1 and 2 changed places" in first.explanation
    seen = observed.seen[2]
    steps = list(seen.steps)
    last = steps[0].losses[-1] * (1 + 2**-23)
    steps[0] = msgspec.structs.replace(steps[0], losses=(*steps[0].losses[:-1], last))
    observed.seen[2] = msgspec.structs.replace(seen, steps=tuple(steps))
    assert observed.judge().violations[0].causes == ()


@pytest.mark.parametrize(
    ("fault", "block", "width", "microbatches"),
    [
        (f"{SUBJECTS}:UsesInBf16", Block(kind="experts", hidden=6), 1, 1),
        (f"{SUBJECTS}:UsesInBf16", Block(kind="recurrent"), 32, 2),
        (f"{SUBJECTS}:UsesInBf16", Block(kind="recurrent"), 32, 3),
    ],
)
def test_uses_that_are_added_in_the_dtype_of_the_reduction(
    observe: Callable[..., Any], fault: str, block: Block, width: int, microbatches: int
) -> None:
    """Round-off of that dtype explains such differences too, and many other causes would."""
    case = Case(
        mesh=(2,),
        model=Model(inputs=5, width=width, outputs=3, blocks=(block,), calls=(0, 0)),
        data=Data(batch=2, length=3, loss_factor=1e4),
        training=Training(steps=3, microbatches=microbatches),
        precision=Precision(reduce="bf16"),
        sharding=Sharding(wrap="whole"),
    )
    for seed in range(1, 9):
        judgement = observe(fault, msgspec.structs.replace(case, seed=seed)).judge()
        causes = [one.causes for one in judgement.violations if one.obligation == "gradient"]
        assert set(causes) <= {("uses added in bf16",)}, (seed, judgement.violations)
        if causes:
            return
    pytest.fail("no seed shows it")


def test_forwards_that_were_seeded_alike() -> None:
    right, wrong = [[1.0], [2.0]], [[1.5], [2.5]]
    assert causes_of_losses(wrong, right, None, [["a"], ["a"]]) == ("seed for all",)
    assert causes_of_losses(wrong, right, None, [["a"], ["b"]]) == ()
    assert causes_of_losses(wrong, right, None, [[], []]) == ()
    # On one rank other steps tell.
    assert causes_of_losses([[1.5]], [[1.0]], None, [["a"]], {"a"}) == ("seed for all",)
    assert causes_of_losses([[1.5]], [[1.0]], None, [["a"]], {"b"}) == ()
    # One rank alone is no proof, and another rank's samples say more.
    assert causes_of_losses([[1.5], [2.0]], right, None, [["a"], ["b"]]) == ()
    assert causes_of_losses([[2.0], [1.0]], right, None, [["a"], ["a"]]) == (
        "samples of another rank",
    )


def _held(*held: tuple[int, int, int], name: str = "w", numel: int = 10) -> dict:
    return {name: [(rank, Entry(name, (numel,), start, stop)) for rank, start, stop in held]}


@pytest.mark.parametrize(
    ("held", "world_size", "causes"),
    [
        (_held((0, 0, 6), (1, 4, 10)), 2, ("shards overlap",)),
        (_held((0, 0, 5), (0, 3, 10)), 2, ("twice on one rank",)),
        (_held((0, 0, 5), (1, 0, 5)), 2, ("same shard on every rank",)),
        (_held((0, 0, 4), (1, 4, 9)), 3, ("remainder dropped", "rank left out")),
        (_held((0, 0, 4), (1, 4, 8), (2, 8, 9)), 3, ("remainder dropped",)),
        (_held((0, 0, 4), (1, 4, 8)), 3, ("rank left out",)),
        (_held((0, 0, 4), (1, 5, 10)), 2, ()),
        # 6 is a multiple of 3: its end is missing for another reason than the remainder.
        (_held((0, 0, 4), (1, 4, 8), (2, 8, 9)) | _held((0, 0, 5), name="v", numel=6), 3, ()),
    ],
)
def test_causes_of_a_tiling(held: dict, world_size: int, causes: tuple[str, ...]) -> None:
    shapes = {name: entries[0][1].shape for name, entries in held.items()}
    assert of_tiling(Tiling(shapes, held, world_size)) == causes


@pytest.mark.parametrize(
    ("held", "hosts", "causes"),
    [
        (_held((0, 0, 4), (1, 4, 8), (2, 0, 4)), (2,), ("shard of the local rank",)),
        (_held((0, 0, 4), (1, 0, 4), (2, 4, 8)), (1, 2), ("shard of the local rank",)),
        (
            _held((0, 0, 4), (1, 0, 4), (2, 0, 4)),
            (1,),
            ("shard of the local rank", "same shard on every rank"),
        ),
        (_held((0, 0, 4), (1, 0, 4), (2, 0, 4)), (), ("same shard on every rank",)),
        # Right for the hosts, but for what else is missing.
        (_held((0, 0, 4), (1, 4, 8)), (2,), ("rank left out",)),
        (_held((0, 0, 4), (1, 4, 8), (2, 4, 8)), (2,), ()),
    ],
)
def test_causes_of_a_tiling_over_hosts(
    held: dict, hosts: tuple[int, ...], causes: tuple[str, ...]
) -> None:
    assert of_tiling(Tiling({"w": (10,)}, held, 3, hosts)) == causes


def test_causes_of_a_tensor_that_nobody_has() -> None:
    shapes = {"w": (10,), "v": (4,), "none": (0,)}
    held = _held((0, 0, 5), (1, 0, 5))
    assert of_nothing(Tiling(shapes, held, 2, (1,)), (4,)) == (
        "parameter left out",
        "shard of the local rank",
    )
    assert of_nothing(Tiling(shapes, held, 2), (4,)) == ("parameter left out",)
    assert of_nothing(Tiling(shapes, held, 2, (1,)), (0,)) == ("empty parameter left out",)
    assert of_nothing(Tiling(shapes, {}, 2, (1,)), (4,)) == ("parameter left out",)


def test_causes_of_another_shape() -> None:
    held = {"w": [(0, Entry("w", (6, 2), 0, 12))], "v": [(0, Entry("v", (3,), 0, 3))]}
    assert of_shapes(Tiling({"w": (5, 2), "v": (3,)}, held, 3)) == ("padded shape",)
    assert of_shapes(Tiling({"w": (5, 2), "v": (3,)}, held, 2)) == ("padded shape",)
    assert of_shapes(Tiling({"w": (4, 2), "v": (3,)}, held, 2)) == ("another shape",)


def _buffers(*memory: tuple[Lie, ...]) -> list:
    return flat_buffers([RankObservation(memory=one) for one in memory], LAYOUT)


SMALL = msgspec.structs.replace(CASE, model=Model(inputs=2, width=2, outputs=1))
LAYOUT = ParameterLayout.of(build_model(SMALL), SMALL)
"""stem.weight 0 to 3, stem.bias 4 and 5, head.weight 6 and 7, head.bias 8."""


def test_a_buffer_that_every_rank_has_is_cut() -> None:
    lies = (Lie("stem.bias", 0, 2, 0, 6, 0), Lie("head.weight", 0, 2, 0, 6, 3))
    (buffer,) = _buffers(lies, lies)
    assert buffer.whole
    assert buffer.shards.tolist() == [[4, 5, NOBODY], [6, 7, NOBODY]]
    assert buffer.starts(LAYOUT) == [("stem.bias", 0), ("head.weight", 3)]
    # 6 elements are no 4 equal shards; one rank has one.
    assert _buffers(lies, lies, lies, lies) == []
    assert _buffers(lies)[0].shards.shape == (1, 6)


def test_shards_of_a_buffer() -> None:
    """The second rank has the end of one parameter, another one, and a storage of padding alone."""
    first = (Lie("stem.weight", 0, 3, 0, 3, 0), Lie("head.bias", 0, 1, 1, 2, 1))
    second = (
        Lie("stem.weight", 3, 4, 0, 3, 0),
        Lie("stem.bias", 0, 2, 0, 3, 1),
        Lie("unit", 0, 2, 1, 2, 0, True),
    )
    one, two = _buffers(first, second)
    assert not (one.whole or two.whole)
    assert one.shards.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert two.shards.tolist() == [[NOBODY, 8], [NOBODY, NOBODY]]
    # Ranks that show other storages cannot be put together.
    assert _buffers(first, second[:2]) == []


def test_where_the_textbook_says_its_memory_lies(observe: Callable) -> None:
    """The shards of ZeRO-3, put end to end, hold every parameter once."""
    for name, whole in (("zero1", True), ("zero3", False)):
        observed = observe(name, CASE)
        layout = ParameterLayout.of(build_model(CASE), CASE)
        buffers = flat_buffers(observed.seen, layout)
        assert {buffer.whole for buffer in buffers if len(buffer.starts(layout)) > 1} == {whole}
        elements = torch.cat([buffer.elements for buffer in buffers])
        held = elements[elements != NOBODY].sort().values
        if not whole:
            assert torch.equal(held, torch.arange(layout.size))
        assert len(held.unique()) == len(held)


def test_a_part_that_is_not_reduced(observe: Callable) -> None:
    observed = observe("zero2+last-element-local", CASE)
    causes = ("part not reduced", "reduction not waited for")
    assert observed.judge().violations[0].causes == causes


def test_halves_of_two_ranks_are_each_a_rank_alone(observe: Callable) -> None:
    case = msgspec.structs.replace(CASE, mesh=(2,))
    first = observe("zero2+half-group", case).judge().violations[0]
    assert set(first.causes) == {"local gradient only", "reduced in smaller groups"}


def test_nan_in_a_step_that_overflows_is_not_blamed_on_memory(observe: Callable) -> None:
    training = Training(steps=2, loss_scale=1024.0, overflow=0)
    observed = observe("zero2", Case(mesh=(2,), training=training))
    assert not observed.judge().violations
    _, data = observed.places("gradient", "reduced", 0, "head.weight")[0]
    infinite = data.isinf().nonzero()
    assert len(infinite)  # else the step did not overflow in this way
    data[infinite[0]] = float("nan")
    (violation,) = observed.judge().violations
    assert violation.obligation == "gradient"
    assert "uninitialised memory" not in violation.causes


def test_an_overflow_of_one_rank_does_not_hide_that_nothing_is_reduced(observe: Callable) -> None:
    """What the other rank has counts 0 times, also where it is infinite."""
    training = Training(steps=1, loss_scale=1024.0, overflow=0)
    observed = observe(
        "zerocheck.faults.gradient:FirstStepUnsynced", Case(mesh=(2,), training=training)
    )
    first = observed.judge().violations[0]
    assert first.obligation == "gradient" and "local gradient only" in first.causes, first


SENTENCES = {"lost": "it is 0", "older": "it is that of an earlier step"}


@pytest.mark.parametrize(
    ("causes", "text"),
    [
        (("lost", "older"), "wrong; it is 0; or it is that of an earlier step"),
        (("lost", "of no sentence"), "wrong; it is 0"),
        (("of no sentence",), "wrong"),
        ((), "wrong"),
    ],
)
def test_causes_that_are_not_told_apart_stand_with_or(causes: tuple[str, ...], text: str) -> None:
    explanation = Explanation.of(causes, SENTENCES, "wrong")
    assert (explanation.text, explanation.causes) == (text, causes)


def test_a_violation_is_narrowed_to_the_causes_that_are_left() -> None:
    text, causes, sentences = Explanation.of(("lost", "older", "silent"), SENTENCES, "wrong")
    violation = Violation(
        obligation="publish",
        step=0,
        role="parameter",
        tensors=(),
        ranks=(),
        explanation=text,
        causes=causes,
        sentences=sentences,
    )
    older = violation.reworded("after load 1: {}".format).narrowed(("older", "another"))
    assert older.causes == ("older",)
    assert older.explanation == "after load 1: wrong; it is that of an earlier step"
    assert violation.narrowed(("silent",)).explanation == text
    assert violation.narrowed(("another",)) == violation.narrowed(causes) == violation


@pytest.mark.parametrize(
    ("factor", "causes"),
    [
        (0.75, ("gradient scaled",)),
        (-1.0, ("gradient scaled",)),
        (3.0, ("gradient scaled", "reduction not waited for")),  # the sum of 3 ranks, undivided
    ],
)
def test_one_rank_alone_is_scaled(
    observe: Callable, factor: float, causes: tuple[str, ...]
) -> None:
    case = msgspec.structs.replace(CASE, training=msgspec.structs.replace(CASE.training, clip=None))
    observed = observe("ddp", case)
    _, data = observed.places("gradient", "reduced", 0, "head.weight")[1]
    data.mul_(factor)
    first = observed.judge().violations[0]
    assert (first.obligation, first.causes) == ("gradient", causes), first.explanation
    assert f"on rank 1 alone the gradient is {factor:.6g} times" in first.explanation
    data[0] *= 1.01
    other = observed.judge().violations[0]
    assert "gradient scaled" not in other.causes


def test_dropout_that_is_drawn_again_in_bf16(observe: Callable) -> None:
    """In bf16 short ranges of a wrong gradient fit something by chance, which says nothing."""
    case = Case(
        seed=3,
        mesh=(3,),
        model=Model(inputs=4, width=8, blocks=(Block(kind="mlp", dropout=0.4),), outputs=3),
        training=Training(steps=1, microbatches=5),
        precision=Precision(compute="bf16", reduce="bf16"),
    )
    observed = observe("zerocheck.faults.forward:CheckpointWithoutRandomState", case)
    first = observed.judge().violations[0]
    assert (first.obligation, first.causes) == ("gradient", ("dropout drawn again",))
    assert not first.attribution


def test_blocks_that_cannot_be_computed_again_are_no_cause() -> None:
    """Where other dropout masks route tokens to other experts, torch refuses the second forward."""

    def refused() -> Passes:
        raise CheckpointError("Recomputed values have different metadata")

    model = Model(blocks=(Block(kind="experts", dropout=0.5),))
    known: Any = SimpleNamespace(case=Case(model=model), redrawn=refused)
    assert list(_drawn_again(known)) == []


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_rank_that_overflowed_is_not_scaled(observe: Callable, value: float) -> None:
    case = msgspec.structs.replace(CASE, training=msgspec.structs.replace(CASE.training, clip=None))
    observed = observe("ddp", case)
    observed.places("gradient", "reduced", 0, "head.weight")[1][1].fill_(value)
    first = observed.judge().violations[0]
    assert first.obligation == "gradient" and "gradient scaled" not in first.causes


def test_a_rank_without_elements_is_right(observe: Callable) -> None:
    """Of one parameter with one row, three ranks of FSDP2 have one shard; it alone is doubled."""
    model = Model(inputs=3, width=1, outputs=1)
    case = Case(mesh=(3,), model=model, training=Training(steps=1))
    observed = observe("fsdp2", case)
    for name in ("stem.weight", "head.weight"):
        for _, data in observed.places("gradient", "reduced", 0, name):
            data.mul_(0.75)
    first = observed.judge().violations[0]
    assert first.obligation == "gradient" and first.causes, first.explanation


@pytest.mark.parametrize(
    ("shards", "pieces"),
    [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [("a", 0, 2), ("b", 2, 6), ("c", 6, 7), ("e", 7, 8)]),
        ([[0, 2, 3, 6], [1, 4, 5, 7]], None),
    ],
)
def test_offsets_are_those_of_parameters_in_one_piece(
    shards: list[list[int]], pieces: list[tuple[str, int, int]] | None
) -> None:
    """A parameter that is cut for each rank by itself moves no offset; it stopped the run."""
    of = layout()
    evidence: Any = SimpleNamespace(layout=of, buffers=[FlatBuffer(torch.tensor(shards), False)])
    found = [
        [(of.places[number].name, start, stop) for number, start, stop in spans]
        for _, spans in _spans(evidence, padded=False)
    ]
    assert found == ([] if pieces is None else [pieces])
