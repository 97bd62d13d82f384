"""Storages that Python objects hold, with their category: a walk over objects made since the start.

A storage counts once, whoever shares it. What only C++ holds is not seen here; `attribution.py`
closes the account against the allocator.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..compat_memory import ReducerBuffers, gathered_by_fsdp1, reducer_buffers
from ..contract.implementation import Implementation
from ..machine.garbage import is_frozen
from ..protocol.layout import OF_ROLE, Category, Phase
from ..protocol.measurements import HARNESS, LOCAL, Exposed


class Claim(NamedTuple):
    """Attribution of a storage to a category.

    rank: 0 where the implementation shows it as a shard, 1 where torch's own objects say what it
    is, 2 where only its name or place is known. The lowest counts.
    """

    rank: int
    category: Category
    holder: str


Claims = dict[int, Claim]
"""Address of a storage -> the best claim to it."""


@contextmanager
def fresh_objects() -> Iterator[None]:
    """Restrict `gc.get_objects()` to objects made within the context.

    Where something is frozen already, as in ranks, it stays: each later collection would go through
    all that they have imported, and copy the pages of it that they share.
    """
    frozen = is_frozen()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


def address(tensor: Any) -> int:
    """Return the start address of a tensor's storage, or 0 if it has no memory."""
    try:
        storage = tensor if isinstance(tensor, torch.UntypedStorage) else tensor.untyped_storage()
        return int(storage.data_ptr()) if storage.nbytes() else 0
    except (RuntimeError, NotImplementedError):
        return 0  # a wrapper, such as a DTensor: the tensors within are found too


def shard_claims(subject: Implementation) -> Claims:
    """Claim the shards that the implementation exposes, where the contract allows asking it."""
    claims: Claims = {}
    for shard in subject.shards():
        if shard.tensor is not None:
            _claim(claims, shard.tensor, Claim(0, OF_ROLE.get(shard.role, "optimizer"), shard.name))
    return claims


def exposed_shards(subject: Implementation, phase: Phase) -> Iterator[Exposed]:
    """Iterate over the shards that the implementation exposes and that have elements."""
    numbers: dict[int, int] = {}
    for shard in subject.shards():
        where = 0 if shard.tensor is None else address(shard.tensor)
        if shard.tensor is not None and where and shard.tensor.numel():
            tensor = shard.tensor
            yield Exposed(
                phase,
                shard.role,
                shard.name,
                tensor.numel(),
                tensor.numel() * tensor.element_size(),
                tensor.untyped_storage().nbytes(),
                numbers.setdefault(where, len(numbers)),
            )


def object_claims(
    subject: Any, harness: Iterable[Any], frame: FrameType | None, end: FrameType
) -> Claims:
    """Return all storages that Python holds, of objects made since `fresh_objects` was entered.

    subject: the implementation, or None once it is closed; harness: objects of ours; frame: the
    innermost running function whose variables count, up to `end`.
    """
    gc.collect()
    objects = gc.get_objects()
    claims: Claims = {}
    for _, tensor in _tensors(harness, ""):
        _claim(claims, tensor, Claim(1, "other", HARNESS))
    tensors = [one for one in objects if issubclass(type(one), torch.Tensor)]
    for tensor in tensors:
        # Whether a view in a graph is a leaf is not asked: for some of them torch raises.
        leaf = not (tensor.requires_grad and tensor._is_view()) and tensor.is_leaf
        if leaf and tensor.grad is not None:
            for _, gradient in _tensors([tensor.grad], "", deep=False):
                _claim(claims, gradient, Claim(1, "gradient", "a .grad"))
    for one in objects:
        if issubclass(type(one), torch.optim.Optimizer):
            for state in one.state.values():
                for role, tensor in _tensors([state], type(one).__name__):
                    _claim(claims, tensor, Claim(1, "optimizer", role))
    for one in tensors:
        if isinstance(one, nn.Parameter):
            for whole in gathered_by_fsdp1(one):
                _claim(claims, whole, Claim(1, "gathered", "a flat parameter"))
    if subject is not None:
        for path, tensor in _tensors([subject], type(subject).__name__):
            if isinstance(tensor, nn.Parameter):
                _claim(claims, tensor, Claim(1, "gathered", path))
            else:  # a rank that owns nothing but padding shows no gradient
                named: Category = "gradient" if "grad" in _inside(path) else "other"
                _claim(claims, tensor, Claim(2, named, path))
    while frame is not None and frame is not end:
        for name, value in frame.f_locals.items():
            for _, tensor in _tensors([value], name, deep=False):
                where = f"{LOCAL} {name} of {frame.f_code.co_qualname}"
                _claim(claims, tensor, Claim(2, "other", where))
        frame = frame.f_back
    for tensor in tensors:
        if isinstance(tensor, nn.Parameter):
            _claim(claims, tensor, Claim(1, "gathered", "a parameter"))
    return claims


def reducers() -> ReducerBuffers:
    """Return what all DDP reducers that are alive report to hold in C++."""
    found = ReducerBuffers(Counter(), Counter())
    for one in gc.get_objects():
        if issubclass(type(one), DistributedDataParallel) and "reducer" in vars(one):
            for sizes, more in zip(found, reducer_buffers(one), strict=True):
                sizes.update(more)
    return found


def _inside(path: str) -> str:
    """Return the path without the name of the class where it begins."""
    return path.partition(".")[2].lower()


def _claim(claims: Claims, tensor: Any, claim: Claim) -> None:
    where = address(tensor)
    if where and (where not in claims or claim.rank < claims[where].rank):
        claims[where] = claim


def _tensors(
    roots: Iterable[Any], name: str, *, deep: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (path, tensor) reachable from the roots, the shortest paths first.

    deep False: containers only, no attributes. Modules and classes are not entered.
    """
    visited: set[int] = set()
    queue = deque((name, root) for root in roots)
    while queue:
        path, one = queue.popleft()
        if id(one) in visited or isinstance(one, _LEAVES):
            continue
        visited.add(id(one))
        if issubclass(type(one), torch.Tensor):
            yield path, one
            inner = getattr(one, "_local_tensor", None)
            if inner is not None:
                queue.append((path, inner))
            if deep and type(one) in (torch.Tensor, nn.Parameter) and not vars(one):
                continue
        queue.extend(_parts(path, one, deep=deep))


_LEAVES = (str, bytes, int, float, type(None), type, type(gc), torch.dtype, torch.device)


def _parts(path: str, one: Any, *, deep: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(one, Mapping):
        for key, value in list(one.items()):
            yield f"{path}[{key!r}]" if isinstance(key, str | int) else path, value
            if not isinstance(key, str | int):
                yield path, key
    elif isinstance(one, list | tuple | set | frozenset | deque):
        for number, value in enumerate(list(one)):
            yield f"{path}[{number}]", value
    elif deep:
        yield from _attributes(path, one)


def _attributes(path: str, one: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(one, FunctionType):
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            yield f"{path}.{name}", cell
    elif isinstance(one, CellType):
        try:
            yield path, one.cell_contents
        except ValueError:
            return  # an empty cell
    elif isinstance(one, MethodType):
        yield path, one.__self__
    elif isinstance(one, partial):
        yield from ((path, part) for part in (one.func, one.args, one.keywords))
    else:
        for name, value in list(getattr(one, "__dict__", {}).items()):
            yield f"{path}.{name}", value
        for kind in type(one).__mro__:
            for name in _slots(kind):
                value = getattr(one, name, None)
                if value is not None:
                    yield f"{path}.{name}", value


def _slots(kind: type) -> Iterable[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]
