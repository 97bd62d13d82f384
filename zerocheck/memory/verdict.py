"""Verdict on whether a simulated rank fits into a device, for one setup and for a search.

What must fit is what the caching allocator reserves, next to the CUDA context. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..sizes import binary

CUDA_CONTEXT = 768 << 20
"""Bytes of the CUDA context, as measured on an H100 after the kernels of a step were loaded. They
are outside of what torch's allocator reserves (docs/out-of-memory.md)."""

CONTEXT_WORDS = (
    f"counted next to it: {CUDA_CONTEXT / 2**30:.2f} GiB of CUDA context, as measured on an H100; "
    "not counted: buffers of NCCL, which were not measured"
)

EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that the caching allocator of a GPU would reserve at most in training."""

    allocated: int
    """Handed out at most, with roundings and cuBLAS's workspaces."""
    default: int
    """Reserved without settings."""
    expandable: int
    """Reserved with `expandable_segments:True`."""
    building: int
    """Reserved without settings, if the whole model is built on the device before it is sharded."""


class MemoryVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on whether a rank fits into a device: see `judge_memory`."""

    limit: int
    """Bytes of the device."""
    context: int
    """Bytes of them that the CUDA context takes."""
    peak: int
    """Bytes of tensors at most."""
    reserved: Reserved | None
    """None if it is not known: then the verdict is by the peak alone."""
    unknown: str
    """Why `reserved` is not known."""
    fits: bool
    expandable: bool
    """True if it fits with expandable segments only."""

    @property
    def by_peak(self) -> bool:
        """True if the verdict is by the peak alone: it fits by that, or surely does not fit."""
        return self.reserved is None or self.peak > room(self.limit)


def room(limit: int) -> int:
    """Return the bytes of a device that torch's allocator can reserve at most."""
    return max(limit - CUDA_CONTEXT, 0)


def judge_memory(
    limit: int, peak: int, reserved: Reserved | None, unknown: str = ""
) -> MemoryVerdict:
    """Judge by what is reserved, or by the peak if that is not known for the reason `unknown`."""
    least = peak if reserved is None else min(reserved.default, reserved.expandable)
    fits = max(least, peak) <= room(limit)
    return MemoryVerdict(
        limit=limit,
        context=CUDA_CONTEXT,
        peak=peak,
        reserved=reserved,
        unknown=unknown,
        fits=fits,
        expandable=fits and reserved is not None and reserved.default > room(limit),
    )


def words_of(verdict: MemoryVerdict) -> Iterator[str]:
    """Yield sentences on the verdict, and what is counted next to it."""
    limit, held = binary(verdict.limit), verdict.reserved
    if held is None and verdict.fits:
        yield (
            f"it fits into {limit} by its peak of {binary(verdict.peak)}; what the allocator "
            f"reserves is not known ({verdict.unknown})"
        )
    elif held is None or verdict.by_peak:
        yield f"it does not fit into {limit} by its peak of {binary(verdict.peak)}"
    elif verdict.expandable:
        yield (
            f"it fits into {limit} only with {EXPANDABLE}: the caching allocator reserves "
            f"{binary(held.expandable)} with it, and {binary(held.default)} without"
        )
    elif verdict.fits:
        yield f"it fits into {limit}: the caching allocator reserves {binary(held.default)}"
    else:
        yield (
            f"it does not fit into {limit}: the caching allocator reserves "
            f"{binary(held.default)}, and {binary(held.expandable)} with expandable segments"
        )
        yield (
            f"its peak of {binary(verdict.peak)} would fit: on a full device torch returns cached "
            "blocks and tries again, which is slow and may fail"
        )
    yield CONTEXT_WORDS
    if held and verdict.fits and held.building > max(held.default, room(verdict.limit)):
        yield (
            f"building the whole model on the device would not fit: {binary(held.building)} are "
            "reserved with that; build it on the meta device or on the CPU"
        )
