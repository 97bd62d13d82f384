"""Parameter groups by name pattern, and learning rates per step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..case.schema import Case
from ..case.shapes import unfrozen
from ..compat import flat_parameters
from ..errors import Unsupported, UsageError
from ..optimizers import ADAMW
from .names import named_parameters, unwrapped


def group_of(case: Case, name: str) -> int:
    """Return the index of the first group whose pattern matches the parameter name.

    Raises UsageError if no pattern matches.
    """
    for index, group in enumerate(case.optimizer.groups):
        if fnmatchcase(name, group.pattern):
            return index
    patterns = ", ".join(repr(group.pattern) for group in case.optimizer.groups)
    raise UsageError(f"parameter {name!r} matches no group pattern of the case ({patterns})")


def grouped(case: Case, named_tensors: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Make parameter groups for `torch.optim.AdamW`, one per group of the case, in its order.

    `named_tensors`: (name of the unwrapped model, tensor to optimize). Every option of the case is
    in the groups, so that `AdamW(groups)` needs no other. Empty groups are kept, so that group i of
    the optimizer is group i of the case.
    """
    optimizer = case.optimizer
    groups: list[dict[str, Any]] = [
        {
            "params": [],
            **ADAMW.torch_group(group, optimizer),
        }
        for group in optimizer.groups
    ]
    for name, tensor in named_tensors:
        groups[group_of(case, name)]["params"].append(tensor)
    return groups


def groups(model: nn.Module, case: Case) -> list[dict[str, Any]]:
    """Make parameter groups of the trainable parameters of a model, wrapped or not.

    Those that the case unfreezes later are in them from the start: torch's optimizers skip a
    parameter without a gradient. A flat parameter of FSDP1 (`use_orig_params=False`) is in the
    group of the parameters in it; Unsupported if these are of several groups.
    """
    return grouped(case, optimized(model, case))


def optimized(model: nn.Module, case: Case) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over (name in the unwrapped model, parameter) for an optimizer of the case.

    A flat parameter that the optimizer sees goes by the name of the first parameter in it.
    """
    later = set(unfrozen(case))
    flats = {id(f.tensor): f for f in flat_parameters(model) if f.originals is None}
    for name, parameter in named_parameters(model):
        flat = flats.get(id(parameter))
        if flat is not None:
            names = [unwrapped(one) for one in flat.names]
            name = names[0]
            if parameter.requires_grad and len({group_of(case, one) for one in names}) > 1:
                raise Unsupported(
                    "the parameter groups of the case split a flat parameter "
                    "(use_orig_params is false)"
                )
        if parameter.requires_grad or name in later:
            yield name, parameter


def case_group(
    group: Mapping[str, Any], group_of: Mapping[int, int], rates: Sequence[float]
) -> int | None:
    """Return the index of the case's group that an optimizer's group is; None for an empty one.

    group_of: the case's group of each parameter of the model, by id. Raises UsageError for a group
    with parameters that the case gives different rates.
    """
    numbers = sorted({group_of[id(p)] for p in group["params"] if id(p) in group_of})
    if len({rates[number] for number in numbers}) > 1:
        raise UsageError(
            f"a parameter group of the optimizer has parameters of groups {numbers} of the case, "
            "which have different learning rates; build it with zerocheck.groups(model, case)"
        )
    return numbers[0] if numbers else None


def check_options(
    groups: Iterable[Mapping[str, Any]], group_of: Mapping[int, int], case: Case
) -> None:
    """Raise UsageError if no group of an optimizer has a learning rate of the case.

    Where one has, whatever else is wrong of the options is for the judge to say.
    """
    own: dict[str, Any] | None = None
    for group in groups:
        for number in sorted({group_of[id(p)] for p in group["params"] if id(p) in group_of}):
            wanted, given = _options(case, number), _given(group)
            if math.isclose(given.get("lr", wanted["lr"]), wanted["lr"], rel_tol=1e-6):
                return
            own = own or {**wanted, **given}
    if own is not None:
        every = {name: bool(own.pop(name)) for name in ("amsgrad", "maximize")}
        fixed = {"optimizer": {"groups": [{"pattern": "*", **own}], **every}}
        raise UsageError(
            "the optimizer has options of its own and not those of the case: build it with "
            f"zerocheck.groups(model, case), or say which it has: build.fixed = {fixed}"
        )


def _options(case: Case, number: int) -> dict[str, float]:
    """Return the options of a group of the case."""
    group = case.optimizer.groups[number]
    return {
        "lr": group.lr,
        "beta1": group.beta1,
        "beta2": group.beta2,
        "eps": group.eps,
        "weight_decay": group.weight_decay,
        "amsgrad": case.optimizer.amsgrad,
        "maximize": case.optimizer.maximize,
    }


def _given(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the options of AdamW that a parameter group has."""
    given = {name: group[name] for name in ("lr", "eps", "weight_decay") if name in group}
    given |= {name: group[name] for name in ("amsgrad", "maximize") if name in group}
    if "betas" in group:
        given["beta1"], given["beta2"] = group["betas"]
    options = {}
    for name, value in given.items():
        try:
            options[name] = float(value)
        except (TypeError, ValueError):
            raise UsageError(
                f"Built.optimizer has {name} {value!r} in a parameter group, where AdamW has a "
                "number; until other optimizers are supported, zerocheck judges AdamW"
            ) from None
    return options


def learning_rates(case: Case, index: int) -> list[float]:
    """Return each group's learning rate at step `index` (0-based) of the case, in Python floats."""
    done = case.start.step + index
    match case.optimizer.schedule:
        case "constant":
            factor = 1.0
        case "warmup":
            factor = min(1.0, (done + 1) / 4)
        case "cosine":
            factor = 0.55 + 0.45 * math.cos(math.pi * (done % 8) / 8)
    return [group.lr * factor for group in case.optimizer.groups]
