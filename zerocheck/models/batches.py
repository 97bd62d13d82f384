"""The samples of a case: other ones on every rank, at every step and in every microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..case.schema import Case
from ..case.shapes import SIDE_INPUTS
from .seeds import DATA, DROPOUT, SIDE, generator_of, seed_of

SPREAD = 1.75
"""Float samples are uniform in (-SPREAD, SPREAD), of a standard deviation of about 1."""


@dataclass(frozen=True)
class Batch:
    """One microbatch of one rank.

    inputs: (batch, length, inputs) fp32, or (batch, length) int64 token ids for a stem `embedding`;
            and (batch, length, SIDE_INPUTS) fp32 where there is a second input
    target: (batch, length, outputs) fp32, or (batch, length) int64 class ids
    seed:   for `torch.manual_seed` before the forward, so that dropout can be replayed
    """

    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor
    seed: int


def batch(case: Case, *, step: int, rank: int, microbatch: int) -> Batch:
    """The samples that `rank` reads in `microbatch` (0-based) of step `step` (0-based).

    The first token and class count through all pairs, so that two ranks never read the same,
    however small the vocabulary is, as long as there are more pairs than microbatches in a case.
    """
    generator = generator_of(case.seed, DATA, step=step, rank=rank, microbatch=microbatch)
    seed = seed_of(case.seed, DROPOUT, step=step, rank=rank, microbatch=microbatch)
    side = _side(case, step=step, rank=rank, microbatch=microbatch)
    shape = (case.data.batch, case.data.length)
    model = case.model
    if model.stem != "embedding":
        inputs = torch.empty(*shape, model.inputs).uniform_(-SPREAD, SPREAD, generator=generator)
        target = torch.empty(*shape, model.outputs).uniform_(-SPREAD, SPREAD, generator=generator)
        return Batch((inputs, *side), target, seed)
    tokens = torch.randint(model.inputs, shape, generator=generator)
    target = torch.randint(model.outputs, shape, generator=generator)
    pad = model.padding_idx
    if pad is not None:
        tokens.masked_fill_(torch.rand(shape, generator=generator) < 0.2, pad)
    words = model.inputs - (pad is not None) or 1
    number = rank + case.world_size * (microbatch + case.training.microbatches * step) + case.seed
    word = number % words
    tokens[0, 0] = word + (pad is not None and model.inputs > 1 and word >= pad)
    target[0, 0] = number // words % model.outputs
    return Batch((tokens, *side), target, seed)


def _side(case: Case, *, step: int, rank: int, microbatch: int) -> tuple[torch.Tensor, ...]:
    """The second input, which about half of the microbatches of a model with `side` have."""
    if not case.model.side:
        return ()
    generator = generator_of(case.seed, SIDE, step=step, rank=rank, microbatch=microbatch)
    if float(torch.rand((), generator=generator)) < 0.5:
        return ()
    side = torch.empty(case.data.batch, case.data.length, SIDE_INPUTS)
    return (side.uniform_(-SPREAD, SPREAD, generator=generator),)


def loss_of(case: Case) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(outputs, target) -> mean loss times `data.loss_factor`, 0-d fp32.

    Cross entropy over the outputs for a stem `embedding`, mean squared error otherwise.
    """
    factor = case.data.loss_factor

    def cross_entropy(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = outputs.float().flatten(0, 1)
        return F.cross_entropy(logits, target.flatten()) * factor

    def squared_error(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs.float(), target) * factor

    return cross_entropy if case.model.stem == "embedding" else squared_error
