"""Shared arithmetic of memory layouts: which tensors have gradients and states after each phase.

Sharding is not known here: an implementation gives the bytes, and this module says in which phases
they are allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from ...case.schema import Case
from ...case.shapes import uncalled, unfrozen
from ...optimizers import optimizer_of, rule_of, state_elements
from ...protocol.layout import Category, Layout, Line, Phase

STEP_BYTES = 4
"""Step count of a parameter, of an optimizer that has one: a 0-d fp32 tensor."""

STEP_PHASES: tuple[Phase, ...] = ("forward", "backward", "step")


class AccountedParameter(NamedTuple):
    """Parameter of a model. itemsize: bytes of an element; trains: from the start."""

    shape: tuple[int, ...]
    numel: int
    itemsize: int
    trains: bool

    @property
    def bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return self.numel * self.itemsize


class Account:
    """Parameters of a model, and a case's changes to them step by step."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.case = case
        self.parameters = {
            name: AccountedParameter(tuple(p.shape), p.numel(), p.element_size(), p.requires_grad)
            for name, p in model.named_parameters()
        }
        self.buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        self._later = set(unfrozen(case))
        self._idle = uncalled(case.model)

    def steps(self) -> range:
        """Return the steps whose layout differs from that of the step before, and one more."""
        training = self.case.training
        last = max(training.first, training.unfreeze or 0, training.overflow or 0)
        return range(training.first, last + 3)

    def learning(self, step: int) -> list[str]:
        """Return the names of the parameters that require gradients in a step."""
        starts = self.case.training.unfreeze
        late = self._later if starts is not None and starts <= step else set()
        return [name for name, one in self.parameters.items() if one.trains or name in late]

    def ever(self) -> list[str]:
        """Return the names of the parameters that require gradients, from the start or later."""
        return [n for n, one in self.parameters.items() if one.trains or n in self._later]

    def used(self, names: Iterable[str]) -> list[str]:
        """Filter the names to the parameters that the forward uses."""
        return [name for name in names if not name.startswith(self._idle)]

    def kept(self, step: int) -> list[str]:
        """Return the names of parameters that keep their gradient into a step's first forward."""
        training = self.case.training
        if training.set_to_none or step <= training.first:
            return []
        return self.used(self.learning(step - 1))

    def skips(self, step: int) -> bool:
        """Return True if the step overflows, so that no update is made."""
        return self.case.training.overflow == step

    @property
    def restored(self) -> bool:
        """True if the case starts in mid-training, with states of all trainable parameters."""
        return self.case.start.step > 0

    def stateful(
        self, step: int, phase: Phase, graded: Callable[[int], Collection[str]] | None = None
    ) -> set[str]:
        """Return the names of the parameters with an optimizer state at the end of a phase.

        graded(step): names of what has a gradient when that step updates; None: of what is used.
        """
        if any(rule.states_at_once for rule in optimizer_of(self.case.optimizer).rules):
            return set(self.ever())
        names = {n for n, one in self.parameters.items() if one.trains and self.restored}
        first = self.case.training.first
        for before in range(first, step + (phase == "step")):
            if not self.skips(before):
                names.update(graded(before) if graded else self.used(self.learning(before)))
        return names

    def moments(self, numel: int, itemsize: int, name: str = "") -> int:
        """Bytes of the optimizer's state for `numel` elements, with counts of steps and the like.

        name: the parameter that they are of, where the case has several optimizers, or factored
        states, which are those of the whole parameter.
        """
        options = self.case.optimizer
        shape = self.parameters[name].shape if name else ()
        rule = rule_of(options, name, shape)
        in_tensors = rule.counts_steps and rule.counts_in_tensor
        counted = STEP_BYTES * (in_tensors + len(rule.scalar_names))
        dtype = torch.bfloat16 if itemsize == torch.bfloat16.itemsize else torch.float32
        whole = math.prod(shape)
        sizes = [
            rule.state_dtype(role, dtype).itemsize * (numel if elements == whole else elements)
            for role, elements in state_elements(options, name, shape).items()
        ]
        return sum(sizes) + counted

    def scaler(self, step: int, phase: Phase) -> int:
        """Bytes held by torch's GradScaler at the end of a phase.

        Scale and growth tracker from the first scaled loss on; `found_inf` between unscaling and
        the update.
        """
        training = self.case.training
        if training.loss_scale is None or phase == "built":
            return 0
        begun = step > training.first or phase != "forward" or training.microbatches > 1
        return 8 * begun + 4 * (phase == "backward")


CategoryBytes = Mapping[Category, int]
"""Bytes by category."""


def layout_of(account: Account, predict: Callable[[int, Phase], CategoryBytes | None]) -> Layout:
    """Build a layout from predict(step, phase), for `built` (first step - 1) and every later phase.

    None: that phase is not predicted.
    """
    return Layout(lines=tuple(_lines(account, predict)))


def _lines(
    account: Account, predict: Callable[[int, Phase], CategoryBytes | None]
) -> Iterator[Line]:
    steps = account.steps()
    places: list[tuple[int, Phase]] = [(steps.start - 1, "built")]
    places += [(step, phase) for step in steps for phase in STEP_PHASES]
    for step, phase in places:
        held = predict(step, phase)
        if held is None:
            continue
        # A line of 0 bytes says that a phase is predicted of which all is 0.
        yield Line(phase, step, "parameter", held.get("parameter", 0))
        for category, count in held.items():
            if count and category != "parameter":
                yield Line(phase, step, category, count)
