"""Functions, classes, hooks and environment variables that code replaces for all other code.

Of modules and classes only what is code counts, by identity: functions, classes, descriptors. What
they hold of data changes all the time.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import is_dataclass
from enum import Enum
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any

import msgspec
import torch
from torch.nn.modules import module as nn_module
from torch.optim import optimizer

from ...machine.place_variables import copied
from .places import MISSING, StateChange, StateKind

_WITHIN = (
    "torch.distributed.fsdp._fully_shard", "zerocheck.contract", "zerocheck.drive",
    "zerocheck.adapters", "zerocheck.models",
)  # fmt: skip
"""Modules, and those within them, but for this folder."""
_ALONE = (
    "torch", "torch.amp.autocast_mode", "torch.amp.grad_scaler", "torch.autograd",
    "torch.autograd.function", "torch.autograd.grad_mode", "torch.autograd.graph",
    "torch.distributed", "torch.distributed._functional_collectives",
    "torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.state_dict_saver", "torch.distributed.device_mesh",
    "torch.distributed.distributed_c10d", "torch.distributed.fsdp",
    "torch.distributed.fsdp._flat_param", "torch.distributed.fsdp._runtime_utils",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.optim.zero_redundancy_optimizer", "torch.distributed.tensor",
    "torch.distributed.tensor._api", "torch.distributed.tensor._dispatch",
    "torch.distributed.tensor._redistribute", "torch.distributed.tensor.placement_types",
    "torch.nn", "torch.nn.functional", "torch.nn.init", "torch.nn.modules.module",
    "torch.nn.parallel.distributed", "torch.nn.utils", "torch.nn.utils.clip_grad",
    "torch.nn.utils.rnn", "torch.optim", "torch.optim.adam", "torch.optim.adamw",
    "torch.optim.lr_scheduler", "torch.optim.optimizer", "torch.optim.sgd", "torch.overrides",
    "torch.random", "torch.serialization", "torch.utils.checkpoint",
    "builtins", "copy", "json", "math", "os", "random", "threading", "time", "warnings",
)  # fmt: skip
_CLASSES_OF = ("torch.", "zerocheck.")
"""Packages whose classes are watched, where a module above has them."""
_CLASSES = (torch.Tensor, torch.UntypedStorage, torch.nn.Parameter, torch.Generator)
_NO_CODE = (BaseException, Enum, msgspec.Struct)
"""Classes of data."""
_CODE_OF = (
    "torch.nn.functional",
    "torch.nn.modules.module",
    "torch.nn.utils.clip_grad",
    "torch.optim.adam",
    "torch.optim.adamw",
    "torch.optim.optimizer",
    "torch.distributed.distributed_c10d",
)
"""Modules of whose functions the code is compared, too: it can be replaced within a function."""
_LAZY = ("__abstractmethods__", "_abc_impl", "__annotations__", "__annotate__", "__doc__")
"""Attributes of classes that Python makes when they are asked for."""
_OF_DYNAMO = ("__compiled_fn_", "__resume_at_")
"""Names of functions that torch.compile puts into a module, and takes out when it forgets them."""
_immutable = 1 << 8
"""Py_TPFLAGS_IMMUTABLETYPE"""


class Namespaces:
    """Place of the attributes of modules and classes."""

    def __init__(self) -> None:
        """Take the current attributes as clean."""
        self._owners: list[Any] = list(_owners())
        self._dicts = [vars(owner) for owner in self._owners]
        self._clean = [list(one.values()) for one in self._dicts]
        self._names = [list(one) for one in self._dicts]

    def changes(self) -> Iterator[StateChange]:
        for number, (now, clean) in enumerate(zip(self._dicts, self._clean, strict=True)):
            if not _alike(list(now.values()), clean):
                yield from self._within(number)

    def put(self, key: tuple[Any, str], value: Any) -> None:
        owner, name = key
        if value is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)

    def adopt(self, change: StateChange) -> None:
        self._take(self._owners.index(change.key[0]))

    def _take(self, number: int) -> None:
        now = self._dicts[number]
        self._clean[number], self._names[number] = list(now.values()), list(now)

    def _within(self, number: int) -> Iterator[StateChange]:
        owner, now = self._owners[number], self._dicts[number]
        before = dict(zip(self._names[number], self._clean[number], strict=True))
        found = False
        for name in [*before, *(name for name in now if name not in before)]:
            old, new = before.get(name, MISSING), now.get(name, MISSING)
            if new is old or not _counts(owner, name, old, new):
                continue
            found = True
            words = f"{_spelled(owner)}.{name} {'removed' if new is MISSING else 'replaced'}"
            yield StateChange(self, (owner, name), old, new, words)
        if not found:
            self._take(number)


class Code:
    """Place of the code of functions."""

    def __init__(self) -> None:
        self._functions = list(
            {one for name in _CODE_OF for one in vars(sys.modules[name]).values() if _plain(one)}
        )
        self._code = attrgetter("__code__", "__defaults__")
        self._clean = list(map(self._code, self._functions))

    def changes(self) -> Iterator[StateChange]:
        now = list(map(self._code, self._functions))
        if now != self._clean:
            for function, before, after in zip(self._functions, self._clean, now, strict=True):
                if before != after:
                    words = f"{_spelled(function)} with other code"
                    yield StateChange(self, function, before, after, words)

    def put(self, key: Any, value: Any) -> None:
        key.__code__, key.__defaults__ = value

    def adopt(self, change: StateChange) -> None:
        self._clean[self._functions.index(change.key)] = change.after


def all_code() -> tuple[StateKind, ...]:
    """Return the places of all code, the current one of which is clean.

    Ranks inherit them: the first look writes to the reference counts of 20 MiB of objects, and a
    forked process has to copy each page of them, which took 20 ms of processor time.
    """
    return Namespaces(), Code()


class Mapping:
    """Place of a mapping, every entry of which counts."""

    def __init__(
        self, name: str, mapping: MutableMapping[Any, Any], *, grows: bool = False
    ) -> None:
        """Take the mapping's entries as clean.

        name: in words, which `{}` may complete with the key; grows: entries added by an import
        stay.
        """
        self._name = name
        self._mapping = mapping
        self._grows = grows
        self._clean = copied(mapping)

    def take(self, *keys: Any) -> None:
        """Take the current values of these as clean."""
        now = copied(self._mapping)
        self._clean.update({key: now[key] for key in keys if key in now})

    def changes(self) -> Iterator[StateChange]:
        now = copied(self._mapping)
        if len(now) == len(self._clean) and (
            not now or _alike([*now, *now.values()], [*self._clean, *self._clean.values()])
        ):
            return
        for key in [*self._clean, *(key for key in now if key not in self._clean)]:
            before, after = self._clean.get(key, MISSING), now.get(key, MISSING)
            if before is not after and before != after:
                lasting = self._grows and before is MISSING
                yield StateChange(self, key, before, after, self._name.format(key), lasting=lasting)

    def put(self, key: Any, value: Any) -> None:
        if value is MISSING:
            del self._mapping[key]
        else:
            self._mapping[key] = value

    def adopt(self, change: StateChange) -> None:
        if change.after is MISSING:
            self._clean.pop(change.key, None)
        else:
            self._clean[change.key] = change.after


def hooks() -> Iterator[Mapping]:
    """Iterate over the hooks of all modules and of all optimizers."""
    for module, word in ((nn_module, "modules"), (optimizer, "optimizers")):
        for name, value in vars(module).items():
            if name.startswith("_global_") and isinstance(value, dict):
                kind = name.removeprefix("_global_").replace("_", " ")
                yield Mapping(f"a hook of all {word} ({kind})", value)


def environment() -> Mapping:
    """Return the place of the environment variables."""
    return Mapping("environment variable {} changed", os.environ, grows=True)


def _owners() -> Iterator[Any]:
    """Iterate over the modules and classes that are watched."""
    within = tuple(f"{name}." for name in _WITHIN)
    visited: set[int] = set(map(id, _CLASSES))
    yield from _CLASSES
    for name, module in list(sys.modules.items()):
        watched = name in _ALONE or f"{name}.".startswith(within)
        if not watched or name.startswith(__package__) or not isinstance(module, ModuleType):
            continue
        yield module
        for value in list(vars(module).values()):
            if issubclass(type(value), type) and id(value) not in visited and _holds_code(value):
                visited.add(id(value))
                yield value


def _holds_code(kind: type) -> bool:
    """Return True for a class that may be patched; C can make one immutable."""
    return (
        kind.__module__.startswith(_CLASSES_OF)
        and not kind.__flags__ & _immutable
        and not issubclass(kind, _NO_CODE)
        and not issubclass(kind, tuple)
        and not is_dataclass(kind)
        and not (kind.__module__ == "torch" and kind.__name__.endswith(("Tensor", "Storage")))
    )


def _alike(now: list[Any], clean: list[Any]) -> bool:
    """Return True if all are the same objects, or equal; False where comparing tensors raises."""
    try:
        return now == clean
    except Exception:
        return False


def _counts(owner: Any, name: str, old: Any, new: Any) -> bool:
    """Return True if code was replaced, removed, or added before that of a base class."""
    if old is MISSING:
        if not isinstance(owner, type) or name in _LAZY or not _is_code(new):
            return False
        inherited = [vars(base)[name] for base in owner.__mro__[1:] if name in vars(base)]
        return bool(inherited) and new is not inherited[0] and not _wrapped(inherited[0], new)
    if not _is_code(old) or _is_module(old) or name in _LAZY or name.startswith(_OF_DYNAMO):
        return False
    return not _wrapped(old, new)


def _wrapped(old: Any, new: Any) -> bool:
    """Return True for what torch wraps by itself: the step of an optimizer, when the first one is
    made, what torch.compile must not enter, when something is first compiled, and how modules are
    made, when something that makes one is. torch would not wrap it again."""
    if getattr(new, "__module__", "") == "torch._dynamo.mutation_guard":
        return True
    if getattr(new, "_torchdynamo_disable", False) is True:
        return inspect.unwrap(new) is inspect.unwrap(old)
    return getattr(new, "hooked", False) is True and inspect.unwrap(new) is inspect.unwrap(old)


def _is_code(value: Any) -> bool:
    return callable(value) or hasattr(type(value), "__get__") or _is_module(value)


def _is_module(value: Any) -> bool:
    """Return True for a module. Its type is asked: `__class__` of a deprecated name warns."""
    return issubclass(type(value), ModuleType)


def _plain(value: Any) -> bool:
    return issubclass(type(value), FunctionType)


def _spelled(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    return f"{owner.__module__}.{owner.__qualname__}"
