"""Layout of FSDP2, from shapes alone: dim 0 of each parameter in chunks of one size."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ...case.schema import Case
from ...case.shapes import sometimes_used, uncalled
from ...case.traits import reduced_precision
from ...models.blocks import DTYPES
from ...optimizers import factored
from ...protocol.layout import Layout, Phase
from ..shared.account import Account, AccountedParameter, CategoryBytes, layout_of
from ..shared.sync import deferred
from ..shared.units import members, unit_modules


def fsdp2_layout(model: nn.Module, case: Case, rank: int) -> Layout | None:
    """Return the layout of FSDP2: chunks of ceil(rows / W) rows of each parameter on every rank.

    The last chunks are padded to that size. The gradients of each unit are in one buffer of such
    chunks. AdamW's states are not padded.

    In mixed precision units are gathered in the dtype of compute, and whole gradients of earlier
    microbatches are held in that of reduction; what is reduced is cast to the parameter's.

    After the forward the root is gathered, in whole chunks, and all units that were called where
    the case does not reshard. Without a reduction until the last microbatch, whole gradients of
    those before are held after the forward.

    None where batches use parameters of their own, since the data say which gradients there are;
    and where the optimizer was made first, which then trains nothing. None too where sums wait for
    their reduction over replicas, and with factored states, which each class shards its own way.

    What is offloaded from the CPU to the CPU is not copied. From an accelerator each gradient is,
    out of the buffer of its unit, so that none is predicted where there is one.
    """
    if sometimes_used(case.model) or case.sharding.optimizer_first or waiting(case):
        return None
    if factored(case.optimizer):
        return None
    if case.sharding.offload != "none" and torch.accelerator.is_available():
        return None
    account = Account(model, case)
    ranks = case.axes.size("shard")
    units = members(model, unit_modules(model, case.sharding))
    stays = {""} if case.sharding.reshard else set(units)
    idle = uncalled(case.model)
    compute, reduction = DTYPES[case.precision.compute], DTYPES[case.precision.reduce]

    def cast(one: AccountedParameter, dtype: torch.dtype) -> AccountedParameter:
        return one._replace(itemsize=dtype.itemsize) if reduced_precision(case) else one

    gathered = sum(
        padded(cast(account.parameters[name], compute), ranks) * ranks
        for path, names in units.items()
        for name in names
        if path in stays and not f"{path}.".startswith(idle)
    )
    prefetches = case.sharding.prefetch > 0 and case.model.calls is not None

    def reduced(step: int) -> int:
        """Bytes of the gradients after a reduction. Those of a unit are views of what its
        reduce-scatter put out. Of a unit that has gradients from before, what is put out is added
        to them and freed, unless one of its parameters is new: its gradient keeps all of it."""
        before = set(account.used(account.learning(case.training.first)))
        graded = set(account.used(account.learning(step)))
        count = 0
        for names in units.values():
            here = graded & set(names)
            new = here - before
            if not case.training.set_to_none and new:
                count += chunks(here & before)
            count += chunks(here)
        return count

    def chunks(names: Iterable[str]) -> int:
        return sum(padded(account.parameters[name], ranks) for name in names)

    def predict(step: int, phase: Phase) -> CategoryBytes | None:
        training = case.training
        if phase == "forward" and prefetches:
            return None
        several = training.microbatches > 1
        if phase != "forward" or (several and case.sharding.sync != "last"):
            gradient = reduced(step) if phase != "built" else 0
        else:
            gradient = reduced(step - 1) if account.kept(step) else 0
            if several:
                graded = account.used(account.learning(step))
                gradient += sum(cast(account.parameters[name], reduction).bytes for name in graded)
        return {
            "parameter": sum(padded(one, ranks) for one in account.parameters.values()),
            "gradient": gradient,
            "optimizer": _states(account, rank, step, phase),
            "buffer": account.buffers,
            "gathered": gathered if phase == "forward" else 0,
            "other": account.scaler(step, phase),
        }

    return layout_of(account, predict)


def waiting(case: Case) -> bool:
    """Return True if gradients reduced over shards wait for their reduction over replicas."""
    return deferred(case) and case.training.microbatches > 1


def padded(one: AccountedParameter, ranks: int) -> int:
    """Bytes of a rank's chunk of a parameter, padding included."""
    rows = one.shape[0]
    return -(-rows // ranks) * (one.numel // rows) * one.itemsize


def own_elements(one: AccountedParameter, rank: int, ranks: int) -> int:
    """Number of elements of a parameter that a rank owns."""
    rows = one.shape[0]
    chunk = -(-rows // ranks)
    return max(0, min(chunk, rows - rank * chunk)) * (one.numel // rows)


def _states(account: Account, rank: int, step: int, phase: Phase) -> int:
    mesh = account.case.axes
    rank, ranks = mesh.coordinate(rank, "shard"), mesh.size("shard")
    return sum(
        account.moments(
            own_elements(account.parameters[name], rank, ranks),
            account.parameters[name].itemsize,
            name,
        )
        for name in account.stateful(step, phase)
    )
