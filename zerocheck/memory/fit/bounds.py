"""Lower bounds of the peak by the formulas, which spare simulations.

Source: Rajbhandari et al. 2020, section 5 (see `memory/formulas.py`), with the dtypes that the
model's parameters have and with frozen parameters, which have neither gradient nor state. At the
end of an optimizer step parameters, gradients and states are there together, so no peak is lower.
Of experts that are divided over E ranks, E times fewer ranks share each. Units that are not
resharded are whole at the end of the forward, next to the shards and the states (PyTorch,
`fully_shard`: `reshard_after_forward=False`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..experts import expert_parameters
from ..formulas import persistent, recipe
from ..setup import Setup


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Sizes of a model: its elements, bytes of all parameters, and of those that train.

    whole: bytes of all parameters, without the factor of experts.
    """

    elements: int
    parameters: int
    trained: int
    whole: int


def model_bytes(model: nn.Module, divided: int = 1) -> ModelBytes:
    """Measure a model; tied parameters count once.

    divided: ranks that experts are divided over; bytes of experts count so many times.
    """
    experts = expert_parameters(model) if divided > 1 else ()
    sizes = {p: p.numel() * p.element_size() for p in model.parameters()}
    shares = {p: size * (divided if p in experts else 1) for p, size in sizes.items()}
    return ModelBytes(
        sum(p.numel() for p in sizes),
        sum(shares.values()),
        sum(size for p, size in shares.items() if p.requires_grad),
        sum(sizes.values()),
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
    whole = model.elements * 2 if setup.precision == "mixed" else model.whole
    forward = {name: size for name, size in held.items() if name != "gradients"}
    forward["gathered parameters"] = whole
    return max(held, forward, key=lambda one: sum(one.values()))
