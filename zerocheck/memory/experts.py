"""Mixture of experts of the presets: a router, and MLPs of which each token takes a few.

How many tokens an expert gets depends on data, which a simulation does not have. Here each gets
the same number (even routing), so that all shapes are known. Real routing is uneven: the tokens of
all experts together are as many, and so are the bytes that the backward keeps.

With expert parallelism each of E neighboring ranks has 1/E of the experts, as in torchtitan. Tokens
go to the ranks of their experts by an all-to-all, and their results come back the same way.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from ..errors import UsageError

EVEN_ROUTING = "even routing assumed: every expert gets the same number of tokens"
"""Assumption that reports print."""


class MixtureOfExperts(nn.Module):
    """Experts after a router; each token is computed by the `active` best ones.

    Only shapes are right: tokens are sorted by their expert, and split into equal parts.
    """

    group: dist.ProcessGroup | None = None
    """Ranks that the experts are divided over; this one has `experts`. None: it has all."""

    def __init__(self, width: int, experts: list[nn.Module], active: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)
        self.active = active

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, sequence, width) to the same shape."""
        tokens = x.reshape(-1, x.shape[-1])
        shares, chosen = self.router(tokens).float().softmax(-1).topk(self.active)
        shares = shares / shares.sum(-1, keepdim=True)
        order = chosen.flatten().argsort()
        places = order // self.active
        rows = tokens[places]
        if self.group is not None:
            by_expert = self._by_expert(rows)
            rows = _exchanged(rows, self.group)[by_expert]
        parts = rows.tensor_split(len(self.experts))
        outputs = torch.cat(
            [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        )
        if self.group is not None:
            outputs = _exchanged(outputs[by_expert.argsort()], self.group)
        outputs = outputs * shares.flatten()[order, None].to(outputs.dtype)
        mixed = torch.zeros(tokens.shape, dtype=outputs.dtype, device=outputs.device)
        return mixed.index_add(0, places, outputs).view(x.shape)

    def _by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the order by expert of received rows, which are sorted by sender first."""
        assert self.group is not None
        numbers = torch.arange(len(rows), device=rows.device)
        return numbers.view(self.group.size(), len(self.experts), -1).transpose(0, 1).flatten()


def _exchanged(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send an equal part of the rows to each rank of a group, and return those received."""
    received: torch.Tensor = all_to_all_single_autograd(rows, None, None, group)
    return received


def divide_experts(name: str, model: nn.Module, ranks: int, tokens: int) -> None:
    """Leave the experts of one of `ranks` ranks in a model of the meta device, in place.

    tokens: of a microbatch. Raises UsageError for a model without experts, and where ranks do not
    divide them, or they do not divide the tokens.
    """
    blocks = [one for one in model.modules() if isinstance(one, MixtureOfExperts)]
    option = f"--expert-parallel {ranks}: {name} has"
    if not blocks:
        raise UsageError(f"{option} no experts that are known")
    for block in blocks:
        count = len(block.experts)
        if count % ranks:
            raise UsageError(f"{option} {count} experts, no multiple of {ranks}")
        if (rows := tokens * block.active) % count:
            raise UsageError(f"{option} {rows} rows a microbatch, no multiple of {count} experts")
        del block.experts[count // ranks :]


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of all experts in a model."""
    blocks = [one.experts for one in model.modules() if isinstance(one, MixtureOfExperts)]
    return {parameter for experts in blocks for parameter in experts.parameters()}
