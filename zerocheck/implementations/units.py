"""Which modules are units: what is gathered, used and released together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from ..case.schema import WrapKind


def unit_modules(model: nn.Module, wrap: WrapKind) -> list[nn.Module]:
    """The modules below the root that become units of their own, in registration order.

    whole   none: the root is the only unit
    block   each module of `model.blocks` that has parameters
    layer   each leaf module with parameters; a module that holds parameters directly and has
            children too is one unit with them, since it may use theirs without calling them

    A module that says `conditional` is called on some ranks and not on others. It belongs to the
    unit around it, which every rank calls: as a unit of its own, it would have some ranks call
    collectives that the others do not.

    What belongs to no unit here belongs to the root. A module that shares a parameter with another
    one (a tied head) stays with the root, which is gathered all the time, so that no parameter is
    in two units. A module that stands twice in the model is one unit.
    """
    if wrap == "whole":
        return []
    if wrap == "block":
        candidates = list(getattr(model, "blocks", ()))
    else:
        candidates = [
            unit
            for child in model.children()
            if not is_conditional(child)
            for unit in _layers(child)
        ]
    distinct = [unit for unit in dict.fromkeys(candidates) if any(True for _ in unit.parameters())]
    users = Counter(id(parameter) for unit in distinct for parameter in unit.parameters())
    inside = {id(module) for unit in distinct for module in unit.modules()}
    for module in model.modules():
        if id(module) not in inside:
            users.update(id(parameter) for parameter in module.parameters(recurse=False))
    return [unit for unit in distinct if all(users[id(p)] == 1 for p in unit.parameters())]


def is_conditional(module: nn.Module) -> bool:
    """Whether it is called on some ranks only. Modules say so by an attribute `conditional`."""
    return bool(getattr(module, "conditional", False))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that hold parameters directly, or call a child conditionally."""
    held = any(True for _ in module.parameters(recurse=False))
    if held or any(is_conditional(child) for child in module.children()):
        yield module
    else:
        for child in module.children():
            yield from _layers(child)
