"""Cases as JSON: round trips, and an error in plain words for everything that can be wrong."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zerocheck.case import schema
from zerocheck.case.codec import decode, encode, from_plain, merged, to_plain
from zerocheck.case.drawing import draw
from zerocheck.case.schema import Block, Case, Data, Model, Training
from zerocheck.errors import UsageError
from zerocheck.strategies import cases

QUICK = settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@QUICK
@given(cases(world_sizes=(1, 2, 3, 4)))
def test_round_trip(case: Case) -> None:
    data = encode(case)
    assert decode(data, source="x") == case
    assert from_plain(to_plain(case), source="x") == case
    assert encode(decode(data, source="x")) == data


def test_every_field_is_written_and_indented() -> None:
    text = encode(Case()).decode()
    assert text.endswith("}\n")
    assert '\n  "mesh": [\n    2\n  ],' in text
    assert set(json.loads(text)) == set(Case.__struct_fields__)


def test_fields_that_are_left_out_have_their_defaults() -> None:
    assert decode(b"{}", source="x") == Case()


@pytest.mark.parametrize("cut", [0, 1, 50, 200, 700])
def test_truncated(cut: int) -> None:
    with pytest.raises(UsageError, match=r"c\.json: .*(ends too early, after \d+ bytes|is empty)"):
        decode(encode(Case())[:cut], source="c.json")


@QUICK
@given(st.binary(max_size=40))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    try:
        decode(data, source="c.json")
    except UsageError as error:
        assert str(error).startswith("c.json")  # noqa: PT017 - most bytes raise, some may not


@QUICK
@given(st.data())
def test_no_flipped_byte_raises_anything_else(data: st.DataObject) -> None:
    text = bytearray(encode(Case(model=Model(blocks=(Block(kind="mlp"),)))))
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(text), source="c.json")
    except UsageError as error:
        assert str(error).startswith("c.json")  # noqa: PT017 - most bytes raise, some may not


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"model":}', "c.json: not JSON: invalid character at line 1, column 10"),
        (b'{\n "seed": 1x}', "c.json: not JSON: expected ',' or '}' at line 2, column 11"),
        (b"{} {}", "c.json: not JSON: trailing characters at line 1, column 5"),
        (b'{"model":{"stem":"\xff"}}', "c.json is not UTF-8 text (line 1, column 19)"),
        (b'{"mesh":[1e999]}', "c.json: not JSON: Number out of range"),
        (b"[" * 100_000, "c.json is nested too deeply to be a case"),
        (b"[1]", "c.json is not a case: it holds [1], needed is an object"),
        (b'{"format":1}', "c.json has case format 1; this zerocheck knows format 2"),
        (b'{"format":"1"}', 'c.json has case format "1"; this zerocheck knows format 2'),
        (b'{"format":true}', "c.json has case format true; this zerocheck knows format 2"),
        (b'{"format":1,"no":1}', "c.json has case format 1; this zerocheck knows format 2"),
        (
            b'{"data":{"lenght":3}}',
            "c.json: data has no field 'lenght'; did you mean 'length'? "
            "(fields: batch, length, loss_factor, masked, rng, past_wrapper)",
        ),
        (b'{"trainnig":{}}', "c.json: the case has no field 'trainnig'; did you mean 'training'?"),
        (
            b'{"model":{"width":0}}',
            "c.json: model.width is 0; allowed: an integer >= 1 and <= 1048576",
        ),
        (
            b'{"model":{"width":"a"}}',
            'c.json: model.width is "a"; allowed: an integer >= 1 and <= 1048576',
        ),
        (
            b'{"model":{"blocks":[{"kind":"mlp"},{"kind":"mpl"}]}}',
            "c.json: model.blocks[1].kind is \"mpl\"; did you mean 'mlp'?; allowed: one of "
            '"attention", "batch_norm"',
        ),
        (
            b'{"model":{"user":{"factory":"a.py:f"}}}',
            "c.json: model.user lacks the field 'parameters', a list of 1",
        ),
        (b'{"model":{"user":{"factori":""}}}', "c.json: model.user has no field 'factori'"),
        (b'{"model":{"blocks":[{}]}}', "c.json: model.blocks[0] lacks the field 'kind', one of"),
        (b'{"mesh":[]}', "c.json: mesh is []; allowed: a list of 1 to 2 elements"),
        (b'{"mesh":[2,0]}', "c.json: mesh[1] is 0; allowed: an integer >= 1 and <= 1024"),
        (b'{"data":null}', "c.json: data is null; allowed: an object"),
        (b'{"seed":1.5}', "c.json: seed is 1.5; allowed: an integer >= 0 and <"),
        (
            b'{"training":{"clip":-1}}',
            "c.json: training.clip is -1; allowed: a number > 0.0 and <= 1e+30 or null",
        ),
        (b'{"model":{"calls":[0,-1]}}', "c.json: model.calls[1] is -1; allowed: an integer >= 0"),
        (b'{"training":{"set_to_none":1}}', "set_to_none is 1; allowed: true or false"),
        (
            b'{"optimizer":{"groups":[{"pattern":""}]}}',
            'groups[0].pattern is ""; allowed: a text of 1 to 256 characters',
        ),
        (b'{"seed":1' + b"0" * 400 + b"}", "c.json: seed is 1000000"),
    ],
)
def test_messages(data: bytes, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        decode(data, source="c.json")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


def test_merged_changes_only_what_is_given() -> None:
    case = merged(Case(seed=7), {"training": {"clip": 2.0}, "mesh": [3]}, source="fixed")
    assert case == Case(seed=7, mesh=(3,), training=Training(clip=2.0))
    assert merged(case, {"data": Data(batch=4)}, source="fixed").data.batch == 4
    with pytest.raises(UsageError, match=r"fixed: training has no field 'clop'; did you mean"):
        merged(case, {"training": {"clop": 2.0}}, source="fixed")
    with pytest.raises(UsageError, match=r"fixed: training is 3; allowed: an object"):
        merged(case, {"training": 3}, source="fixed")


def test_cases_are_values() -> None:
    case = Case(model=Model(blocks=(Block(kind="conv"),)))
    again = decode(encode(case), source="x")
    assert hash(case) == hash(again)
    with pytest.raises(AttributeError):
        case.seed = 1  # type: ignore[misc]
    assert msgspec.structs.replace(case, seed=1) != case


def test_the_repr_is_python_that_makes_the_case() -> None:
    for case in draw(30, seed=2, world_sizes=(1, 2, 3)):
        assert eval(repr(case), vars(schema)) == case
    assert repr(Case(training=Training(steps=1))) == "Case(training=Training(steps=1))"
