"""Explanations of how one tensor became another: a shift, a swap, zeros.

Every explanation is exact: it accounts for each bit of the tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from .contents import Contents, Item
from .places import bits
from .source import DamagedCheckpoint

_TRIES = 64


class Explainer:
    """Explainer of tensors of one checkpoint that differ from another's.

    Values of other tensors are looked up by digest, made when they are first needed, of tensors
    with as many elements of the same dtype.
    """

    def __init__(self, contents: Contents, other: Contents) -> None:
        self._sides = {"the first": contents, "the other": other}
        self._digests: dict[str, dict[bytes, list[str]]] = {}

    def explain(self, mine: torch.Tensor, its: torch.Tensor, item: Item) -> str:
        """Explain `its` by `mine` in words, or return an empty string. Same shape and dtype."""
        one, other = bits(mine), bits(its)
        for tensor, word in ((other, "the other"), (one, "the first")):
            if not tensor.any():
                return f"{word} is all zeros"
        for tensor, side in ((other, "the first"), (one, "the other")):
            found = [label for label in self._equal(tensor, side, item) if label != item.label]
            if found:
                which = "the other" if side == "the first" else "the first"
                return f"{which} has the values that {side} has in {found[0]}"
        if not torch.equal(one.sort().values, other.sort().values):
            return ""
        shift = _roll(one, other)
        if shift is None:
            return "the same values in another order"
        rows = its.shape[0] if its.ndim > 1 else 0
        row = its.numel() // rows if rows else 0
        if row and shift % row == 0:
            return f"shifted by {shift // row} of {rows} rows"
        return f"shifted by {shift} of {its.numel()} elements"

    def _equal(self, tensor: torch.Tensor, side: str, item: Item) -> Iterable[str]:
        digests = self._digests.setdefault(side, {})
        form = f"{item.stored.numel} {item.stored.dtype}"
        if form.encode() not in digests:
            digests[form.encode()] = []
            contents = self._sides[side]
            for one in contents.items.values():
                if f"{one.stored.numel} {one.stored.dtype}" != form:
                    continue
                try:
                    digest = _digest(bits(contents.read(one)))
                except DamagedCheckpoint:
                    continue
                digests.setdefault(digest, []).append(one.label)
        return digests.get(_digest(tensor), [])


def _digest(tensor: torch.Tensor) -> bytes:
    """Return a digest of the bits, to find equal tensors among those that are stored."""
    return hashlib.blake2b(tensor.numpy().data, digest_size=16).digest()


def _roll(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """Return the least k > 0, of 64 candidates, with other = one rolled by k, or None."""
    where = (other == one[0]).nonzero().reshape(-1)
    for place in where[:_TRIES].tolist():
        if place and torch.equal(one.roll(place), other):
            return int(place)
    return None
