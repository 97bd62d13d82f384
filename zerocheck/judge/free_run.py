"""Free run of the reference trainer: many steps on one device, from the start of a case.

It informs and does not judge: two correct trainers drift apart, AdamW's most, since it divides by a
root of squares, so what is compared with it needs a tolerance. The judge takes one step at a time
instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from zerocheck_reference import Group, OptimizerState, Trainer

from ..case.schema import Case
from ..case.shapes import unfrozen
from ..contract.groups import group_of, learning_rates
from ..contract.semantics import Semantics
from ..contract.start import initial_state
from ..machine.devices import CPU, random_state, seed_device, set_random_state
from ..models.batches import batch, carried_seed, loss_of, weight
from ..models.network import build_model
from ..models.overflow import infinite_loss
from ..models.user import call_with
from ..optimizers import UpdateRule, rule_of
from .local import as_on_a_rank


class Trajectory(NamedTuple):
    """Result of a free run.

    losses: per step, the mean over ranks and microbatches; parameters: after the last step, by the
    name in the unwrapped model.
    """

    losses: tuple[float, ...]
    parameters: dict[str, torch.Tensor]


def trajectory(
    case: Case,
    semantics: Semantics,
    *,
    restored: bool,
    device: torch.device | None = None,
) -> Trajectory:
    """Run all steps of a case by the reference, on the samples of all ranks.

    semantics: what a step means; restored: the case's state of mid-training is put in first;
    device: on which the ranks were, None for the CPU: dropout draws from its generator.
    """
    device = device or torch.device(CPU)
    with as_on_a_rank(device):
        return _Free(case, semantics, device, restored=restored).run()


class _Free:
    def __init__(
        self, case: Case, semantics: Semantics, device: torch.device, *, restored: bool
    ) -> None:
        self.case = case
        self.weighted = semantics.weight == "token"
        self.model = build_model(case)
        self._loss_of = loss_of(case)
        self._device = device
        self._random = []
        for rank in range(case.world_size):
            seed_device(carried_seed(case, rank), device)
            self._random.append(random_state(device))
        state = initial_state(case, self.model) if restored else None
        if device.type != CPU:
            self.model.to(device)
        parameters = dict(self.model.named_parameters())
        if state is not None:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(state[name, "parameter"])
        self.trainer = Trainer(
            self.model,
            self._groups(parameters),
            max_norm=case.training.clip,
            norm_type=float(case.training.norm),
            clip_rule=semantics.clip,
            average=semantics.average,
            divide=semantics.divide,
            unused=semantics.unused,
        )
        if state is not None:
            self.trainer.set_state(_states(case, state, device))

    def run(self) -> Trajectory:
        losses = tuple(self._step(index) for index in range(self.case.training.steps))
        parameters = {n: p.detach().to(CPU) for n, p in self.model.named_parameters()}
        return Trajectory(losses, parameters)

    def _groups(self, parameters: dict[str, nn.Parameter]) -> list[Group]:
        later = set(unfrozen(self.case))
        optimizer = self.case.optimizer
        names: dict[tuple[int, UpdateRule], list[str]] = {}
        for name, parameter in parameters.items():
            if parameter.requires_grad or name in later:
                rule = rule_of(optimizer, name, parameter.shape)
                names.setdefault((group_of(self.case, name), rule), []).append(name)
        self._numbers = [number for number, _ in names]
        return [
            Group(
                names=tuple(of_group),
                options=rule.reference_options(optimizer.groups[number], optimizer),
            )
            for (number, rule), of_group in names.items()
        ]

    def _step(self, index: int) -> float:
        """Take one step; returns its mean loss."""
        if index == self.case.training.unfreeze:
            for name in unfrozen(self.case):
                self.model.get_parameter(name).requires_grad_(True)
        values: list[float] = []
        losses = [
            [
                self._loss(index, rank, number, values)
                for number in range(self.case.training.microbatches)
            ]
            for rank in range(self.case.world_size)
        ]
        if index == self.case.training.overflow:
            with torch.no_grad():  # the step is skipped
                for row in losses:
                    for loss in row:
                        loss(self.model)
        else:
            rates = learning_rates(self.case, index)
            self.trainer.step(losses, lr=[rates[number] for number in self._numbers])
        return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values)

    def _loss(
        self, index: int, rank: int, number: int, values: list[float]
    ) -> Callable[[nn.Module], torch.Tensor]:
        where = {"step": index, "rank": rank, "microbatch": number}
        drawn = batch(self.case, **where).on(self._device)
        factor = weight(self.case, **where) if self.weighted else 1.0

        def loss(model: nn.Module) -> torch.Tensor:
            carried = self.case.data.rng == "carried"
            if carried:
                set_random_state(self._random[rank], self._device)
            else:
                seed_device(drawn.seed, self._device)
            past = model if self.case.data.past_wrapper else None
            outputs = call_with(model, drawn.inputs, drawn.keywords, past)
            value = self._loss_of(outputs, drawn.target)
            if carried:
                self._random[rank] = random_state(self._device)
            if infinite_loss(self.case, **where):
                value = value * math.inf
            values.append(float(value.detach()))
            return value if factor == 1.0 else value * factor

        return loss


def _states(
    case: Case, state: dict[tuple[str, str], torch.Tensor], device: torch.device
) -> dict[str, OptimizerState]:
    """Return the state of mid-training by parameter, for those that have optimizer states."""
    held: dict[str, dict[str, torch.Tensor]] = {}
    for (name, role), tensor in state.items():
        held.setdefault(name, {})[role] = tensor if role == "step" else tensor.to(device)
    return {
        name: rule_of(case.optimizer, name, roles["parameter"].shape).reference_state(roles)
        for name, roles in held.items()
        if len(roles) > 1
    }
