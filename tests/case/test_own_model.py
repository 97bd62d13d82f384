"""A case with the user's own model: data that round-trips, with shapes and features of its own."""

from __future__ import annotations

import msgspec
import pytest

from zerocheck.case import shapes
from zerocheck.case.codec import decode, encode, to_plain
from zerocheck.case.drawing import draw
from zerocheck.case.features import features
from zerocheck.case.reductions import simpler
from zerocheck.case.schema import (
    Block,
    Case,
    Data,
    Model,
    Start,
    Training,
    UserModel,
    UserParameter,
)
from zerocheck.case.validity import check
from zerocheck.errors import UsageError

PARAMETERS = (
    UserParameter(name="wte.weight", shape=(7, 4), trains=False),
    UserParameter(name="layers.0.weight", shape=(4, 4), contiguous=False),
    UserParameter(name="layers.0.gain", shape=()),
    UserParameter(name="experts.0.weight", shape=(2, 4), dtype="bf16", used="sometimes"),
    UserParameter(name="spare.weight", shape=(3, 0), used="never"),
)
USER = UserModel(
    factory="my_model.py:tiny",
    parameters=PARAMETERS,
    order=("wte", "layers.0"),
    features=("tied", "dropout"),
)
CASE = Case(model=Model(user=USER))
FIXED = {"model": {"user": to_plain(CASE)["model"]["user"]}}
replace = msgspec.structs.replace


def test_it_round_trips_through_json() -> None:
    assert decode(encode(CASE), source="it") == CASE
    assert hash(decode(encode(CASE), source="it")) == hash(CASE)
    check(CASE)


def test_shapes_come_from_what_was_seen() -> None:
    model = CASE.model
    assert shapes.parameter_shapes(model)["layers.0.weight"] == (4, 4)
    assert shapes.parameter_elements(model) == 28 + 16 + 1 + 8
    assert shapes.parameter_dtypes(model)["experts.0.weight"] == "bf16"
    assert "wte.weight" not in shapes.trainable(model)
    assert shapes.uncalled(model) == ("spare.weight",)
    assert shapes.sometimes_used(model) == ("experts.0.weight",)
    assert shapes.scalars(model) == ("layers.0.gain",)
    assert shapes.empties(model) == ("spare.weight",)
    assert shapes.transposed(model) == ("layers.0.weight",)
    assert shapes.draws_random(model)


def test_its_features_are_those_that_were_found_and_those_of_its_parameters() -> None:
    found = set(features(CASE))
    assert {"tied", "dropout", "frozen", "unused", "sometimes-used", "parameter-0d"} <= found
    assert {"parameter-empty", "transposed"} <= found
    assert not found & {"stem-dense", "no-blocks", "block-mlp", "mixed-dtypes"}
    assert "carried-rng" in features(replace(CASE, data=Data(rng="carried")))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            replace(CASE, model=Model(user=USER, blocks=(Block(kind="mlp"),))),
            "model.blocks cannot be set beside model.user",
        ),
        (replace(CASE, data=Data(batch=3)), "data.batch cannot be set beside model.user"),
        (
            replace(CASE, model=Model(user=replace(USER, factory="my_model.py"))),
            "name the function that makes the model too: my_model.py:NAME",
        ),
        (
            replace(CASE, model=Model(user=replace(USER, parameters=PARAMETERS[1:2] * 2))),
            "'layers.0.weight' more than once",
        ),
        (
            replace(CASE, model=Model(user=replace(USER, parameters=PARAMETERS[:1]))),
            "no trainable parameter is left",
        ),
        (replace(CASE, start=Start(zeros=("head.*",))), "'head.*' matches no parameter"),
        (replace(CASE, training=Training(unfreeze=1)), "training.unfreeze needs frozen parameters"),
    ],
)
def test_what_does_not_go_with_it(case: Case, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        check(case)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": []}, "model.user.parameters"),
        ({"factory": 3}, "model.user.factory is 3"),
        ({"code": "x"}, "model.user has no field 'code'"),
        ({"parameters": [{"name": "a", "shape": [-1]}]}, "model.user.parameters[0].shape[0] is -1"),
        (
            {"parameters": [{"name": "a", "shape": [1], "used": "seldom"}]},
            'model.user.parameters[0].used is "seldom"',
        ),
    ],
)
def test_a_file_that_is_wrong_says_where(change: dict[str, object], message: str) -> None:
    plain = to_plain(CASE)
    plain["model"]["user"] = {**plain["model"]["user"], **change}
    with pytest.raises(UsageError) as raised:
        decode(msgspec.json.encode(plain), source="it")
    assert message in str(raised.value)


def test_drawn_cases_have_it_and_differ_in_all_else() -> None:
    drawn = draw(60, seed=0, world_sizes=(2, 3), fixed=FIXED)
    assert len(set(drawn)) == 60
    assert {case.model for case in drawn} == {CASE.model}
    assert len({case.optimizer for case in drawn}) > 10
    assert {case.data.rng for case in drawn} == {"seeded", "carried"}
    assert {case.data.batch for case in drawn} == {Data().batch}


def test_it_stays_while_a_case_shrinks() -> None:
    case = max(draw(40, seed=1, world_sizes=(4,), fixed=FIXED), key=lambda one: len(features(one)))
    search = simpler(case)
    candidate = next(search)
    assert candidate == Case(model=CASE.model, seed=case.seed, training=Training(steps=1))
    tried = [candidate]
    smallest = case
    try:
        while True:
            candidate = search.send(candidate.training.steps == case.training.steps)
            tried.append(candidate)
    except StopIteration as done:
        smallest = done.value
    assert {one.model for one in tried} == {CASE.model}
    assert smallest.optimizer == Case().optimizer and smallest.mesh == (1,)
