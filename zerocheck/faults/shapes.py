"""Faults with parameters of unusual shape or memory: 0-d, empty, transposed."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import causes as bugs
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero2 import Zero2
from ..adapters.textbook.zero3 import Zero3
from ..case.schema import Case
from ..errors import Unsupported
from .fault import fault
from .parts import Plantable, frozen


@fault(
    "gradient", bugs.GRADIENT_MISSING, source="seen in review", features=("parameter-0d",),
    without=("frozen",),
)  # fmt: skip
class ScalarsOutside(Zero2):
    """0-d parameters are in no bucket, since they have no dim to shard."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        left = [p for p in model.parameters() if p.dim() == 0 and p.requires_grad]
        if len(left) == sum(p.requires_grad for p in model.parameters()):
            raise Unsupported("nothing is left in the buckets")
        with frozen(left):
            super().__init__(model, case, mesh)


@fault(
    "publish", bugs.INITIAL_STATE, source="bitsandbytes PR#1187", features=("transposed",),
    without=("frozen",),
)  # fmt: skip
class TransposedAsStored(Zero1):
    """Parameters are flattened in the order of their memory, but read row by row."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        stored = {
            parameter: parameter.detach().t().reshape(-1).clone()
            for parameter in model.parameters()
            if not parameter.is_contiguous() and parameter.requires_grad
        }
        super().__init__(model, case, mesh)
        for parameter, values in stored.items():
            parameter.data.view(-1).copy_(values)


@fault("ownership", bugs.EMPTY_PARAMETER_LEFT_OUT, source="DS #8279", features=("parameter-empty",))
class EmptyNotOwned(Plantable, Zero3):
    """An empty parameter is owned by no rank, and missing in the saved state."""

    def plant(self) -> None:
        for flat in self.flats:
            flat.pieces = [piece for piece in flat.pieces if piece.start < piece.stop]
