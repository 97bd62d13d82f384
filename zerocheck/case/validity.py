"""Validity of cases: well-formed but impossible ones are rejected before any allocation."""

from __future__ import annotations

import math

from ..catalogue import NAMED, check_factory
from ..errors import UsageError, few, unknown
from .codec import from_plain, to_plain
from .mesh import INNER, fits
from .schema import MAX_WORLD_SIZE, RESERVED, Block, Case, OptimizerKind
from .shapes import (
    activation_elements,
    call_order,
    empties,
    matching,
    overflowing,
    parameter_dtypes,
    parameter_elements,
    parameter_shapes,
    sometimes_used,
    trainable,
    uncalled,
    unfrozen,
)
from .traits import can_pass_wrapper, estimated

MAX_ELEMENTS = 1 << 28
"""Most elements of parameters, and of one microbatch's activations (1 GiB each in fp32)."""


def check(case: Case) -> None:
    """Raise UsageError, with the given and the allowed values, for a case that cannot be run.

    Costs microseconds and little memory, whatever the case asks for.
    """
    from_plain(to_plain(case), source="the case")
    if case.world_size > MAX_WORLD_SIZE:
        raise UsageError(
            f"mesh {list(case.mesh)} has {case.world_size} ranks; allowed: at most {MAX_WORLD_SIZE}"
        )
    if case.start.step == 0 and case.start.moments != "zero":
        raise UsageError(
            f"start.moments is {case.start.moments!r}, but start.step is 0, where the moments are "
            "zero; allowed: start.step >= 1, or 'zero'"
        )
    _check_user(case)
    _check_stem(case)
    _check_calls(case)
    for index, block in enumerate(case.model.blocks):
        _check_block(case, index, block)
    _check_sizes(case)
    _check_patterns(case)
    _check_masked(case)
    _check_past_wrapper(case)
    _check_optimizer(case)
    _check_training(case)
    _check_axes(case)
    _check_overflow_in(case)
    _check_sync(case)
    _check_resume(case)


def _check_user(case: Case) -> None:
    """Check a user's own model, which has no options of a drawn model or of its data."""
    user = case.model.user
    if user is None:
        return
    check_factory(user.factory)
    names = [one.name for one in user.parameters]
    twice = (
        next((name for name in names if names.count(name) > 1), None)
        if (len(set(names)) < len(names))
        else None
    )
    if twice is not None:
        raise UsageError(f"model.user.parameters has {twice!r} more than once")
    plain = Case()
    for section, allowed in (("model", {"user"}), ("data", {"loss_factor", "rng"})):
        given, default = getattr(case, section), getattr(plain, section)
        for name in given.__struct_fields__:
            if name not in allowed and getattr(given, name) != getattr(default, name):
                raise UsageError(
                    f"{section}.{name} cannot be set beside model.user; allowed: left out, since "
                    f"{user.factory} brings its own"
                )


def _check_stem(case: Case) -> None:
    model = case.model
    if model.tied and model.stem != "embedding":
        raise UsageError(f"model.tied needs the stem 'embedding', model.stem is {model.stem!r}")
    if model.tied and model.outputs != model.inputs:
        raise UsageError(
            f"model.tied needs model.outputs == model.inputs, given are {model.outputs} and "
            f"{model.inputs}"
        )
    if model.padding_idx is None:
        return
    if model.stem != "embedding":
        raise UsageError(
            f"model.padding_idx needs the stem 'embedding', model.stem is {model.stem!r}"
        )
    if model.padding_idx >= model.inputs:
        raise UsageError(
            f"model.padding_idx is {model.padding_idx}; allowed: 0 to {model.inputs - 1} "
            f"(model.inputs is {model.inputs})"
        )


def _check_calls(case: Case) -> None:
    blocks = len(case.model.blocks)
    for place, index in enumerate(case.model.calls or ()):
        if index >= blocks:
            allowed = f"0 to {blocks - 1}" if blocks else "none"
            raise UsageError(
                f"model.calls[{place}] is {index}; allowed: {allowed} (the model has {blocks} "
                "blocks)"
            )


def _check_block(case: Case, index: int, block: Block) -> None:
    where = f"model.blocks[{index}]"
    width = case.model.width
    positions = case.data.batch * case.data.length
    called = index in call_order(case.model)
    if block.kind in ("attention", "group_norm") and width % block.heads:
        fitting = ", ".join(str(n) for n in range(1, min(width, 256) + 1) if width % n == 0)
        raise UsageError(
            f"{where}.heads is {block.heads}, which does not divide model.width {width}; allowed: "
            f"{fitting}"
        )
    if block.kind == "conv" and block.kernel % 2 == 0:
        raise UsageError(f"{where}.kernel is {block.kernel}; allowed: odd numbers, 1 to 15")
    if block.kind == "batch_norm" and called and positions == 1:
        raise UsageError(
            f"{where} is a batch_norm, which needs data.batch * data.length >= 2 in training; "
            f"given are {case.data.batch} * {case.data.length}"
        )
    # torch multiplies the batch in here too, and refuses a product of 1.
    if block.kind == "group_norm" and called and positions * (width // block.heads) == 1:
        raise UsageError(
            f"{where} is a group_norm with 1 value per group; allowed: {where}.heads < {width}, or "
            "data.batch * data.length >= 2"
        )


def _check_sizes(case: Case) -> None:
    for what, elements in (
        ("parameters", parameter_elements(case.model)),
        ("activations of one microbatch", activation_elements(case.model, case.data)),
    ):
        if elements > MAX_ELEMENTS:
            raise UsageError(
                f"the {what} would have {elements} elements; allowed: at most {MAX_ELEMENTS}"
            )


def _check_patterns(case: Case) -> None:
    model = case.model
    names = list(parameter_shapes(model))
    for where, patterns in (("model.frozen", model.frozen), ("start.zeros", case.start.zeros)):
        for pattern in patterns:
            if not matching(names, (pattern,)):
                raise UsageError(
                    f"{where}: the pattern {pattern!r} matches no parameter ({few(names, 4)})"
                )
    learning = trainable(model)
    later = set(unfrozen(case))
    idle = (*uncalled(model), *sometimes_used(model))
    if not any(not name.startswith(idle) for name in set(learning).difference(empties(model))):
        frozen = ", ".join(repr(pattern) for pattern in model.frozen)
        raise UsageError(
            f"no trainable parameter is left that the loss depends on (model.frozen: {frozen}); "
            "needed is at least 1, with elements, that every rank uses"
        )
    groups = [group.pattern for group in case.optimizer.groups]
    updated = [name for name in names if name in learning or name in later]
    reached = set(matching(updated, groups))
    left = [name for name in updated if name not in reached]
    if left:
        raise UsageError(
            f"{few(left, 4)} matches no pattern of optimizer.groups "
            f"({', '.join(repr(pattern) for pattern in groups)}); end them with '*'"
        )


def _check_masked(case: Case) -> None:
    if not case.data.masked:
        return
    if case.model.stem != "embedding":
        raise UsageError(
            f"data.masked needs the stem 'embedding', model.stem is {case.model.stem!r}"
        )
    if case.data.batch * case.data.length == 1:
        raise UsageError(
            "data.masked needs data.batch * data.length >= 2, so that a target is left; given are "
            "1 * 1"
        )


def _check_past_wrapper(case: Case) -> None:
    """Check that what the wrapper does to a model's inputs and outputs changes no number."""
    if case.data.past_wrapper and not can_pass_wrapper(case):
        raise UsageError(
            "data.past_wrapper needs a drawn model, training.compile 'none' and precision.compute "
            "'fp32'"
        )


def _check_optimizer(case: Case) -> None:
    options = case.optimizer
    of_one: dict[str, tuple[object, tuple[OptimizerKind, ...]]] = {
        "amsgrad": (False, ("adamw", "adam")),
        "momentum": (0.0, ("sgd", "muon", "rmsprop")),
        "nesterov": (False, ("sgd", "muon")),
        "adjustment": ("original", ("muon",)),
        "fallback": ((), ("muon",)),
    }
    for name, (default, kinds) in of_one.items():
        if options.kind not in kinds and getattr(options, name) != default:
            raise UsageError(
                f"optimizer.{name} is {getattr(options, name)!r}, and optimizer.kind is "
                f"{options.kind!r}, which has none; allowed: {default!r}"
            )
    user = options.user
    if (options.kind == "user") != (user is not None):
        raise UsageError(
            f"optimizer.kind is {options.kind!r}, and optimizer.user is "
            f"{'not given' if user is None else 'given'}; allowed: optimizer.user with kind 'user'"
        )
    if user is not None:
        check_factory(user.location, "optimizer")
        names = [one.name for one in user.states]
        if RESERVED.intersection(names) or len({*names}) < len(names):
            raise UsageError(
                f"optimizer.user.states has {names}; allowed: each name once, and none of "
                f"{', '.join(sorted(RESERVED))}"
            )
        if not user.bf16 and "bf16" in parameter_dtypes(case.model).values():
            raise UsageError(
                f"the model has parameters in bf16, which {user.location} does not take; allowed: "
                "fp32"
            )
    if options.maximize and user is not None and not user.maximize:
        raise UsageError(
            f"optimizer.maximize is True, and {user.location} has no such option; allowed: False"
        )
    if options.maximize and options.kind == "muon":
        raise UsageError(
            "optimizer.maximize is True, and optimizer.kind is 'muon', which has none; allowed: "
            "False"
        )
    if options.schedule != "constant" and options.kind == "asgd":
        raise UsageError(
            f"optimizer.schedule is {options.schedule!r}, and ASGD keeps the rate of the step "
            "before in its state; allowed with optimizer.kind 'asgd': 'constant'"
        )
    if options.kind == "adafactor" and empties(case.model):
        raise UsageError(
            f"optimizer.kind is 'adafactor', and torch's divides by the number of elements: "
            f"{empties(case.model)[0]} has none; allowed: parameters with elements"
        )
    if options.nesterov and not options.momentum:
        raise UsageError(
            "optimizer.nesterov needs a momentum, and optimizer.momentum is 0; allowed: above 0"
        )


def _check_training(case: Case) -> None:
    training = case.training
    for field in ("unfreeze", "overflow"):
        step = getattr(training, field)
        if step is not None and step >= training.steps:
            lowest = 1 if field == "unfreeze" else 0
            raise UsageError(
                f"training.{field} is {step}; allowed: {lowest} to training.steps - 1, which is "
                f"{training.steps - 1}"
            )
    if training.unfreeze is not None and not case.model.frozen:
        raise UsageError("training.unfreeze needs frozen parameters, model.frozen is empty")
    scale = training.loss_scale
    if scale is None and training.overflow is not None:
        raise UsageError("training.overflow needs training.loss_scale, which is None")
    if scale is not None and (scale < 1.0 or math.frexp(scale)[0] != 0.5):
        raise UsageError(f"training.loss_scale is {scale:g}; allowed: powers of two from 1 on")


def _check_overflow_in(case: Case) -> None:
    training = case.training
    if training.overflow_in is None:
        return
    if training.overflow is None:
        raise UsageError("training.overflow_in needs training.overflow, which is None")
    if estimated(case):
        raise UsageError(
            "training.overflow_in needs a model that is not compiled, of layers that are not "
            "sharded; allowed: training.compile 'none' and sharding.tensor_parallel 1"
        )
    names = list(overflowing(case.model))
    if training.overflow_in not in names:
        raise UsageError(
            f"training.overflow_in is {training.overflow_in!r}; allowed: a parameter that every "
            f"microbatch trains ({few(names, 4)})"
        )


def _check_sync(case: Case) -> None:
    if case.sharding.sync == "shards" and not case.axes.has("replicate"):
        raise UsageError(
            "sharding.sync 'shards' needs a mesh of two axes, such as [2, 2]; given is "
            f"{list(case.mesh)}; allowed: 'last' or 'each'"
        )


def _check_axes(case: Case) -> None:
    for where, mesh in (
        ("mesh", case.mesh),
        *((f"resume[{number}].mesh", segment.mesh) for number, segment in enumerate(case.resume)),
    ):
        if not fits(mesh, case.sharding.inner):
            given = zip(INNER.values(), case.sharding.inner, strict=True)
            asked = [f"sharding.{field} is {count}" for field, count in given if count > 1]
            raise UsageError(
                f"{' and '.join([*asked, where])} is {list(mesh)}; allowed: a mesh of one axis, "
                "whose size it divides"
            )


def _check_resume(case: Case) -> None:
    training = case.training
    if training.first >= training.steps:
        raise UsageError(
            f"training.first is {training.first}; allowed: 0 to training.steps - 1, which is "
            f"{training.steps - 1}"
        )
    if case.resume and training.unfreeze is not None:
        raise UsageError("training.unfreeze with resume is not supported; allowed: None")
    for number, segment in enumerate(case.resume):
        size = math.prod(segment.mesh)
        if size > MAX_WORLD_SIZE:
            raise UsageError(
                f"resume[{number}].mesh {list(segment.mesh)} has {size} ranks; allowed: at most "
                f"{MAX_WORLD_SIZE}"
            )
        tried = segment.killed is not None or segment.damage != "none"
        if tried and number < len(case.resume) - 1:
            raise UsageError(
                f"resume[{number}] has killed or damage; allowed: in the last segment, since "
                "nothing is trained after it"
            )
        if segment.killed is not None and segment.damage != "none":
            raise UsageError(f"resume[{number}] has killed and damage; allowed: one of them")
        if segment.into and segment.into not in NAMED:
            raise unknown(f"implementation in resume[{number}].into", segment.into, NAMED)
