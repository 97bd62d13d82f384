"""Known causes of copies that differ between ranks, compared bit for bit."""

from __future__ import annotations

import torch

from ... import causes as bugs
from ..compare import same_bits
from .unwritten import unwritten


def causes(
    copies: torch.Tensor, owned: torch.Tensor, earlier: torch.Tensor | None
) -> tuple[str, ...]:
    """Find all causes of the elements that differ.

    copies: of one rank; owned: of the owner; earlier: that rank's own before the step.
    """
    if bool(copies.isnan().any()) and not bool(owned.isnan().any()):
        return unwritten("").causes or (bugs.COPIES_DIFFER,)
    found = []
    if earlier is not None and same_bits(copies, earlier):
        found.append(bugs.COPIES_OF_THE_PREVIOUS_STEP)
    if same_bits(copies, owned.bfloat16().to(owned.dtype)):
        found.append(bugs.COPIES_ROUNDED_TO_BF16)
    return tuple(found) or (bugs.COPIES_DIFFER,)
