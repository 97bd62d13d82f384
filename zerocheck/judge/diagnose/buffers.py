"""Known causes of a wrong buffer, each computed and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ... import causes as bugs
from ...floating_point import Enclosure, U
from ..compare import compare, exactly

SENT = {
    "local": bugs.BUFFERS_LOCAL,
    "rank0": bugs.BUFFERS_SENT,
    "rank0_each": bugs.BUFFERS_SENT_EACH,
}
"""Cause of buffers that are sent in this way, as `Semantics.buffers`, where another is declared."""


def causes(
    observed: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
    others: Sequence[tuple[str, Sequence[torch.Tensor]]],
) -> tuple[str, ...]:
    """Find all causes that explain one buffer on every rank.

    before: at the start of the step; others: by cause, what each rank has with it.
    """
    found = tuple(
        name
        for name, candidates in _candidates(expected, before, others)
        if all(
            compare(actual.reshape(-1).double(), one)[1] is None
            for actual, one in zip(observed, candidates, strict=True)
        )
    )
    return found or (bugs.BUFFERS_DIFFER,)


def _candidates(
    expected: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
    others: Sequence[tuple[str, Sequence[torch.Tensor]]],
) -> Iterator[tuple[str, list[Enclosure]]]:
    if len(expected) > 1:
        yield bugs.BUFFERS_OF_RANK_0, [exactly(expected[0])] * len(expected)
        terms = torch.stack([one.reshape(-1).double() for one in expected])
        error = (len(expected) + 2) * U * terms.abs().mean(0)
        yield bugs.BUFFERS_AVERAGED, [Enclosure(terms.mean(0), error)] * len(expected)
    for cause, each in others:
        yield cause, [exactly(one) for one in each]
    yield bugs.BUFFERS_ROUNDED_TO_BF16, [exactly(one.bfloat16()) for one in expected]
    yield bugs.BUFFERS_NOT_UPDATED, [exactly(one) for one in before]
