"""Faults in other optimizers: torch's that are their own reference, the user's, and factored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from .. import causes as bugs
from ..adapters.fsdp2.adapter import Fsdp2
from ..adapters.fsdp2.gathered_muon import Fsdp2Muon, local
from ..adapters.textbook.zero1 import Zero1
from ..case.schema import Case
from ..contract import Loader
from ..contract.groups import groups
from .fault import fault
from .parts import CheckpointInParts, OneByOne, Zero1InParts, lend, method_of
from .update import GroupsCollapse


def _of_torch(kind: str) -> Mapping[str, Any]:
    return {"optimizer": {"kind": kind}, "training": {"loss_scale": None}}


@fault(bugs.SCALAR_STATE_LOST, source="none known", features=("mid-training",))
class ProductOfMomentaLost(Zero1):
    """NAdam's product of momenta is no tensor of the shape of a parameter, and is not restored."""

    fixed = _of_torch("nadam")

    def restore(self, full: Mapping[tuple[str, str], torch.Tensor]) -> None:
        super().restore(full)
        for state in self.optimizer.optimizer.state.values():
            if "mu_product" in state:
                state["mu_product"] = torch.tensor(1.0)


@fault(bugs.MOMENTS_RESET, source="seen often", features=("mid-training",))
class SumOfSquaresForgotten(Zero1InParts):
    """Adagrad's sum of squares starts anew in every step."""

    fixed = _of_torch("adagrad")

    def step(self, rates: Sequence[float]) -> None:
        for state in self.states():
            state["sum"].zero_()
        super().step(rates)


@fault(bugs.DECOUPLED_INSTEAD_OF_L2, source="seen often")
class DecayOfAdamW(Zero1InParts):
    """The case has Adam, and the parameters decay as AdamW's do."""

    fixed = _of_torch("adam")

    def step(self, rates: Sequence[float]) -> None:
        groups = self.optimizer.optimizer.param_groups
        for rate, group in zip(rates, groups, strict=True):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.mul_(1 - rate * group["weight_decay"])
            group["kept"], group["weight_decay"] = group["weight_decay"], 0.0
        super().step(rates)
        for group in groups:
            group["weight_decay"] = group.pop("kept")


@fault(bugs.BETAS_SWAPPED, source="none known", features=("mid-training",))
class BetasOfAdamaxSwapped(Zero1InParts):
    """Adamax is given beta2 and beta1."""

    fixed = _of_torch("adamax")

    def step(self, rates: Sequence[float]) -> None:
        self.exchange()
        super().step(rates)
        self.exchange()

    def exchange(self) -> None:
        """Exchange the betas of each group."""
        for group in self.optimizer.optimizer.param_groups:
            group["betas"] = group["betas"][::-1]


@fault(bugs.OPTIONS_OF_ANOTHER_GROUP, source="seen often", features=("groups",))
class RateOfTheFirstGroup(GroupsCollapse):
    """RMSprop has the learning rate of the first group for all of them."""

    fixed = _of_torch("rmsprop")


@fault(bugs.GRADIENT_WITH_THE_WRONG_SIGN, source="none known")
class SignOfRprop(Zero1InParts):
    """Rprop, which sees the signs of gradients alone, sees the wrong ones."""

    fixed = _of_torch("rprop")

    def step(self, rates: Sequence[float]) -> None:
        self.negate()
        super().step(rates)
        self.negate()

    def negate(self) -> None:
        """Change the sign of each gradient."""
        for gradient in self.optimizer.given():
            gradient.neg_()


class SignedMomentum(torch.optim.Optimizer):
    """Lion: moves by the sign of a mean. Elementwise, and without a step count."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(torch.lerp(mean, p.grad, 0.1).sign_(), alpha=group["lr"])
                mean.lerp_(p.grad, 0.01)


class NormalizedMomentum(OneByOne):
    """Moves by a momentum over its norm: needs whole parameters. Counts in an int."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], rate: float) -> None:
        """Take one step of one parameter."""
        if not state:
            state["step"], state["momentum"] = 0, torch.zeros_like(p)
        state["step"] += 1
        state["momentum"].mul_(0.9).add_(g)
        self.move(p, state["momentum"], rate / state["step"] ** 0.5)

    def move(self, p: torch.Tensor, momentum: torch.Tensor, rate: float) -> None:
        """Move a parameter along its momentum."""
        p.sub_(momentum / (momentum.norm() + 1e-8), alpha=rate)


class CorrectedMean(SignedMomentum):
    """Moves by a mean that is corrected for its start. Counts in the parameter group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(mean / (1 - 0.9 ** group["step"]), alpha=group["lr"])


def _of_user(kind: type, *, elementwise: bool, count: str = "") -> Mapping[str, Any]:
    """Return the fields of a case with one of these classes, as inspection finds them."""
    state = {"name": "mean" if elementwise else "momentum", "size": 0.1 if elementwise else 5.0}
    user = {
        "location": f"{__name__}:{kind.__name__}",
        "states": [state],
        "count": count or ("none" if elementwise else "int"),
        "elementwise": elementwise,
        "weight_decay": elementwise,
    }
    return {"optimizer": {"kind": "user", "user": user}, "training": {"loss_scale": None}}


class OfUsersOptimizer(Fsdp2):
    """FSDP2 with an optimizer of the user's own, `kind`."""

    options: ClassVar[tuple[str, ...]] = Fsdp2Muon.options
    kind: ClassVar[type[Any]]

    def make_optimizer(self, model: nn.Module, case: Case) -> Any:
        return self.kind(groups(model, case))


class _OfShards(NormalizedMomentum):
    def move(self, p: torch.Tensor, momentum: torch.Tensor, rate: float) -> None:
        super().move(local(p), local(momentum), rate)


@fault(bugs.STEP_OF_EACH_SHARD, source="Megatron-LM #5961; dion #18", features=("other-optimizer",))
class NormOfTheShard(OfUsersOptimizer):
    """An optimizer that needs whole parameters is given the local shards."""

    fixed = _of_user(NormalizedMomentum, elementwise=False)
    kind = _OfShards


@fault(bugs.STEP_COUNT_LOST, source="Megatron-LM #6920")
class CountOfTheUsersLost(Zero1InParts):
    """A step count that is an int is in no checkpoint, and starts at 0 after a load."""

    fixed = _of_user(NormalizedMomentum, elementwise=False)

    def restore_counts(self) -> None:
        super().restore_counts()
        for state in self.optimizer.optimizer.state.values():
            state["step"] = 0


@fault(bugs.STEP_COUNT_LOST, source="Megatron-LM #6920", features=("other-optimizer",))
class CountOfTheGroupLost(OfUsersOptimizer):
    """A step count in the parameter group is not restored, and starts at 0 after a load."""

    fixed = _of_user(CorrectedMean, elementwise=True, count="group")
    kind = CorrectedMean

    def load(self, directory: str, loader: Loader) -> None:
        super().load(directory, loader)
        for group in self.optimizers.groups():
            group["step"] = 0


@fault(bugs.WEIGHT_DECAY_MISSING, source="seen often")
class DecayOfTheUsersLost(Zero1InParts):
    """The options of the groups are lost when the user's optimizer is made of shards."""

    fixed = _of_user(SignedMomentum, elementwise=True)

    def step(self, rates: Sequence[float]) -> None:
        for group in self.optimizer.optimizer.param_groups:
            group["weight_decay"] = 0.0
        super().step(rates)


@fault(bugs.MOMENTS_LOST, source="lerobot #4658")
class MeanOfTheUsersLost(Zero1InParts):
    """The states of an optimizer that the checkpoint does not know are not loaded."""

    fixed = _of_user(SignedMomentum, elementwise=True)

    def restore_counts(self) -> None:
        super().restore_counts()
        for state in self.states():
            state["mean"].zero_()


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


class FactoredInParts(OfUsersOptimizer):
    """FSDP2 with the methods of FactoredRms, over its shards, as its own."""

    fixed = FACTORED
    kind = FactoredRms
    factored: FactoredRms

    def make_optimizer(self, model: nn.Module, case: Case) -> Any:
        self.factored = super().make_optimizer(model, case)
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

    fixed = _of_torch("adafactor")

    def end_load(self) -> None:
        for state in self.optimizer.optimizer.state.values():
            for role in ("row_var", "col_var"):
                if role in state:
                    state[role].zero_()


@fault(bugs.SHARDS_IN_ANOTHER_ORDER, source="none known", features=("resume-more",))
class RowsInAnotherOrder(CheckpointInParts, Zero1):
    """On another number of ranks Adafactor's means of rows are joined in another order."""

    fixed = _of_torch("adafactor")

    def end_load(self) -> None:
        for state in self.optimizer.optimizer.state.values():
            if "row_var" in state:
                first, *others = state["row_var"].chunk(2, -2)
                state["row_var"] = torch.cat([*others, first], -2)
