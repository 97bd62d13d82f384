"""Hooks of the script that change what a model computes, or its gradients.

A script may register hooks on the model that it attaches: on parameters, to leave rows of an
embedding as they are; on modules, to scale an output. The model of `reference=` lacks them, unless
its function registers them too, and its gradient is another one. A hook that returns nothing, such
as one that logs, changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from ...catalogue import STACKS
from ...contract.names import unwrapped
from .guard import ErrorGuard

_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class ScriptHook(msgspec.Struct, frozen=True):
    """A hook of the script. on: the parameter or module; function: name and place."""

    on: str
    function: str


class _Registered(NamedTuple):
    on: str
    hooks: MutableMapping[int, Callable[..., Any]]
    key: int
    hook: Callable[..., Any]


def _registered(model: nn.Module, *, modules: bool = True) -> Iterator[_Registered]:
    """Yield the hooks that no package of STACKS registered. modules: those of modules as well."""
    owners: list[tuple[str, Any, Sequence[str]]] = [
        (name, parameter, _OF_PARAMETERS) for name, parameter in model.named_parameters()
    ]
    if modules:
        owners += [(name, module, _OF_MODULES) for name, module in model.named_modules()]
    for name, owner, kinds in owners:
        for kind in kinds:
            hooks = getattr(owner, kind, None) or {}
            for key, hook in list(hooks.items()):
                if package_of(hook) not in STACKS:
                    yield _Registered(unwrapped(name), hooks, key, hook)


def _function(hook: Any) -> Any:
    """Return what is called in the end: of a method its function, of a partial what it calls."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    return hook if hasattr(hook, "__code__") else type(hook).__call__


def package_of(hook: Any) -> str:
    """Return the package that a function, method or callable object was written in.

    `functools.wraps` copies __module__; the globals are those of where it was written. What is not
    written in Python counts as torch's.
    """
    module = getattr(_function(hook), "__globals__", {}).get("__name__", "torch")
    return str(module).partition(".")[0]


def _words(found: _Registered, bare: Callable[[str], str] = str) -> ScriptHook:
    function = _function(found.hook)
    code = function.__code__
    place = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    return ScriptHook(bare(found.on), f"{function.__qualname__} ({place})")


class HookWatch:
    """Hooks of the script that changed something in a step."""

    def __init__(self, guard: ErrorGuard) -> None:
        self._guard = guard
        self._changing: dict[ScriptHook, None] = {}

    @property
    def changing(self) -> tuple[ScriptHook, ...]:
        """Hooks that changed something so far, each once."""
        return tuple(self._changing)

    def watching(self, model: nn.Module) -> ExitStack:
        """Watch the hooks of a model; closing the stack puts them back.

        Hooks of modules that are compiled are not watched: the module would be compiled again.
        """
        stack = ExitStack()
        compiled = any(
            hasattr(one, "_orig_mod") or one._compiled_call_impl is not None
            for one in model.modules()
        )
        for found in _registered(model, modules=not compiled):
            watched = self._watched(found)
            found.hooks[found.key] = watched
            stack.callback(_put_back, found, watched)
        return stack

    def _watched(self, found: _Registered) -> Callable[..., Any]:
        @functools.wraps(_function(found.hook))
        def watched(*given: Any, **named: Any) -> Any:
            before: list[tuple[int, int]] = []
            with self._guard():
                before = _versions(given)
            made = found.hook(*given, **named)
            with self._guard():
                same = made is None or any(made is one for one in given)
                if not same or _versions(given) != before:
                    self._changing[_words(found)] = None
            return made

        return watched


def _put_back(found: _Registered, watched: Callable[..., Any]) -> None:
    if found.hooks.get(found.key) is watched:  # else the script removed it
        found.hooks[found.key] = found.hook


def _versions(given: Sequence[Any]) -> list[tuple[int, int]]:
    """Return which tensors these are, with gradients, and how often each was changed in place."""
    tensors: list[torch.Tensor | None] = []
    for one in given:
        for tensor in one if isinstance(one, tuple) else (one,):
            if isinstance(tensor, torch.Tensor):
                tensors += [tensor, tensor.grad] if tensor.is_leaf else [tensor]
    versions: list[tuple[int, int]] = []
    for tensor in tensors:
        with suppress(RuntimeError):  # a tensor of inference mode has none
            versions += [(id(tensor), tensor._version)] if tensor is not None else []
    return versions


def hooks_missing(
    changing: Sequence[ScriptHook], reference: nn.Module, bare: Callable[[str], str]
) -> str:
    """Return the reason why no gradient is judged: a hook that the reference has not, or "".

    bare: the name in the reference for one in the run.
    """
    theirs = [_words(found, bare) for found in _registered(reference)]
    for hook in changing:
        mine = ScriptHook(bare(hook.on), hook.function)
        if mine not in theirs:
            return (
                f"{hook.on or 'the model'} has a hook that changes what is computed, "
                f"{hook.function}, and not in the model of reference=: register it there too"
            )
        theirs.remove(mine)
    return ""
