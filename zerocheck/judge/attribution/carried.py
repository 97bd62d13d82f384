"""Provenance of what a checkpoint carries beside tensors of the optimizer.

These are the buffers, the data position, random states and the loss scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...case.schema import Case
from ..layout import ParameterLayout, ParameterPlace
from .counts import related
from .facts import Facts
from .known_vectors import buffers_before_a_load
from .places import listed, ranks_words
from .values import Source, bits
from .vector import Known, provenance

Tensors = Mapping[str, torch.Tensor]
"""Buffers by name."""


def loaded_buffers(loaded: Sequence[Tensors], saved: Sequence[Tensors], case: Case) -> str:
    """Return the provenance of buffers after a load that are those of no rank that saved them.

    loaded, saved: per rank.
    """
    before = buffers_before_a_load(case)
    due = [saved[rank if rank < len(saved) else 0] for rank in range(len(loaded))]
    found = (
        _buffers(held, right, saved, before, rank)
        for rank, (held, right) in enumerate(zip(loaded, due, strict=True))
    )
    return Facts.joined(found).sentence(len(loaded))


def changed_buffers(
    after: Sequence[Tensors], before: Sequence[Tensors], one: str = "the one before"
) -> Facts:
    """Return facts on buffers that differ from others, per rank. one: name of the right one."""
    return Facts.joined(
        _buffers(held, right, before, {}, rank, one, one)
        for rank, (held, right) in enumerate(zip(after, before, strict=True))
    )


def _buffers(
    held: Tensors,
    due: Tensors,
    saved: Sequence[Tensors],
    before: Tensors,
    rank: int,
    one: str = "the saved one",
    many: str = "the saved ones",
) -> Facts:
    names = [name for name in held if name in due and held[name].shape == due[name].shape]
    if not names:
        return Facts((), 0, 0)
    layout = _layout(names, due)
    observed, right = _flat(names, held), _flat(names, due)
    wrong = bits(observed) != bits(right)
    if not bool(wrong.any()):
        return Facts((), 0, 0)
    same_place = [
        Source(f"is that of rank {other}", f"are those of rank {other}", _flat(names, there))
        for other, there in enumerate(saved)
        if there is not due and all(name in there for name in names)
    ]
    if all(name in before for name in names):
        words = "of the model before the load"
        same_place.append(Source(f"is that {words}", f"are those {words}", _flat(names, before)))
    known = Known(Source(one, many, right), same_place, noun="buffer", ranks=(rank,))
    return provenance("buffer", observed, wrong, known, layout)


def _layout(names: Sequence[str], buffers: Tensors) -> ParameterLayout:
    """Return a layout of buffers, as if they were parameters."""
    places, start = [], 0
    for name in names:
        stop = start + buffers[name].numel()
        places.append(ParameterPlace(name, tuple(buffers[name].shape), start, stop, True, 0))
        start = stop
    return ParameterLayout.of_places(places)


def _flat(names: Sequence[str], buffers: Tensors) -> torch.Tensor:
    """Return buffers as one vector: of fp32 if all are, else of float64."""
    parts = [buffers[name].reshape(-1) for name in names]
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    wide = torch.float32 if all(part.dtype in narrow for part in parts) else torch.float64
    return torch.cat([part.to(wide) for part in parts])


def data_position(given: Sequence[int], saved: int, ranks_before: int, ranks: int) -> str:
    """Return the provenance of a data position, in samples, per rank."""
    factors = {}
    if ranks_before > 1:
        factors[float(ranks_before)] = "the number of ranks that saved"
    found: dict[tuple[int, str], list[int]] = {}
    for rank, samples in enumerate(given):
        if samples == saved:
            continue
        words = related(float(samples), float(saved), factors)
        if not words and ranks != ranks_before and samples * ranks_before == saved * ranks:
            words = f" (as many steps with {ranks} ranks, not {ranks_before})"
        found.setdefault((samples, words), []).append(rank)
    parts = []
    for (samples, words), bad in found.items():
        on = "" if len(bad) == len(given) else f" on {ranks_words(bad)}"
        parts.append(f"the data position{on} is {samples} samples{words}, {saved} were read")
    return "; ".join(parts)


def random_states(loaded: Sequence[bytes], saved: Sequence[bytes]) -> str:
    """Return the provenance of random states after a load, per rank."""
    found: dict[str, list[int]] = {}
    for rank, state in enumerate(loaded):
        if state == saved[rank]:
            continue
        owners = [other for other, one in enumerate(saved) if one == state]
        alike = [other for other, one in enumerate(loaded) if one == state and other != rank]
        words = "a random state that no rank saved"
        if owners:
            words = f"the random state that {ranks_words(owners)} saved"
        elif alike:
            words += ", the same on several ranks"
        found.setdefault(words, []).append(rank)
    return "; ".join(
        f"{ranks_words(ranks)} {'has' if len(ranks) == 1 else 'have'} {words}"
        for words, ranks in found.items()
    )


def loss_scale(scales: Sequence[float], saved: float, first: float) -> str:
    """Return the provenance of loss scales after a load, per rank.

    first: the scale that the training began with.
    """
    found: dict[float, list[int]] = {}
    for rank, scale in enumerate(scales):
        if scale != saved:
            found.setdefault(scale, []).append(rank)
    parts = []
    for scale, bad in found.items():
        words = ", that of the first step" if scale == first else _times(scale, saved)
        on = "" if len(bad) == len(scales) else f" on {ranks_words(bad)}"
        parts.append(f"the loss scale{on} is {scale:g}{words}, {saved:g} was saved")
    return listed(parts)


def _times(scale: float, saved: float) -> str:
    if not saved or not scale:
        return ""
    factor = scale / saved
    return f", {factor:g} times as much" if factor > 1 else f", 1/{1 / factor:g} of it"
