"""What the adapters do with earlier releases of DeepSpeed."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("deepspeed")

from packaging.version import Version

from zerocheck.adapters.deepspeed import configured_engine, refusals, releases
from zerocheck.adapters.deepspeed.options import stored_as
from zerocheck.adapters.deepspeed.stage3 import DeepSpeed3
from zerocheck.adapters.deepspeed.user_config import DeepSpeedConfig
from zerocheck.case.schema import Case, Precision, Training, TrainingSegment
from zerocheck.errors import UsageError

TWO = Case(mesh=(2,))


def microbatches(count: int) -> Case:
    return msgspec.structs.replace(TWO, training=Training(microbatches=count))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_divided_outputs_round_elsewhere_unless_the_divisor_is_a_power_of_two(
    stage: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = microbatches(count)
    assert refusals.refusal(case, stage) is None
    monkeypatch.setattr(releases, "divides_outputs", True)
    reason = refusals.refusal(case, stage)
    assert (reason is None) == (count in (1, 2, 4))
    assert reason is None or f"with {count} microbatches" in reason


def test_masters_of_early_releases_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    case = msgspec.structs.replace(TWO, precision=Precision(compute="bf16", reduce="bf16"))
    assert refusals.refusal(case, 3) is None
    monkeypatch.setattr(releases, "other_precision", True)
    assert "reduced precision is not read" in str(refusals.refusal(case, 3))
    assert refusals.refusal(TWO, 3) is None


SCATTERED = stored_as({"contiguous_gradients": False})
UNIVERSAL = stored_as({"universal": True})
PERSISTENT = stored_as({"persistence_threshold": 16})
UNUSED = msgspec.structs.replace(TWO.model, unused=True)
NARROW = Precision(compute="bf16", reduce="fp32")
RESUMED = (TrainingSegment(mesh=(2,)),)
CLIPPED = Training(clip=1.0)


@pytest.mark.parametrize(
    ("flag", "stages", "fields", "words"),
    [
        ("sums_anew", (1, 2), {"model": UNUSED}, "has no gradient of a parameter group"),
        ("sums_anew", (1, 2), {"mesh": (64,)}, "has no gradient of a parameter group"),
        (
            "sums_anew",
            (2,),
            {"training": Training(microbatches=2), "options": SCATTERED},
            "two faults that hide each other",
        ),
        (
            "converts_one_group",
            (3,),
            {"resume": RESUMED, "options": UNIVERSAL},
            "converts the first parameter group of stage 3 alone",
        ),
        ("waits_for_the_last", (3,), {"options": PERSISTENT}, "on a CPU it races"),
        (
            "last_not_reduced",
            (1,),
            {"precision": NARROW, "training": CLIPPED},
            "clips by the norm of gradients that are not all reduced",
        ),
    ],
)
def test_what_a_release_fails_at_is_refused(
    flag: str,
    stages: tuple[int, ...],
    fields: dict[str, object],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By that release, in those stages, and nothing that lacks one of the fields."""
    case = msgspec.structs.replace(TWO, **fields)
    before = [refusals.refusal(case, stage) for stage in (1, 2, 3)]
    assert before == [None, None, None]
    monkeypatch.setattr(releases, flag, True)
    for stage in (1, 2, 3):
        assert (words in str(refusals.refusal(case, stage))) == (stage in stages), stage
    for name in fields:
        less = msgspec.structs.replace(case, **{name: getattr(TWO, name)})
        assert [refusals.refusal(less, stage) for stage in (1, 2, 3)] == [None, None, None], name


def test_a_config_is_read_as_later_releases_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = DeepSpeedConfig(name="ds_config.json", stage=3, fixed={})
    assert issubclass(configured_engine.of_config(given), DeepSpeed3)
    monkeypatch.setattr(configured_engine, "INSTALLED", Version("0.18.9"))
    with pytest.raises(UsageError, match=r"0\.18\.9 is installed; .*zerocheck run deepspeed3"):
        configured_engine.of_config(given)
