"""Sizes of batches in a DeepSpeed config: those with which DeepSpeed does not start."""

from __future__ import annotations

from ...shared.user_config.section import Section

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def impossible_batch(top: Section) -> dict[str, int | None]:
    """Return the sizes of batches if DeepSpeed starts with them on no number of ranks.

    It wants that of all samples or that of a microbatch, and then their product with the number of
    ranks to be right. Values of "auto" are set by who starts it.
    """
    if any(top.auto(key) for key in BATCH):
        return {}
    sizes = {key: top.whole(key, 0, lowest=0) if top.says(key) else None for key in BATCH}
    whole, micro, count = sizes.values()
    if whole is None and micro is None:
        return sizes
    if whole is not None:
        parts = (micro or 1) * (count or 1)
        possible = whole >= parts and whole % parts == 0
        return {} if possible and 0 not in sizes.values() else sizes
    return {} if micro and count != 0 else sizes
