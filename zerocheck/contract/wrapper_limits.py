"""Cases that torch's DDP and FSDP1 cannot run with the user's wrapping, or compute wrongly.

What torch documents or raises is no fault of the user's code, and neither are the listed faults of
torch (reports/findings): such cases are unsupported, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ..case.schema import Case
from ..case.shapes import empties, sometimes_used, uncalled
from ..compat import FlatHandle
from ..errors import Unsupported
from .memory_order import order_of
from .names import unwrapped


def check_wrapped(model: nn.Module, case: Case, flats: Sequence[FlatHandle]) -> None:
    """Raise Unsupported where torch rejects the behaviour of the wrapped model in this case.

    flats: its flat parameters.
    """
    some = (*uncalled(case.model), *sometimes_used(case.model))
    ddp = ddp_in(model)
    if ddp is not None and some:
        if not (ddp.find_unused_parameters or ddp.static_graph):
            raise Unsupported(
                "DDP refuses parameters that a forward does not use unless "
                f"find_unused_parameters=True: {some[0].rstrip('.')}"
            )
        if ddp.static_graph and sometimes_used(case.model):
            raise Unsupported("the graph changes from batch to batch, and static_graph is True")
    if flats and empties(case.model):
        raise Unsupported(
            f"FSDP1 cannot flatten a parameter without elements: {empties(case.model)[0]}"
        )


def ddp_in(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP around a model, inside further wrappers; None without one."""
    kinds = (one for one in model.modules() if isinstance(one, DistributedDataParallel))
    return next(kinds, None)


def sends_buffers(model: nn.Module) -> bool:
    """Return True if a DDP sends the buffers of rank 0 to all ranks before a forward."""
    ddp = ddp_in(model)
    return ddp is not None and ddp.broadcast_buffers and bool(ddp.modules_buffers)


def by_mesh(model: nn.Module) -> bool:
    """Return True if every FSDP1 module has a device mesh: its state dicts then have DTensors."""
    units = FullyShardedDataParallel.fsdp_modules(model)
    return all(getattr(unit, "_device_mesh", None) is not None for unit in units)


def check_torch_faults(case: Case, flats: Sequence[FlatHandle]) -> None:
    """Raise Unsupported where FSDP1 is known to compute wrong numbers, citing our page on it."""
    for flat in flats:
        if flat.sharded or flat.originals is None:
            continue
        for piece in flat.pieces:
            if order_of(piece.shape, piece.strides) != tuple(range(len(piece.shape))):
                _refuse(
                    f"permutes the gradient of {piece.name}, which is not contiguous",
                    "fsdp1-gradient-of-a-transposed-weight",
                )
        if case.training.unfreeze is not None and case.training.microbatches > 1:
            _refuse("loses microbatches of what is unfrozen", "fsdp1-unfrozen-under-no-sync")
    # The root's comes first.
    if len(flats) > 1 and not (flats[0].sharded or flats[0].tensor.requires_grad):
        _refuse("does not reshard a frozen root unit", "fsdp1-frozen-root-unit")


def check_damage(case: Case) -> None:
    """Raise Unsupported where torch.distributed.checkpoint loads what was damaged."""
    if any(segment.damage in ("flip", "mix") for segment in case.resume):
        raise Unsupported(
            "torch.distributed.checkpoint verifies no file, and loads what was changed in it: see "
            "reports/findings/dcp-loads-a-damaged-checkpoint.md"
        )


def uses_partly(flats: Sequence[FlatHandle], case: Case) -> bool:
    """Return True if a flat parameter has parameters that are used and others that are not.

    The gradient of what is not used is then 0, and not None.
    """
    some = (*uncalled(case.model), *sometimes_used(case.model))
    for flat in flats if some else ():
        idle = [unwrapped(name).startswith(some) for name in flat.names]
        if any(idle) and not all(idle):
            return True
    return False


def _refuse(what: str, page: str) -> None:
    raise Unsupported(f"without sharding, FSDP1 {what}: see reports/findings/{page}.md")
