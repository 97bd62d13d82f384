"""From a case to its model: an nn.Module with the same bits on every rank and in the judge."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..case.schema import Block as BlockSpec
from ..case.schema import Case, Model
from ..case.shapes import SPARE, STEM_KERNEL, call_order, matching
from .layers import (
    BatchNorm1d,
    Conv1d,
    Embedding,
    GroupNorm,
    LayerNorm,
    Linear,
    RMSNorm,
    fill,
)
from .seeds import WEIGHTS, generator_of


class Block(nn.Module):
    """One block: maps (batch, length, width) to the same shape.

    Its layers: `up`, `down` (mlp); `qkv`, `out` (attention); `conv`; `norm` (every norm).
    """

    def __init__(self, spec: BlockSpec, width: int) -> None:
        super().__init__()
        self.kind = spec.kind
        self.heads = spec.heads
        self.residual = spec.residual
        self.relu = spec.activation == "relu"
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
            case "layer_norm":
                self.norm: nn.Module = LayerNorm(width, bias=spec.bias)
            case "rms_norm":
                self.norm = RMSNorm(width, eps=1e-5)
            case "group_norm":
                self.norm = GroupNorm(spec.heads, width, bias=spec.bias)
            case "batch_norm":
                self.norm = BatchNorm1d(width, bias=spec.bias)
        self.dropout = nn.Dropout(spec.dropout) if spec.dropout else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        match self.kind:
            case "mlp":
                y: torch.Tensor = self.up(x)
                y = self.down(F.relu(y) if self.relu else F.gelu(y))
            case "attention":
                y = self.out(self._attended(self.qkv(x)))
            case "conv":
                y = self.conv(x)
            case _:
                y = self.norm(x)
        if self.dropout is not None:
            y = self.dropout(y)
        return x + y if self.residual else y

    def _attended(self, qkv: torch.Tensor) -> torch.Tensor:
        """(batch, length, 3 width) -> (batch, length, width), by matmul and softmax alone.

        The fused kernels choose their algorithm by size; this one has the same bits everywhere.
        """
        batch, length, triple = qkv.shape
        depth = triple // 3 // self.heads
        q, k, v = qkv.view(batch, length, 3, self.heads, depth).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(depth))
        mixed: torch.Tensor = torch.softmax(scores, dim=-1) @ v
        return mixed.transpose(1, 2).reshape(batch, length, triple // 3)


class Network(nn.Module):
    """`stem`, `blocks`, `head`, and `spare`, a trainable block that no forward calls."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.order = call_order(model)
        width = model.width
        match model.stem:
            case "dense":
                self.stem: nn.Module = Linear(model.inputs, width)
            case "conv":
                self.stem = Conv1d(model.inputs, width, STEM_KERNEL, padding=STEM_KERNEL // 2)
            case "embedding":
                self.stem = Embedding(model.inputs, width, padding_idx=model.padding_idx)
        self.blocks = nn.ModuleList(Block(spec, width) for spec in model.blocks)
        self.head = Linear(width, model.outputs, bias=model.head_bias)
        if model.tied:
            assert isinstance(self.stem, Embedding)
            self.head.weight = self.stem.weight
        if model.unused:
            self.spare = Block(SPARE, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, inputs) or token ids (batch, length) -> (batch, length, outputs)."""
        x = self.stem(x)
        for index in self.order:
            x = self.blocks[index](x)
        outputs: torch.Tensor = self.head(x)
        return outputs


def build_model(case: Case) -> Network:
    """The model of the case, in training mode, on the CPU, in fp32.

    Its bits depend on the case alone; the global random state is neither read nor changed. Call
    `check(case)` first: a case from elsewhere may ask for more memory than there is.
    """
    model = Network(case.model)
    generator = generator_of(case.seed, WEIGHTS)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        fill(name, parameter, generator)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            fill(name, buffer, generator)
    with torch.no_grad():
        for name in matching(parameters, case.start.zeros):
            parameters[name].zero_()
    for name in matching(parameters, case.model.frozen):
        parameters[name].requires_grad_(False)
    return model
