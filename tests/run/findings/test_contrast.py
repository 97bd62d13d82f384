"""What wrong cases and tensors have, and right ones have not."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from zerocheck.case.schema import Block, Case, Data, Model, Sharding, Start, Training
from zerocheck.run.findings.contrast import WrongCase, kinds, of_cases, of_tensors

TWO, THREE, FOUR = (Case(mesh=(ranks,)) for ranks in (2, 3, 4))
NORM = Model(blocks=(Block(kind="layer_norm"), Block(kind="mlp", hidden=5)))


def clipped(case: Case) -> Case:
    return msgspec.structs.replace(case, training=Training(clip=0.01))


def test_one_feature_tells_them_apart() -> None:
    masked = [msgspec.structs.replace(one, data=Data(masked=True)) for one in (TWO, THREE)]
    assert of_cases(masked, [TWO, THREE, FOUR]) == (
        "in 2 of the 5 cases tried: those with another number of tokens in every microbatch"
    )


def test_a_number_of_ranks() -> None:
    told = of_cases([THREE, FOUR], [Case(mesh=(1,)), TWO])
    assert told == "in 2 of the 4 cases tried: those on 3 ranks or more"


def test_two_features_together() -> None:
    started = Start(step=7)
    both = msgspec.structs.replace(clipped(TWO), start=started)
    right = [TWO, clipped(TWO), clipped(THREE), msgspec.structs.replace(TWO, start=started)]
    told = of_cases([both], right)
    features = "with start in mid-training and with gradient clipping"
    assert told == f"in 1 of the 5 cases tried: those {features}"


@pytest.mark.parametrize("seed", ["1", "7"])
def test_the_words_do_not_depend_on_the_hash_seed(seed: str) -> None:
    here = f"from {__name__} import test_two_features_together as test; test()"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", here], env=environment, check=True, timeout=60)


def test_what_the_others_have() -> None:
    wrong = [
        Case(mesh=(2,), model=Model(head_bias=False)),
        Case(mesh=(3,), model=Model(head_bias=False)),
    ]
    assert "head without bias" in of_cases(wrong, [TWO, THREE])
    assert "without head without bias" in of_cases([TWO, THREE], wrong)


def test_nothing_tells_them_apart() -> None:
    other = msgspec.structs.replace(TWO, seed=5)
    told = of_cases([TWO], [msgspec.structs.replace(TWO, seed=6), other])
    assert told == "in 1 of the 3 cases tried, which no feature tells from the others"


def test_too_few_cases_say_nothing() -> None:
    assert of_cases([TWO, THREE], [FOUR]) == ""
    assert of_cases([], [TWO, THREE, FOUR]) == ""


def test_the_kind_of_parameters() -> None:
    case = Case(mesh=(2,), model=NORM)
    norms = ("blocks.0.norm.weight", "blocks.0.norm.bias")
    assert of_tensors([WrongCase(case, norms)]) == "in all parameters of norms"
    biases = (
        "stem.bias",
        "blocks.0.norm.bias",
        "blocks.1.up.bias",
        "blocks.1.down.bias",
        "head.bias",
    )
    assert of_tensors([WrongCase(case, biases)]) == "in all biases"


def test_a_second_case_refutes_a_kind() -> None:
    case = Case(mesh=(2,), model=NORM)
    norms = ("blocks.0.norm.weight", "blocks.0.norm.bias")
    other = WrongCase(case, ("stem.weight",))
    assert of_tensors([WrongCase(case, norms), other]) == ""


def test_all_parameters_or_none_are_no_kind() -> None:
    assert of_tensors([]) == ""
    names = ("stem.weight", "stem.bias", "head.weight", "head.bias")
    assert of_tensors([WrongCase(TWO, names)]) == ""
    assert of_tensors([WrongCase(TWO, ())]) == ""


def test_kinds_of_a_parameter() -> None:
    case = Case(mesh=(4,), model=Model(inputs=3, width=6, outputs=2), sharding=Sharding(bucket=18))
    assert set(kinds(case, "stem.weight")) >= {
        "matrices",
        "parameters with as many elements as a bucket",
        "parameters whose first dim the ranks do not divide",
        "first parameters",
    }
    assert "parameters with a first dim below the number of ranks" in set(kinds(case, "head.bias"))
    tied = Case(mesh=(2,), model=Model(stem="embedding", inputs=8, outputs=8, tied=True))
    assert "tied parameters" in set(kinds(tied, "stem.weight"))
    twice = Case(mesh=(2,), model=Model(blocks=(Block(kind="mlp"),), calls=(0, 0)))
    assert "parameters of modules that are used twice" in set(kinds(twice, "blocks.0.up.weight"))
