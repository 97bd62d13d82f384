"""Device that the ranks ran on, and checks that its results repeat bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import Unsupported
from ..machine.devices import CPU, drawn_from, processor
from ..protocol.observations import RankObservation
from .local import Passes

AGAIN = 3
"""Times that the reference takes a step again, before a difference of bits is blamed on the code
under test. Kernels that add with atomics come to another order soon."""


def ran_on(observations: Sequence[RankObservation]) -> torch.device:
    """Return the device for the judge's local passes: that of rank 0, on whose host the judge is.

    Raises Unsupported where ranks were on different kinds of GPU, or the judge's own is another:
    kernels are chosen by it, so that bits cannot be compared.
    """
    device = torch.device(observations[0].device)
    if device.type == CPU:
        return device
    kinds = dict.fromkeys(rank.processor for rank in observations if rank.processor)
    kinds[processor(device)] = None
    if len(kinds) > 1:
        raise Unsupported(
            f"the ranks and the judge are on different GPUs ({'; '.join(kinds)}), whose kernels "
            "give different bits"
        )
    return device


def states_of_device(states: Sequence[Sequence[bytes]], device: torch.device) -> list[list[bytes]]:
    """Return, by [rank][microbatch], the part of the random state that dropout draws from."""
    return [[drawn_from(state, device) for state in of_rank] for of_rank in states]


def check_repeats(passes: Passes, again: Callable[[], Passes]) -> None:
    """Raise Unsupported if the reference does not reproduce the same bits.

    Asked on a GPU before anything is said to be violated. An operator without a deterministic
    kernel, as the user's own model may call, gives other bits in each run; torch warns of those
    that it knows.
    """
    for _ in range(AGAIN):
        other = again()
        if not torch.equal(_bits(_losses(other)), _bits(_losses(passes))):
            raise Unsupported(f"{_WORDS}: a loss differs")
        if not torch.equal(_bits(other.gradients), _bits(passes.gradients)):
            raise Unsupported(f"{_WORDS}: a local gradient differs")
        for one, two in zip(other.buffers, passes.buffers, strict=True):
            if any(not torch.equal(_bits(one[name]), _bits(two[name])) for name in two):
                raise Unsupported(f"{_WORDS}: a buffer differs")


_WORDS = (
    "the model does not give the same bits twice on this GPU, so that nothing can be said of the "
    "last ones"
)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as its bits, so that NaN equals itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _losses(passes: Passes) -> torch.Tensor:
    return torch.tensor(passes.losses, dtype=torch.float64)
