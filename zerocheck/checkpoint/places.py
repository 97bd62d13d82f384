"""Positions of elements in a tensor, and views of a tensor for bitwise comparison."""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK = 1 << 22
"""Elements that are looked at together, so that memory holds few copies."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View the tensor as 1-D integers, equal where the bits are: NaN equals NaN, -0 is not 0."""
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_BITS[flat.dtype.itemsize])


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to a dtype that torch can compare: float8 to float32, others unchanged."""
    small = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.float() if small else tensor


def blocks(*tensors: torch.Tensor) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Yield 1-D blocks of tensors of one shape, row-major, each with the index of its start."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), BLOCK):
        yield start, tuple(one[start : start + BLOCK] for one in flat)


def index_of(flat: int, shape: tuple[int, ...]) -> list[int]:
    """Return the index of an element, from its place in row-major order."""
    index = []
    for length in reversed(shape):
        flat, place = divmod(flat, length)
        index.append(place)
    return index[::-1]


class MarkedElements:
    """Number and first element, in row-major order, of those that masks of blocks mark."""

    def __init__(self) -> None:
        self.count = 0
        self.first = -1

    def add(self, start: int, mask: torch.Tensor) -> None:
        """The mask of the block that begins at `start`."""
        count = int(mask.count_nonzero())
        if count and not self.count:
            self.first = start + int(mask.to(torch.uint8).argmax())
        self.count += count

    def where(self, shape: tuple[int, ...]) -> str:
        """ "3 of 10 elements, first [1, 2]"."""
        total = torch.Size(shape).numel()
        return f"{self.count} of {total} elements, first {index_of(self.first, shape)}"


def at(tensor: torch.Tensor, place: int) -> str:
    """Describe one element as in reports, with nine digits. `place`: in row-major order."""
    value = tensor[tuple(index_of(place, tuple(tensor.shape)))].item()
    return f"{value:.9g}" if isinstance(value, float) else str(value)
