"""Lower bounds of the peak by the formulas, which spare simulations.

Source: Rajbhandari et al. 2020, section 5 (see `memory/formulas.py`), with the dtypes that the
model's parameters have and with frozen parameters, which have neither gradient nor state. At the
end of an optimizer step parameters, gradients and states are there together, so no peak is lower.
Units that are not resharded are whole at the end of the forward, next to the shards and the states
(PyTorch, `fully_shard`: `reshard_after_forward=False`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..formulas import persistent, recipe
from ..setup import Setup


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Sizes of a model: its elements, bytes of all parameters, and of those that train."""

    elements: int
    parameters: int
    trained: int


def model_bytes(model: nn.Module) -> ModelBytes:
    """Measure a model; tied parameters count once."""
    found = list(model.parameters())
    return ModelBytes(
        sum(p.numel() for p in found),
        sum(p.numel() * p.element_size() for p in found),
        sum(p.numel() * p.element_size() for p in found if p.requires_grad),
    )


def lower_bound(setup: Setup, model: ModelBytes) -> dict[str, int]:
    """Return bytes that a rank holds at its peak at least, by what they are; {} if not known.

    Of shards that are offloaded the device holds none.

    Divided by the ranks of a replica as the stage says, rounded down. Rank 0 never has less than
    its share.
    """
    stage, ranks = setup.stage, setup.shards
    if stage is None or setup.offload != "none":
        return {}
    share = persistent(1, ranks, stage, setup.held)
    if setup.traits.masters and stage == 1:  # it may reduce gradients as they come
        share["gradient"] /= ranks
    word = recipe("fp32").parameter  # bytes of a parameter as the model has it, of which all are
    held = {
        "parameters": int(model.parameters * share["parameter"] / word),
        "gradients": int(model.trained * share["gradient"] / word),
        "optimizer states": int(model.trained * share["optimizer"] / word),
    }
    if setup.reshard or ranks == 1 or stage < 3:
        return held
    whole = model.elements * 2 if setup.precision == "mixed" else model.parameters
    forward = {name: size for name, size in held.items() if name != "gradients"}
    forward["gathered parameters"] = whole
    return max(held, forward, key=lambda one: sum(one.values()))
