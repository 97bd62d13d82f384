"""Parts of a user's model: the module that the factory returns, and its repeated blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def model_of(name: str, made: Any) -> nn.Module:
    """Return the model in the result of the factory `name`: the result, or the first of a tuple.

    Raises UsageError for anything else.
    """
    model = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(model, nn.Module):
        what = (
            f"a tuple that begins with {type(model).__name__}"
            if model is not made
            else (type(made).__name__)
        )
        raise UsageError(f"{name} returns {what}; needed is a torch.nn.Module")
    return model


def block_list(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Path and list of the model's blocks: the ModuleList with the most parameters.

    A list marked as `no_unit`, such as one of experts, is no list of blocks.
    """
    lists = [(path, m) for path, m in model.named_modules() if _is_list(m)]
    sized = [(sum(p.numel() for p in found.parameters()), path, found) for path, found in lists]
    sized = [one for one in sized if one[0]]
    if not sized:
        return None
    _, path, found = max(sized, key=lambda one: one[0])
    return path, found


def show_blocks(model: nn.Module, otherwise: Iterable[nn.Module] = ()) -> None:
    """Expose the model's repeated blocks as `blocks`, for code that makes units of them.

    A model with a ModuleList of that name is left alone. A ModuleDict whose keys are numbers counts
    as a list, as torchtitan's `layers`. otherwise: the blocks of a model without any list. Nothing
    is registered: names and parameters stay as they are.
    """
    if isinstance(getattr(model, "blocks", None), nn.ModuleList):
        return
    found = block_list(model)
    size = sum(p.numel() for p in found[1].parameters()) if found is not None else 0
    parts = found[1] if found is not None else otherwise
    for module in model.modules():
        if isinstance(module, nn.ModuleDict) and module and all(map(str.isdigit, module)):
            numel = sum(p.numel() for p in module.parameters())
            if numel > size:
                size, parts = numel, module.values()
    vars(model)["blocks"] = [part for part in parts if not is_no_unit(part)]


def is_no_unit(module: nn.Module) -> bool:
    """Return True if a module must not be a unit of its own, by its attribute `no_unit`."""
    return bool(getattr(module, "no_unit", False))


def is_container(module: nn.Module) -> bool:
    """Return True if a module is never called, as a list of modules."""
    return type(module).forward is nn.Module.forward


def show_sharded_layers(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """Expose the styles of layers that tensor parallelism shards, by path, for the adapter.

    As `show_blocks` does: nothing is registered.
    """
    vars(model)["sharded_layers"] = styles


def parameter_places(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the modules that hold each parameter, and its name in them: several if it is tied."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [*places.values()]


def tie(places: Iterable[Sequence[tuple[nn.Module, str]]]) -> None:
    """Tie parameters again where they were in `places`, after each was replaced by itself."""
    for (module, name), *others in places:
        for other, alias in others:
            setattr(other, alias, getattr(module, name))


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and not is_no_unit(module)
