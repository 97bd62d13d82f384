"""First value of a step that is not finite: in which phase, on which rank, in which microbatch.

A step that goes on with such values loses the model, whatever one device would do with them. NaN in
an output is looked for before infinity, which masks may hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import nn

from ... import causes as bugs
from ...compat import in_transform
from ...contract.names import unwrapped
from ...judge.compare import all_finite
from ...judge.obligation import Checked, ObligationCheck
from ...protocol.verdicts import Violation
from ..record.forwards import Forward, tensors_in
from ..record.guard import ErrorGuard
from ..record.holdings import local
from ..record.step_record import (
    AFTER,
    BEFORE,
    Key,
    NotFinite,
    OptimizerStep,
    ShardPiece,
    StepSummary,
    element_of,
    index_of,
)
from .joint_context import JointContext

STATE, OUTPUT, RETURNED, INFINITE, GRADIENT, UPDATED, SKIPPED = range(7)
"""Phases of a step, in the order in which a value that is not finite explains those behind it:
parameters and states before it; NaN in inputs and outputs of modules; gradients that come to the
outputs of the model; infinities in outputs; gradients; parameters and states after the step;
gradients of an optimizer whose update was left out."""

LOST = (GRADIENT, UPDATED)
"""Phases that show that such a value came to the update. One before them may be meant: a mask."""


class _Output(NamedTuple):
    """Tensor that was looked at. flags: whether it holds NaN, where first; the same of infinity."""

    microbatch: int
    place: str
    shape: tuple[int, ...]
    flags: torch.Tensor


class OutputWatch:
    """Observation of the outputs of all modules in a step, without waiting for an accelerator."""

    def __init__(self, model: nn.Module, guard: ErrorGuard) -> None:
        self._model, self._guard = model, guard
        self._outputs: list[_Output] = []
        self._microbatch = -1

    def hooked(self) -> ExitStack:
        """Put the hooks on; closing the stack takes them off."""
        stack = ExitStack()
        called = self._model.register_forward_pre_hook(self._called, with_kwargs=True)
        stack.callback(called.remove)
        for name, module in _not_compiled(self._model):
            hook = partial(self._returned, _words(unwrapped(name), module))
            stack.callback(module.register_forward_hook(hook).remove)
        return stack

    def found(self) -> Iterator[NotFinite]:
        """Yield the first NaN in an output, and the first infinity."""
        if not self._outputs:
            return
        rows = [one.flags.cpu().tolist() for one in self._outputs]
        for phase, column, value in ((OUTPUT, 0, "nan"), (INFINITE, 2, "inf")):
            for number, (one, row) in enumerate(zip(self._outputs, rows, strict=True)):
                if row[column]:
                    element = index_of(row[column + 1], one.shape)
                    yield NotFinite(phase, one.microbatch, number, one.place, element, value)
                    break

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        with self._guard():
            self._microbatch += 1
            for path, tensor in tensors_in((args, kwargs), every=True).items():
                self._look(f"input {path} of the model", tensor)

    def _returned(self, words: str, module: nn.Module, args: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        with self._guard():
            for tensor in tensors_in(outputs).values():
                self._look(words, tensor)

    def _look(self, place: str, tensor: torch.Tensor) -> None:
        if not tensor.is_floating_point() or in_transform(tensor):
            return
        flat = local(tensor).reshape(-1)
        if len(flat):
            holds = [flat.isnan(), flat.isinf()]
            flags = [one for mask in holds for one in (mask.any(), mask.byte().argmax())]
            row = torch.stack([one.to(torch.int64) for one in flags])
            shape = tuple(local(tensor).shape)
            self._outputs.append(_Output(max(self._microbatch, 0), place, shape, row))


def _not_compiled(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with their names, but none that is compiled, which a hook would do again."""
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        return
    yield name, model
    for child, module in model.named_children():
        yield from _not_compiled(module, f"{name}.{child}" if name else child)


def _words(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"the output of {name} ({kind})" if name else f"the output of the model ({kind})"


def not_finite(
    values: Mapping[Key, torch.Tensor],
    pieces: Sequence[ShardPiece],
    steps: Sequence[OptimizerStep | None],
    forwards: Sequence[Forward],
    outputs: Iterable[NotFinite],
) -> tuple[NotFinite, ...]:
    """Return the first such value of each phase.

    steps: of the optimizer of each piece; outputs: of modules.
    """
    found = list(outputs)
    wrong = {
        (what, number)
        for (what, number), value in values.items()
        if (step := steps[number]) is not None and step.reached and not all_finite(value)
    }

    def add(phase: int, keys: Iterable[Key], words: str) -> None:
        for what, number in sorted(keys, key=lambda key: key[1])[:1]:
            role = what.partition(".")[2] or "gradient"
            bad = values[what, number].isfinite().logical_not()
            at = int(bad.nonzero()[0])
            value = f"{float(values[what, number][at]):g}"
            element = element_of(pieces[number], at)
            place = words.format(role, pieces[number].name)
            found.append(NotFinite(phase, -1, number, place, element, value))

    before = {key for key in wrong if key[0].startswith(BEFORE)}
    add(STATE, before, "{} of {} as the step began")
    for microbatch, forward in enumerate(forwards):
        for path, tensor in forward.returned.items():
            bad = tensor.isfinite().logical_not().reshape(-1)
            if bool(bad.any()):
                at = int(bad.nonzero()[0])
                place = f"the gradient of the loss by output {path or 0} of the model"
                value, element = tensor.reshape(-1)[at], index_of(at, tuple(tensor.shape))
                found.append(
                    NotFinite(RETURNED, microbatch, 0, place, element, f"{float(value):g}")
                )
                break
    skipped = {number for number, step in enumerate(steps) if step is not None and step.skipped}
    gradients = {key for key in wrong if key[0] == "gradient"}
    add(GRADIENT, {key for key in gradients if key[1] not in skipped}, "{} of {}")
    add(SKIPPED, {key for key in gradients if key[1] in skipped}, "{} of {}")
    known = {(what.partition(".")[2], number) for what, number in before}
    new = (
        key
        for key in wrong
        if key[0].startswith(AFTER) and (key[0].partition(".")[2], key[1]) not in known
    )
    add(UPDATED, new, "{} of {} after the step")
    return tuple(found)


def first_words(summaries: Sequence[StepSummary], phases: Collection[int]) -> str:
    """Return what is not finite first, over all ranks, or "" where none is in one of the phases."""
    every = [(one, rank) for rank, summary in enumerate(summaries) for one in summary.not_finite]
    if not any(one.phase in phases for one, _ in every):
        return ""
    first, rank = min(
        every, key=lambda pair: (pair[0].phase, pair[0].microbatch, pair[0].number, pair[1])
    )
    value = {"nan": "NaN"}.get(first.value, first.value)
    text = f"the first value that is not finite is {value} in {first.place}"
    text += f", element {list(first.element)}" if first.element else ""
    text += f", in microbatch {first.microbatch}" if first.microbatch >= 0 else ""
    if first.phase not in (GRADIENT, SKIPPED):
        return f"{text} on rank {rank}"
    here = [r for one, r in every if one.phase == first.phase]
    return f"{text} on {'rank' if len(here) < 2 else 'ranks'} {', '.join(map(str, here))}"


def _check_finite(context: JointContext) -> Iterator[Checked]:
    """Check that no step is taken with values that are not finite."""
    where = first_words(context.summaries, LOST)
    if where:
        text = f"the step was taken with a value that is not finite, no rank skipped it: {where}"
        found = context.violation("update", "gradient", text, bugs.STEP_NOT_SKIPPED)
        wrong = [
            rank
            for rank, one in enumerate(context.summaries)
            if any(value.phase in LOST for value in one.not_finite)
        ]
        yield Checked(violation=replace(found, ranks=tuple(wrong)))


FINITE = ObligationCheck("update", _check_finite)


def with_first(violation: Violation | None, context: JointContext) -> Violation | None:
    """Add to a violation of the decision to skip what is not finite first."""
    # Where ranks disagree, one with NaN in an output may have left its gradient out.
    where = first_words(context.summaries, (OUTPUT, *LOST, SKIPPED))
    if violation is None or not where:
        return violation
    return replace(violation, explanation=f"{violation.explanation}; {where}")
