"""Cases that FSDP1 cannot run, with the reason, known from the case alone."""

from __future__ import annotations

import torch
from torch import nn

from ...case.schema import Case, Sharding
from ...case.shapes import calls_twice, sometimes_used, uncalled, unfrozen
from ...case.traits import meshes
from ...compat import size_based_units
from ...contract.groups import group_of
from ...models.parts import is_no_unit
from ...optimizers import optimizer_of
from ..shared.compiling import compiles, uncompiled
from ..shared.limits import bf16_only, elementwise, norms_cast, one_precision, same_units
from ..shared.units import members, skeleton, unit_modules


def wrapped_units(model: nn.Module, sharding: Sharding) -> list[nn.Module]:
    """Return the modules that FSDP1 wraps below the root."""
    if sharding.wrap == "size":
        return size_based_units(model, sharding.bucket)
    return unit_modules(model, sharding)


def refusal(case: Case, *, shards: bool) -> str | None:
    """Return the reason to reject what torch refuses or documents as wrong use, or None.

    shards: False for NO_SHARD.
    """
    reason = elementwise(case) or one_precision(case) or bf16_only(case) or norms_cast(case)
    reason = reason or _summed_by_call(case, shards) or same_units(case) or _deferred(case)
    reason = reason or _offloading(case) or uncompiled(case)
    if reason is not None:
        return reason
    sharding = case.sharding
    if compiles(case) and not sharding.use_orig_params:
        return "torch.compile needs FSDP1's use_orig_params, as torch says (training.compile)"
    if sharding.optimizer_first and not sharding.use_orig_params:
        return (
            "torch says that the optimizer must be made after FSDP wrapped the model, since flat "
            "parameters replace those that it has"
        )
    if sharding.optimizer_first and any(
        rule.states_at_once for rule in optimizer_of(case.optimizer).rules
    ):
        return (
            "torch makes states of this optimizer with it, of whole parameters, which do not fit "
            "the shards of FSDP1"
        )
    model = skeleton(case)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.dim() == 0:
            return f"FSDP1 refuses scalar parameters: {name}"
        if parameter.numel() == 0:
            return f"FSDP1 cannot flatten an empty parameter: {name}"
    units = wrapped_units(model, sharding)
    flats = members(model, units)
    reason = _called_on_some_ranks(case, model, units, flats)
    if reason is not None:
        return reason
    several = [name for name in parameters if sum(name in held for held in flats.values()) > 1]
    if several:
        return f"FSDP1 does not support parameters shared by units: {several[0]}"
    for held in flats.values():
        if len({parameters[name].dtype for name in held}) > 1:
            return "FSDP1 flattens parameters of one dtype only"
        if sharding.use_orig_params:
            continue
        learning = [name for name in held if parameters[name].requires_grad]
        if set(held) & set(unfrozen(case)):
            return "a flat parameter cannot be unfrozen in part (sharding.use_orig_params is false)"
        if learning and len(learning) < len(held):
            return (
                "FSDP1 refuses a flat parameter that is frozen in part "
                "(sharding.use_orig_params is false)"
            )
        if len({group_of(case, name) for name in learning}) > 1:
            return (
                "the parameter groups of the case split a flat parameter "
                "(sharding.use_orig_params is false)"
            )
    return None


def _summed_by_call(case: Case, shards: bool) -> str | None:
    """Return the reason why the judge cannot reproduce the sum over calls, or None.

    Where the dtype of a flat parameter changes between calls of its unit, each call gets an
    autograd node of its own that adds to the gradient. Those of one microbatch give the sum that
    they give together, but added to that of the microbatch before, each is rounded by itself. So
    they are where nothing is sharded, and `zero_grad(set_to_none=False)` leaves zeros in fp32.
    """
    whole = not shards or any(mesh.size("shard") == 1 for mesh in meshes(case))
    there = case.training.microbatches > 1 or (whole and not case.training.set_to_none)
    if case.precision.compute != "fp32" and there and calls_twice(case.model):
        return (
            "FSDP1 in mixed precision adds the gradients of a module that is called twice, one "
            "after the other, to one that is there: their sum alone is known"
        )
    return None


def _deferred(case: Case) -> str | None:
    """Return the reason why HYBRID_SHARD cannot defer the reduction over replicas, or None."""
    if case.sharding.sync == "shards" and case.training.microbatches > 1:
        return (
            "FSDP1 reduces over both mesh axes at once: it has no deferred reduction over replicas"
        )
    return None


def _offloading(case: Case) -> str | None:
    """Return the reason why FSDP1 cannot offload, or None.

    Without an accelerator `_init_device_handle` refuses the CPU as the device to offload from, and
    offloaded memory is pinned. A reduced gradient overwrites the earlier one, which torch documents
    (`no_sync`, under Note).
    """
    if case.sharding.offload == "none":
        return None
    if not torch.accelerator.is_available():
        return (
            "FSDP needs a non-CPU accelerator device, but no accelerator device is detected "
            "(sharding.offload)"
        )
    if case.sharding.offload == "pageable":
        return "FSDP1 pins what it offloads (sharding.offload is 'pageable')"
    if case.sharding.sync != "last" and case.training.microbatches > 1:
        return (
            "FSDP1 does not support gradient accumulation outside no_sync() with CPU offloading, "
            "as torch documents (sharding.sync)"
        )
    return None


def _called_on_some_ranks(
    case: Case, model: nn.Module, units: list[nn.Module], flats: dict[str, list[str]]
) -> str | None:
    """Return the reason why ranks would issue different collectives, or None."""
    sometimes = sometimes_used(case.model)
    if not sometimes:
        return None
    inside = {m for c in model.modules() if is_no_unit(c) for m in c.modules()}
    if inside & set(units):
        return "FSDP1 would gather a unit on those ranks only that call it"
    for held in flats.values():
        always = [name for name in held if not name.startswith((*uncalled(case.model), *sometimes))]
        if not always and any(name.startswith(sometimes) for name in held):
            return "FSDP1 would reduce a flat parameter on those ranks only that used it"
    return None
