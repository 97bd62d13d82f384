"""All faults by name, with description, source and the expected finding. Imports no torch.

- `checkpoints.py`: faults of checkpoints: their content, exports, and their files
- `communication.py`: faults in communication
- `deepspeed.py`: faults in DeepSpeed's engine; they need its extra
- `fault.py`: description of a fault: its source, and the finding that it must cause
- `forwards.py`: faults in the forward and its buffers, and sharders that break off or hang
- `gradients.py`: faults in gradients: reduction, accumulation, scaling, clipping
- `hosts.py`: faults that only several hosts show
- `injections.py`: faults injected at the collectives of any implementation
- `memory.py`: faults of memory: the numbers are right, and only measurements show them
- `offloading.py`: faults that only offloaded, or compiled, cases show
- `omissions.py`: faults that leave something out, or do not restore a state
- `precision.py`: faults that only mixed precision shows
- `races.py`: faults that show sometimes: their effect depends on timing
- `replicas.py`: faults that only a mesh of two axes shows
- `sgd.py`: faults that only SGD has, or shows
- `states.py`: faults in the update and in ownership: optimizer, copies, shards, dtypes
- `tensor_parallel.py`: faults that only tensor parallelism shows
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
from .sgd import MOMENTUM_OF_CHECKPOINTS, SGD
from .states import DTYPES, OWNERSHIP, PUBLISHING, UPDATE
from .tensor_parallel import TENSOR_PARALLEL

__all__ = ["FAULTS", "NAMED_FAULTS", "OF_EXTRAS", "Fault", "injected_into"]

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        *GRADIENT, *ACCUMULATION, *SCALING, *CLIPPING, *UPDATE, *SGD, *PUBLISHING, *OWNERSHIP,
        *FORWARDS, *BUFFERS, *DTYPES, *BROKEN, *LEFT_OUT, *RESTORING, *RACES,
        *CHECKPOINTS, *MOMENTUM_OF_CHECKPOINTS,
        *EXPORTS, *FILES, *MEMORY, *COMMUNICATION, *HOSTS, *REPLICAS,
        *PRECISION, *OFFLOADING, *COMPILING, *TENSOR_PARALLEL, *INJECTED,
    )
}  # fmt: skip
"""Name -> fault. All of them are tried where none is named."""

OF_EXTRAS: dict[str, Fault] = {fault.name: fault for fault in DEEPSPEED}
"""Those of a library that is an extra. They are tried where they are named."""

NAMED_FAULTS: dict[str, Fault] = {**FAULTS, **OF_EXTRAS}
