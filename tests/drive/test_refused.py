"""What is said of a load that refuses a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from zerocheck.drive.checkpoints import gist


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
