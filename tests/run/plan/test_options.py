"""Options: defaults, and refusals that say what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from zerocheck.catalogue import BUILT_IN
from zerocheck.errors import UsageError
from zerocheck.protocol.verdicts import EQUIVALENCE
from zerocheck.run.plan.options import RunOptions, parse_obligations
from zerocheck.run.plan.profiles import PROFILES
from zerocheck.run.plan.settings import parse_world_sizes


def test_defaults() -> None:
    options = RunOptions()
    assert options.implementations == tuple(BUILT_IN)
    assert options.world_sizes == PROFILES["quick"].world_sizes == (1, 2, 3, 4, 5, 8)
    assert options.obligations == EQUIVALENCE
    assert options.cases == PROFILES["quick"].cases
    assert RunOptions(profile="ci").cases == PROFILES["ci"].cases
    assert RunOptions(max_cases=7).cases == 7
    assert RunOptions(max_cases=7_000).cases == options.cases


def test_what_is_given_twice_counts_once() -> None:
    options = RunOptions(
        implementations=("ddp", "ddp"), world_sizes=(3, 2, 3), obligations=("update", "loss")
    )
    assert options.implementations == ("ddp",)
    assert options.world_sizes == (3, 2)
    assert options.obligations == ("loss", "update")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"implementations": ("fsdp",)}, "unknown implementation 'fsdp'; did you mean 'fsdp2'"),
        ({"implementations": ("my.py",)}, "name the class or build function in it too: my.py:NAME"),
        ({"implementations": ("my.py:",)}, "'my.py:' is not an implementation"),
        ({"implementations": (":My",)}, "':My' is not an implementation"),
        ({"profile": "quik"}, "unknown profile 'quik'; did you mean 'quick'"),
        ({"features": ("tyed",)}, "unknown feature 'tyed'; did you mean 'tied'"),
        ({"obligations": ("updat",)}, "unknown obligation 'updat'; did you mean 'update'"),
        ({"ranks": "process"}, "unknown kind of ranks 'process'; did you mean 'processes'"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"world_sizes": (0,)}, r"world size 0 is out of range \(allowed: 1 to 1024\)"),
        ({"world_sizes": (2, -3)}, "world size -3 is out of range"),
        ({"world_sizes": (1025,)}, "world size 1025 is out of range"),
        ({"world_sizes": (2.5,)}, r"world size 2\.5 is not a whole number"),
        ({"world_sizes": (True,)}, "world size True is not a whole number"),
        ({"seed": -1}, "seed -1 is out of range"),
        ({"seed": 1 << 62}, "seed 4611686018427387904 is out of range"),
        ({"max_cases": 0}, "max cases 0 is out of range"),
        ({"optimizer": "adm"}, "unknown optimizer 'adm'; did you mean 'adam'"),
        ({"optimizer": "lbfgs"}, "'lbfgs' is not judged: it calls the model several times"),
    ],
)
def test_refusals(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunOptions(**given)


def test_parsing() -> None:
    assert parse_world_sizes("1, 2,8") == (1, 2, 8)
    assert parse_obligations("equivalence") == EQUIVALENCE
    assert parse_obligations("gradient, update") == ("gradient", "update")
    for text in ("", "2,", "2.5", "two"):
        with pytest.raises(UsageError, match="is not a whole number"):
            parse_world_sizes(text)
    with pytest.raises(UsageError, match="did you mean 'equivalence'"):
        parse_obligations("equivalance")
