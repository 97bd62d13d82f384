"""Checkpoints of a stage of a pipeline that trains nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from zerocheck.contract.checkpoint import _whole_states


@pytest.mark.parametrize("frozen", [True, False])
def test_the_state_of_its_optimizer_is_empty(frozen: bool) -> None:
    model = nn.Linear(3, 2).requires_grad_(not frozen)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained}])
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    held, moments = _whole_states(model, [optimizer], flat)
    assert {*held} == {"weight", "bias"} and bool(moments) != frozen
    if frozen:
        with pytest.raises(RuntimeError, match="optim state_dict is empty"):
            get_state_dict(model, [optimizer], options=flat)
