"""Layout of DDP, from shapes alone."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ...case.schema import Case
from ...case.shapes import sometimes_used, uncalled
from ...protocol.layout import Layout, Phase
from ..shared.account import Account, CategoryBytes, layout_of

MAP_BYTES = 8
"""Of each parameter in the two maps of used parameters, which the reducer keeps to find unused
ones: int32, on the device and next to it."""


def ddp_layout(
    model: nn.Module,
    case: Case,
    *,
    gradient_views: bool,
    states: Callable[[Account, int, Phase], int],
    extra: Callable[[Account, int, Phase], int] = lambda account, step, phase: 0,
) -> Layout | None:
    """Return the layout of DDP: whole parameters and gradients, and C++ buckets of the same size.

    Where gradients are views of the buckets, the buckets count as gradients and are allocated from
    the start. states(account, step, phase): bytes of optimizer state; extra: additional bytes.

    None where batches use parameters of their own, since then the data determine which gradients
    exist; where gradients that are views outlive their bucket, which depends on when DDP rebuilds
    its buckets (`bucket_view` without `set_to_none`); and where a bucket that is viewed may have no
    gradient at all (`bucket_view` with parameters that are never used, or with a reduction of each
    microbatch, where the first buckets are freed before a step is over).
    """
    sharding, training = case.sharding, case.training
    views = gradient_views and (
        not training.set_to_none
        or bool(uncalled(case.model))
        or (sharding.sync == "each" and training.microbatches > 1)
    )
    if sometimes_used(case.model) or views:
        return None
    account = Account(model, case)
    whole = sum(one.bytes for one in account.parameters.values())
    finds = sharding.find_unused or sharding.static_graph or bool(uncalled(case.model))

    def predict(step: int, phase: Phase) -> CategoryBytes:
        learning = account.learning(step)
        bucket = sum(account.parameters[name].bytes for name in learning)
        maps = MAP_BYTES * len(learning) if finds else 0
        gradient = sum(
            account.parameters[name].bytes for name in with_gradient(account, step, phase)
        )
        if gradient_views:
            # Without a reduction they are made next to the bucket, which takes them over after it.
            kept = training.microbatches > 1 and sharding.sync == "last" and phase == "forward"
            gradient = bucket + gradient * kept
        return {
            "parameter": whole,
            "gradient": gradient,
            "bucket": maps + (0 if gradient_views else bucket),
            "optimizer": states(account, step, phase),
            "buffer": account.buffers,
            "other": account.scaler(step, phase) + extra(account, step, phase),
        }

    return layout_of(account, predict)


def with_gradient(account: Account, step: int, phase: Phase) -> list[str]:
    """Return the names of the parameters with a gradient at the end of a phase."""
    if phase == "built":
        return []
    if phase == "forward" and account.case.training.microbatches == 1:
        return account.kept(step)
    return account.used(account.learning(step))


def replicated_states(account: Account, step: int, phase: Phase) -> int:
    """Bytes of the optimizer's state of every parameter that has had a gradient."""
    return sum(state_bytes(account, name) for name in account.stateful(step, phase))


def state_bytes(account: Account, name: str) -> int:
    """Bytes of the optimizer's state of a parameter."""
    one = account.parameters[name]
    return account.moments(one.numel, one.itemsize, name)
