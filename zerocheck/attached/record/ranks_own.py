"""Parameters that differ between ranks by design, such as experts: each rank trains its own.

A wrapper keeps its parameters equal. One that it leaves out, or keeps equal on some of the ranks,
may be another on each: then copies, sums over ranks and norms of it are not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ...compat import flat_parameters
from .step_record import BEFORE, StepSummary


def left_out(model: nn.Module, world_size: int) -> set[int]:
    """Return the ids of parameters that the wrapper of a model does not keep equal on all ranks."""
    found = set(_beside(model))
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() < world_size:
            found.add(id(parameter))
    return found


def _beside(model: nn.Module) -> Iterator[int]:
    """Yield the ids of parameters that DDP or FSDP ignores."""
    modules = list(model.modules())
    for ddp in (one for one in modules if isinstance(one, DistributedDataParallel)):
        for name, parameter in ddp.module.named_parameters():
            if name in ddp.parameters_to_ignore:
                yield id(parameter)
    if any(isinstance(one, FSDPModule) for one in modules):
        yield from (id(one) for one in model.parameters() if not isinstance(one, DTensor))
    if any(isinstance(one, FullyShardedDataParallel) for one in modules):
        known: set[int] = set()
        for flat in flat_parameters(model):
            known |= {id(flat.tensor), *map(id, (flat.originals or {}).values())}
        yield from (id(one) for one in model.parameters() if id(one) not in known)


def own_of_ranks(
    summaries: Sequence[StepSummary], hashes: Iterable[Sequence[Mapping[str, str]]]
) -> tuple[str, ...]:
    """Return the names of parameters that are left out and differ between ranks before the step.

    None where meshes say what ranks hold: what they hold alike must be equal. summaries, hashes: of
    each rank, as in its RankVerdict.
    """
    if summaries[0].placed:
        return ()
    values: dict[tuple[object, ...], set[str]] = {}
    for summary, theirs in zip(summaries, hashes, strict=True):
        for piece, known in zip(summary.pieces, theirs, strict=True):
            if piece.left_out and not piece.whole and f"{BEFORE}.parameter" in known:
                values.setdefault(piece.place, set()).add(known[f"{BEFORE}.parameter"])
    return tuple(dict.fromkeys(str(place[0]) for place, each in values.items() if len(each) > 1))
