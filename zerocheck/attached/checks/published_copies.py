"""Obligation of engines with masters: after a step the parameters are the masters, cast.

A rank sends digests, which add up over the ranks, of its masters and of its copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import torch

from ... import causes as bugs
from ...causes.registry import said
from ...contract.shard import Shard
from ...drive.recorder import entry_of
from ...judge.obligation import Checked, ObligationCheck
from ...protocol.verdicts import Violation
from ..record.digests import PartDigest, WholeDigest, digest_of, whole_of, wrong_ranges
from ..record.step_record import MasterParts, RankVerdict
from ..record.zero_engine import ZeroEngine
from .joint_context import JointContext


def master_parts(engine: ZeroEngine) -> MasterParts:
    """Return the digests of this rank's masters and copies."""
    dtypes = {
        name: getattr(parameter, "ds_tensor", parameter).dtype
        for name, parameter in engine.named.items()
    }
    masters = []
    for part in engine.partitions():
        for shard in part.shards("parameter", part.master):
            assert shard.tensor is not None
            cast = shard.tensor.to(dtypes[shard.name])
            masters.append(_digest(replace(shard, tensor=cast)))
    return MasterParts(tuple(masters), tuple(_digest(shard) for shard in engine.copies()))


def _digest(shard: Shard) -> PartDigest:
    assert shard.tensor is not None
    return digest_of(shard.tensor, entry_of(shard), rounds=False)


def parted_before(verdicts: Sequence[RankVerdict]) -> bool:
    """Return True if some rank's parameters were not the masters when the step began."""
    parts = [one.summary.masters[0] for one in verdicts if one.summary.masters]
    return bool(_differing(parts))


def _check_published(context: JointContext) -> Iterator[Checked]:
    """Compare the copies of every rank with the masters of all, before the step and after it."""
    every = [one.summary.masters for one in context.verdicts]
    if not all(every):
        return
    yield Checked()
    before, after = zip(*every, strict=True)
    found = _differing(before)
    if found:
        yield Checked(violation=_violation(context, found, (), before=True))
    elif (found := _differing(after)) and context.summaries[0].ran:
        yield Checked(violation=_violation(context, found, before, before=False))


PUBLISHED = ObligationCheck("publish", _check_published)


class _Differing(NamedTuple):
    """Copy on a rank that is not its master. number: of the copy there."""

    rank: int
    number: int
    copy: PartDigest
    master: PartDigest | WholeDigest


def _differing(parts: Sequence[MasterParts]) -> list[_Differing]:
    """Return the copies that are not the masters. parts: by rank."""
    by_name: dict[str, list[PartDigest]] = {}
    for one in parts:
        for part in one.masters:
            by_name.setdefault(part.entry.name, []).append(part)
    whole = {name: whole_of(found) for name, found in by_name.items()}
    found = []
    for rank, one in enumerate(parts):
        own = {(part.entry.name, part.place): part for part in one.masters}
        for number, copy in enumerate(one.copies):
            name = copy.entry.name
            master = own.get((name, copy.place)) or whole.get(name)
            # It may be frozen, or lack a master on all ranks, which is left to `ownership`.
            if master is None or master.numel != copy.numel or master.blocks == copy.blocks:
                continue
            found.append(_Differing(rank, number, copy, master))
    return found


def _violation(
    context: JointContext,
    found: Sequence[_Differing],
    earlier: Sequence[MasterParts],
    *,
    before: bool,
) -> Violation:
    first, entry = found[0], found[0].copy.entry
    numel = torch.Size(entry.shape).numel()
    low, high = next(wrong_ranges(numel, first.copy.blocks, first.master.blocks))
    low, high = max(low, entry.start), min(high, entry.stop)
    text = "the parameters that the forward uses are not the masters: of "
    text += f"{entry.name} elements in [{low}, {high}) differ"
    stale = not before and all(
        earlier[one.rank].copies[one.number].blocks == one.copy.blocks for one in found
    )
    cause = bugs.COPIES_OF_THE_PREVIOUS_STEP if stale else bugs.COPIES_DIFFER
    if stale:
        text += f"; {said((cause,))[cause]}"
    if before:
        text = f"before the step, {text}; they parted earlier"
    return msgspec.structs.replace(
        context.violation("publish", "parameter", text, cause),
        tensors=tuple(dict.fromkeys(one.copy.entry.name for one in found)),
        ranks=tuple(sorted({one.rank for one in found})),
        wrong=high - low,
        total=numel,
    )
