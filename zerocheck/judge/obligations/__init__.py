"""Obligations: one file each, with the check that yields its results.

Of each step they are judged in the order of OF_A_STEP, of the measurements of a case in that of
OF_A_MEASUREMENT. Ownership is judged where shards are put together, see context.py. Of a
checkpoint, all but `export` are in resume.py and load_attempts.py of the judge.

- `buffers.py`: buffers, such as running statistics, follow the declared semantics, bit for bit
- `clip.py`: the norm and the clipped gradient
- `communication.py`: each rank calls the collectives that its layout says, and all ranks call the
  same
- `export.py`: exported tensors equal the shards' contents, bit for bit, role by role
- `gradient.py`: given the parameters, the reduced gradient is that of the declared semantics
- `loss.py`: each rank's loss, given the parameters, is that of one device, bit for bit
- `peak.py`: at no instant of a step a rank holds more than its layout predicts
- `persistent.py`: each rank holds the predicted bytes, and every byte is attributed to an owner
- `publish.py`: every rank's next forward uses the updated parameters
- `release.py`: nothing grows from step to step, and nothing remains after close()
- `update.py`: the next state lies in its enclosure, and a step is skipped only if it must be
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
