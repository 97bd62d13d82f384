"""Faults in factored states: means and norms of shards, and states that a checkpoint gets wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from .. import causes as bugs
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.fsdp2.gathered_muon import Fsdp2Muon, local
from ..adapters.textbook.zero1 import Zero1
from ..case.schema import Case
from ..contract.groups import groups
from .fault import fault
from .parts import CheckpointInParts, OneByOne, lend, method_of


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its sum over ranks done, where they have parts of one."""
    if not isinstance(tensor, DTensor):
        return tensor
    places = [Replicate() if one.is_partial() else one for one in tensor.placements]
    return tensor.redistribute(placements=places)


def placed(tensor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return a tensor sharded as a parameter is: a dim of size 1 may have been gathered."""
    if not isinstance(tensor, DTensor) or not isinstance(p, DTensor):
        return tensor
    return tensor.redistribute(placements=p.placements)


class FactoredRms(OneByOne):
    """Adafactor for DTensors: divides by roots of means of rows and columns, and clips by RMS."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], rate: float) -> None:
        """Take one step of one parameter."""
        square = g * g
        means = {"square": square}
        if p.dim() > 1:
            means = {"rows": square.mean(-1), "columns": self.mean_of_rows(square)}
        for name, mean in means.items():
            held = state.setdefault(name, torch.zeros_like(mean))
            held.mul_(0.9).add_(mean, alpha=0.1)
        if p.dim() > 1:
            rows, columns = state["rows"].unsqueeze(-1), state["columns"].unsqueeze(-2)
            mean = whole(rows.sum(-2, keepdim=True)) / p.shape[-2]
            means["square"] = rows / (mean + 1e-30) * columns
        else:
            means["square"] = state["square"]
        way = g / (means["square"].sqrt() + 1e-8)
        p.sub_(placed(way / self.rms(way).clamp(min=1.0), p), alpha=rate)

    def mean_of_rows(self, square: torch.Tensor) -> torch.Tensor:
        """Return the mean over the rows of all ranks."""
        return whole(square.sum(-2)) / square.shape[-2]

    def rms(self, way: torch.Tensor) -> torch.Tensor:
        """Return the root mean square over all elements."""
        return (whole((way * way).sum()) / max(way.numel(), 1)).sqrt()


def _state(name: str, **shape: Any) -> dict[str, Any]:
    return {"name": name, "power": 2, "signed": False, **shape}


FACTORED = {
    "optimizer": {
        "kind": "user",
        "user": {
            "location": f"{__name__}:FactoredRms",
            "states": [
                _state("rows", of_matrices="rows", of_vectors="none"),
                _state("columns", of_matrices="columns", of_vectors="none"),
                _state("square", of_matrices="none"),
            ],
            "elementwise": False,
        },
    },
    "start": {"step": 0, "moments": "zero"},  # factored states of DTensors are not restored
    "training": {"loss_scale": None},
}
ADAFACTOR = {"optimizer": {"kind": "adafactor"}, "training": {"loss_scale": None}}


class FactoredInParts(Fsdp2):
    """FSDP2 with the methods of FactoredRms, over its shards, as its own."""

    fixed: ClassVar[Mapping[str, Any]] = FACTORED
    options: ClassVar[tuple[str, ...]] = Fsdp2Muon.options
    factored: FactoredRms

    def make_optimizer(self, model: nn.Module, case: Case) -> Any:
        self.factored = FactoredRms(groups(model, case))
        return lend(self, self.factored, "mean_of_rows", "rms", update="update_parameter")

    update_parameter = method_of("factored", FactoredRms.update)
    mean_of_rows = method_of("factored", FactoredRms.mean_of_rows)
    rms = method_of("factored", FactoredRms.rms)


@fault(
    bugs.MEAN_OF_SHARD_MEANS, source="none known", features=("other-optimizer", "uneven"),
    without=("dims-below-world",),
)  # fmt: skip
class ColumnsByMeanOfMeans(FactoredInParts):
    """The mean of a column is the mean of the ranks' means, which have unequal numbers of rows."""

    def mean_of_rows(self, square: torch.Tensor) -> torch.Tensor:
        if not isinstance(square, DTensor) or square.dim() > 2 or not local(square).numel():
            return super().mean_of_rows(square)
        ranks = [Partial("avg") if one.is_shard() else one for one in square.placements]
        mean = local(square).mean(-2)
        return whole(DTensor.from_local(mean, square.device_mesh, ranks, run_check=False))


@fault(bugs.STEP_OF_EACH_SHARD, source="Megatron-LM #5961", features=("other-optimizer",))
class FactorsOfTheShard(FactoredInParts):
    """A factored optimizer is given local shards: means of columns are those of the rank's rows."""

    def update_parameter(
        self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], rate: float
    ) -> None:
        if local(p).numel():
            super().update_parameter(local(p), local(g), state, rate)


@fault(bugs.NORM_OF_EACH_SHARD, source="none known", features=("other-optimizer",))
class ClippedByTheShard(FactoredInParts):
    """An update is clipped by the root mean square of the rank's rows, and not of the parameter."""

    def rms(self, way: torch.Tensor) -> torch.Tensor:
        root = super().rms(local(way))
        if not isinstance(way, DTensor):
            return root
        places = [Replicate()] * way.device_mesh.ndim
        return DTensor.from_local(root, way.device_mesh, places, run_check=False)


@fault(bugs.MOMENTS_LOST, source="Megatron-LM #6920")
class FactorsNotLoaded(CheckpointInParts, Zero1):
    """A load takes states that have the shape of their parameter, and leaves Adafactor's at 0."""

    fixed = ADAFACTOR

    def end_load(self) -> None:
        for state in self.optimizer.optimizer.state.values():
            for role in ("row_var", "col_var"):
                if role in state:
                    state[role].zero_()


@fault(bugs.SHARDS_IN_ANOTHER_ORDER, source="none known", features=("resume-more",))
class RowsInAnotherOrder(CheckpointInParts, Zero1):
    """On another number of ranks Adafactor's means of rows are joined in another order."""

    fixed = ADAFACTOR

    def end_load(self) -> None:
        for state in self.optimizer.optimizer.state.values():
            if "row_var" in state:
                first, *others = state["row_var"].chunk(2, -2)
                state["row_var"] = torch.cat([*others, first], -2)
