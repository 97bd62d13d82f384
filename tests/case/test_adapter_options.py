"""Options of adapters: data of a case, drawn by the seed, and only for who obeys them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest

from zerocheck.case.codec import decode, encode, merged, to_plain
from zerocheck.case.drawing import draw
from zerocheck.case.features import FEATURES, features
from zerocheck.case.options import defaults, drawn, drawn_values, placed, plain
from zerocheck.case.reductions import left, simpler, value_at
from zerocheck.case.schema import Case, Sharding, TrainingSegment
from zerocheck.case.validity import check
from zerocheck.errors import UsageError

OVERLAP = "deepspeed.overlap_comm"


def test_the_defaults_come_first() -> None:
    for name, values in drawn_values().items():
        section, option = placed(name)
        assert values[0] == (defaults()[name] if section == "options" else Sharding().offload)
        assert option == name


def test_every_value_is_drawn_and_every_option_has_a_feature() -> None:
    seen = {name: {drawn(seed)[name] for seed in range(200)} for name in drawn_values()}
    assert seen == {name: set(values) for name, values in drawn_values().items()}
    assert set(drawn_values()) <= {row.field for row in FEATURES.values()}


def test_the_seed_of_a_case_says_which() -> None:
    for case in draw(50, seed=3, world_sizes=(2,)):
        found = {name: value_at(case, ".".join(placed(name))) for name in drawn_values()}
        assert found == drawn(case.seed)


@pytest.mark.parametrize("obeyed", [None, (), ("bucket",)])
def test_who_does_not_obey_them_gets_the_cases_that_there_were_before(
    obeyed: tuple[str, ...] | None,
) -> None:
    """All other choices stay as they are, and no feature of these options is there."""
    names = {row.name for row in FEATURES.values() if row.field in drawn_values()}
    cases = draw(60, seed=3, world_sizes=(1, 2, 3), fixed=plain(obeyed))
    assert not any(names & set(features(case)) or case.options for case in cases)
    others = draw(60, seed=3, world_sizes=(1, 2, 3))
    assert [case.model for case in cases] == [case.model for case in others]
    assert [case.training for case in cases] == [case.training for case in others]


def test_what_is_obeyed_is_not_fixed() -> None:
    fields = plain((OVERLAP,))
    assert set(fields["options"]) == set(defaults()) - {OVERLAP}
    assert fields["sharding"] == {"offload": "none"}


def test_only_what_is_not_at_its_default_is_stored() -> None:
    case = Case(options={"deepspeed.universal": True, OVERLAP: False})
    assert case == Case(options={"deepspeed.universal": True})
    assert hash(case) == hash(Case(options={"deepspeed.universal": True}))
    assert to_plain(case)["options"] == {"deepspeed.universal": True}
    assert decode(encode(case), source="it") == case and not Case().options
    assert msgspec.structs.replace(case, options={OVERLAP: True}).options == {OVERLAP: True}
    back = merged(case, {"options": {"deepspeed.universal": False}}, source="it")
    assert back == Case()
    assert repr(case) == "Case(options={'deepspeed.universal': True})"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deepspeed.overlap_com": True}, f"'deepspeed.overlap_com'; did you mean '{OVERLAP}'"),
        ({OVERLAP: 1}, f"options.{OVERLAP} is 1; allowed: true or false"),
        ({"deepspeed.prefetch_bucket": -1}, "is -1; allowed: an integer >= 0 and <= 1099511627776"),
        ({"deepspeed.read_out": "function"}, "is \"function\"; did you mean 'functions'?; allowed"),
        ({OVERLAP: None}, "allowed: an object of integers, texts, true and false"),
        ([], "options is []; allowed: an object of integers, texts, true and false"),
    ],
)
def test_what_is_no_option_is_refused(options: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        merged(Case(), {"options": options}, source="c.json")
    assert message in str(error.value)
    if isinstance(options, dict) and None not in options.values():
        with pytest.raises(UsageError):
            check(Case(options=options))


def test_reductions_take_options_back() -> None:
    case = Case(mesh=(1,), options={OVERLAP: True, "deepspeed.universal": True})
    case = msgspec.structs.replace(case, resume=(TrainingSegment(mesh=(1,)),))
    assert {path for path, _ in left(case)} >= {f"options.{OVERLAP}", "options.deepspeed.universal"}
    search = simpler(case)
    candidate, smallest = next(search), case
    with suppress(StopIteration):
        while True:
            fails = candidate.options.get(OVERLAP) is True
            smallest = candidate if fails else smallest
            candidate = search.send(fails)
    assert smallest.options == {OVERLAP: True}
