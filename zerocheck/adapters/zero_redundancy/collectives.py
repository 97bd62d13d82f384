"""Collectives of ZeroRedundancyOptimizer after those of DDP.

Source: torch/distributed/optim/zero_redundancy_optimizer.py of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ...case.schema import Case
from ...case.shapes import unfrozen
from ..ddp.collectives import bucket_tensor, ddp_calls
from ..shared.calls import CollectivePrediction
from .layout import assigned_names


def zero_redundancy(model: nn.Module, case: Case) -> CollectivePrediction | None:
    """Predict DDP's calls, and after each update the broadcasts of the parameters.

    Parameters are sent one by one, or all that a rank updates together. None where DDP's calls are
    not known.
    """
    return ddp_calls(model, case, lambda step: _published(model, case, step))


def _published(model: nn.Module, case: Case, step: int) -> Iterator[tuple[int, str]]:
    """Iterate over (elements, dtype) of ZeroRedundancyOptimizer's broadcasts after its update.

    With bucket views a rank's parameters are sent as one, and an empty tensor as one element.
    """
    if step == case.training.overflow:
        return
    late = case.training.unfreeze
    still = unfrozen(case) if late is None or step < late else ()
    learns = {
        name: bucket_tensor(name, p)
        for name, p in model.named_parameters()
        if p.requires_grad or name in unfrozen(case)
    }
    for names in assigned_names(case, {name: one.elements for name, one in learns.items()}):
        if not case.sharding.bucket_view:
            yield from ((learns[name].elements, learns[name].dtype) for name in names)
            continue
        elements = sum(learns[name].elements for name in names if name not in still)
        yield (elements, learns[names[0]].dtype) if elements else (1, "float32")
