"""torch's ZeroRedundancyOptimizer over DistributedDataParallel: states are cut (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer

from ..case.schema import Case
from ..case.shapes import learning, parameter_dtypes
from ..contract import Built, groups
from .ddp import Ddp, ddp
from .scaling import scaler_of
from .sync import accumulation


class ZeroRedundancy(Ddp):
    """DDP with ZeroRedundancyOptimizer over AdamW. A parameter is updated by one rank, which alone
    has its moments, and is broadcast to the others; it is never cut.

    `sharding.bucket_view` sets parameters_as_bucket_view. With `optimizer_first` the optimizer is
    made before DDP. Refused by torch, and declared here: models without trainable parameters, and
    several dtypes.
    """

    _optimizer: ZeroRedundancyOptimizer

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """None, or the reason why this case cannot be run."""
        reason = super().supports(case)
        dtypes = parameter_dtypes(case.model)
        if reason is None and len({dtypes[name] for name in learning(case)}) > 1:
            return "ZeroRedundancyOptimizer wants one dtype: a block of the model is in bf16"
        return reason

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        """Wrap the model and share out its optimizer states.

        Raises Unsupported if every parameter is frozen.
        """
        first = _shared_out(model, case, mesh) if case.sharding.optimizer_first else None
        wrap = partial(ddp, model, case, mesh, gradient_views=False)
        wrapped = wrap()
        optimizer = self._optimizer = first or _shared_out(wrapped, case, mesh)
        return Built(
            wrapped,
            optimizer,
            accumulate=accumulation(case),
            states=lambda: optimizer.optim.state,
            scaler=scaler_of(case),
            rewrap=wrap,
        )

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Every rank restores the parameters, and the moments of those that it updates."""
        super().restore(full)
        local = self._optimizer.optim
        own = {p for group in local.param_groups for p in group["params"]}
        local.state.update((p, s) for p, s in self._optimizer.state.items() if p in own)
        self._optimizer.state.clear()

    def close(self) -> None:
        del self._optimizer
        super().close()


def _shared_out(model: nn.Module, case: Case, mesh: DeviceMesh) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        groups(model, case),
        optimizer_class=torch.optim.AdamW,
        process_group=mesh.get_group(),
        parameters_as_bucket_view=case.sharding.bucket_view,
    )
