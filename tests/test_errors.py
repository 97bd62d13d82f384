"""The nearest spelling."""

from __future__ import annotations

import pytest

from zerocheck.case.features import FEATURES
from zerocheck.errors import did_you_mean


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("cliping", "clip"),  # not clip-inf, which has more letters in common
        ("clip-infs", "clip-inf"),
        ("uneven-totl", "uneven-total"),  # not uneven, with which it begins
        ("tyed", "tied"),
        ("Droput", "dropout"),
        ("kernel-fusd", "kernel-fused"),
    ],
)
def test_the_nearest_feature(given: str, meant: str) -> None:
    assert did_you_mean(given, FEATURES) == f"; did you mean {meant!r}?"


def test_nothing_near() -> None:
    assert did_you_mean("xyz", FEATURES) == ""
    assert did_you_mean("clip", []) == ""
