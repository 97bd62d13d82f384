"""What is said of a load that refuses a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from zerocheck.case.schema import Case, Optimizer, OptimizerKind
from zerocheck.contract.no_kernel import refused_dtypes
from zerocheck.contract.refusals import refused_cast
from zerocheck.drive.checkpoints import gist
from zerocheck.drive.steps import Driver
from zerocheck.errors import Unsupported
from zerocheck.models.network import build_model


def test_type_and_message() -> None:
    assert gist(KeyError("exp_avg")) == "KeyError: 'exp_avg'"
    assert len(gist(ValueError("x" * 999))) == 500


def test_the_tracebacks_of_ranks_are_left_out(tmp_path: Path) -> None:
    state_dict_saver.save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    next(tmp_path.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointException) as raised:
        state_dict_loader.load({"a": torch.zeros(3)}, checkpoint_id=tmp_path)
    assert "Traceback" in str(raised.value) and "^^^^" in str(raised.value)
    message = gist(raised.value)
    assert message.startswith("CheckpointException: CheckpointException ranks:dict_keys([0]): File")
    assert (
        "No such file or directory" in message
        and "Traceback" not in message
        and "\n" not in message
    )


class _Checkpoints:
    """Checkpoints whose load raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def load(self, subject: object) -> None:
        raise self.error


IN_PLACE = "aten.add_.Tensor: in-place operations that require placement changes are not supported"


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_what_torch_cannot_run_at_all_is_no_refusal_of_a_checkpoint(
    kind: OptimizerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver: Any = Driver.__new__(Driver)
    driver._model = None
    driver.device, driver.case = torch.device("cpu"), Case(optimizer=Optimizer(kind=kind))
    driver.progress = SimpleNamespace(at=lambda text: None)
    driver.checkpoints = _Checkpoints(RuntimeError(f"{IN_PLACE}. The input has placement"))
    monkeypatch.setattr(Driver, "_built", lambda self, load: (None, None))
    if kind == "adamw":
        assert driver.load_checkpoint(None).checkpoint.refused.startswith("RuntimeError: aten.add_")
        return
    with pytest.raises(Unsupported, match=f"torch refuses Muon of DTensors: {IN_PLACE}"):
        driver.load_checkpoint(None)


def test_a_model_that_is_cast_is_refused_where_torch_has_no_kernel() -> None:
    """And an operator of an implementation, whose parameters have their dtypes, is not excused."""
    case = Case()
    model = build_model(case)
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(2, 2) @ torch.zeros(2, 2, dtype=torch.bfloat16)
    assert refused_cast(model, raised.value, case) is None
    cast = model.to(torch.bfloat16)
    reason = refused_cast(cast, raised.value, case)
    assert reason is not None and "a model that is cast to bfloat16 cannot run this ca" in reason
    assert refused_cast(cast, RuntimeError("shapes cannot be multiplied"), case) is None


def test_a_reference_without_a_kernel_is_no_failure_of_the_judge() -> None:
    norm = torch.nn.BatchNorm1d(3).to(torch.bfloat16)
    with pytest.raises(Unsupported, match="in the declared dtypes: mixed dtype"), refused_dtypes():
        norm(torch.zeros(4, 3))
    with pytest.raises(RuntimeError, match="shapes cannot"), refused_dtypes():
        torch.zeros(2, 3) @ torch.zeros(2, 3)
