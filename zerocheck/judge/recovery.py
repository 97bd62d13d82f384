"""Checks of a step whose (clipped) gradient was recovered from optimizer states."""

from __future__ import annotations

from collections.abc import Callable

from ..case.schema import Case
from ..contract.semantics import Semantics
from ..protocol.verdicts import Violation
from . import hidden
from .estimate import Tolerances
from .expected import Expected
from .layout import ParameterLayout
from .pieces import Enclosing
from .tolerance import StepTolerance
from .vacuity import Vacuity


class Recovery:
    """Enclosures that one recovered gradient is compared with."""

    def __init__(
        self,
        recovered: hidden.Recovered,
        layout: ParameterLayout,
        case: Case,
        semantics: Semantics,
        tolerance: StepTolerance,
    ) -> None:
        self.recovered = recovered
        self.layout = layout
        self.case = case
        self.semantics = semantics
        self.tolerance = tolerance

    def expected(
        self, reduced: Callable[[Tolerances], Expected]
    ) -> Callable[[Tolerances], Expected]:
        """Enclose the gradient that entered the states, from the enclosure of the reduced one."""

        def wanted(tolerances: Tolerances) -> Expected:
            right = reduced(tolerances)
            if self.case.training.clip is None:
                return right._replace(of=right.of.wider(self.recovered.error))
            return right._replace(of=self._clipping(right.of).clipped)

        return wanted

    def clip(
        self,
        gradient: Callable[[Tolerances], Enclosing],
        vacuity: Vacuity,
        *,
        step: int,
        exposed: bool,
    ) -> tuple[float, Violation | None]:
        """Judge clipping. gradient: the reduced one; exposed: it was exposed."""

        def check(tolerances: Tolerances) -> tuple[float, Violation | None]:
            wanted = self._clipping(gradient(tolerances))
            return hidden.check_clip(
                self.recovered, wanted, self.layout, step=step, exposed=exposed
            )

        right = gradient(self.tolerance.initial)
        clipped = self._clipping(right).clipped
        vacuity.clipped(zip(right.exact(), clipped.exact(), strict=True))
        return self.tolerance.judged("clip", check)

    def _clipping(self, gradient: Enclosing) -> hidden.Clipping:
        return hidden.clipping(
            gradient, self.recovered.error, self.layout, self.case, self.semantics
        )
