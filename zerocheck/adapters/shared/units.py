"""Choice of units: modules whose parameters are gathered, used and released together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ...case.schema import Case, Model, Sharding
from ...case.shapes import matching, uncalled
from ...models.network import Network, build_model
from ...models.parts import is_container, is_no_unit


def unit_modules(model: nn.Module, sharding: Sharding) -> list[nn.Module]:
    """Return the modules below the root that become separate units, in registration order.

    whole   none: the root is the only unit
    block   each module of `model.blocks` that has parameters; see models/parts.py for the user's
    layer   each leaf module with parameters; a module that holds parameters directly and has
            children too is one unit with them, since it may use theirs without calling them
    size    from the layers up, each module with `sharding.bucket` elements or more that holds no
            other unit

    A list of modules is never called, so it is no unit.

    A module that says `no_unit` belongs to the unit around it, which every rank calls. Some ranks
    do not call it, and as a unit of its own it would have the others call collectives alone; or a
    parameter of it is used where it is not called, and would not be gathered.

    What belongs to no unit here belongs to the root. A module that shares a parameter with another
    one (a tied head) stays with the root, which is gathered all the time, so that no parameter is
    in two units. A module that stands twice in the model is one unit.
    """
    always_called = [child for child in _called(model) if not is_no_unit(child)]
    match sharding.wrap:
        case "whole":
            return []
        case "block":
            candidates = [b for b in getattr(model, "blocks", ()) if not is_no_unit(b)]
        case "layer":
            candidates = [unit for child in always_called for unit in _layers(child)]
        case "size":
            candidates = [
                unit for child in always_called for unit in _large(child, sharding.bucket)
            ]
    distinct = [unit for unit in dict.fromkeys(candidates) if any(True for _ in unit.parameters())]
    users = Counter(id(parameter) for unit in distinct for parameter in unit.parameters())
    inside = {id(module) for unit in distinct for module in unit.modules()}
    for module in model.modules():
        if id(module) not in inside:
            users.update(id(parameter) for parameter in module.parameters(recurse=False))
    return [unit for unit in distinct if all(users[id(p)] == 1 for p in unit.parameters())]


def block_classes(model: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of a drawn model's blocks."""
    blocks: Any = model.blocks
    return {type(block) for block in blocks}


def in_order_of_calls(model: nn.Module, units: list[nn.Module], case: Case) -> list[nn.Module]:
    """Return the used units, in the order in which the case's forward first calls them.

    Units are those of `unit_modules`, so that the blocks are called one after the other and the
    layers of a block as they are registered. Those of the user's own model come as it called them
    when it was looked at.
    """
    if case.model.user is not None:
        order = case.model.user.order
        path_of = {module: path for path, module in model.named_modules()}
        ordered = [unit for unit in units if path_of[unit] in order]
        return sorted(ordered, key=lambda unit: order.index(path_of[unit]))
    idle = tuple(prefix.rstrip(".") for prefix in uncalled(case.model))
    paths = {module: path for path, module in model.named_modules()}
    calls = case.model.calls
    if calls is None:
        calls = tuple(range(len(case.model.blocks)))
    first = {f"blocks.{index}": place for place, index in reversed(list(enumerate(calls)))}

    def place(unit: nn.Module) -> tuple[int, int]:
        path = paths[unit]
        block = ".".join(path.split(".")[:2])
        inside = first[block] if path.startswith("blocks.") else -1
        return (2 if path.startswith("head") else int(path.startswith("blocks"))), inside

    called = [
        unit
        for unit in units
        if not any(paths[unit] == name or paths[unit].startswith(f"{name}.") for name in idle)
    ]
    return sorted(called, key=place)


def members(model: nn.Module, units: Iterable[nn.Module]) -> dict[str, list[str]]:
    """Map the path of each unit to the names of its parameters; the root has the path "".

    A parameter belongs to the innermost unit around it, of several to all: then it is tied across
    units.
    """
    chosen = set(units)
    names = {parameter: name for name, parameter in model.named_parameters()}
    held: dict[str, list[str]] = {}

    def visit(module: nn.Module, path: str, unit: str) -> None:
        if module in chosen:
            unit = path
        for parameter in module.parameters(recurse=False):
            inside = held.setdefault(unit, [])
            if names[parameter] not in inside:
                inside.append(names[parameter])
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name, unit)

    visit(model, "", "")
    return held


def skeleton(case: Case) -> nn.Module:
    """Build the model of a case without memory: shapes, strides, dtypes and requires_grad.

    The user's own has its memory, and is one and the same for all cases: do not change it.
    """
    if case.model.user is not None:
        return _of_user(case.model)
    with torch.device("meta"):
        model = Network(case.model)
    parameters = dict(model.named_parameters())
    for name in matching(parameters, case.model.frozen):
        parameters[name].requires_grad_(False)
    return model


@lru_cache(maxsize=1)
def _of_user(model: Model) -> nn.Module:
    return build_model(Case(model=model))


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the children of a module, with those of a list in place of the list."""
    for child in module.children():
        is_list = is_container(child) and not any(True for _ in child.parameters(recurse=False))
        yield from _called(child) if is_list and not is_no_unit(child) else (child,)


def _is_layer(module: nn.Module) -> bool:
    """Return True if a module holds parameters directly, or has a child that is no unit."""
    held = any(True for _ in module.parameters(recurse=False))
    return held or any(is_no_unit(child) for child in _called(module))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the outermost modules that are layers."""
    if _is_layer(module):
        yield module
    else:
        for child in _called(module):
            yield from _layers(child)


def _large(module: nn.Module, least: int) -> list[nn.Module]:
    """Return the innermost modules, layers or containers of them, with `least` elements or more."""
    if not _is_layer(module):
        inside = [unit for child in _called(module) for unit in _large(child, least)]
        if inside:
            return inside
    elements = sum(parameter.numel() for parameter in module.parameters())
    return [module] if elements >= least else []
