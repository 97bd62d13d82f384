"""Provenance of wrong values, from vectors made by hand: each kind of origin, and its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from zerocheck.judge.attribution import cover
from zerocheck.judge.attribution.moved import StorageOrder
from zerocheck.judge.attribution.places import Scope
from zerocheck.judge.attribution.values import Origin, Source, evidence, significant
from zerocheck.judge.attribution.vector import Known, provenance
from zerocheck.judge.layout import ParameterLayout, ParameterPlace

SHAPES: Mapping[str, tuple[int, ...]] = {
    "stem.weight": (6, 4),
    "stem.bias": (6,),
    "norm.weight": (6,),
    "head.weight": (5, 8),
    "head.bias": (8,),
}


def layout_of(shapes: Mapping[str, tuple[int, ...]], frozen: str = "") -> ParameterLayout:
    places: list[ParameterPlace] = []
    start = 0
    for name, shape in shapes.items():
        stop = start + torch.empty(shape).numel()
        places.append(ParameterPlace(name, shape, start, stop, name != frozen, 0))
        start = stop
    return ParameterLayout.of_places(places)


LAYOUT = layout_of(SHAPES)
RIGHT = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(1))
OTHER = torch.rand(LAYOUT.size, generator=torch.Generator().manual_seed(2))
EARLIER = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(3))
SAVED = Source("the saved one", "the saved ones", RIGHT)
STEP = Source("is that after step 1", "are those after step 1", EARLIER)
SQUARE = Source("exp_avg_sq", "exp_avg_sq", OTHER)


def part(name: str) -> slice:
    place = LAYOUT.by_name[name]
    return slice(place.start, place.stop)


def sentence(
    observed: torch.Tensor,
    *,
    role: str = "exp_avg",
    layout: ParameterLayout = LAYOUT,
    right: Source = SAVED,
    same_place: Sequence[Source] = (STEP,),
    lines: Sequence[StorageOrder] = (),
    scopes: Sequence[Scope] = (),
) -> str:
    known = Known(right, same_place, (SQUARE,), {4.0: "the number of ranks"}, lines, scopes)
    wrong = observed.view(torch.int32) != right.vector.view(torch.int32)
    return provenance(role, observed, wrong, known, layout).sentence()


FORMS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "is 0": torch.zeros_like,
    "is NaN": lambda v: torch.full_like(v, torch.nan),
    "is the saved one rounded to bf16": lambda v: v.bfloat16().float(),
    "is the saved one rounded to fp16": lambda v: v.half().float(),
    "is the saved one truncated to bf16": lambda v: (v.view(torch.int32) & -65536).view(v.dtype),
    "is the saved one negated": torch.neg,
    "is the saved one times 4 (the number of ranks)": lambda v: v * 4,
    "is the saved one divided by 4 (the number of ranks)": lambda v: v / 4,
    "is the saved one times 0.9": lambda v: (v.double() * 0.9).float(),
    "is the saved one plus 1": lambda v: v + 1,
    "is that after step 1": lambda v: EARLIER,
    "holds exp_avg_sq of the same elements": lambda v: OTHER,
}


@pytest.mark.parametrize("words", FORMS)
def test_a_form_of_every_element(words: str) -> None:
    assert sentence(FORMS[words](RIGHT)) == f"exp_avg of every parameter {words}"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("stem.weight", "head.weight"), "every matrix is 0"),
        (("stem.bias", "head.bias"), "every bias is 0"),
        (("stem.bias", "norm.weight", "head.bias"), "every vector is 0"),
        (("head.weight",), "head.weight is 0"),
        (("stem.weight", "head.bias"), "stem.weight and head.bias are 0"),
    ],
)
def test_classes_of_tensors(names: Sequence[str], words: str) -> None:
    observed = RIGHT.clone()
    for name in names:
        observed[part(name)] = 0
    assert sentence(observed, role="parameter") == words


def test_frozen_parameters() -> None:
    layout = layout_of(SHAPES, frozen="head.weight")
    observed = RIGHT.clone()
    observed[part("head.weight")] = EARLIER[part("head.weight")]
    words = sentence(observed, role="parameter", layout=layout)
    assert words == "head.weight (frozen) is that after step 1"


def test_ranges_are_rows_where_they_end_with_one() -> None:
    observed = RIGHT.clone()
    observed[part("head.bias")][1:3] = 0
    observed[part("head.weight")][8:24] = 0
    assert sentence(observed) == "exp_avg of head.weight[1:3] and head.bias[1:3] is 0"
    observed[part("head.weight")][24] = 0
    assert "head.weight.flatten()[8:25]" in sentence(observed)


def test_right_values_within_a_range_do_not_split_it() -> None:
    right = RIGHT.clone()
    right[part("head.bias")][2] = 0
    observed = right.clone()
    observed[part("head.bias")][1:4] = 0
    assert (
        sentence(observed, right=SAVED._replace(vector=right)) == "exp_avg of head.bias[1:4] is 0"
    )


def test_shards_of_a_rank() -> None:
    shards = torch.arange(LAYOUT.size) * 4 // LAYOUT.size
    scopes = [Scope(rank, "that saved", shards == rank) for rank in range(4)]
    observed = torch.where(shards == 3, 0.0, RIGHT)
    assert sentence(observed, scopes=scopes) == "exp_avg in the shard of rank 3 that saved is 0"
    observed = torch.where(shards >= 2, 0.0, RIGHT)
    words = sentence(observed, scopes=scopes)
    assert words == "exp_avg in the shards of ranks 2 and 3 that saved is 0"


def test_two_tensors_have_changed_places() -> None:
    observed = RIGHT.clone()
    observed[part("stem.bias")] = RIGHT[part("norm.weight")]
    assert sentence(observed) == "exp_avg of stem.bias is the saved one of norm.weight"
    observed[part("norm.weight")] = RIGHT[part("stem.bias")]
    assert sentence(observed) == "exp_avg of stem.bias and norm.weight have changed places"


def test_transposed_matrices() -> None:
    observed = RIGHT.clone()
    for name in ("stem.weight", "head.weight"):
        shape = LAYOUT.by_name[name].shape
        observed[part(name)] = RIGHT[part(name)].view(shape).t().reshape(-1)
    assert sentence(observed) == "exp_avg of every matrix is the saved one transposed"


def test_elements_further_on_from_an_element_on() -> None:
    observed = RIGHT.clone()
    observed[40:-5] = RIGHT[45:]
    observed[-5:] = 0
    words = sentence(observed)
    assert "5 elements further on in the flat vector of all parameters" in words
    assert "head.weight.flatten()[4:40]" in words and "head.bias[3:8] is 0" in words


def test_elements_of_a_tensor_turned_round() -> None:
    observed = RIGHT.clone()
    observed[part("head.weight")] = RIGHT[part("head.weight")].roll(-3)
    assert sentence(observed) == (
        "exp_avg of head.weight is the saved one 3 elements further on in its tensor, "
        "those beyond an end from the other end"
    )


def test_a_flat_buffer_with_padding() -> None:
    """Offsets are counted in the buffer: between tensors there is padding."""
    slots = [torch.cat((torch.arange(p.start, p.stop), -torch.ones(2))) for p in LAYOUT.places]
    buffer = torch.cat(slots).to(torch.int64)
    line = StorageOrder("its flat buffer", "their flat buffers", [buffer.view(1, -1)])
    observed = RIGHT.clone()
    values = torch.where(buffer >= 0, RIGHT[buffer], 0.0)
    inside = buffer[:-1] >= 0
    observed[buffer[:-1][inside]] = values[1:][inside]
    words = sentence(observed, lines=[line])
    assert (
        words
        == "exp_avg of every parameter is the saved one 1 element further on in its flat buffer"
    )


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([0, 1, 3, 2], "those of ranks 2 and 3 have changed places"),
        (
            [0, 2, 3, 1],
            "that of rank 2 is in the place of rank 1, that of rank 3 is in the place of rank 2, "
            "that of rank 1 is in the place of rank 3",
        ),
    ],
)
def test_shards_in_another_order(order: list[int], words: str) -> None:
    shards = torch.arange(LAYOUT.size).view(4, -1)
    observed = RIGHT.view(4, -1)[order].reshape(-1)
    line = StorageOrder("its flat buffer", "their flat buffers", [shards])
    assert f"the saved one in another order of shards: {words}" in sentence(observed, lines=[line])


def test_every_third_element() -> None:
    observed = RIGHT.clone()
    observed[:20] = RIGHT[2:62:3]
    assert "the saved one with a stride of 3 elements" in sentence(observed)


def test_no_regular_order() -> None:
    order = torch.randperm(40, generator=torch.Generator().manual_seed(4))
    observed = RIGHT.clone()
    observed[part("head.weight")] = RIGHT[part("head.weight")][order]
    words = sentence(observed)
    assert words == (
        "exp_avg of head.weight has values of other elements of the saved one, in no regular order"
    )


def test_two_origins_that_are_equally_good_are_both_named() -> None:
    twin = Source("is that after step 0", "are those after step 0", EARLIER.clone())
    twin.vector[0] += 1
    observed = RIGHT.clone()
    observed[part("head.bias")] = EARLIER[part("head.bias")]
    words = sentence(observed, same_place=(STEP, twin))
    assert words == "exp_avg of head.bias is that after step 1, or is that after step 0"


def test_one_origin_of_all_is_better_than_two_of_parts() -> None:
    half = RIGHT.clone()
    half[part("stem.weight")] = EARLIER[part("stem.weight")]
    first = Source("is that after step 0", "are those after step 0", half)
    words = sentence(EARLIER, same_place=(first, STEP))
    assert words == "exp_avg of every parameter is that after step 1"


def test_values_of_no_origin_are_counted() -> None:
    observed = RIGHT.clone()
    observed[part("head.bias")] = 0
    observed[part("stem.bias")] = torch.rand(6, generator=torch.Generator().manual_seed(9)) + 3
    assert sentence(observed) == (
        "exp_avg of head.bias is 0; 6 of 14 wrong elements remain unexplained"
    )


def test_nothing_is_guessed() -> None:
    """Values of few bits occur elsewhere by chance: that is no evidence for a shift."""
    assert sentence(torch.rand(LAYOUT.size, generator=torch.Generator().manual_seed(7)) + 3) == ""
    right = torch.randint(2, 6, (LAYOUT.size,), generator=torch.Generator().manual_seed(8)).float()
    observed = right.clone()
    observed[part("stem.bias")] = 1024.0
    observed[part("head.bias")][0] = 2.0 if right[part("head.bias")][0] != 2.0 else 3.0
    assert "further" not in sentence(observed, right=SAVED._replace(vector=right))


def test_evidence_is_of_significant_bits() -> None:
    values = torch.tensor([0.0, 1.0, 0.5, 3.0, torch.inf, 1 + 2**-23])
    assert significant(values).tolist() == [0, 1, 1, 2, 0, 24]
    assert evidence(torch.full((9,), 3.0), 0.0) == 2.0
    assert evidence(values, 10.0) == 1 + 1 + 2 + 24 - 10


def test_a_large_vector_is_compared_with_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hypothesis is computed for a bounded number of elements, but for the one that fits."""
    asked: list[int] = []
    size = 1 << 18
    observed = torch.ones(size)

    def counted(fits: bool) -> Origin:
        def vector(at: torch.Tensor) -> torch.Tensor:
            asked.append(len(at))
            return torch.full((len(at),), 1.0 if fits else 2.0)

        return Origin("fits", "fit", vector)

    pool = [counted(number == 30) for number in range(60)]
    accounts, left = cover.cover(observed, torch.ones(size, dtype=torch.bool), [lambda _: pool])
    assert [account.origins[0] for account in accounts] == [pool[30]] and not left.any()
    assert sum(asked) < 60 * 2 * cover.SAMPLE + 2 * size


def test_later_stages_are_asked_only_for_what_is_left() -> None:
    wrong = torch.ones(4, dtype=torch.bool)
    zero = Origin("is 0", "are 0", lambda at: torch.zeros(len(at)), key="0")
    asked: list[list[int]] = []

    def later(sample: torch.Tensor) -> list[Origin]:
        asked.append(sample.tolist())
        return []

    cover.cover(torch.zeros(4), wrong, [lambda _: [zero], later])
    assert asked == []
    cover.cover(torch.tensor([0.0, 5.0, 0.0, 0.0]), wrong, [lambda _: [zero], later])
    assert len(asked) == 1
