"""Tolerance of local results: their distance from the reference that right code may have.

Where ranks compute their losses by the operators of the reference, in its order, bits must agree,
and bounds are derived. Right code may also run the model by another autograd graph: checkpointing,
a compiled or rewritten forward, another order of accumulation. Its round-off is not known to the
bit. A difference is then violated only if it exceeds what runs of the reference with perturbed
round-off explain (judge/estimate.py). A difference that they explain holds, and the verdict is an
estimate.
"""

from __future__ import annotations

from collections.abc import Callable

from ..protocol.verdicts import Obligation, Violation
from .estimate import EXACT, Tolerances
from .local import Passes
from .state import State
from .step_replay import StepReplay

Check = Callable[[Tolerances], tuple[float, Violation | None]]
"""check(tolerances of local results) -> (share of the bound, violation)."""


LOCAL: tuple[Obligation, ...] = ("loss", "gradient", "buffers")
"""Obligations on local results, whose bits depend on kernels."""


class StepTolerance:
    """Tolerance of the local results of the current step.

    initial: where nothing more was estimated; widest: where it was; obligations: those whose bound
    is an estimate.
    """

    def __init__(self, replayed: StepReplay, *, kernels_differ: bool) -> None:
        """Start. kernels_differ: bounds are estimated from the start, as the case declares."""
        self.initial = self.widest = EXACT
        self.obligations: set[Obligation] = {*LOCAL} if kernels_differ else set()
        self._replayed = replayed
        self._kernels_differ = kernels_differ
        self._other_graph = False
        self._step: tuple[int, State, Passes] | None = None

    def enter(self, step: int, before: State, passes: Passes) -> None:
        """Begin a step. passes: of the reference, from the state before it."""
        self._step = step, before, passes
        if self._kernels_differ:
            self.initial = self._replayed.tolerances_by_tensor(step, before, passes)
        self.widest = self.initial

    def leave(self) -> None:
        """Discard the step, which is as large as all local gradients."""
        self._step = None

    def judged(self, obligation: Obligation, check: Check) -> tuple[float, Violation | None]:
        """Return the result of a check by derived bounds, or by estimated ones where needed.

        Where both are violated, the one by derived bounds counts if it knows the cause.
        """
        share, violation = check(self.initial)
        if violation is None or not self._widens():
            return share, violation
        wide = check(self.widest)
        if wide[1] is not None and violation.causes:
            return share, violation
        self.obligations.add(obligation)
        return wide

    def _widens(self) -> bool:
        """Return True if bits can differ in this step; then estimate tolerances."""
        if self._kernels_differ or self._step is None:
            return False
        step, before, passes = self._step
        self._other_graph = self._other_graph or not self._replayed.same_computation(step, before)
        if self._other_graph and self.widest is EXACT:
            self.widest = self._replayed.tolerances_by_element(step, before, passes)
        return self._other_graph
