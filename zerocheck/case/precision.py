"""How the precision of a drawn case is drawn: by its seed, so that all other choices stay."""

from __future__ import annotations

from .schema import Model, Precision, Training

_DRAWN = {
    7: Precision(compute="bf16", reduce="fp32"),
    15: Precision(compute="bf16", reduce="bf16"),
    19: Precision(compute="fp32", reduce="bf16"),
}
"""Of 24 seeds."""


def drawn(seed: int, model: Model, training: Training) -> Precision:
    """Mixed precision for 3 of 24 seeds; fp16 for every second seed of a case that scales losses.

    fp32 for the user's own model, and for one that has parameters of bf16 itself.
    """
    if model.user is not None or any(block.dtype != "fp32" for block in model.blocks):
        return Precision()
    if training.loss_scale is not None and seed % 2 == 0:
        return Precision(compute="fp16", reduce="fp16" if seed % 4 else "fp32")
    return _DRAWN.get(seed % 24, Precision())
