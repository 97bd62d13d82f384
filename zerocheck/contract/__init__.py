"""Contract between zerocheck and the code under test.

- `build.py`: short form of the contract, for code that looks like torch: a model and an optimizer
- `checkpoint.py`: checkpoints of code that looks like torch: its distributed state-dict API and dcp
- `flat.py`: shards of a rank's flat parameters as parts of the original ones
- `groups.py`: parameter groups by name pattern, and learning rates per step
- `implementation.py`: interface that an implementation needs in order to be judged
- `loading.py`: loading of an implementation by name
- `memory_order.py`: ranges in the order of memory, as boxes of a tensor
- `names.py`: names of parameters in the unwrapped model, whatever wraps it
- `no_kernel.py`: errors of torch's kernels for dtypes
- `optimizers.py`: torch optimizers inside the object that trains a model
- `partitions.py`: partition of a flat group of parameters on one rank, as shards
- `refusals.py`: refusals by torch of any caller's code: such cases are unsupported
- `semantics.py`: declarations of an implementation's semantics: correct trainers differ
- `shard.py`: local view of a tensor, with its location in the whole
- `start.py`: state of a model before a case: a start in mid-training, other weights before a load
- `states.py`: optimizer states by role, read from and written into optimizers
- `user_optimizers.py`: user-defined optimizer classes: hidden state, effects of their `step()`
- `versions.py`: numbered checkpoints in one directory, so that a killed writer leaves the last one
- `wrapper_limits.py`: cases that DDP and FSDP1 cannot run with the user's wrapping
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .groups import grouped, groups, make_optimizer, torch_optimizer
from .implementation import Implementation, Loader, Microbatch, Saving, Step, StepReport
from .semantics import Semantics
from .shard import Shard

if TYPE_CHECKING:
    from .build import Built, BuiltImplementation

__all__ = [
    "Built",
    "BuiltImplementation",
    "Implementation",
    "Loader",
    "Microbatch",
    "Saving",
    "Semantics",
    "Shard",
    "Step",
    "StepReport",
    "grouped",
    "groups",
    "make_optimizer",
    "torch_optimizer",
]


def __getattr__(name: str) -> Any:
    """Import the rest on first use: all of torch.distributed, which the judge does without."""
    if name not in ("Built", "BuiltImplementation"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".build", __name__), name)
