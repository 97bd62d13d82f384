"""Names of parameters in the unwrapped model, whatever wraps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn

WRAPPERS = (
    "module.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "_orig_mod.",
    "_forward_module.",
)
"""Prefixes that DDP, FSDP1, activation checkpointing, torch.compile and Lightning's Fabric put into
names. Needed only where modules are unknown: in a checkpoint, or after a deep copy."""

Rename = Callable[[str], str]

_names: WeakKeyDictionary[nn.Module, Mapping[str, str]] = WeakKeyDictionary()
"""Per module of a model that was registered: {name within the module: name in the model}."""


def register(model: nn.Module) -> None:
    """Register the names of a model that is about to be wrapped.

    Wrappers keep the modules inside them, so a parameter or buffer is recognised by its module and
    its name there. A tied parameter goes by its first name.
    """
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    for path, module in model.named_modules():
        names = {name: first[id(p)] for name, p in module._parameters.items() if p is not None}
        names.update((name, f"{path}.{name}".lstrip(".")) for name in module._buffers)
        _names[module] = names


def name_of(module: nn.Module, attribute: str, path: str) -> str:
    """Return the registered name of the parameter or buffer that `module` calls `attribute`.

    path: its name in the wrapped model, from which prefixes are stripped if the module is unknown.
    """
    return _names.get(module, {}).get(attribute) or unwrapped(path)


def named_parameters(
    model: nn.Module, rename: Rename | None = None
) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over (name in the unwrapped model, parameter) of a wrapped model, each once.

    rename: from the name in the wrapped model; default: by the registered modules.
    """
    yield from _named(model, "_parameters", rename)  # type: ignore[misc]


def named_buffers(
    model: nn.Module, rename: Rename | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (name in the unwrapped model, buffer) of a wrapped model, each once."""
    yield from _named(model, "_buffers", rename)


def _named(
    model: nn.Module, kind: Literal["_parameters", "_buffers"], rename: Rename | None
) -> Iterator[tuple[str, torch.Tensor]]:
    visited: set[int] = set()
    for path, module in model.named_modules():
        for attribute, tensor in getattr(module, kind).items():
            if tensor is None or id(tensor) in visited:
                continue
            visited.add(id(tensor))
            whole = f"{path}.{attribute}".lstrip(".")
            yield rename(whole) if rename else name_of(module, attribute, whole), tensor


def renaming(model: nn.Module) -> Rename:
    """Return the function from a name in a state dict to that in the unwrapped model."""
    registered = {
        unwrapped(whole := f"{path}.{attribute}".lstrip(".")): name_of(module, attribute, whole)
        for path, module in model.named_modules()
        for attribute in (*module._parameters, *module._buffers)
    }
    return lambda name: registered.get(name) or unwrapped(name)


def unwrapped(name: str) -> str:
    """Strip the prefixes of wrappers: `module.blocks.0.weight` becomes `blocks.0.weight`.

    `module.` is stripped at the front, and behind other prefixes there, since a model may have a
    child of that name.
    """
    while name.startswith(WRAPPERS):
        name = name[name.index(".") + 1 :]
    for prefix in WRAPPERS[1:]:
        name = name.replace(prefix, "")
    return name
