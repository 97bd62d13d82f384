"""Changes that libraries made to a model after it was made, made to the `reference=` too.

Trainers change the model that they are given: TRL puts a forward on it that makes the logarithms of
probabilities, or adapters of PEFT, transformers a hook that adds noise to embeddings (NEFTune),
Liger faster layers. The reference computes the same with them only. Functions of other places are
left alone, since what a user's function does to something outside the model would be done twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from ...catalogue import CHANGING
from ..record.forwards import NESTED, closure, dotted
from ..record.model_hooks import package_of

Counterparts = Mapping[nn.Module, nn.Module]
"""Module of the reference for each of the run that has one."""


def adopt(run: nn.Module, reference: nn.Module, bare: Callable[[str], str]) -> None:
    """Put forwards and forward hooks of packages in CHANGING on the modules of the same name.

    bare: the name in the reference for one in the run. What the reference has already stays.
    """
    theirs = {dotted(name): module for name, module in reference.named_modules()}
    named = ((bare(dotted(name)), module) for name, module in run.named_modules())
    modules = {module: theirs[name] for name, module in named if name in theirs}
    for module, other in modules.items():
        function = library_forward(module)
        if function is not None and "forward" not in vars(other):
            other.forward = MethodType(_moved(function, modules, {}), other)
            _take_settings(module, other)
        hooks = [*_hooks_to_add(module, other)]
        for hook, register, keywords in hooks:
            register(hook, with_kwargs=keywords)
        if hooks:
            _take_settings(module, other)


def with_adapters(run: nn.Module, reference: nn.Module) -> nn.Module:
    """Return the model of the reference with the adapters of PEFT that the one of the run has.

    Trainers make them of a `peft_config`, and add a frozen one that they compare with ("ref").
    """
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return reference
    adapted: Any = next((one for one in run.modules() if isinstance(one, peft.PeftModel)), None)
    if adapted is None:
        return reference
    made: Any = reference
    for name, config in adapted.peft_config.items():
        if not isinstance(made, peft.PeftModel):
            made = type(adapted)(made, deepcopy(config), adapter_name=name)
        elif name not in made.peft_config:
            made.add_adapter(name, deepcopy(config))
    return made  # type: ignore[no-any-return]


def library_forward(module: nn.Module) -> FunctionType | None:
    """Return the forward that a library put on a module, behind any decorators, or None."""
    found = [vars(module).get("forward")]
    for _ in range(NESTED):
        if not found:
            break
        function = found.pop(0)
        function = getattr(function, "__func__", function)
        if function is getattr(type(module).forward, "__func__", type(module).forward):
            continue
        if _of_library(function):
            return function
        found += [one for one in closure(function) if callable(one)]
        found += [getattr(function, name, None) for name in ("__wrapped__", "model_forward")]
        found = [one for one in found if one is not None and not isinstance(one, nn.Module)]
    return None


def _of_library(function: Any) -> bool:
    return isinstance(function, FunctionType) and package_of(function) in CHANGING


def _hooks_to_add(
    module: nn.Module, other: nn.Module
) -> Iterator[tuple[FunctionType, Callable[..., Any], bool]]:
    """Yield hooks to put on the other module: the hook, its registration, whether it has kwargs.

    Only functions without a closure, which can keep nothing of the run.
    """
    for kind in ("forward_pre_hook", "forward_hook"):
        known = getattr(other, f"_{kind}s").values()
        with_keywords = getattr(module, f"_{kind}s_with_kwargs")
        for key, hook in getattr(module, f"_{kind}s").items():
            if hook not in known and _of_library(hook) and not hook.__closure__:
                yield hook, getattr(other, f"register_{kind}"), key in with_keywords


def _take_settings(module: nn.Module, other: nn.Module) -> None:
    """Copy plain attributes that the other module lacks: functions that were put on read them."""
    for name, value in vars(module).items():
        if name not in vars(other) and isinstance(value, (bool, int, float, str)):
            setattr(other, name, value)


def _moved(found: Any, modules: Counterparts, known: dict[int, Any]) -> Any:
    """Return a function that does to the counterparts what this one does to modules of the run.

    known: functions that are being copied, by id, since one may refer to itself.
    """
    if isinstance(found, nn.Module):
        return modules.get(found, found)
    if isinstance(found, MethodType):
        owner = _moved(found.__self__, modules, known)
        return MethodType(_moved(found.__func__, modules, known), owner)
    if not isinstance(found, FunctionType) or not found.__closure__:
        return found
    if id(found) not in known:
        cells = tuple(CellType() for _ in found.__closure__)
        copy = FunctionType(
            found.__code__, found.__globals__, found.__name__, found.__defaults__, cells
        )
        copy.__kwdefaults__ = found.__kwdefaults__
        vars(copy).update(vars(found))
        known[id(found)] = copy
        for new, cell in zip(cells, found.__closure__, strict=True):
            with suppress(ValueError):  # an empty cell
                new.cell_contents = _moved(cell.cell_contents, modules, known)
    return known[id(found)]
