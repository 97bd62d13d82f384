"""torch's ZeroRedundancyOptimizer over DistributedDataParallel: sharded states (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer

from ...case.schema import Case
from ...case.shapes import learning, parameter_dtypes
from ...case.traits import reduced_precision
from ...contract import Built, Loader, groups, torch_optimizer
from ...contract.checkpoint import other_states, take_over
from ...optimizers import optimizer_of
from ...protocol.layout import Layout
from ..ddp.adapter import Ddp, ddp
from ..ddp.layout import ddp_layout
from ..shared import full_checkpoint as file
from ..shared.scaling import scaler_of
from ..shared.schedules import with_schedule
from ..shared.sync import accumulation
from . import collectives as predicted_calls
from .layout import dummies, shared_states


class ZeroRedundancy(Ddp):
    """DDP with ZeroRedundancyOptimizer. A parameter is updated by one rank, which alone
    has its moments, and is broadcast to the others; it is never cut.

    `sharding.bucket_view` sets parameters_as_bucket_view. With `optimizer_first` the optimizer is
    made before DDP. Refused by torch, and declared here: models without trainable parameters, and
    several dtypes.

    Checkpoints: the states are consolidated on rank 0, which writes one file with torch.save.
    """

    stage = 1
    options = ("bucket", "sync", "bucket_view", "find_unused", "static_graph", "optimizer_first")

    _optimizer: ZeroRedundancyOptimizer

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None."""
        reason = super().supports(case) or _one_optimizer(case)
        dtypes = parameter_dtypes(case.model)
        if reason is None and len({dtypes[name] for name in learning(case)}) > 1:
            return "ZeroRedundancyOptimizer wants one dtype: a block of the model is in bf16"
        return reason

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> Layout | None:
        """Return a rank's memory layout (see `ddp_layout`) and collectives, as far as predicted."""
        held = ddp_layout(
            model, case, gradient_views=False, states=shared_states(rank), extra=dummies
        )
        if reduced_precision(case):  # gradients come in another order than the bare model's in fp32
            return held
        return with_schedule(held, predicted_calls.zero_redundancy(model, case), case)

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
            scaler=scaler_of(case, mesh),
            rewrap=wrap,
        )

    def save(self, directory: str, loader: Loader) -> None:
        file.write(directory, self._whole_states(), other_states(loader, self.built.scaler))

    def load(self, directory: str, loader: Loader) -> None:
        found = file.read(directory)
        self._inner.load_state_dict(found["model"])
        self._optimizer.load_state_dict(found["optimizer"])
        take_over(found, loader, self.built.scaler)

    def export(self) -> Mapping[tuple[str, str], torch.Tensor]:
        """Export the consolidated states, on rank 0."""
        return self._exported(self._whole_states())

    def _whole_states(self) -> dict[str, Any]:
        """Return the whole states on rank 0, {} elsewhere."""
        self._optimizer.consolidate_state_dict(to=0)
        return super()._whole_states() if dist.get_rank() == 0 else {}

    def close(self) -> None:
        del self._optimizer
        super().close()


def _one_optimizer(case: Case) -> str | None:
    """Return the reason to reject a case with two optimizers, or None."""
    optimizer = optimizer_of(case.optimizer)
    if len(optimizer.rules) > 1:
        return f"shares out one optimizer, and the case has {optimizer.name}"
    return None


def _shared_out(model: nn.Module, case: Case, mesh: DeviceMesh) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        groups(model, case),
        optimizer_class=torch_optimizer(case),
        process_group=mesh.get_group(),
        parameters_as_bucket_view=case.sharding.bucket_view,
    )
