"""All faults by name, with description, source and the expected finding.

Imports no torch: the command line lists it.
"""

from __future__ import annotations

from .checkpoints import CHECKPOINTS, EXPORTS, FILES
from .communication import COMMUNICATION
from .deepspeed import DEEPSPEED
from .fault import Fault
from .forwards import BROKEN, BUFFERS, FORWARDS
from .gradients import ACCUMULATION, CLIPPING, GRADIENT, SCALING
from .hosts import HOSTS
from .injections import INJECTED, injected_into
from .memory import MEMORY
from .offloading import COMPILING, OFFLOADING
from .omissions import LEFT_OUT, RESTORING
from .precision import PRECISION
from .races import RACES
from .replicas import REPLICAS
from .states import DTYPES, OWNERSHIP, PUBLISHING, UPDATE
from .tensor_parallel import TENSOR_PARALLEL

__all__ = ["FAULTS", "NAMED_FAULTS", "OF_EXTRAS", "Fault", "injected_into"]

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        *GRADIENT, *ACCUMULATION, *SCALING, *CLIPPING, *UPDATE, *PUBLISHING, *OWNERSHIP,
        *FORWARDS, *BUFFERS, *DTYPES, *BROKEN, *LEFT_OUT, *RESTORING, *RACES,
        *CHECKPOINTS, *EXPORTS, *FILES, *MEMORY, *COMMUNICATION, *HOSTS, *REPLICAS,
        *PRECISION, *OFFLOADING, *COMPILING, *TENSOR_PARALLEL, *INJECTED,
    )
}  # fmt: skip
"""Name -> fault. All of them are tried where none is named."""

OF_EXTRAS: dict[str, Fault] = {fault.name: fault for fault in DEEPSPEED}
"""Those of a library that is an extra. They are tried where they are named."""

NAMED_FAULTS: dict[str, Fault] = {**FAULTS, **OF_EXTRAS}
