"""Layouts of DDP and of DDP with ZeroRedundancyOptimizer, from shapes alone."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..case.schema import Case
from ..case.shapes import sometimes_used, uncalled
from ..contract.groups import group_of
from ..contract.layout import Layout, Phase
from .account import Account, CategoryBytes, layout_of

EMPTY_BUCKET_BYTES = 4
"""One element of fp32."""
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
    names = account.stateful(step, phase, lambda at: account.used(account.learning(at)))
    return sum(_state(account, name) for name in names)


def shared_out(account: Account, rank: int) -> set[str]:
    """Return the names of the parameters that ZeroRedundancyOptimizer assigns to a rank.

    Group by group, the largest first, each goes to the rank that has the fewest elements so far.
    """
    case = account.case
    elements = [0] * case.world_size
    own: set[str] = set()
    for group in range(len(case.optimizer.groups)):
        members = [name for name in account.ever() if group_of(case, name) == group]
        for name in sorted(members, key=lambda n: account.parameters[n].numel, reverse=True):
            least = elements.index(min(elements))
            elements[least] += account.parameters[name].numel
            if least == rank:
                own.add(name)
    return own


def dummies(account: Account, step: int, phase: Phase) -> int:
    """Bytes of the buckets of one element that ZeroRedundancyOptimizer makes for ranks without any
    trainable element, where parameters are views of buckets.

    It looks at what is trainable when it steps.
    """
    case = account.case
    if not case.sharding.bucket_view:
        return 0
    last = step if phase == "step" else step - 1
    while account.skips(last):
        last -= 1
    learning = set(account.learning(last))
    return EMPTY_BUCKET_BYTES * sum(
        not any(account.parameters[n].numel for n in shared_out(account, rank) & learning)
        for rank in range(case.world_size)
    )


def shared_states(rank: int) -> Callable[[Account, int, Phase], int]:
    """Return a function of the bytes of the states of the parameters assigned to a rank."""

    def states(account: Account, step: int, phase: Phase) -> int:
        names = account.stateful(step, phase, lambda at: account.used(account.learning(at)))
        return sum(_state(account, name) for name in names & shared_out(account, rank))

    return states


def _state(account: Account, name: str) -> int:
    one = account.parameters[name]
    return account.moments(one.numel, one.itemsize)
