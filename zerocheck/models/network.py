"""Model of a case: an nn.Module with the same bits on every rank and in the judge."""

from __future__ import annotations

import torch
from torch import nn

from ..case.schema import Case, Model
from ..case.shapes import SIDE_INPUTS, SPARE, STEM_KERNEL, call_order, matching
from .blocks import BlockModule
from .layers import Conv1d, Embedding, Linear, fill
from .overflow import mark
from .seeds import WEIGHTS, generator_of
from .user import build_user_model


class Side(Linear):
    """Layer of the second input, called only in microbatches that have it."""

    no_unit = True
    """Some ranks call it and others do not: it must not be a sharding unit of its own."""


class Network(nn.Module):
    """`stem`, `side`, `blocks`, `head`, and `spare`, a trainable block that no forward calls."""

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
        self.side = Side(SIDE_INPUTS, width) if model.side else None
        self.blocks = nn.ModuleList(BlockModule(spec, width) for spec in model.blocks)
        self.head = Linear(width, model.outputs, bias=model.head_bias)
        if model.tied:
            assert isinstance(self.stem, Embedding)
            self.head.weight = self.stem.weight
        if model.unused:
            self.spare = BlockModule(SPARE, width)

    def forward(self, x: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, length, inputs) or token ids (batch, length) -> (batch, length, outputs).

        side: (batch, length, SIDE_INPUTS) where this microbatch has it; added after the stem.
        """
        x = self.stem(x)
        if side is not None and self.side is not None:
            x = x + self.side(side)
        for index in self.order:
            x = self.blocks[index](x)
        outputs: torch.Tensor = self.head(x)
        return outputs


def build_model(case: Case) -> nn.Module:
    """Build the model of the case, in training mode, on the CPU, in fp32 but for its bf16 blocks.

    The user's own is in the mode and the dtypes that its factory gives it.

    Its bits depend on the case alone; the global random state is neither read nor changed. Call
    `check(case)` first: a case from elsewhere may ask for more memory than there is.
    """
    if case.model.user is not None:
        return mark(case, build_user_model(case))
    model: nn.Module = Network(case.model)
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
    return mark(case, model)
