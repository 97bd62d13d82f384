"""Layouts of FSDP1 by its strategy, from shapes alone: flat parameters with padding."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...case.schema import Case
from ...case.shapes import sometimes_used
from ...case.traits import reduced_precision
from ...protocol.layout import Layout, Phase
from ..shared.account import Account, CategoryBytes, layout_of
from ..shared.units import members
from .refusals import wrapped_units

ZERO_BYTES = 4
"""A zero that FSDP1 makes when it clips for the first time, and keeps."""
ALIGNMENT_BYTES = 16
"""With `use_orig_params` each parameter begins at a multiple of it."""


@dataclass(frozen=True)
class FlatBytes:
    """Flat parameter as held by one rank.

    places: {name: (begin, end)} of its parameters in the whole, elements; total: elements of the
    whole, padding between and after them included; chunk: of what the rank holds; itemsize: bytes.
    """

    places: dict[str, tuple[int, int]]
    total: int
    chunk: int
    itemsize: int

    def elements(self, name: str, start: int) -> int:
        """Elements of a parameter in the chunk that begins at `start`."""
        low, high = self.places[name]
        return max(0, min(high, start + self.chunk) - max(low, start))


def fsdp1_layout(
    model: nn.Module, case: Case, rank: int, *, shards: bool, keeps: bool
) -> Layout | None:
    """Return the layout of FSDP1: a chunk of each flat parameter, and of its gradient, per rank.

    shards: parameters are sharded, which they are not on one rank; keeps: gathered parameters stay
    after the forward. Otherwise only the root's do.

    With `use_orig_params` parameters begin at multiples of 16 bytes, and the optimizer has a state
    for each parameter of which the rank holds anything; otherwise for the flat parameter, padding
    included.

    The end of a forward is not predicted for several microbatches, with prefetching, or for a model
    that calls a block twice. None where batches use parameters of their own, since the data
    determine which gradients exist, where shards are offloaded, since some stay behind, and where
    units of a least size have others within, which change what is counted.
    """
    if sometimes_used(case.model) or case.sharding.offload != "none":
        return None
    if case.sharding.wrap == "size" and units_of_norms(model, case):
        return None
    account = Account(model, case)
    ranks, rank = case.axes.size("shard"), case.axes.coordinate(rank, "shard")
    shards = shards and ranks > 1
    aligned = case.sharding.use_orig_params
    units = flat_units(model, case)
    flats = {
        path: flat_bytes(
            {name: account.parameters[name].numel for name in names},
            account.parameters[names[0]].itemsize,
            ranks,
            shards=shards,
            aligned=aligned,
        )
        for path, names in units.items()
        if names
    }
    start = {path: rank * one.chunk if shards else 0 for path, one in flats.items()}
    simple = (
        case.training.microbatches == 1
        and case.model.calls is None
        and not case.sharding.prefetch
        and not case.model.unused
    )
    gathered = sum(
        one.chunk * ranks * one.itemsize
        for path, one in flats.items()
        if shards and (keeps or path == "")
    )

    def graded(step: int) -> Collection[str]:
        """Return the trainable parameters of all flat parameters that have some used parameter."""
        learning = set(account.learning(step))
        return [
            name
            for one in flats.values()
            if account.used(set(one.places) & learning)
            for name in one.places
            if name in learning
        ]

    def states(step: int, phase: Phase) -> int:
        stateful = account.stateful(step, phase, graded)
        steps = range(case.training.first, step + (phase == "step"))
        updated = {name for one in steps if not account.skips(one) for name in graded(one)}
        count = 0
        for path, one in flats.items():
            names = stateful & set(one.places)
            counts = [one.elements(name, start[path]) for name in names]
            if aligned:
                count += sum(account.moments(numel, one.itemsize) for numel in counts if numel)
            elif updated & names or any(counts):  # pieces are restored, the flat one is updated
                count += account.moments(one.chunk, one.itemsize)
        return count

    def zero_scalar(step: int, phase: Phase) -> int:
        clipped = case.training.clip is not None and phase != "built"
        return ZERO_BYTES * (clipped and (step > case.training.first or phase == "step"))

    def predict(step: int, phase: Phase) -> CategoryBytes | None:
        if phase == "forward" and not simple:
            return None
        kept = not case.training.set_to_none and step > case.training.first
        names = set(graded(step - 1 if phase == "forward" else step))
        if phase == "forward" and aligned:
            # A flat gradient goes when no parameter has a part of it here: zero_grad sees none.
            names = {
                name
                for path, one in flats.items()
                for name in names & set(one.places)
                if any(one.elements(other, start[path]) for other in names & set(one.places))
            }
        has = phase in ("backward", "step") or (phase == "forward" and kept)
        return {
            "parameter": sum(one.chunk * one.itemsize for one in flats.values()),
            "gradient": has
            * sum(one.chunk * one.itemsize for one in flats.values() if names & set(one.places)),
            "optimizer": states(step, phase),
            "buffer": account.buffers,
            "gathered": gathered if phase == "forward" else 0,
            "other": account.scaler(step, phase) + zero_scalar(step, phase),
        }

    return layout_of(account, predict)


def flat_units(model: nn.Module, case: Case) -> dict[str, list[str]]:
    """Map the path of each flat parameter's unit to the names of its parameters."""
    return members(model, [*wrapped_units(model, case.sharding), *units_of_norms(model, case)])


def units_of_norms(model: nn.Module, case: Case) -> list[nn.Module]:
    """Return the batch norms, each a unit, where FSDP1 has mixed precision and a policy.

    See `_module_classes_to_ignore` of its MixedPrecision.
    """
    if not reduced_precision(case) or case.sharding.wrap == "whole":
        return []
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def flat_bytes(
    sizes: Mapping[str, int], itemsize: int, ranks: int, *, shards: bool, aligned: bool
) -> FlatBytes:
    """Return a flat parameter. sizes: elements of its parameters; aligned: `use_orig_params`."""
    alignment = ALIGNMENT_BYTES // itemsize if aligned else 1
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name, numel in sizes.items():
        begin = -(-end // alignment) * alignment
        end = begin + numel
        places[name] = (begin, end)
    if aligned:
        end = -(-end // ranks) * ranks
    return FlatBytes(places, end, -(-end // ranks) if shards else end, itemsize)
