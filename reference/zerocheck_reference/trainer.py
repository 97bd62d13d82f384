"""A whole step of a global batch on one device: gradient, clipping, update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ._check import nearest, one_of, real
from .adamw import AdamWOptions
from .clip import CLIP_RULES, ClipRule, clip_coefficient, gradient_norm
from .gradient import Average, Divide, LocalPass, Unused, average, check_rectangle, local_pass
from .muon import MuonOptions
from .optimizer import OptimizerOptions, OptimizerState
from .precision import round_to
from .sgd import SGDOptions

Loss = Callable[[nn.Module], Tensor]

OPTIONS = (AdamWOptions, SGDOptions, MuonOptions)
"""Options of the optimizers that it has."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters, by their names in `model.named_parameters()`, that share `options`.

    ValueError for a `names` that is not a tuple of strings, or a name that stands in it twice.
    """

    names: tuple[str, ...]
    options: OptimizerOptions

    def __post_init__(self) -> None:
        if not isinstance(self.names, tuple) or not all(isinstance(n, str) for n in self.names):
            raise ValueError(f"names is {self.names!r} (allowed: a tuple of strings)")
        if not isinstance(self.options, OptimizerOptions):
            names = ", ".join(one.__name__ for one in OPTIONS)
            names += ", or what has lr, initial, check and after as these have"
            raise ValueError(f"options is {self.options!r} (allowed: {names})")
        _no_duplicates(self.names)


class StepResult(NamedTuple):
    """What one step computed on its way.

    losses       0-d, undivided, as [rank][microbatch]
    gradient     reduced, before clipping, by name, in the dtype of the state; None: no update
    norm         of that gradient, in its units, whether it is clipped or not
    coefficient  that the gradient was multiplied by; 1 without clipping
    """

    losses: tuple[tuple[Tensor, ...], ...]
    gradient: dict[str, Tensor | None]
    norm: float
    coefficient: float


class Trainer:
    """Training on one device, for a model whose global batch comes as [rank][microbatch].

    groups     every parameter that requires a gradient stands in exactly one; a frozen one may
               stand in one too, for when it is unfrozen
    max_norm   clip the gradient to it; None for no clipping
    norm_type  2.0 or inf
    clip_rule  see `clip_coefficient`; its eps is 1e-6
    average, divide, unused
               see `gradient.average`; `divide` says also whether each loss is divided by the
               number of microbatches before its backward

    `state` holds the state of the optimizer per name. It is what counts: each step writes its
    parameters into the model, cast to the model's dtype, so a float32 master of a bfloat16 model is
    a state in float32 (`set_state`).

    Buffers: each rank starts a step from the same ones, and those of rank 0 stay.

    ValueError for a name that is unknown (with the nearest right one), in two groups, or for a
    trainable parameter in none; for an option that is not allowed.
    """

    state: dict[str, OptimizerState]

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Group],
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        clip_rule: ClipRule = "min(1, c/(norm+eps))",
        average: Average = "mean",
        divide: Divide = "loss",
        unused: Unused = "skip",
    ) -> None:
        if max_norm is not None:
            real("max_norm", max_norm, high_open=False)
        if norm_type not in (2.0, float("inf")):
            raise ValueError(f"norm_type is {norm_type!r} (allowed: 2.0, inf)")
        one_of("clip_rule", clip_rule, CLIP_RULES)
        one_of("average", average, ("mean", "sum"))
        one_of("divide", divide, ("loss", "gradient"))
        one_of("unused", unused, ("skip", "zero"))
        self.model = model
        self.groups = tuple(groups)
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.clip_rule: ClipRule = clip_rule
        self.average: Average = average
        self.divide: Divide = divide
        self.unused: Unused = unused
        self._parameters = dict(model.named_parameters())
        self._group_of = self._index_groups()
        self._require_groups()
        self.state = {
            name: self.groups[index].options.initial(self._parameters[name])
            for name, index in self._group_of.items()
        }

    def set_state(self, state: Mapping[str, OptimizerState]) -> None:
        """Replace the states of the given names by copies, and write their parameters.

        To start in mid-training, or from what another trainer holds. ValueError for a name in no
        group, a shape that is not the parameter's, or a state that does not fit its group; then
        nothing is changed.
        """
        for name, given in state.items():
            self._known(name, self._group_of)
            try:
                self.groups[self._group_of[name]].options.check(given)
            except ValueError as error:
                raise ValueError(f"state of {name!r}: {error}") from None
            shape = self._parameters[name].shape
            if given.parameter.shape != shape:
                raise ValueError(
                    f"state of {name!r} has shape {tuple(given.parameter.shape)} "
                    f"(allowed: the parameter's, {tuple(shape)})"
                )
        for name, given in state.items():
            self.state[name] = given.copy()
            self._write(name)

    def step(
        self, losses: Sequence[Sequence[Loss]], *, lr: Sequence[float] | None = None
    ) -> StepResult:
        """Take one step. `losses` are functions of the model, as [rank][microbatch].

        Each is called once, rank by rank, and returns the loss of that microbatch, a 0-d tensor,
        divided by neither the ranks nor the microbatches. `lr` has one learning rate per group, in
        place of those of the options. A parameter whose gradient is None keeps its state as it is.

        ValueError for ranks that differ in their number of microbatches, a wrong number of
        learning rates, a parameter that was unfrozen and is in no group. After any error, one of a
        loss function included, parameters, states and buffers are as they were.
        """
        microbatches = check_rectangle("losses", losses)
        options = self._options(lr)
        self._require_groups()
        passes = self._passes(losses, microbatches)
        gradient = self._reduce(passes)

        present = {name: g for name, g in gradient.items() if g is not None}
        norm = gradient_norm(list(present.values()), p=self.norm_type).item()
        coefficient = 1.0
        if self.max_norm is not None:
            coefficient = clip_coefficient(norm, self.max_norm, rule=self.clip_rule)
        for name, g in present.items():
            if coefficient != 1.0:
                g = round_to(g.to(torch.float64) * coefficient, g.dtype)
            self.state[name] = options[self._group_of[name]].after(self.state[name], g)
            self._write(name)
        seen = tuple(tuple(single.loss for single in rank) for rank in passes)
        return StepResult(seen, gradient, norm, coefficient)

    def _passes(self, losses: Sequence[Sequence[Loss]], microbatches: int) -> list[list[LocalPass]]:
        divisor = microbatches if self.divide == "loss" else 1
        before = self._buffers()
        kept = before
        after_first = before
        passes = []
        try:
            for rank, row in enumerate(losses):
                self._set_buffers(before)
                passes.append([local_pass(self.model, loss, loss_divisor=divisor) for loss in row])
                if rank == 0:
                    after_first = self._buffers()
            kept = after_first
        finally:
            self._set_buffers(kept)
        return passes

    def _reduce(self, passes: Sequence[Sequence[LocalPass]]) -> dict[str, Tensor | None]:
        exact = average(
            passes,
            average=self.average,
            divide=self.divide,
            unused=self.unused,
            dtype=torch.float64,
            like=self._parameters,
        )
        return {
            name: None if g is None else round_to(g, self.state[name].parameter.dtype)
            for name, g in exact.items()
        }

    def _options(self, lr: Sequence[float] | None) -> list[OptimizerOptions]:
        if lr is None:
            return [group.options for group in self.groups]
        if len(lr) != len(self.groups):
            raise ValueError(f"lr has {len(lr)} values (allowed: {len(self.groups)}, one a group)")
        # Options are dataclasses, which the interface cannot say.
        return [
            replace(group.options, lr=rate)  # type: ignore[type-var]
            for group, rate in zip(self.groups, lr, strict=True)
        ]

    def _index_groups(self) -> dict[str, int]:
        index_of: dict[str, int] = {}
        _no_duplicates([name for group in self.groups for name in group.names])
        for index, group in enumerate(self.groups):
            for name in group.names:
                self._known(name, self._parameters)
                index_of[name] = index
        return index_of

    def _require_groups(self) -> None:
        orphans = [
            name
            for name, parameter in self._parameters.items()
            if parameter.requires_grad and name not in self._group_of
        ]
        if orphans:
            raise ValueError(f"in no group: {', '.join(orphans)} (allowed: each in exactly one)")

    def _known(self, name: str, allowed: Mapping[str, object]) -> None:
        if name in allowed:
            return
        every = dict(self.model.named_parameters(remove_duplicate=False))
        for first, parameter in self._parameters.items():
            if name in every and every[name] is parameter and name != first:
                raise ValueError(f"{name!r} is tied to {first!r} (allowed: that name)")
        raise ValueError(
            f"unknown parameter {name!r}{nearest(name, allowed)} (allowed: {', '.join(allowed)})"
        )

    @torch.no_grad()
    def _write(self, name: str) -> None:
        self._parameters[name].copy_(self.state[name].parameter)

    def _buffers(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_buffers()}

    @torch.no_grad()
    def _set_buffers(self, values: Mapping[str, Tensor]) -> None:
        for name, buffer in self.model.named_buffers():
            if name in values:
                buffer.copy_(values[name])


def _no_duplicates(names: Sequence[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"more than once: {', '.join(twice)} (allowed: each name once)")
