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

    What belongs to no unit here belongs to the root. A module that shares a parameter with another
    one (a tied head) stays with the root, which is gathered all the time, so that no parameter is
    in two units. A module that stands twice in the model is one unit.
    """
    if wrap == "whole":
        return []
    if wrap == "block":
        candidates = list(getattr(model, "blocks", ()))
    else:
        candidates = [unit for child in model.children() for unit in _layers(child)]
    distinct = [unit for unit in dict.fromkeys(candidates) if any(True for _ in unit.parameters())]
    users = Counter(id(parameter) for unit in distinct for parameter in unit.parameters())
    inside = {id(module) for unit in distinct for module in unit.modules()}
    for module in model.modules():
        if id(module) not in inside:
            users.update(id(parameter) for parameter in module.parameters(recurse=False))
    return [unit for unit in distinct if all(users[id(p)] == 1 for p in unit.parameters())]


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that hold parameters directly."""
    if any(True for _ in module.parameters(recurse=False)):
        yield module
    else:
        for child in module.children():
            yield from _layers(child)
