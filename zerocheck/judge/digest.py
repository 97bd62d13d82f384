"""Hash of all observations, so that a replay can be declared identical bit for bit."""

from __future__ import annotations

import hashlib

import msgspec
import torch

from .assemble import Observation


def digest_of(observation: Observation) -> str:
    """BLAKE2b over every recorded tensor and loss, in order, as 32 hexadecimal digits."""
    state = hashlib.blake2b(digest_size=16)
    for rank, record in observation.records():
        state.update(f"{rank} {record.step} {record.point} {record.role}".encode())
        if record.numel:
            data = observation.fetch(rank, record).contiguous().view(torch.uint8)
            state.update(data.numpy().data)
    for one in observation.ranks:
        state.update(msgspec.msgpack.encode([(s.losses, s.grad_norm) for s in one.steps]))
    return state.hexdigest()
