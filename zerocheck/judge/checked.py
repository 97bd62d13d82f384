"""What the file of an obligation of MEMORY gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..case.schema import Case
from ..drive.observation import Measured
from .verdict import Violation


class Checked(NamedTuple):
    """What came of one obligation: whether there was anything to look at, and what is wrong.

    vacuous: it holds since nothing could fail.
    """

    exercised: bool
    violation: Violation | None = None
    vacuous: bool = False


Check = Callable[[Case, Sequence[Measured]], Checked]
"""check(case, what each rank measured)."""
