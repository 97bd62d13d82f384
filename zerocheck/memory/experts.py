"""Mixture of experts of the presets: a router, and MLPs of which each token takes a few.

How many tokens an expert gets depends on data, which a simulation does not have. Here each gets
the same number (even routing), so that all shapes are known. Real routing is uneven: the tokens of
all experts together are as many, and so are the bytes that the backward keeps.
"""

from __future__ import annotations

import torch
from torch import nn

EVEN_ROUTING = "even routing assumed: every expert gets the same number of tokens"
"""Assumption that reports print."""


class MixtureOfExperts(nn.Module):
    """Experts after a router; each token is computed by the `active` best ones.

    Only shapes are right: tokens are sorted by their expert, and split into equal parts.
    """

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
        parts = tokens[places].tensor_split(len(self.experts))
        outputs = torch.cat(
            [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        )
        outputs = outputs * shares.flatten()[order, None].to(outputs.dtype)
        mixed = torch.zeros(tokens.shape, dtype=outputs.dtype, device=outputs.device)
        return mixed.index_add(0, places, outputs).view(x.shape)
