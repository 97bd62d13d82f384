"""Layouts of DeepSpeed's stages between steps, from shapes alone.

    stage 0      parameters whole; in bf16 an fp32 master of each that learns, and its moments
    stages 1, 2  of each group a flat buffer of parameters, at a multiple of 2 W elements, whole on
                 each rank, and of its masters and moments a W-th
    stage 3      of each parameter ceil(n / W) elements, of its master and moments too, and of its
                 gradient; a bucket for reductions; what stays gathered beside its part

Masters are there in fp32 too, from stage 1 on. Within a step, what is held of gradients depends on
where buckets begin and end; no layout tells of that.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...case.schema import Case
from ...case.shapes import empties
from ...case.traits import reduced_precision
from ...contract.groups import group_of
from ...models.blocks import DTYPES
from ...protocol.layout import Layout, Phase
from ..shared.account import Account, AccountedParameter, CategoryBytes, layout_of
from .idle_ranks import ALIGNMENT
from .options import options_of

MASTER_BYTES = 4
NORM_BYTES = 4
"""Of the norm of the last step, which the engine keeps; stage 3 has it in fp64."""
TRACKER_BYTES = 1
"""Of stage 3's `inf_or_nan_tracker`."""


@dataclass(frozen=True)
class _Model:
    """Model on the ranks of a case. groups: trainable parameters, by group of the optimizer."""

    account: Account
    case: Case
    groups: list[list[AccountedParameter]]

    @classmethod
    def of(cls, model: nn.Module, case: Case) -> _Model:
        account = Account(model, case)
        groups: dict[int, list[AccountedParameter]] = {}
        for name in account.ever():
            groups.setdefault(group_of(case, name), []).append(account.parameters[name])
        return cls(account, case, list(groups.values()))

    @property
    def ranks(self) -> int:
        return self.case.world_size

    def kept(self, one: AccountedParameter) -> int:
        """Bytes per element of a parameter as the forward uses it."""
        return (
            DTYPES[self.case.precision.compute].itemsize
            if reduced_precision(self.case)
            else one.itemsize
        )

    def layout(
        self,
        parameter: int,
        masters: list[int],
        gradient: int = 0,
        bucket: int = 0,
        *,
        norm: int = NORM_BYTES,
    ) -> Layout:
        """Build the layout from parameter bytes without masters, and elements of masters.

        parameter: bytes without masters; masters: elements that this rank updates, of each group;
        gradient, bucket: bytes that are allocated from the start.
        """
        first = self.case.training.first

        def predict(step: int, phase: Phase) -> CategoryBytes | None:
            if phase not in ("built", "step"):
                return None
            begun = step >= first
            stateful = begun or self.account.restored
            return {
                "parameter": parameter + MASTER_BYTES * sum(masters),
                "gradient": gradient + norm * begun,
                "optimizer": stateful * sum(self.account.moments(n, MASTER_BYTES) for n in masters),
                "buffer": self.account.buffers,
                "other": bucket,
            }

        return layout_of(self.account, predict)


def stage0_layout(model: nn.Module, case: Case) -> Layout | None:
    """Return the layout of stage 0.

    In bf16 the engine takes a step when it is built, so that all states exist from the start. None
    where parameters have no elements: some of them get a state, and some get none.
    """
    if empties(case.model):
        return None
    sizes = _Model.of(model, case)
    account = sizes.account
    masters = case.precision.compute == "bf16"

    def predict(step: int, phase: Phase) -> CategoryBytes | None:
        if phase not in ("built", "step"):
            return None
        every = account.parameters
        stateful = account.stateful(step, phase, account.learning)
        if masters:
            stateful = set(account.ever())
        return {
            "parameter": sum(one.numel * sizes.kept(one) for one in every.values())
            + MASTER_BYTES * masters * sum(every[name].numel for name in account.ever()),
            "optimizer": sum(
                account.moments(every[name].numel, every[name].itemsize) for name in stateful
            ),
            "buffer": account.buffers,
        }

    return layout_of(account, predict)


def flat_layout(model: nn.Module, case: Case, *, stage: int) -> Layout | None:
    """Return the layout of stages 1 and 2.

    Stage 1 with fp32 accumulation of bf16 gradients keeps whole gradients, as long as the flat
    buffers.

    None where something is offloaded, and where some rank's partition is padding alone, which no
    rank exposes.
    """
    one = _Model.of(model, case)
    aligned = ALIGNMENT * one.ranks
    learning = [sum(tensor.numel for tensor in group) for group in one.groups]
    flat = [-(-numel // aligned) * aligned for numel in learning]
    partitions = [numel // one.ranks for numel in flat]
    idle = any(n <= (one.ranks - 1) * part for n, part in zip(learning, partitions, strict=True))
    if case.sharding.offload != "none" or idle:
        return None
    parameter = sum(t.numel * one.kept(t) for t in one.account.parameters.values() if not t.trains)
    for group, numel in zip(one.groups, flat, strict=True):
        parameter += numel * one.kept(group[0])
    wide = (case.precision.compute, case.precision.reduce) == ("bf16", "fp32")
    gradient = sum(flat) * MASTER_BYTES if wide and stage == 1 else 0
    return one.layout(parameter, partitions, gradient)


def part_layout(model: nn.Module, case: Case) -> Layout | None:
    """Return the layout of stage 3; None as in `flat_layout`."""
    one = _Model.of(model, case)
    sharding, own_options = case.sharding, options_of(case)

    def part(tensor: AccountedParameter) -> int:
        return -(-tensor.numel // one.ranks)

    # The last rank has a part of what is longer than the parts of all others.
    idle = any(all(t.numel <= (one.ranks - 1) * part(t) for t in group) for group in one.groups)
    if sharding.offload != "none" or idle:
        return None
    every = one.account.parameters.values()
    # What stays gathered is as long as all parts together. On one rank it is the part, but for a
    # single parameter, which DeepSpeed gathers into a buffer (_all_gather_sequential).
    stays = [t for t in every if t.numel <= own_options.persistence_threshold]
    if one.ranks == 1 and len(stays) > 1:
        stays = []
    partitions = [sum(map(part, group)) for group in one.groups]
    narrow = case.precision.compute == "bf16"
    width = DTYPES[case.precision.reduce].itemsize if narrow else MASTER_BYTES
    sent = DTYPES[case.precision.reduce].itemsize if reduced_precision(case) else MASTER_BYTES
    return one.layout(
        sum(part(t) * one.kept(t) for t in every)
        + one.ranks * sum(part(t) * one.kept(t) for t in stays),
        partitions,
        sum(partitions) * width,
        TRACKER_BYTES + sharding.bucket * sent * own_options.contiguous_gradients,
        norm=2 * NORM_BYTES,
    )
