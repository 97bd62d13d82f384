"""torch's DistributedDataParallel with AdamW: nothing is sharded (ZeRO-0)."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..case.schema import Case
from ..case.shapes import sometimes_used, uncalled
from ..contract import Built, BuiltImplementation, Semantics, groups
from ..contract.implementation import EXTRAS
from ..errors import Unsupported
from .limits import norm_of_empties, one_axis_fp32
from .scaling import scaler_of
from .sync import accumulation, synchronized


class Ddp(BuiltImplementation):
    """DistributedDataParallel; gradients are reduced once, or with each microbatch.

    `sharding.bucket` (elements) sets its bucket size, `bucket_view` gradient_as_bucket_view. A
    model that may leave trainable parameters out of the forward is wrapped with
    find_unused_parameters. DDP refuses a model without any trainable parameter, and so does this; a
    changing graph that is said to be static is wrong use by DDP's documentation. It reduces only
    what was trainable when it was made, so the model is wrapped anew after some were unfrozen.
    """

    semantics = Semantics(accumulate="local", unused="skip", buffers="rank0", weight="token")
    options = ("bucket", "sync", "bucket_view", "find_unused", "static_graph", "optimizer_first")
    handles = EXTRAS

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """None, or the reason why this case cannot be run."""
        return one_axis_fp32(case) or norm_of_empties(case) or _changing_graph(case)

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.semantics = synchronized(self.semantics, case)

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        """Wrap the model.

        Raises Unsupported if every parameter is frozen.
        """
        first = torch.optim.AdamW(groups(model, case)) if case.sharding.optimizer_first else None
        wrap = partial(ddp, model, case, mesh, gradient_views=case.sharding.bucket_view)
        wrapped = wrap()
        return Built(
            wrapped,
            first or torch.optim.AdamW(groups(wrapped, case)),
            accumulate=accumulation(case),
            scaler=scaler_of(case),
            rewrap=wrap,
        )


def ddp(
    model: nn.Module, case: Case, mesh: DeviceMesh, *, gradient_views: bool
) -> DistributedDataParallel:
    """The model in DDP with the options of the case. gradient_views: gradient_as_bucket_view.

    Raises Unsupported if every parameter is frozen.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise Unsupported("DDP refuses a model without trainable parameters")
    sharding = case.sharding
    left_out = bool(uncalled(case.model) or sometimes_used(case.model))
    return DistributedDataParallel(
        model,
        process_group=mesh.get_group(),
        bucket_cap_mb=sharding.bucket * 4 / 2**20,
        gradient_as_bucket_view=gradient_views,
        find_unused_parameters=sharding.find_unused or left_out,
        static_graph=sharding.static_graph,
    )


def _changing_graph(case: Case) -> str | None:
    """None, or why DDP must not be told that the graph is static."""
    if case.sharding.static_graph and sometimes_used(case.model):
        return "the graph of the model changes from batch to batch (sharding.static_graph is true)"
    return None
