"""Result type of the checks of MEMORY obligations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..case.schema import Case
from ..protocol.measurements import Measured
from ..protocol.verdicts import Violation


class Checked(NamedTuple):
    """Result of checking one obligation: if it was exercised, and its violation.

    vacuous: it holds since nothing could fail.
    """

    exercised: bool
    violation: Violation | None = None
    vacuous: bool = False


Check = Callable[[Case, Sequence[Measured]], Checked]
"""check(case, what each rank measured)."""
