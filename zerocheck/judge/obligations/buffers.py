"""Obligation: buffers, such as running statistics, follow the declared semantics, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from ... import causes as bugs
from ...causes.registry import said
from ...contract.semantics import Semantics
from ...protocol.verdicts import Explanation, Violation
from ..context import StepContext
from ..diagnose.buffers import SENT, causes
from ..estimate import Tolerances
from ..layout import Buffers
from ..obligation import Checked, ObligationCheck


def check(
    observed: Sequence[Buffers],
    expected: Sequence[Buffers],
    semantics: Semantics,
    *,
    step: int,
    before: Sequence[Buffers],
    others: Callable[[], Iterable[tuple[str, Sequence[Buffers]]]] = tuple,
    tolerances: Mapping[str, float] | None = None,
) -> Violation | None:
    """Find the first buffer that differs, on all ranks where it does.

    tolerances: by name, of an element, where kernels are not the reference's.
    For the diagnosis: before, the buffers at the start of the step; others, by cause what each rank
    would have with it.
    """
    for name in expected[0]:
        bad = [
            rank
            for rank, (actual, wanted) in enumerate(zip(observed, expected, strict=True))
            if name in actual
            and not _same(actual[name], wanted[name], (tolerances or {}).get(name, 0.0))
        ]
        if not bad:
            continue
        actual, wanted = observed[bad[0]][name], expected[bad[0]][name]
        holders = [rank for rank, one in enumerate(observed) if name in one]
        different = (actual != wanted).reshape(-1).nonzero().reshape(-1)
        first = int(different[0]) if len(different) else 0
        names = causes(
            [observed[rank][name] for rank in holders],
            [expected[rank][name] for rank in holders],
            [before[rank][name] for rank in holders],
            [(cause, [made[rank][name] for rank in holders]) for cause, made in others()],
        )
        explanation = Explanation.of(
            names,
            said(names),
            f"buffer {name!r} is not what the declared semantics (buffers={semantics.buffers!r}) "
            "give",
        )
        return Violation(
            obligation="buffers",
            step=step,
            role="buffer",
            tensors=(name,),
            ranks=tuple(bad),
            observed=float(actual.reshape(-1)[first]),
            expected=float(wanted.reshape(-1)[first]),
            bound=0.0,
            wrong=len(different),
            total=actual.numel(),
            explanation=explanation.text,
            causes=names,
            sentences=explanation.sentences,
        )
    return None


def _others(step: StepContext) -> Iterator[tuple[str, Sequence[Buffers]]]:
    for sent, cause in SENT.items():
        if sent != step.semantics.buffers:
            yield cause, step.replay(buffers=sent).buffers
    recomputed = step.judged.replayed.recomputed(step.index, step.before)
    yield bugs.BUFFERS_UPDATED_TWICE, recomputed.buffers


def _same(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    if tolerance and bool(((actual.double() - wanted.double()).abs() <= tolerance).all()):
        return True
    return torch.equal(actual, wanted) or (
        torch.equal(actual.nan_to_num(nan=0.0), wanted.nan_to_num(nan=0.0))
        and torch.equal(actual.isnan(), wanted.isnan())
    )


def _check_step(step: StepContext) -> Iterator[Checked]:
    if not step.layout.buffers or step.last or not step.forward_holds:
        return
    before, passes = step.observation.buffers(step.index - 1), step.passes
    step.verdicts.vacuity.buffers(before, passes.buffers)

    def within(tolerances: Tolerances) -> tuple[float, Violation | None]:
        return 0.0, check(
            step.observation.buffers(step.index),
            passes.buffers,
            step.semantics,
            step=step.index,
            before=before,
            others=lambda: _others(step),
            tolerances=tolerances.buffers,
        )

    yield Checked(*step.tolerance.judged("buffers", within))


BUFFERS = ObligationCheck("buffers", _check_step)
