"""Checks of the values in one checkpoint: finite, second moments, first moments given these."""

from __future__ import annotations

import torch

from .contents import OTHER, Contents, Item
from .groups import betas
from .moment_bound import largest
from .places import MarkedElements, at, blocks, wide
from .result import CheckpointProblem
from .source import DamagedCheckpoint

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""States that have the shape of their parameter: those of AdamW first, then that of SGD."""


class ValueChecks:
    """Checks of all tensors, each read once, parameter by parameter.

    broken: (role, name) of tensors with a gap or an overlap, which have no defined values.
    findings: errors; unknown: numbers of unknown role that are not finite; bounded: how many
    parameters have a first moment that was compared with the bound.
    """

    def __init__(self, contents: Contents, broken: set[tuple[str, str]]) -> None:
        self._contents = contents
        self._broken = broken
        self.findings: list[CheckpointProblem] = []
        self.unknown: list[str] = []
        self.bounded = 0

    def run(self) -> None:
        """Check all tensors."""
        items = self._contents.items
        done: set[tuple[str, str]] = set()
        for name in self._contents.optimized():
            spots = [(role, name) for role in MOMENTS if (role, name) in items]
            done.update(spots)
            held = {
                spot[0]: tensor for spot in spots if (tensor := self._read(items[spot])) is not None
            }
            self._second(name, held)
            self._first(name, held)
        for spot, item in items.items():
            if spot not in done:
                self._read(item)

    def _read(self, item: Item) -> torch.Tensor | None:
        """Return a tensor with defined values, after the check that they are finite."""
        if (item.role, item.name) in self._broken:
            return None
        try:
            tensor = wide(self._contents.read(item))
        except DamagedCheckpoint as error:
            self._wrong("readable", item.label, str(error), file=error.file)
            return None
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            marked = MarkedElements()
            for start, (block,) in blocks(tensor):
                marked.add(start, ~torch.isfinite(block))
            if marked.count and item.role == OTHER and tensor.numel() == 1:  # the best score so far
                self.unknown.append(item.name)
            elif marked.count:
                what = f"{marked.where(item.stored.shape)} is {at(tensor, marked.first)}"
                self._wrong("finite", item.label, what)
        return tensor

    def _second(self, name: str, held: dict[str, torch.Tensor]) -> None:
        for role in ("exp_avg_sq", "max_exp_avg_sq"):
            if role in held:
                marked = MarkedElements()
                for start, (block,) in blocks(held[role]):
                    marked.add(start, block < 0)
                if marked.count:
                    value = at(held[role], marked.first)
                    shape = tuple(held[role].shape)
                    self._wrong(
                        "nonnegative", f"{role} {name}", f"{marked.where(shape)} is {value}"
                    )
        v, most = held.get("exp_avg_sq"), held.get("max_exp_avg_sq")
        if v is None or most is None or v.shape != most.shape:
            return
        marked = MarkedElements()
        for start, (one, its) in blocks(v, most):
            marked.add(start, its < one)
        if marked.count:
            self._wrong(
                "nonnegative",
                f"max_exp_avg_sq {name}",
                f"{marked.where(tuple(v.shape))} is {at(most, marked.first)}, below exp_avg_sq, "
                f"{at(v, marked.first)}",
            )

    def _first(self, name: str, held: dict[str, torch.Tensor]) -> None:
        """Compare |exp_avg| with the bound of `moment_bound`.

        Non-finite values are reported by another check.
        """
        m, v = held.get("exp_avg"), held.get("exp_avg_sq")
        pair = betas(self._contents.settings.get(name, {}))
        step = self._contents.steps.get(name)
        if m is None or v is None or pair is None or step is None or step < 1 or step % 1:
            return
        if m.shape != v.shape or not (m.is_floating_point() and v.is_floating_point()):
            return
        coarse = m if torch.finfo(m.dtype).eps > torch.finfo(v.dtype).eps else v
        marked, example = MarkedElements(), ""
        for start, (first, second) in blocks(m, v):
            bound = largest(second.to(coarse.dtype), pair, step)
            if bound is None:
                return
            fine = torch.isfinite(first) & torch.isfinite(second)
            before = marked.count
            marked.add(start, (first.double().abs() > bound) & fine)
            if marked.count and not before:
                place = marked.first - start
                example = f"{first[place]:.9g}, at most {bound[place]:.9g}"
        self.bounded += 1
        if marked.count:
            self._wrong(
                "bounded",
                f"exp_avg {name}",
                f"{marked.where(tuple(m.shape))} is {example} next to its exp_avg_sq after "
                f"{step:g} steps with betas {pair[0]:g}, {pair[1]:g}, if they never changed",
            )

    def _wrong(self, check: str, where: str, detail: str, *, file: str = "") -> None:
        self.findings.append(CheckpointProblem(check=check, where=where, detail=detail, file=file))
