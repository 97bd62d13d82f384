"""Model, samples and start of a case; everything follows from the case alone."""

from ..case.validity import check
from .batches import Batch, batch, loss_of
from .blocks import BlockModule
from .network import Network, build_model
from .start import initial_state

__all__ = [
    "Batch",
    "BlockModule",
    "Network",
    "batch",
    "build_model",
    "check",
    "initial_state",
    "loss_of",
]
