"""Check that the chunks of a tensor cover it exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from .source import Stored, StoredBox


def problems(stored: Stored) -> Iterator[str]:
    """Yield what is wrong with a tensor's chunks: out of bounds, overlap, gap; nothing if exact.

    Boxes within bounds that are disjoint cover the tensor exactly if and only if their volumes add
    up to its own. Chunks without elements cover nothing and are only checked against the bounds.
    """
    ndim = len(stored.shape)
    boxes = []
    for chunk in stored.chunks:
        if len(chunk.offsets) != ndim or len(chunk.sizes) != ndim:
            yield f"{_box(chunk)} has not the {ndim} dims of the tensor {list(stored.shape)}"
        elif not all(
            min(offset, size) >= 0 and offset + size <= length
            for offset, size, length in zip(chunk.offsets, chunk.sizes, stored.shape, strict=True)
        ):
            yield f"{_box(chunk)} is out of the bounds {list(stored.shape)}"
        elif math.prod(chunk.sizes):
            boxes.append(chunk)
    clash = _overlap(boxes)
    if clash is not None:
        yield f"{_box(clash[0])} and {_box(clash[1])} overlap"
    covered = sum(math.prod(box.sizes) for box in boxes)
    if clash is not None or covered != stored.numel:
        gap = _first_gap(boxes, stored.shape)
        if gap is not None:
            missing = stored.numel - covered
            some = f"{missing} of {stored.numel} elements" if clash is None else "some elements"
            yield f"no chunk holds {some}, first {gap}"


def _overlap(boxes: Sequence[StoredBox]) -> tuple[StoredBox, StoredBox] | None:
    """Return two boxes that share an element, or None.

    A sweep over the dim with the most different offsets: only boxes whose ranges there meet are
    compared in full.
    """
    if len(boxes) < 2:
        return None
    ndim = len(boxes[0].offsets)
    if not ndim:
        return boxes[0], boxes[1]
    dim = max(range(ndim), key=lambda d: len({box.offsets[d] for box in boxes}))
    active: list[StoredBox] = []
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        start = box.offsets[dim]
        active = [one for one in active if one.offsets[dim] + one.sizes[dim] > start]
        for other in active:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(
                    box.offsets, box.sizes, other.offsets, other.sizes, strict=True
                )
            ):
                return other, box
        active.append(box)
    return None


def _first_gap(boxes: Sequence[StoredBox], shape: Sequence[int], dim: int = 0) -> list[int] | None:
    """Return the first element, in row-major order, that no box holds, or None."""
    if dim == len(shape):
        return None if boxes else []
    ahead = sorted(boxes, key=lambda box: box.offsets[dim], reverse=True)
    inside: list[StoredBox] = []
    for start in _cuts(boxes, dim, shape[dim]):
        while ahead and ahead[-1].offsets[dim] <= start:
            inside.append(ahead.pop())
        inside = [box for box in inside if start < _end(box, dim)]
        below = _first_gap(inside, shape, dim + 1)
        if below is not None:
            return [start, *below]
    return None


def _cuts(boxes: Iterable[StoredBox], dim: int, length: int) -> list[int]:
    """Return the offsets along a dim at which the set of boxes can change."""
    cuts = {0}
    for box in boxes:
        cuts |= {box.offsets[dim], _end(box, dim)}
    return sorted(cut for cut in cuts if 0 <= cut < length)


def _end(box: StoredBox, dim: int) -> int:
    return box.offsets[dim] + box.sizes[dim]


def _box(chunk: StoredBox) -> str:
    ranges = ", ".join(
        f"{start}:{start + size}" for start, size in zip(chunk.offsets, chunk.sizes, strict=False)
    )
    return f"chunk [{ranges}]"
