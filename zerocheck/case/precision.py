"""Drawing of a case's precision: by its seed, so that all other choices stay."""

from __future__ import annotations

from .schema import Model, Precision

_DRAWN = {
    7: Precision(compute="bf16", reduce="fp32"),
    15: Precision(compute="bf16", reduce="bf16"),
    19: Precision(compute="fp32", reduce="bf16"),
}
"""Remainder of a case's seed by OF_SEEDS -> the precision."""

OF_SEEDS = 24


def drawn(seed: int, model: Model) -> Precision:
    """Draw mixed precision for 3 of 24 seeds.

    fp32 for the user's own model, and for one that has parameters of bf16 itself. fp16 is for who
    asks for it (`--feature compute-fp16`): there data decide which step overflows.
    """
    if model.user is not None or any(block.dtype != "fp32" for block in model.blocks):
        return Precision()
    return _DRAWN.get(seed % OF_SEEDS, Precision())
