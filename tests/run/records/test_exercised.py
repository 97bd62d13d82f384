"""Features that a judged case exercised."""

from __future__ import annotations

import msgspec
import pytest
from hand_made import case

from zerocheck.case.features import FEATURES, features
from zerocheck.case.schema import Block, Case, Model, Training
from zerocheck.protocol.verdicts import Obligation
from zerocheck.run.records.exercised import _OF_DIMENSION, _OF_FEATURE, able, idle
from zerocheck.run.records.records import CaseFinished

TIGHT = Case(mesh=(2,), training=Training(clip=0.01))
NORMED = Case(mesh=(2,), model=Model(blocks=(Block(kind="batch_norm"),)))


def ran(one: Case, *vacuous: Obligation, status: str = "holds", **verdicts: str) -> CaseFinished:
    done = case(status=status, **verdicts)  # type: ignore[arg-type]
    judgement = msgspec.structs.replace(done.judgement, vacuous=vacuous)  # type: ignore[type-var]
    return msgspec.structs.replace(done, case=one, judgement=judgement)


def exercised(record: CaseFinished) -> tuple[str, ...]:
    spared = idle(record)
    return tuple(
        name
        for name in features(record.case)
        if record.judgement is not None and name not in spared
    )


def test_all_features_of_a_case_in_which_all_could_fail() -> None:
    assert exercised(ran(TIGHT)) == features(TIGHT)
    assert idle(ran(TIGHT)) == {}


def test_clipping_that_does_nothing_exercises_no_clipping() -> None:
    done = ran(TIGHT, "clip")
    assert idle(done) == {"clip": "clip", "clip-tight": "clip"}
    assert "world-2" in exercised(done) and "clip" not in exercised(done)


def test_a_loose_maximum_is_not_meant_to_clip() -> None:
    loose = Case(mesh=(2,), training=Training(clip=100.0))
    assert "clip-loose" in exercised(ran(loose, "clip"))
    assert "clip" not in exercised(ran(loose, "clip"))


def test_gradients_of_zero_exercise_no_world_and_no_model() -> None:
    done = ran(NORMED, "gradient")
    spared = idle(done)
    assert spared["world-2"] == spared["no-bias" if "no-bias" in spared else "stem-dense"]
    assert set(spared.values()) == {"gradient"}
    # The buffers move all the same, and so may the parameters, by decay.
    assert "block-batch-norm" in exercised(done) and "lr-large" not in spared


def test_what_is_violated_could_fail() -> None:
    done = ran(TIGHT, status="violated", gradient="violated")
    assert exercised(done) == features(TIGHT)
    assert done.judgement is not None and "gradient" in able(done.judgement)


def test_an_obligation_that_was_not_asked_for_takes_nothing_away() -> None:
    done = ran(TIGHT, "publish")
    judgement = msgspec.structs.replace(done.judgement, statuses={"update": "holds"})  # type: ignore[type-var]
    assert exercised(msgspec.structs.replace(done, judgement=judgement)) == features(TIGHT)


def test_nothing_could_fail() -> None:
    done = ran(TIGHT, "update")
    judgement = msgspec.structs.replace(done.judgement, statuses={"update": "holds"})  # type: ignore[type-var]
    done = msgspec.structs.replace(done, judgement=judgement)
    assert exercised(done) == () and set(idle(done)) == set(features(TIGHT))


def test_a_case_that_was_not_judged_exercised_nothing() -> None:
    crashed = msgspec.structs.replace(ran(TIGHT), status="crashed", judgement=None)
    assert exercised(crashed) == () and idle(crashed) == {}


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_has_an_obligation_or_a_reason(name: str) -> None:
    known = name in _OF_FEATURE or FEATURES[name].dimension in _OF_DIMENSION
    assert known or FEATURES[name].dimension == "disturbance"


def test_no_row_is_of_a_feature_that_is_gone() -> None:
    assert _OF_FEATURE.keys() <= FEATURES.keys()
    assert _OF_DIMENSION.keys() <= {row.dimension for row in FEATURES.values()}
