"""One case seed, many streams of random numbers that never coincide."""

from __future__ import annotations

import torch

WEIGHTS, STATE, DATA, DROPOUT, SIDE, MASK, CARRIED, SCRAMBLED, OVERFLOW = range(9)
"""The streams: initial weights, state of a start in mid-training, samples, dropout masks, second
inputs, targets that are left out, random numbers that a rank carries on, weights before a load, the
element of a gradient that overflows."""


def seed_of(seed: int, stream: int, *, step: int = 0, rank: int = 0, microbatch: int = 0) -> int:
    """Return a seed below 2**32, unique in a case for each (stream, step, rank, microbatch).

    torch's CPU generator reads 32 bits of its seed. The four numbers fit (step < 1024,
    rank < 1024, microbatch < 64), and the mixing is a bijection.
    """
    packed = ((stream * 1024 + step) * 1024 + rank) * 64 + microbatch
    return _mix(_mix(seed & 0xFFFFFFFF) ^ _mix(~(seed >> 32) & 0xFFFFFFFF) ^ packed)


def generator_of(
    seed: int, stream: int, *, step: int = 0, rank: int = 0, microbatch: int = 0
) -> torch.Generator:
    """Create a separate CPU generator, so that the global one is neither read nor moved."""
    generator = torch.Generator()
    generator.manual_seed(seed_of(seed, stream, step=step, rank=rank, microbatch=microbatch))
    return generator


def _mix(value: int) -> int:
    """Apply a bijection of 32 bits (the finalizer of MurmurHash3)."""
    value = (value ^ (value >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    value = (value ^ (value >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return value ^ (value >> 16)
