"""What the adapters do with earlier releases of DeepSpeed."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("deepspeed")

from packaging.version import Version

from zerocheck.adapters.deepspeed import configured_engine, refusals, releases
from zerocheck.adapters.deepspeed.stage3 import DeepSpeed3
from zerocheck.adapters.deepspeed.user_config import DeepSpeedConfig
from zerocheck.case.schema import Case, Precision, Training
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


def test_a_config_is_read_as_later_releases_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = DeepSpeedConfig(name="ds_config.json", stage=3, fixed={})
    assert issubclass(configured_engine.of_config(given), DeepSpeed3)
    monkeypatch.setattr(configured_engine, "INSTALLED", Version("0.18.9"))
    with pytest.raises(UsageError, match=r"0\.18\.9 is installed; .*zerocheck run deepspeed3"):
        configured_engine.of_config(given)
