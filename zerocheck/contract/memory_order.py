"""Ranges in the order of memory, as boxes of a tensor.

A flat parameter holds the elements of a parameter in the order in which they lie in memory. For a
contiguous parameter this is row-major order. For a transposed one it is that of the transposed
tensor, so that a range of it is not a range of the flattened parameter, but up to three boxes for
two dims: the rest of a column, whole columns, the beginning of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

Box = tuple[slice, ...]


def order_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dims from the slowest to the fastest in memory. Dims of size 1 stay in place."""
    fixed = [dim for dim, size in enumerate(shape) if size > 1]
    ordered = iter(sorted(fixed, key=lambda dim: -strides[dim]))
    return tuple(next(ordered) if size > 1 else dim for dim, size in enumerate(shape))


def in_memory_order(whole: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return all elements, 1-D, in the order of memory of a parameter with this order of dims."""
    return whole.permute(order).reshape(-1)


def boxes(
    shape: tuple[int, ...], order: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[Box, tuple[int, ...], int, int]]:
    """Split the range [start, stop) into boxes.

    (index in the whole, shape of the part of memory with its dims in `order`, start, stop).
    """
    sizes = tuple(shape[dim] for dim in order)
    for part, low, high in _ordered_boxes(sizes, start, stop):
        index: list[slice] = [slice(0, 0)] * len(shape)
        for dim, one in zip(order, part, strict=True):
            index[dim] = one
        extent = tuple(one.stop - one.start for one in part)
        yield tuple(index), extent, low, high


def _ordered_boxes(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
    """Iterate over the boxes of a row-major range."""
    if start >= stop:
        return
    if len(sizes) == 1:
        yield (slice(start, stop),), start, stop
        return
    inner = prod(sizes[1:])
    first, last = -(-start // inner), stop // inner
    rest = tuple(slice(0, size) for size in sizes[1:])
    if first > last:  # within one row
        first = last
        yield from _within(sizes, last, start, stop, inner)
        return
    if start < first * inner:
        yield from _within(sizes, first - 1, start, first * inner, inner)
    if first < last:
        yield (slice(first, last), *rest), first * inner, last * inner
    if last * inner < stop:
        yield from _within(sizes, last, last * inner, stop, inner)


def _within(
    sizes: tuple[int, ...], row: int, start: int, stop: int, inner: int
) -> Iterator[tuple[Box, int, int]]:
    base = row * inner
    for part, low, high in _ordered_boxes(sizes[1:], start - base, stop - base):
        yield (slice(row, row + 1), *part), low + base, high + base
