"""Words for a set of tensors."""

from __future__ import annotations

import pytest

from zerocheck.judge.attribution.tensors import numbered, tensors
from zerocheck.judge.layout import ParameterLayout, ParameterPlace


def _layout(frozen: str = "") -> ParameterLayout:
    shapes = {
        "a.weight": (2, 2),
        "a.bias": (2,),
        "b.weight": (2, 3),
        "b.bias": (2,),
        "b.gain": (),
        "c.weight": (1, 2),
        "c.bias": (1,),
        "none": (0,),
    }
    places: list[ParameterPlace] = []
    start = 0
    for name, shape in shapes.items():
        size = 1
        for one in shape:
            size *= one
        places.append(ParameterPlace(name, shape, start, start + size, name != frozen, 0))
        start += size
    return ParameterLayout.of_places(places)


@pytest.mark.parametrize(
    ("names", "frozen", "words"),
    [
        (
            ["a.weight", "a.bias", "b.weight", "b.bias", "b.gain", "c.weight", "c.bias"],
            "",
            "every tensor",
        ),
        (["a.weight", "b.weight", "c.weight"], "", "every matrix"),
        (["a.bias", "b.bias", "c.bias"], "", "every bias"),
        (["b.weight", "b.bias", "b.gain"], "", "every tensor of b"),
        (["a.weight", "b.weight"], "", "a.weight, b.weight"),
        (
            ["a.weight", "a.bias", "b.weight", "c.bias"],
            "",
            "a.weight, a.bias, b.weight and 1 more tensors",
        ),
        (
            ["a.bias", "b.bias", "c.bias", "b.weight", "b.gain", "c.weight"],
            "a.weight",
            "every trained tensor",
        ),
    ],
)
def test_a_class_or_names(names: list[str], frozen: str, words: str) -> None:
    assert tensors(names, _layout(frozen)) == words


def test_a_class_of_the_trained_ones() -> None:
    names = [f"{one}.weight" for one in "bc"] + ["a.weight"]
    shapes = [(n, (2, 2)) for n in (*sorted(names), "d.weight")]
    places = [
        ParameterPlace(name, shape, 4 * n, 4 * n + 4, name != "d.weight", 0)
        for n, (name, shape) in enumerate(shapes)
    ]
    places.append(ParameterPlace("d.bias", (2,), 16, 18, True, 0))
    made = ParameterLayout.of_places(places)
    assert tensors(names, made) == "every matrix that is trained"


def test_lists_of_numbers() -> None:
    assert numbered([2], "rank") == "rank 2"
    assert numbered([2, 0], "rank") == "ranks 0 and 2"
    assert numbered([3, 1, 2], "rank") == "ranks 1 to 3"
    assert numbered([0, 2, 3], "rank") == "ranks 0, 2 and 3"
