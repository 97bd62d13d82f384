"""Model and samples of a case; everything follows from the case alone.

- `batches.py`: samples of a case, different on every rank, at every step and in every microbatch
- `blocks.py`: blocks of a model: each maps (batch, length, width) to the same shape
- `inspection.py`: inspection of the user's model: its description, and whether it can be judged
- `layers.py`: torch's layers without their initialization, and their values instead
- `network.py`: model of a case: an nn.Module with the same bits on every rank and in the judge
- `overflow.py`: overflow of a microbatch: an infinite loss, or one element of one gradient alone
- `parts.py`: parts of a user's model: the factory's module, and its repeated blocks
- `seeds.py`: one case seed, many streams of random numbers that never coincide
- `user.py`: user's own model as the model of a case: `--model path/to/file.py:factory`
"""

from .batches import Batch, batch, loss_of
from .blocks import BlockModule
from .network import Network, build_model

__all__ = ["Batch", "BlockModule", "Network", "batch", "build_model", "loss_of"]
