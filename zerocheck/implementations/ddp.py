"""torch's DistributedDataParallel with AdamW: nothing is sharded (ZeRO-0)."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..case.schema import Case
from ..case.shapes import sometimes_used, uncalled
from ..contract import Built, BuiltImplementation, Semantics, groups
from ..errors import Unsupported
from .limits import norm_of_empties, one_axis_fp32


class Ddp(BuiltImplementation):
    """DistributedDataParallel; gradients are accumulated under no_sync and reduced once.

    `sharding.bucket` (elements) sets its bucket size. A model that may leave trainable parameters
    out of the forward is wrapped with find_unused_parameters. DDP refuses a model without any
    trainable parameter, and so does this.
    """

    semantics = Semantics(accumulate="local", unused="skip", buffers="rank0")

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """None, or the reason why this case cannot be run."""
        return one_axis_fp32(case) or norm_of_empties(case)

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        """Wrap the model.

        Raises Unsupported if every parameter is frozen.
        """
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise Unsupported("DDP refuses a model without trainable parameters")
        wrapped = DistributedDataParallel(
            model,
            process_group=mesh.get_group(),
            bucket_cap_mb=case.sharding.bucket * 4 / 2**20,
            find_unused_parameters=bool(uncalled(case.model) or sometimes_used(case.model)),
        )
        optimizer = torch.optim.AdamW(groups(wrapped, case))
        return Built(wrapped, optimizer)
