"""Comparison of two checkpoints: names, shapes, dtypes, bits, steps and settings.

Sharding, number of ranks and format of the checkpoints make no difference.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from .contents import MODEL, OTHER, Contents, Item, contents_of
from .formats import open_checkpoint
from .groups import IMPLEMENTATION
from .places import MarkedElements, at, bits, wide
from .result import COMPARED, UNREAD, CheckpointProblem, CheckpointReport
from .source import DamagedCheckpoint
from .tiling import problems


class _Absent:
    """Placeholder for a value that only one checkpoint has."""

    def __repr__(self) -> str:
        return "absent"


_MISSING = _Absent()
_LEFT_OUT = frozenset({"files", "tiling", "readable", UNREAD})


def compare(path: Path, other: Path) -> CheckpointReport:
    """Compare the checkpoints at two paths. Raises UsageError for a path without one.

    Damage that keeps tensors from being read is a finding here too.
    """
    pair = [contents_of(one, open_checkpoint(one)) for one in (path, other)]
    findings = []
    for contents in pair:
        for found in contents.source.findings:
            findings.append(_in(contents, found))
    findings += _Comparison(*pair).findings()
    order = ["files", "readable", "tiling", UNREAD, *COMPARED]
    damaged = {found.check for found in findings} & _LEFT_OUT
    unchecked = {} if any(one.steps for one in pair) else {"steps": "neither has step counts"}
    if not any(one.settings or one.others for one in pair):
        unchecked["settings"] = "neither has param groups"
    return CheckpointReport(
        checkpoints=tuple(contents.described() for contents in pair),
        findings=tuple(sorted(findings, key=lambda one: order.index(one.check))),
        checked=tuple(
            one for one in order if one in damaged or (one in COMPARED and one not in unchecked)
        ),
        unchecked=unchecked,
        notes=tuple(f"{one.path}: {note}" for one in pair for note in one.notes),
        verified=tuple(f"{one.path}: {text}" for one in pair for text in one.source.verified),
        unverifiable=tuple(
            f"{one.path}: {text}" for one in pair for text in one.source.unverifiable
        ),
    )


def _in(contents: Contents, found: CheckpointProblem) -> CheckpointProblem:
    return CheckpointProblem(
        check=found.check, where=found.where, detail=f"in {contents.path}: {found.detail}"
    )


class _Comparison:
    def __init__(self, one: Contents, other: Contents) -> None:
        self._one, self._other = one, other
        self._explainer = Explainer(one, other)

    def findings(self) -> Iterator[CheckpointProblem]:
        """Yield a finding for everything that differs."""
        mine, its = self._one.items, self._aligned()
        for here, there, contents in ((mine, its, self._one), (its, mine, self._other)):
            for spot, item in here.items():
                # A step can be a number in one format and a tensor in another.
                if spot not in there and not (item.role == "step" and self._both_step(item.name)):
                    yield CheckpointProblem(
                        check="names", where=_label(spot), detail=f"only in {contents.path}"
                    )
        for spot, item in mine.items():
            if spot in its and item.role != "step":
                yield from self._tensors(_label(spot), item, its[spot])
        yield from self._steps()
        yield from self._settings()

    def _aligned(self) -> dict[tuple[str, str], Item]:
        """Return the other's items; without an optimizer, names may lack the container's prefix."""
        mine = self._one.named(MODEL)
        its = self._other.named(MODEL)
        if not mine or not its or set(mine) & set(its):
            return self._other.items
        for long, short in ((its, mine), (mine, its)):
            before = Counter(
                name.removesuffix(known)
                for name in long
                for known in short
                if name.endswith(f".{known}")
            )
            for prefix, _ in before.most_common(1):
                renamed = {}
                for (role, name), item in self._other.items.items():
                    fitting = name.removeprefix(prefix) if long is its else prefix + name
                    renamed[role, fitting if role != OTHER else name] = item
                return renamed
        return self._other.items

    def _both_step(self, name: str) -> bool:
        return name in self._one.steps and name in self._other.steps

    def _tensors(self, label: str, mine: Item, its: Item) -> Iterator[CheckpointProblem]:
        for what, a, b in (
            ("shape", list(mine.stored.shape), list(its.stored.shape)),
            ("dtype", mine.stored.dtype, its.stored.dtype),
        ):
            if a != b:
                yield CheckpointProblem(
                    check="shapes", where=label, detail=f"its {what} is {a} and {b}"
                )
        if mine.stored.shape != its.stored.shape:
            return
        read = []
        for item, contents in ((mine, self._one), (its, self._other)):
            torn = next(problems(item.stored), "")
            check = "tiling"
            if not torn:
                try:
                    read.append(contents.read(item))
                except DamagedCheckpoint as error:
                    torn, check = str(error), "readable"
            if torn:
                yield CheckpointProblem(
                    check=check, where=label, detail=f"in {contents.path}: {torn}"
                )
                return
        yield from self._values(label, mine, read[0], read[1])

    def _values(
        self, label: str, item: Item, mine: torch.Tensor, its: torch.Tensor
    ) -> Iterator[CheckpointProblem]:
        same_dtype = mine.dtype == its.dtype
        if same_dtype and torch.equal(bits(mine), bits(its)):
            return
        one, other = wide(mine), wide(its)
        marked = MarkedElements()
        if same_dtype and not one.is_complex():
            marked.add(0, bits(mine) != bits(its))
        else:
            marked.add(0, (one != other).reshape(-1))
        if not marked.count:
            return
        detail = f"{marked.where(item.stored.shape)}: "
        detail += f"{at(one, marked.first)} and {at(other, marked.first)}"
        if not one.is_complex() and not other.is_complex():
            detail += f", largest difference {_largest(one, other):.9g}"
        reason = self._explainer.explain(mine, its, item) if same_dtype else ""
        yield CheckpointProblem(
            check="values", where=label, detail=detail + (f"; {reason}" if reason else "")
        )

    def _steps(self) -> Iterator[CheckpointProblem]:
        for name, step in self._one.steps.items():
            its = self._other.steps.get(name)
            if its is not None and its != step:
                yield CheckpointProblem(
                    check="steps", where=f"step {name}", detail=f"it is {step:g} and {its:g}"
                )

    def _settings(self) -> Iterator[CheckpointProblem]:
        """Settings parameter by parameter, so that the order of groups makes no difference."""
        same: dict[tuple[str, str, str], list[str]] = {}
        one, other = self._one.settings, self._other.settings
        for name in one.keys() & other.keys():
            words = (one[name].keys() | other[name].keys()) - IMPLEMENTATION
            for word in words:
                a, b = (side[name].get(word, _MISSING) for side in (one, other))
                if not _same(a, b):
                    same.setdefault((word, repr(a), repr(b)), []).append(name)
        for (word, a, b), names in sorted(same.items()):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield CheckpointProblem(
                check="settings", where=f"{word} of {min(names)}{more}", detail=f"{a} and {b}"
            )
        for here, there, path in (
            (one, other, self._one.path), (other, one, self._other.path),
        ):  # fmt: skip
            for name in here.keys() - there.keys() if there else ():
                yield CheckpointProblem(
                    check="settings", where=name, detail=f"in a param group only in {path}"
                )
        mine, its = self._one.others, self._other.others
        for name in sorted(mine.keys() | its.keys()):
            a, b = mine.get(name, _MISSING), its.get(name, _MISSING)
            if not _same(a, b):
                yield CheckpointProblem(
                    check="settings", where=name, detail=f"{_short(a)} and {_short(b)}"
                )


def _label(spot: tuple[str, str]) -> str:
    return " ".join(spot)


def _same(a: object, b: object) -> bool:
    """Return True for equal values; a tuple equals a list with equal items, NaN equals NaN."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return (type(a) is type(b) and (a == b or (a != a and b != b))) or repr(a) == repr(b)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest |a - b|, NaN if one of them is NaN; equal infinities are left out."""
    if not one.numel():
        return 0.0
    a, b = one.double().reshape(-1), other.double().reshape(-1)
    return float(torch.where(a == b, 0.0, (a - b).abs()).max())


_TRIES = 64


class Explainer:
    """Explainer of tensors of one checkpoint that differ from another's.

    Every explanation is exact: it accounts for each bit of the tensor.

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
