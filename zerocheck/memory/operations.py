"""Floating-point operations of a forward, counted by torch from the shapes of its operators.

Source: `torch.utils.flop_counter.FlopCounterMode`, which counts 2 m k n for a matrix product of
(m, k) and (k, n), so 2 per weight and token, and the two products of attention, of all positions
with all (a causal kernel does half of that). Other operators count as none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..errors import failing
from ..models.parts import block_list
from ..models.user import call_with
from .setup import Setup
from .source import ModelSource

DEPTH = 100
"""Levels of modules that are told apart."""


@dataclass(frozen=True, slots=True)
class ForwardOperations:
    """Operations of the forward of one microbatch.

    total: of the whole model; blocks: of each block; modules: by path.
    """

    total: int
    blocks: tuple[int, ...]
    modules: Mapping[str, int]

    @property
    def share_of_blocks(self) -> float:
        """Share of the forward that is in the blocks, which checkpointing runs again."""
        return sum(self.blocks) / self.total if self.total else 0.0


def forward_operations(given: ModelSource, setup: Setup) -> ForwardOperations:
    """Count the operations of one forward, on the meta device.

    Raises UsageError if the model does not take the samples.
    """
    model = given.build()
    found = block_list(model)
    counter = FlopCounterMode(display=False, depth=DEPTH)
    samples = given.samples(setup).on("meta")
    with failing(f"{setup.model} fails on the meta device"), counter, torch.no_grad():
        call_with(model, samples.inputs, samples.keywords)
    modules = {path: sum(counts.values()) for path, counts in counter.get_flop_counts().items()}
    root = type(model).__name__
    path, blocks = found if found is not None else ("", nn.ModuleList())
    each = tuple(modules.get(f"{root}.{path}.{index}", 0) for index in range(len(blocks)))
    return ForwardOperations(counter.get_total_flops(), each, modules)
