"""Registry of causes: every name that the judge gives to a violation, with what it means.

A cause is a text in journals, fingerprints and known issues. Here it has a constant, the
obligations under which it is named, a tier, the way it shows and the usual reason. One file for
each family:

- `gradient.py`: causes of a wrong reduced gradient: factors, microbatches, missing terms
- `reduction.py`: causes of a gradient reduced over other ranks, or with misplaced elements
- `clip.py`: causes of a wrong gradient norm, or of a wrongly clipped gradient
- `update.py`: causes of a wrong update of an optimizer, step count or skipped step
- `publish.py`: causes of parameters that are not the updated ones on every rank
- `loss.py`: causes of a wrong loss in the forward
- `buffers.py`: causes of wrong running statistics
- `ownership.py`: causes of shards that do not tile the tensors
- `resume.py`: causes of a wrong state after a checkpoint was loaded
- `checkpoint.py`: causes of wrong exports, and of damaged or half written checkpoints
- `memory.py`: causes of memory that is held too long, or higher than predicted
- `communication.py`: causes of collectives that were not predicted
- `registry.py`: what one cause is, and look-up by text or by an older name

A cause whose text depends on a dtype or the like is a family, and its constant is called with it:
`REDUCED_IN(format="bf16")`. `docs/causes.md` is made of this by `zerocheck.faults.causes_page`.
"""

from __future__ import annotations

from .buffers import *  # noqa: F403
from .checkpoint import *  # noqa: F403
from .clip import *  # noqa: F403
from .communication import *  # noqa: F403
from .gradient import *  # noqa: F403
from .loss import *  # noqa: F403
from .memory import *  # noqa: F403
from .ownership import *  # noqa: F403
from .publish import *  # noqa: F403
from .reduction import *  # noqa: F403
from .resume import *  # noqa: F403
from .update import *  # noqa: F403
