"""Whole samples, put together from the parts that ranks of an axis have.

Each rank sends what its calls of the model were given, and the gradients that came to their
outputs, to the first rank of the axis. That one calls the reference with the whole samples, and the
gradient that it gets is the sum of those of all ranks of the axis.

Under tensor parallelism samples are in parts between two stages of a pipeline, and every rank has
the gradient of the whole: it counts once for each of them. A DTensor is put together by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import torch
from torch.distributed.tensor import DTensor

from ..record.axes import Axes, JobAxis, SequenceAxis
from ..record.dtypes import dtype_of
from ..record.forwards import Forward, mapped, tensors_in
from ..record.holdings import whole
from ..record.ranks import AllRanks, agreed
from ..record.repeatable import Digest, digest
from ..record.step_record import Observed

_Member = tuple[tuple[int, ...], Digest, Digest]

DRAWS = (
    "the model draws random numbers (dropout), each rank for its part of a sequence, which one "
    "device would draw otherwise"
)


class _Unknown(Exception):
    """Why samples cannot be put together."""


def with_whole_samples(observed: Observed, axes: Axes, ranks: AllRanks) -> Observed:
    """Return the step with whole samples on the first rank of an axis, and no calls on others.

    Every rank calls this. Where they cannot be put together, the reason is in `unjudged`.
    """
    observed = replace(observed, forwards=[_put_together(one) for one in observed.forwards])
    axis = axes.of("sequence")
    if axis is None:
        tensors = axes.of("parameters")
        if tensors is None:
            return observed
        parts, apart = _in_parts(observed.forwards, tensors, ranks)
        observed = replace(observed, seeded_apart=apart)
        if not parts:
            return observed
        axis = replace(tensors, sequence=SequenceAxis())
    if axis.sequence is None:
        return observed
    every = ranks.to_first(_sent(observed.forwards), axis.ranks)
    summary = msgspec.structs.replace(observed.summary, samples_on=axis.ranks[0])
    if not every:
        return replace(observed, summary=summary, forwards=[])
    calls = [msgspec.msgpack.decode(one, type=list[_Calls]) for one in every]
    times = len(axis.ranks) if axis.split == "parameters" else 0
    joined = partial(_joined, observed.forwards, calls, times)
    try:
        forwards = joined(axis.sequence)
    except _Unknown as why:
        reason = summary.unjudged or str(why)
        summary = msgspec.structs.replace(summary, unjudged=reason)
        return replace(observed, summary=summary, forwards=[])
    other = partial(joined, axis.sequence.other)
    return replace(observed, summary=summary, forwards=forwards, reordered=other)


def _put_together(forward: Forward) -> Forward:
    """Return a call without DTensors, but whole tensors. Every rank of their mesh calls this."""

    def put(tensor: torch.Tensor) -> torch.Tensor:
        return whole(tensor).requires_grad_(tensor.requires_grad)

    tensors = (*_given(forward).values(), *forward.returned.values())
    if not any(isinstance(one, DTensor) for one in tensors):
        return forward
    args, kwargs = mapped(forward.args, put), mapped(forward.kwargs, put)
    returned = {path: whole(one) for path, one in forward.returned.items()}
    return replace(forward, args=args, kwargs=kwargs, returned=returned)


def _in_parts(forwards: Sequence[Forward], axis: JobAxis, ranks: AllRanks) -> tuple[bool, bool]:
    """Return whether ranks of the axis have other samples or gradients, and random numbers."""
    tensors = [t for one in forwards for t in (*_given(one).values(), *one.returned.values())]
    states = [one.random[0] for one in forwards if any(one.dropout.values())]
    member = axis.ranks, digest(tensors), digest(states)
    every = ranks.gather(msgspec.msgpack.encode(member))
    known: dict[tuple[int, ...], tuple[Digest, Digest]] = {}
    parts = apart = False
    for members, *mine in (msgspec.msgpack.decode(one, type=_Member) for one in every):
        first = known.setdefault(members, (mine[0], mine[1]))
        parts |= first[0] != mine[0]
        apart |= first[1] != mine[1]
    return agreed((parts, apart), tuple[bool, bool], ranks)


class _Sent(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as bytes, in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Sent:
        flat = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
        return cls(str(tensor.dtype), tuple(tensor.shape), flat.numpy().tobytes())

    def tensor(self) -> torch.Tensor:
        dtype = dtype_of(self.dtype)
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        data = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
        return data.view(dtype).view(self.shape)


class _Calls(msgspec.Struct, frozen=True, array_like=True):
    """A call of the model on one rank: see Forward. given: tensors of its inputs, by path."""

    given: dict[str, _Sent]
    returned: dict[str, _Sent]
    draws: bool
    outputs: dict[str, _Sent]


def _sent(forwards: Sequence[Forward]) -> bytes:
    calls = [
        _Calls(
            {path: _Sent.of(tensor) for path, tensor in _given(one).items()},
            {path: _Sent.of(tensor) for path, tensor in one.returned.items()},
            one.draws,
            {path: _Sent.of(tensor) for path, tensor in one.outputs.items()},
        )
        for one in forwards
    ]
    return msgspec.msgpack.encode(calls)


def _given(forward: Forward) -> dict[str, torch.Tensor]:
    return tensors_in((forward.args, forward.kwargs), every=True)


def _joined(
    mine: Sequence[Forward], every: Sequence[Sequence[_Calls]], times: int, sequence: SequenceAxis
) -> list[Forward]:
    """Join the calls of all ranks. times: see `_Call`. Raises _Unknown."""
    if len({len(one) for one in every}) > 1:
        counts = " and ".join(str(len(one)) for one in every)
        raise _Unknown(f"ranks with parts of the same samples called the model {counts} times")
    found = []
    for forward, calls in zip(mine, zip(*every, strict=True), strict=True):
        if any(one.draws for one in calls):
            raise _Unknown(DRAWS)
        found.append(_whole(forward, _Call(calls, sequence, times)))
    return found


class _Call:
    """One call of the model on all ranks of the axis.

    times: how often the gradient of the whole counts, 0 where each rank has a part of it.
    """

    def __init__(self, every: Sequence[_Calls], sequence: SequenceAxis, times: int) -> None:
        self._every, self._sequence, self.times = every, sequence, times

    def given(self, path: str) -> list[torch.Tensor]:
        """Return an input of each rank. Raises _Unknown where one has none."""
        return self._parts([one.given for one in self._every], "input", path)

    def returned(self, path: str) -> list[torch.Tensor]:
        """Return the gradients of an output. Raises _Unknown where a rank has none."""
        return self._parts([one.returned for one in self._every], "gradient of the output", path)

    def _parts(
        self, every: Sequence[Mapping[str, _Sent]], what: str, path: str
    ) -> list[torch.Tensor]:
        if any(path not in one for one in every):
            raise _Unknown(f"not all parts of a sequence have the {what} {path}")
        return [one[path].tensor() for one in every]

    def whole(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Put parts of the sequence together along a dimension."""
        return self._sequence.whole(parts, dim)

    def outputs(self) -> dict[str, torch.Tensor]:
        """Return the samples of the outputs of all ranks, one after the other."""
        every = [one.outputs for one in self._every]
        return {
            path: torch.cat([one[path].tensor() for one in every])
            for path in every[0]
            if all(path in one for one in every)
        }

    def cut(self, total: int, output: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the parts of a whole output that the ranks have. total: positions of a whole."""
        count = len(self._every)
        if self.length(output) != total:
            return [output] * count
        return self._sequence.parts(output, self.dim, count)

    def length(self, tensor: torch.Tensor) -> int | None:
        """Return the size in the dimension of the sequence, None where there is none."""
        dim = self._sequence.dim
        return tensor.shape[dim] if tensor.dim() > max(1, dim) else None

    @property
    def dim(self) -> int:
        return self._sequence.dim


def _whole(forward: Forward, call: _Call) -> Forward:
    given = _given(forward)
    parts = {path: call.given(path) for path in given}
    first = next((path for path, one in given.items() if call.length(one)), None)
    if first is None:
        raise _Unknown(f"no input of the model has a dimension {call.dim} for the sequence")
    length = call.length(given[first]) or 0
    # A model that is given whole sequences cuts them itself.
    cut = not all(_alike(each) for each in parts.values())
    total = sum(call.length(one) or 0 for one in parts[first]) if cut else length
    wholes: dict[int, torch.Tensor] = {}
    for path, tensor in given.items() if cut else ():
        whole = _input(parts[path], path, length, call)
        if whole is not None:
            wholes[id(tensor)] = whole.to(tensor.device).requires_grad_(tensor.requires_grad)
    put: set[int] = set()

    def there(tensor: torch.Tensor) -> torch.Tensor:
        put.add(id(tensor))
        return wholes.get(id(tensor), tensor)

    args, kwargs = mapped(forward.args, there), mapped(forward.kwargs, there)
    hidden = [path for path, one in given.items() if id(one) in wholes.keys() - put]
    if hidden:
        raise _Unknown(f"the input {hidden[0]} is in an object of the script, and not in a tree")
    return replace(
        forward,
        args=args,
        kwargs=kwargs,
        outputs=call.outputs(),
        cut=partial(call.cut, total),
        returned={
            path: _output(call.returned(path), path, total, call).to(gradient.device)
            for path, gradient in forward.returned.items()
        },
    )


def _input(
    parts: Sequence[torch.Tensor], path: str, length: int, call: _Call
) -> torch.Tensor | None:
    """Return the whole input, None for one that all ranks were given whole."""
    first = parts[0]
    if call.length(first) == length:
        return call.whole(parts, call.dim)
    if _alike(parts):
        return None
    if first.dim() and first.shape[0] == length:  # positions, or tables by position
        return call.whole(parts, 0)
    raise _Unknown(
        f"the input {path} {list(first.shape)} differs between parts of a sequence, and has no "
        f"dimension of {length} positions"
    )


def _output(parts: Sequence[torch.Tensor], path: str, total: int, call: _Call) -> torch.Tensor:
    """Return the gradient of the whole output. total: positions of a whole sequence."""
    sizes = [call.length(one) or 0 for one in parts]
    if sum(sizes) == total:
        return call.whole(parts, call.dim) * max(1, call.times)
    if call.times and _alike(parts):
        return parts[0] * call.times
    if {*sizes} == {total}:  # the model put it together, and each rank has a loss of it
        return torch.stack([*parts]).sum(0)
    raise _Unknown(
        f"the output {path or 'of the model'} {list(parts[0].shape)} is no part of {total} "
        f"positions in its dimension {call.dim}, so the loss of a whole sequence is not known"
    )


def _alike(parts: Sequence[torch.Tensor]) -> bool:
    return all(one.shape == parts[0].shape and torch.equal(one, parts[0]) for one in parts[1:])
