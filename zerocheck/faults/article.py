"""Two sharders of a well-known tutorial on ZeRO, rewritten from their description.

Both look right, train, and print falling losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.shared.limits import fp32, one_axis
from ..case.schema import Case
from ..contract import Implementation, Semantics, Shard, Step, StepReport, grouped
from ..optimizers import STATES
from .fault import fault
from .parts import average


@fault(
    bugs.LOCAL_GRADIENT_ONLY, parent="zerocheck.faults.article:Repaired",
    source="a tutorial on ZeRO from scratch", world=3, without=("sometimes-used", "clip"),
)  # fmt: skip
class ArticleStage1(Implementation):
    """ZeRO-1 of a tutorial: gradients are never reduced.

    Each rank optimizes its share of the tensors. Shares are counted in tensors, and the last
    rank takes the rest. zero_grad clears the gradients of the share only. After the step each
    rank broadcasts its share.
    """

    semantics = Semantics()
    fixed: ClassVar = {"training": {"clip": None}}

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None."""
        return one_axis(case) or fp32(case)

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        self.model = model
        self.group = mesh.get_group()
        self.rank, self.world_size = self.group.rank(), self.group.size()
        self.trained = [pair for pair in model.named_parameters() if pair[1].requires_grad]
        self.owned = self.share(self.rank)
        self.optimizer = torch.optim.AdamW(grouped(case, self.owned))

    def share(self, rank: int) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of a rank."""
        each = len(self.trained) // self.world_size
        last = rank == self.world_size - 1
        return self.trained[rank * each : None if last else (rank + 1) * each]

    def train_step(self, step: Step) -> StepReport:
        for group, rate in zip(self.optimizer.param_groups, step.lr, strict=True):
            group["lr"] = rate
        self.optimizer.zero_grad()
        for microbatch in step.microbatches:
            loss = microbatch.loss(self.model) / len(step.microbatches)
            loss.backward()  # type: ignore[no-untyped-call]
        self.reduce()
        step.reached("reduced")
        self.optimizer.step()
        for rank in range(self.world_size):
            for _, parameter in self.share(rank):
                dist.broadcast(parameter.data, group_src=rank, group=self.group)
        return StepReport()

    def reduce(self) -> None:
        """Do nothing: this is the bug."""

    def shards(self) -> Iterator[Shard]:
        """Iterate over whole parameters and buffers, and the share's gradients and moments."""
        for name, parameter in self.model.named_parameters():
            yield Shard(name, "parameter", parameter.detach(), tuple(parameter.shape))
        for name, parameter in self.owned:
            yield Shard(name, "gradient", parameter.grad, tuple(parameter.shape))
            state = self.optimizer.state.get(parameter, {})
            for role in STATES:
                if role in state:
                    yield Shard(name, role, state[role], tuple(parameter.shape))
            if "step" in state:
                yield Shard(name, "step", state["step"], ())
        for name, buffer in self.model.named_buffers():
            yield Shard(name, "buffer", buffer, tuple(buffer.shape))


@fault(
    bugs.DIFFERENT_COLLECTIVES, parent="zerocheck.faults.article:Repaired",
    source="a tutorial on ZeRO from scratch", without=("sometimes-used", "clip"),
)  # fmt: skip
class ArticleStage2(ArticleStage1):
    """ZeRO-2 of the tutorial: each rank all-reduces the gradients of its share, and only those.

    So ranks call different collectives. What they get is an abort, a hang, or sums of gradients
    that do not belong together.
    """

    def reduce(self) -> None:
        for _, parameter in self.owned:
            if parameter.grad is not None:
                average(parameter.grad, self.group)


class Repaired(ArticleStage1):
    """Stage 1 with the missing part: gradients are averaged over ranks. This is no fault."""

    def reduce(self) -> None:
        for _, parameter in self.trained:
            if parameter.grad is not None:
                average(parameter.grad, self.group)

    def train_step(self, step: Step) -> StepReport:
        self.model.zero_grad()
        return super().train_step(step)
