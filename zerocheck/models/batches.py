"""Samples of a case, different on every rank, at every step and in every microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from ..case.schema import Case
from ..case.shapes import SIDE_INPUTS
from .seeds import CARRIED, DATA, DROPOUT, MASK, SIDE, generator_of, seed_of
from .user import parts_of

SPREAD = 1.75
"""Float samples are uniform in (-SPREAD, SPREAD), of a standard deviation of about 1."""

IGNORED = -100
"""The target of a token that is left out: `ignore_index` of torch's cross entropy."""


@dataclass(frozen=True)
class Batch:
    """One microbatch of one rank.

    Those of the user's own model are what it draws; else

    inputs: (batch, length, inputs) fp32, or (batch, length) int64 token ids for a stem `embedding`;
            and (batch, length, SIDE_INPUTS) fp32 where there is a second input
    target: (batch, length, outputs) fp32, or (batch, length) int64 class ids, IGNORED where masked
    seed:   for `torch.manual_seed` before the forward, so that dropout can be replayed
    keywords: names by which the model gets the last inputs, which are keyword arguments
    """

    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor
    seed: int
    keywords: tuple[str, ...] = ()

    def on(self, device: torch.device) -> Batch:
        """Copy the samples to a device; they are drawn on the CPU."""
        if device.type == "cpu":
            return self
        inputs = tuple(one.to(device) for one in self.inputs)
        return replace(self, inputs=inputs, target=self.target.to(device))


def batch(case: Case, *, step: int, rank: int, microbatch: int) -> Batch:
    """Return the samples that `rank` reads in `microbatch` (0-based) of step `step` (0-based).

    Ranks of one data-parallel rank (`Mesh.data_parallel_rank`) read the same.

    The first token and class count through all pairs, so that two ranks never read the same,
    however small the vocabulary is, as long as there are more pairs than microbatches in a case.
    """
    rank = case.axes.data_parallel_rank(rank)
    generator = generator_of(case.seed, DATA, step=step, rank=rank, microbatch=microbatch)
    seed = seed_of(case.seed, DROPOUT, step=step, rank=rank, microbatch=microbatch)
    if case.model.user is not None:
        drawn = parts_of(case.model.user).drawn(generator)
        return Batch(drawn.inputs, drawn.target, seed, drawn.keywords)
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
    turn = microbatch + case.training.microbatches * step
    number = rank + case.axes.data_parallel_size * turn + case.seed
    word = number % words
    tokens[0, 0] = word + (pad is not None and model.inputs > 1 and word >= pad)
    target[0, 0] = number // words % model.outputs
    if case.data.masked:
        target.masked_fill_(~_kept(case, step, _number(case, rank, microbatch)), IGNORED)
    return Batch((tokens, *side), target, seed)


def _side(case: Case, *, step: int, rank: int, microbatch: int) -> tuple[torch.Tensor, ...]:
    """Return the second input, present in about half of the microbatches of a model with `side`."""
    if not case.model.side:
        return ()
    generator = generator_of(case.seed, SIDE, step=step, rank=rank, microbatch=microbatch)
    if float(torch.rand((), generator=generator)) < 0.5:
        return ()
    side = torch.empty(case.data.batch, case.data.length, SIDE_INPUTS)
    return (side.uniform_(-SPREAD, SPREAD, generator=generator),)


def weight(case: Case, *, step: int, rank: int, microbatch: int) -> float:
    """Return the tokens of the microbatch over their mean in the step's microbatches.

    So the mean over ranks and microbatches of `loss * weight` is the mean over tokens. 1.0 without
    `data.masked`.
    """
    if not case.data.masked:
        return 1.0
    passes = case.axes.data_parallel_size * case.training.microbatches
    total = sum(_tokens(case, step, number) for number in range(passes))
    number = _number(case, case.axes.data_parallel_rank(rank), microbatch)
    return _tokens(case, step, number) * passes / total


def overflows(case: Case, *, step: int, rank: int, microbatch: int) -> bool:
    """Return True if the loss of this microbatch is infinite: one of step `training.overflow`."""
    place = case.seed % (case.axes.data_parallel_size * case.training.microbatches)
    number = _number(case, case.axes.data_parallel_rank(rank), microbatch)
    return step == case.training.overflow and place == number


def carried_seed(case: Case, rank: int) -> int:
    """Return the seed of a rank's generator where random numbers are carried on between passes."""
    return seed_of(case.seed, CARRIED, rank=case.axes.data_parallel_rank(rank))


def _number(case: Case, rank: int, microbatch: int) -> int:
    """Number the microbatches of all data-parallel ranks in one step. rank: one of these."""
    return rank * case.training.microbatches + microbatch


def _tokens(case: Case, step: int, number: int) -> int:
    """Return the number of targets of a microbatch that count.

    It is at least one, and never equal to that of the next microbatch, so that the mean of means is
    not the mean.
    """
    return 1 + (case.seed + step + number) % (case.data.batch * case.data.length)


def _kept(case: Case, step: int, number: int) -> torch.Tensor:
    """Mask of the targets that count, (batch, length). The first is one of them."""
    rank, microbatch = divmod(number, case.training.microbatches)
    generator = generator_of(case.seed, MASK, step=step, rank=rank, microbatch=microbatch)
    score = torch.rand(case.data.batch * case.data.length, generator=generator)
    score[0] = 2.0
    kept = torch.zeros(len(score), dtype=torch.bool)
    kept[score.topk(_tokens(case, step, number)).indices] = True
    return kept.view(case.data.batch, case.data.length)


def loss_of(case: Case) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the mean loss times `data.loss_factor`, 0-d fp32.

    Cross entropy over the outputs for a stem `embedding`, of the tokens that are not masked; mean
    squared error otherwise; the user's own model has its own.
    """
    factor = case.data.loss_factor
    if case.model.user is not None:
        loss = parts_of(case.model.user).loss_of
        return lambda outputs, target: loss(outputs, target) * factor

    def cross_entropy(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = outputs.float().flatten(0, 1)
        return F.cross_entropy(logits, target.flatten()) * factor

    def squared_error(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs.float(), target) * factor

    return cross_entropy if case.model.stem == "embedding" else squared_error
