"""A user's FSDP2 with RMSprop: a right one, and one whose states are lost in each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import zerocheck
from zerocheck.case.schema import Case


class ForgetfulRMSprop(torch.optim.RMSprop):
    """RMSprop whose averages start anew in each step."""

    def step(self, closure: Any = None) -> Any:
        for state in self.state.values():
            if "square_avg" in state:
                state["square_avg"].zero_()
        return super().step(closure)


def _built(kind: type[torch.optim.RMSprop], model: nn.Module, case: Case, mesh: DeviceMesh) -> Any:
    fully_shard(model, mesh=mesh)
    return zerocheck.Built(model, kind(zerocheck.groups(model, case)))


def right(model: nn.Module, case: Case, mesh: DeviceMesh) -> Any:
    return _built(torch.optim.RMSprop, model, case, mesh)


def state_lost(model: nn.Module, case: Case, mesh: DeviceMesh) -> Any:
    return _built(ForgetfulRMSprop, model, case, mesh)
