"""Parameter groups by name pattern, and learning rates per step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ..case.schema import Case, OptimizerKind
from ..case.shapes import unfrozen
from ..compat import flat_parameters
from ..errors import Unsupported, UsageError, unknown
from ..optimizers import UpdateRule, optimizer_of
from ..optimizers.trial import others
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


def grouped(
    case: Case,
    named_tensors: Iterable[tuple[str, Any]],
    kind: OptimizerKind | None = None,
    *,
    keep_empty: bool = False,
) -> list[dict[str, Any]]:
    """Make parameter groups for the case's optimizer of torch, one per group, in its order.

    `named_tensors`: (name of the unwrapped model, tensor to optimize, of the shape of the whole
    parameter). Every option of the case is in the groups, so that `torch.optim.AdamW(groups)` needs
    no other. Empty groups are kept, so that group i of the optimizer is group i of the case; of two
    optimizers only with `keep_empty`, or if all are, since torch's state dicts
    refuse them there.

    kind: of a case with two optimizers the one that they are for: "muon", or "adamw" for all that
    is no matrix. None: both, one after the other, where those of Muon have `use_muon` True.
    Raises UsageError for an optimizer that the case does not have.
    """
    options, optimizer = case.optimizer, optimizer_of(case.optimizer)
    rules = [rule for rule in optimizer.rules if kind in (None, rule.kind)]
    if not rules:
        raise unknown("optimizer of the case", str(kind), [rule.kind for rule in optimizer.rules])
    flags = len(optimizer.rules) > 1 and kind is None
    groups: dict[UpdateRule, list[dict[str, Any]]] = {
        rule: [
            {
                "params": [],
                **rule.torch_group(group, options),
                **({"use_muon": rule.kind == "muon"} if flags else {}),
            }
            for group in options.groups
        ]
        for rule in rules
    }
    for name, tensor in named_tensors:
        rule = optimizer.rule(options, name, tuple(tensor.shape))
        if rule in groups:
            groups[rule][group_of(case, name)]["params"].append(tensor)
    every = [group for of_rule in groups.values() for group in of_rule]
    if len(optimizer.rules) > 1 and not keep_empty:
        # One is left at least: torch's optimizers refuse an empty list.
        return [group for group in every if group["params"]] or every[:1]
    return every


def groups(model: nn.Module, case: Case, kind: OptimizerKind | None = None) -> list[dict[str, Any]]:
    """Make parameter groups of the trainable parameters of a model, wrapped or not.

    Those that the case unfreezes later are in them from the start: torch's optimizers skip a
    parameter without a gradient. A flat parameter of FSDP1 (`use_orig_params=False`) is in the
    group of the parameters in it; Unsupported if these are of several groups. kind: see `grouped`.
    """
    return grouped(case, optimized(model, case), kind)


def make_optimizer(model: nn.Module, case: Case) -> Any:
    """Make the case's optimizer of torch over a model, as `Built` takes it.

    One optimizer; or [Muon, AdamW], without one that has no parameters.
    """
    made = _all_of(case, list(optimized(model, case)), keep_empty=False)
    return made[0] if len(optimizer_of(case.optimizer).rules) == 1 else made


class SeveralOptimizers:
    """Optimizers of different parameters as one: with all groups, and one dict of states."""

    def __init__(self, made: Sequence[torch.optim.Optimizer]) -> None:
        self._made = made
        self.state = made[0].state
        for one in made[1:]:
            one.state = self.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of all, those of one optimizer after those of another."""
        return [group for one in self._made for group in one.param_groups]

    def step(self) -> None:
        """Update, one optimizer after the other."""
        for one in self._made:
            one.step()


def optimizer_over(case: Case, named: Sequence[tuple[str, torch.Tensor]]) -> Any:
    """Make the case's optimizer of torch over named tensors, as one object with every group."""
    made = _all_of(case, named, keep_empty=True)
    return made[0] if len(made) == 1 else SeveralOptimizers(made)


def _all_of(
    case: Case, named: Sequence[tuple[str, torch.Tensor]], *, keep_empty: bool
) -> list[torch.optim.Optimizer]:
    rules = optimizer_of(case.optimizer).rules
    found = []
    for rule in rules:
        of_torch: Any = rule.torch_class
        groups = grouped(case, named, rule.kind, keep_empty=keep_empty)
        if keep_empty or len(rules) == 1 or any(group["params"] for group in groups):
            found.append(of_torch(groups))
    return found


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
    options: dict[str, Any] | None = None
    for group in groups:
        for number in sorted({group_of[id(p)] for p in group["params"] if id(p) in group_of}):
            wanted, given = _options(case, number), _given(group, case)
            if math.isclose(given.get("lr", wanted["lr"]), wanted["lr"], rel_tol=1e-6):
                return
            options = options or {**wanted, **given}
    if options is not None:
        fields = optimizer_of(case.optimizer).fields
        of_group = {name: options[name] for name in fields.group}
        every = {name: type(wanted[name])(options[name]) for name in fields.optimizer}
        kind = {"kind": case.optimizer.kind} if case.optimizer.kind != "adamw" else {}
        fixed = {"optimizer": {**kind, "groups": [{"pattern": "*", **of_group}], **every}}
        raise UsageError(
            "the optimizer has options of its own and not those of the case: build it with "
            f"zerocheck.groups(model, case), or say which it has: build.fixed = {fixed}"
        )


def _options(case: Case, number: int) -> dict[str, Any]:
    """Return the options of a group of the case."""
    fields, group = optimizer_of(case.optimizer).fields, case.optimizer.groups[number]
    options = {name: getattr(group, name) for name in fields.group}
    return {**options, **{name: getattr(case.optimizer, name) for name in fields.optimizer}}


def _given(group: Mapping[str, Any], case: Case) -> dict[str, float]:
    """Return the options of the case's optimizer that a parameter group has."""
    optimizer = optimizer_of(case.optimizer)
    options = {}
    for name, value in optimizer.read_group(group).items():
        try:
            options[name] = float(value)
        except (TypeError, ValueError):
            raise UsageError(
                f"Built.optimizer has {name} {value!r} in a parameter group, where "
                f"{optimizer.name} has a number; {others('Class')}"
            ) from None
    return options


def torch_optimizer(case: Case) -> Any:
    """Return the class of torch that is the case's optimizer; it takes `groups(model, case)`.

    Raises Unsupported for a case with two optimizers: see `make_optimizer`.
    """
    optimizer = optimizer_of(case.optimizer)
    if len(optimizer.rules) > 1:
        raise Unsupported(f"it makes one optimizer, and the case has {optimizer.name}")
    return optimizer.rules[0].torch_class


SCHEDULE_PERIOD = 8
"""Steps after which the cosine schedule starts again. The warm-up is shorter."""


def learning_rates(case: Case, index: int) -> list[float]:
    """Return each group's learning rate at step `index` (0-based) of the case, in Python floats."""
    done = case.start.step + index
    match case.optimizer.schedule:
        case "constant":
            factor = 1.0
        case "warmup":
            factor = min(1.0, (done + 1) / 4)
        case "cosine":
            factor = 0.55 + 0.45 * math.cos(math.pi * (done % SCHEDULE_PERIOD) / SCHEDULE_PERIOD)
    return [group.lr * factor for group in case.optimizer.groups]
