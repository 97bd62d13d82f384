"""The blocks of a model: each maps (batch, length, width) to the same shape."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..case.schema import Block as BlockSpec
from .layers import (
    GRU,
    BatchNorm1d,
    Conv1d,
    GroupNorm,
    LayerNorm,
    Linear,
    RMSNorm,
    store_transposed,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""dtype of the parameters of a block, by the word of a case."""


class Mlp(nn.Module):
    """`up`, the activation, `down`."""

    def __init__(self, spec: BlockSpec, width: int) -> None:
        super().__init__()
        self.relu = spec.activation == "relu"
        self.up = Linear(width, spec.hidden, bias=spec.bias)
        self.down = Linear(spec.hidden, width, bias=spec.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., width) -> (..., width)."""
        y: torch.Tensor = self.up(x)
        y = self.down(F.relu(y) if self.relu else F.gelu(y))
        return y


class Expert(Mlp):
    """One expert of a mixture, which is called only where a token goes to it."""

    no_unit = True
    """Some ranks call it and others do not: it must not be a sharding unit of its own."""


class Experts(Linear):
    """A mixture of experts: the router, a linear layer, and the experts `mlps`.

    Every token goes to the expert with the largest logit, whose output is multiplied by its
    softmax probability, so that the router has a gradient. An expert that no token goes to is not
    called, and its parameters have no gradient.
    """

    def __init__(self, spec: BlockSpec, width: int) -> None:
        super().__init__(width, spec.experts, bias=spec.bias)
        self.mlps = nn.ModuleList(Expert(spec, width) for _ in range(spec.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        tokens = x.flatten(0, 1)
        shares = torch.softmax(super().forward(tokens), dim=-1)
        share, chosen = shares.max(dim=-1)
        outputs = torch.zeros_like(tokens)
        for number, expert in enumerate(self.mlps):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                weight = share[rows].unsqueeze(1)
                given = expert(tokens[rows]) * weight  # under autocast it may be wider
                outputs = outputs.index_add(0, rows, given.to(outputs.dtype))
        return outputs.reshape(x.shape)  # cuDNN may give x other strides


class BlockModule(nn.Module):
    """One block: maps (batch, length, width) to the same shape.

    Its layers: `up`, `down` (mlp); `qkv`, `out` (attention); `conv`; `gru` (recurrent); `experts`;
    `norm` (every norm); `narrow`, `widen` (an adapter of rank 0). `gain` is a 0-d parameter.

    A block in bf16 casts what comes in to bf16, computes in it, the residual included, and casts
    what goes out back. Running statistics are in bf16 too, as after `module.to(torch.bfloat16)`.
    """

    def __init__(self, spec: BlockSpec, width: int) -> None:
        super().__init__()
        self.kind = spec.kind
        self.heads = spec.heads
        self.residual = spec.residual
        self.relu = spec.activation == "relu"
        self.checkpoint = spec.checkpoint
        self.gain = nn.Parameter(torch.empty(())) if spec.gain else None
        match spec.kind:
            case "mlp":
                self.up = Linear(width, spec.hidden, bias=spec.bias)
                self.down = Linear(spec.hidden, width, bias=spec.bias)
            case "attention":
                self.qkv = Linear(width, 3 * width, bias=spec.bias)
                self.out = Linear(width, width, bias=spec.bias)
            case "conv":
                padding = spec.kernel // 2
                self.conv = Conv1d(width, width, spec.kernel, padding=padding, bias=spec.bias)
            case "recurrent":
                self.gru = GRU(width, bias=spec.bias)
            case "experts":
                self.experts = Experts(spec, width)
            case "layer_norm":
                self.norm: nn.Module = LayerNorm(width, bias=spec.bias)
            case "rms_norm":
                self.norm = RMSNorm(width, eps=1e-5)
            case "group_norm":
                self.norm = GroupNorm(spec.heads, width, bias=spec.bias)
            case "batch_norm":
                self.norm = BatchNorm1d(width, bias=spec.bias)
        self.dropout = nn.Dropout(spec.dropout) if spec.dropout else None
        self.narrow = Linear(width, 0, bias=False) if spec.empty else None
        self.widen = Linear(0, width, bias=False) if spec.empty else None
        self.dtype = DTYPES[spec.dtype]
        if self.dtype != torch.float32:
            self.to(self.dtype)
        if spec.transposed:
            store_transposed(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        dtype = x.dtype
        if self.dtype != torch.float32:  # others compute in what they are given, lowered or not
            x = x.to(self.dtype)
        if self.checkpoint:
            y: torch.Tensor = checkpoint(self._body, x, use_reentrant=False)
        else:
            y = self._body(x)
        return (x + y if self.residual else y).to(dtype)

    def _body(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the block: layers, adapter, gain, dropout."""
        y = self._layers(x)
        if self.narrow is not None and self.widen is not None:
            y = y + self.widen(self.narrow(x))
        if self.gain is not None:
            y = y * self.gain
        return y if self.dropout is None else self.dropout(y)

    def _layers(self, x: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "mlp":
                y: torch.Tensor = self.up(x)
                y = self.down(F.relu(y) if self.relu else F.gelu(y))
            case "attention":
                y = self.out(self._attended(self.qkv(x)))
            case "conv":
                y = self.conv(x)
            case "recurrent":
                y = self.gru(x)
            case "experts":
                y = self.experts(x)
            case _:
                y = self.norm(x)
        return y

    def _attended(self, qkv: torch.Tensor) -> torch.Tensor:
        """(batch, length, 3 width) -> (batch, length, width), by matmul and softmax alone.

        The fused kernels choose their algorithm by size; this one has the same bits everywhere.
        """
        batch, length, triple = qkv.shape
        depth = triple // 3 // self.heads
        parts = qkv.reshape(batch, length, 3, self.heads, depth)  # cuDNN may give other strides
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(depth))
        mixed: torch.Tensor = torch.softmax(scores, dim=-1) @ v
        return mixed.transpose(1, 2).reshape(batch, length, triple // 3)
