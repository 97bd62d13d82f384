"""Optimizers of a job: one or several, around others too.

Accelerate, Lightning and Fabric wrap the optimizer of the script. ZeroRedundancyOptimizer, and the
OSS of fairscale, have one of their own for the parameters that this rank owns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.optim import Optimizer

from ...errors import UsageError
from ...optimizers import BY_EQUATIONS, NAMES_BY_EQUATIONS, UpdateRule, known_optimizer
from .step_record import GroupOptions


def _hook_parents(optimizer: Optimizer) -> None:
    """Have the steps of torch's classes that an optimizer derives from call its hooks too.

    torch does so for a class when an instance of it is made. A subclass may change gradients in its
    step, as detectron2's clips each, before it calls that of its parent.
    """
    for parent in type(optimizer).__mro__[1:]:
        of_torch = parent.__module__.startswith("torch.optim.") and parent is not Optimizer
        if of_torch and "step" in vars(parent):
            parent([torch.nn.Parameter(torch.zeros(1))])


class JobOptimizers(Sequence[Optimizer]):
    """Optimizers of a job, each with parameters of its own. given: with their wrappers.

    Parameter groups are numbered through all of them, in order.
    """

    _attached: ClassVar[weakref.WeakSet[JobOptimizers]] = weakref.WeakSet()

    def __init__(self, optimizers: Any) -> None:
        """Take an optimizer or a list of them, each below its wrappers.

        Raises UsageError for what is no torch optimizer and has none inside.
        """
        several = isinstance(optimizers, (list, tuple))
        self.given = tuple(optimizers if several else [optimizers])
        self._all = tuple(map(observed_optimizer, self.given))
        for optimizer in self._all:
            _hook_parents(optimizer)
        self._attached.add(self)

    def __getitem__(self, number: Any) -> Any:
        return self._all[number]

    def __len__(self) -> int:
        return len(self._all)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def name(self) -> str:
        """Names of the classes, such as "AdamW and SGD"."""
        return " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in self))

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers."""
        return [group for optimizer in self for group in optimizer.param_groups]

    @property
    def group_numbers(self) -> dict[int, int]:
        """Numbers of the parameter groups, by id(parameter)."""
        return {
            id(parameter): number
            for number, group in enumerate(self.groups)
            for parameter in group["params"]
        }

    @property
    def owners(self) -> dict[int, int]:
        """Numbers of the optimizers, by id(parameter)."""
        return {one: number for number, each in enumerate(self) for one in _parameters(each)}

    def names_with(self, parameter: torch.Tensor) -> list[str]:
        """Return the names of the optimizers that have a parameter."""
        return [type(one).__name__ for one in self if id(parameter) in _parameters(one)]

    @property
    def states(self) -> Mapping[Any, Mapping[str, Any]]:
        """States that this rank holds, by the optimizers' parameters."""
        return {key: state for each in self for key, state in owned_part(each).state.items()}

    @property
    def elsewhere(self) -> set[int]:
        """Ids of parameters whose optimizer another `attach` was given."""
        others = [each for job in self._attached if job is not self for each in job]
        return {one for each in others for one in _parameters(each)} - self.owners.keys()


def observed_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer below the wrappers, whose `step` is observed.

    Raises UsageError for what is no torch optimizer and has none inside.
    """
    if isinstance(optimizer, PostLocalSGDOptimizer):
        raise UsageError(
            "attach does not check PostLocalSGDOptimizer, since each rank trains parameters of its "
            "own between two averages (allowed: optimizers whose ranks have equal parameters)"
        )
    inner = _wrapped(optimizer)
    while inner is not None and _parameters(inner) == _parameters(optimizer):
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            break
        optimizer, inner = inner, _wrapped(inner)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"attach needs a torch optimizer, got {type(optimizer).__name__}")
    return optimizer


def owned_part(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of the parameters that this rank owns; itself where it owns all."""
    return _inner(optimizer) or optimizer


def check_kind(optimizer: Optimizer) -> None:
    """Raise UsageError unless the optimizer's update can be judged, within its `step`."""
    if isinstance(optimizer, ZeroRedundancyOptimizer) and vars(optimizer).get("_overlap_with_ddp"):
        raise UsageError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) updates within the backward, where "
            "no step can be seen (allowed: overlap_with_ddp=False)"
        )
    inner = owned_part(optimizer)
    allowed = "allowed: torch.optim.AdamW, Adam, SGD without dampening, Adagrad without lr_decay, "
    allowed += "RMSprop that is not centered, their subclasses, and these in "
    allowed += "ZeroRedundancyOptimizer or a wrapper that has them in an attribute"
    known = _rule(inner)
    if known is None or known.whole:  # a rank has a slice of a matrix
        raise UsageError(
            f"attach judges {NAMES_BY_EQUATIONS}, got {_class_name(inner)} ({allowed})"
        )
    for number, group in enumerate(inner.param_groups):
        foreign = known.foreign_option(inner, group)
        if foreign:
            raise UsageError(
                f"attach judges {known.name}; parameter group {number} of this "
                f"{_class_name(inner)} {foreign} ({allowed})"
            )


def _class_name(optimizer: Optimizer) -> str:
    """Return the name of a class, with the module of one that is not of torch."""
    kind = type(optimizer)
    torchs = kind.__module__.startswith("torch.")
    return kind.__name__ if torchs else f"{kind.__module__}.{kind.__qualname__}"


def group_options(optimizers: Iterable[Optimizer]) -> tuple[GroupOptions, ...]:
    """Return the options of the parameter groups of optimizers that `check_kind` let pass."""
    found = []
    for optimizer in optimizers:
        known = _rule(owned_part(optimizer))
        assert known is not None
        for group in optimizer.param_groups:
            given: dict[str, Any] = {
                name: value if isinstance(value, bool) else float(value)
                for name, value in known.read_group(group).items()
            }
            found.append(GroupOptions(kind=known.kind, **given))
    return tuple(found)


def _rule(inner: Optimizer) -> UpdateRule | None:
    """Return the rule by which an optimizer updates; None for one that is not judged.

    Its class says which, but for options that make it another one: torch's Adam with
    `decoupled_weight_decay` is AdamW.
    """
    known = known_optimizer(inner, BY_EQUATIONS)
    if known is None or _takes(known, inner):
        return known
    others = (one for one in BY_EQUATIONS if isinstance(inner, one.lookalikes))
    return next((one for one in others if _takes(one, inner)), known)


def _takes(rule: UpdateRule, inner: Optimizer) -> bool:
    return not any(rule.foreign_option(inner, group) for group in inner.param_groups)


def _inner(optimizer: Any) -> Optimizer | None:
    """Return the wrapped torch optimizer, whose parameters all belong to the outer one."""
    inner = _wrapped(optimizer)
    return inner if isinstance(inner, Optimizer) else None


def _wrapped(optimizer: Any) -> Any:
    """Return what an optimizer is around, a torch optimizer or not, or None."""
    for inner in getattr(optimizer, "__dict__", {}).values():
        if hasattr(inner, "param_groups") and _parameters(inner) <= _parameters(optimizer):
            return inner
    return None


def _parameters(optimizer: Any) -> set[int]:
    groups = getattr(optimizer, "param_groups", None) or ()
    return {id(parameter) for group in groups for parameter in group["params"]}
