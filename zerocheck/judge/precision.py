"""Roundings of mixed precision: formats of local gradients, their sum and their reduction.

A local gradient g_rm is known to the bit. On its way to the reduced gradient it is

    cast to the format of the sum, if that is narrower       1 rounding there
    added to other microbatches                              M - 1 roundings there
    cast to the format of the reduction, if that is narrower 1 rounding there
    added to other ranks, and divided                        N - 1 + s roundings there
    cast to the format of the parameter                      exact: it is fp32, the widest

which `path_of` counts as (roundings, format), in this order. A cast to a wider format is exact.
With `reduce_each` and a declared format of the reduction, each microbatch is reduced first and
summed afterwards, so the reduction comes first; with `reduce_shards` the sum is between the two
reductions, and is counted in its own format all the same. With `reduce_again` each term is in as
many reductions as there are microbatches. With `divided` "own" the s roundings of the division come
before the reduction, in the format of the local gradient. `bounds.along` makes an enclosure of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..case.schema import Case
from ..contract.semantics import Semantics
from ..floating_point import FP32, Format
from ..models.blocks import DTYPES
from . import bounds


class Computing(NamedTuple):
    """Reduced precision of the forward and backward.

    dtype: None for that of each parameter; autocast: the forward is under torch.autocast; inputs:
    True if floating-point inputs are cast; parameters, outputs: True if these are; kernel:
    True if gradients of cast parameters are in the dtype that kernels give; first: and in fp32 in
    the first of several microbatches.
    """

    dtype: torch.dtype | None = None
    autocast: bool = False
    inputs: bool = False
    parameters: bool = True
    outputs: bool = False
    kernel: bool = False
    first: bool = False

    @classmethod
    def of(cls, semantics: Semantics) -> Computing:
        """Return the precision that the semantics declare."""
        if semantics.compute == "own":
            return cls()
        dtype = DTYPES[semantics.compute]
        mode = semantics.precision_mode
        return cls(
            dtype,
            autocast=mode != "cast",
            inputs=semantics.inputs == "cast",
            parameters=mode != "autocast",
            outputs=semantics.outputs == "cast",
            kernel=semantics.gradient_dtype == "kernel",
            first=semantics.accumulate == "local",
        )

    @property
    def cast(self) -> torch.dtype | None:
        """Dtype that the parameters are cast to, or None."""
        return self.dtype if self.parameters else None


OWN = Computing()
"""All in the dtype of each parameter."""

Path = tuple[tuple[int, Format], ...]


def declared(semantics: Semantics) -> bool:
    """Return True if some gradient's format is not that of its parameter all the way."""
    return (semantics.compute, semantics.accumulate_dtype, semantics.reduce) != (
        "own",
        "own",
        "own",
    )


def begun_in(semantics: Semantics) -> torch.dtype | None:
    """Return the dtype that parameters are cast to before masters are made, or None."""
    return Computing.of(semantics).cast if semantics.master_init == "rounded" else None


def formats_of(semantics: Semantics) -> tuple[Format, Format, Format]:
    """Return the formats of local gradients, their sum over microbatches, and the reduction.

    For fp32 parameters.
    """
    cast = Computing.of(semantics).cast
    local = FP32 if cast is None or semantics.gradient_dtype == "kernel" else Format.of(cast)
    accumulate = (
        local
        if semantics.accumulate_dtype == "own"
        else Format.of(DTYPES[semantics.accumulate_dtype])
    )
    reduce = accumulate if semantics.reduce == "own" else Format.of(DTYPES[semantics.reduce])
    return local, accumulate, reduce


def narrowest(semantics: Semantics) -> Format:
    """Return the format with the largest round-off among those in which gradients are added."""
    return max(formats_of(semantics)[1:], key=lambda format: format.u)


def path_of(case: Case, semantics: Semantics, *, microbatches: int) -> Path:
    """List (count, format) of a term's roundings in order, without steps that do not round."""
    local, accumulate, reduce = formats_of(semantics)
    reductions = bounds.gradient_roundings(
        world_size=case.world_size,
        microbatches=1,
        average=semantics.reduction,
        divide="loss",
        accumulate=semantics.accumulate,
        mesh=case.axes,
    )
    if semantics.divide == "gradient":
        reductions += bounds.roundings_of_division(microbatches)
    sums = microbatches - 1
    division = 0
    if semantics.divide_ranks == "own" and semantics.average == "mean":
        division = sum(bounds.roundings_of_division(size) for size in bounds.stages(case.axes))
        reductions -= division
    if semantics.accumulate == "reduce_again":
        # With every microbatch the sum is cast, reduced and divided once more, and added to.
        cast = int(reduce.u > local.u) + int(reduce.u > accumulate.u)
        return (
            (sums + (accumulate.u > local.u), accumulate),
            (microbatches * (reductions + cast), reduce),
        )
    if semantics.accumulate == "reduce_each":
        first, second = (reductions, reduce), (sums, accumulate)
    else:
        first, second = (sums, accumulate), (reductions, reduce)
    path = [(division, local), _into(first, local), _into(second, first[1])]
    return tuple((count, format) for count, format in path if count)


def _into(stage: tuple[int, Format], before: Format) -> tuple[int, Format]:
    """Return the stage, with the rounding of a cast if its format is narrower than the last."""
    count, format = stage
    return count + (format.u > before.u), format
