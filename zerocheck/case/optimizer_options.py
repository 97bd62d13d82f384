"""Options of optimizers other than AdamW, which every choice of a case is about.

They are drawn by the seed of the case, in a stream of its own, so that a case with AdamW stays what
it is, and one with another optimizer has the same model, data and sharding.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from .schema import AdjustmentKind, Case, Group, Model, Optimizer
from .shapes import parameter_dtypes, sometimes_used, transposed

MOMENTA = (0.9, 0.9, 0.5, 0.0)
"""Values for SGD; the first is the simplest one that has a state."""

MUON_MOMENTA = (0.95, 0.95, 0.5)

ADJUSTMENTS: tuple[AdjustmentKind, ...] = ("original", "match_rms_adamw")

FALLBACKS = (("stem.*", "head.*"), ("stem.*", "head.*"), ("stem.*",), ())
"""Matrices that a recipe leaves to AdamW; the first is the usual one."""

STREAM = 1 << 40
"""Added to the seed of a case, which gives the stream of these options."""

_replace = msgspec.structs.replace


def with_options(case: Case, fixed: Mapping[str, Any]) -> Case:
    """Return a case with the options of its optimizer; those of AdamW were chosen before.

    fixed: paths of fixed fields, with their values.
    """
    if case.optimizer.kind == "adamw":
        return case
    source = random.Random(case.seed + STREAM)  # only random() is used: its sequence stays
    if case.optimizer.kind == "muon":
        options = _of_muon(case.optimizer, case.model, source, fixed)
        return _replace(case, optimizer=options)
    if case.optimizer.kind != "sgd":
        return _replace(case, optimizer=_of_another(case, source, fixed))
    momentum = MOMENTA[int(source.random() * len(MOMENTA))]
    nesterov = source.random() < 0.5
    options = _replace(
        case.optimizer,
        amsgrad=fixed.get("optimizer.amsgrad", False),
        momentum=fixed.get("optimizer.momentum", momentum),
    )
    options = _replace(
        options, nesterov=fixed.get("optimizer.nesterov", nesterov and options.momentum > 0)
    )
    if "optimizer.groups" not in fixed:
        scale = max(1.0, case.data.loss_factor)
        options = _replace(options, groups=tuple(_scaled(one, scale) for one in options.groups))
    if "optimizer.kernel" not in fixed and fused_fails(options, case):
        options = _replace(options, kernel="foreach")
    return _replace(case, optimizer=options)


def _of_muon(
    options: Optimizer, model: Model, source: random.Random, fixed: Mapping[str, Any]
) -> Optimizer:
    """Return options with those of Muon, which has neither amsgrad nor maximize."""

    def pick(values: Sequence[Any]) -> Any:
        return values[int(source.random() * len(values))]

    chosen = {
        "amsgrad": False,
        "maximize": False,
        "momentum": pick(MUON_MOMENTA),
        "nesterov": source.random() < 0.7,
        "adjustment": pick(ADJUSTMENTS),
        "fallback": pick(FALLBACKS),
    }
    if "bf16" in parameter_dtypes(model).values():
        # Without Nesterov's form torch divides a buffer in bf16 by its norm (reports/findings/).
        chosen["nesterov"] = True
    given = {name: fixed.get(f"optimizer.{name}", value) for name, value in chosen.items()}
    return _replace(options, **given)


def _of_another(case: Case, source: random.Random, fixed: Mapping[str, Any]) -> Optimizer:
    """Return options with those of an optimizer that is its own reference."""
    options = case.optimizer
    chosen: dict[str, Any] = {}
    if options.kind != "adam":
        chosen["amsgrad"] = False
    if options.kind == "rmsprop":
        chosen["momentum"] = MOMENTA[int(source.random() * len(MOMENTA))]
    if options.user is not None and not options.user.maximize:
        chosen["maximize"] = False
    if options.kind == "asgd":
        chosen["schedule"] = "constant"
    if options.kind in ("asgd", "user"):
        scale = max(1.0, case.data.loss_factor)
        chosen["groups"] = tuple(_scaled(one, scale) for one in options.groups)
    given = {name: fixed.get(f"optimizer.{name}", value) for name, value in chosen.items()}
    return _replace(options, **given)


def is_matrix_of_muon(options: Optimizer, name: str, shape: Sequence[int]) -> bool:
    """Return True for a parameter that Muon updates: a matrix that is not left to AdamW.

    One without elements has no singular vectors, and torch.optim.Muon divides by its columns.
    """
    return (
        len(shape) == 2
        and 0 not in shape
        and not any(fnmatchcase(name, one) for one in options.fallback)
    )


def fused_fails(options: Optimizer, case: Case) -> bool:
    """Return True for a fault of torch's fused SGD on the CPU, which is not the fault of a sharder.

    It does not update parameters in bf16, mixes up elements of different strides, fails on a
    parameter that gets its first gradient later than others, and makes buffers of memory that is
    not initialised in a step that is skipped (reports/findings/).
    """
    if options.kind != "sgd" or options.kernel != "fused":
        return False
    narrow = "bf16" in parameter_dtypes(case.model).values()
    late = case.training.unfreeze is not None or bool(sometimes_used(case.model))
    return (
        narrow
        or bool(transposed(case.model))
        or (options.momentum > 0 and (late or case.training.overflow is not None))
    )


def _scaled(group: Group, scale: float) -> Group:
    """Return a group for a loss that is multiplied by `scale`: the parameters take the same way.

    AdamW does not see the size of gradients. SGD does, and would diverge. Options that SGD ignores
    are at their default.
    """
    return Group(
        pattern=group.pattern, lr=group.lr / scale, weight_decay=group.weight_decay * scale
    )
