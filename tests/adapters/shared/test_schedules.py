"""What is predicted in a release of torch that nobody compared with the predictions."""

from __future__ import annotations

import pytest
import torch

from zerocheck.adapters.ddp.adapter import Ddp
from zerocheck.adapters.fsdp1.adapter import Fsdp1
from zerocheck.adapters.fsdp2.adapter import MEMORY_SINCE, Fsdp2
from zerocheck.adapters.shared.schedules import COMPARED, without_schedule
from zerocheck.adapters.zero_redundancy.adapter import ZeroRedundancy
from zerocheck.case.schema import Case
from zerocheck.models.network import build_model
from zerocheck.run.known_issues.entries import ours


@pytest.mark.parametrize("implementation", [Ddp, ZeroRedundancy, Fsdp1, Fsdp2])
def test_nothing_is_predicted_of_an_unknown_schedule(
    implementation: type[Ddp | Fsdp1 | Fsdp2], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(mesh=(2,))
    known = implementation.layout(build_model(case), case, 0)
    assert known is not None and known.calls and known.highest
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    unknown = implementation.layout(build_model(case), case, 0)
    assert unknown is not None and unknown.calls is None and unknown.highest is None
    assert unknown.lines == known.lines  # shards are what they are


def test_obligations_that_need_a_prediction_are_said_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert without_schedule() == {} == Fsdp2.without
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    assert without_schedule().keys() == {"peak", "communication"}
    assert "torch 2.99 was not compared" in without_schedule()["peak"]


@pytest.mark.parametrize(("version", "known"), [("2.12.1", False), ("2.13.0+cpu", True)])
def test_the_live_memory_of_fsdp2_is_known_since_a_release(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    case = Case(mesh=(2,))
    layout = Fsdp2.layout(build_model(case), case, 0)
    assert layout is not None and layout.calls and (layout.highest is not None) is known
    assert ("peak" in without_schedule(memory_since=MEMORY_SINCE)) is not known


def test_releases_that_were_measured_are_known() -> None:
    measured = ours()[0].versions.measured["torch"]
    assert {version.rpartition(".")[0] for version in measured} <= {*COMPARED}
