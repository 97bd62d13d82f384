"""Obligations: one file each, with the check that yields its results.

Of each step, in the order in which they are judged: `loss`, `buffers`, `gradient`, `clip`,
`update`, `publish`. Ownership is judged where shards are put together: see context.py. Of the
measurements of a case: `persistent`, `peak`, `release`, `communication`. Of a checkpoint: `export`
(the others are in resume.py and tried.py of the judge).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .buffers import BUFFERS
from .clip import CLIP
from .communication import COMMUNICATION
from .gradient import GRADIENT
from .loss import LOSS
from .peak import PEAK
from .persistent import PERSISTENT
from .publish import PUBLISH
from .release import RELEASE
from .update import UPDATE

if TYPE_CHECKING:
    from ..context import StepContext
    from ..obligation import Measurements, ObligationCheck

OF_A_STEP: tuple[ObligationCheck[StepContext], ...] = (
    LOSS, BUFFERS, GRADIENT, CLIP, UPDATE, PUBLISH,
)  # fmt: skip
"""Obligations of every step, in order: where several are violated, the first is named first."""
OF_A_MEASUREMENT: tuple[ObligationCheck[Measurements], ...] = (
    PERSISTENT, PEAK, RELEASE, COMMUNICATION,
)  # fmt: skip
"""Obligations of memory and communication, judged once for a case."""
