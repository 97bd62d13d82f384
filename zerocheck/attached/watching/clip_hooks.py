"""Hooks into the clipping of gradients in a step: what was clipped, to which limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ...compat import clip_functions
from ..record.guard import ErrorGuard
from ..record.step_record import Clip
from ..record.zero_engine import CLIPPING, ZeroEngine


class ClipHooks:
    """Record of the clippings of a step, and the functions that make it.

    norms: by the number of their clipping, those that are still sharded.
    """

    def __init__(
        self,
        guard: ErrorGuard,
        copied: Callable[[str, Collection[int] | None], list[int]],
        engine: ZeroEngine | None,
        model: nn.Module,
    ) -> None:
        """Prepare the hooks.

        copied(what, ids): copies the gradients of these parameters, of all for None, as `what`, and
        returns the numbers of their pieces.
        """
        self._guard, self._copied, self._engine, self._model = guard, copied, engine, model
        self._kind = "2"
        self.clips: list[Clip] = []
        self.norms: dict[int, DTensor] = {}

    def wrappers(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        """Yield (owner, name, make): what is to be replaced by make(what it is)."""
        for cell, make in zip(
            clip_functions(),
            (self._noting_kind, self._noting_clip, self._noting_value),
            strict=True,
        ):
            yield cell, "cell_contents", make
        yield FullyShardedDataParallel, "clip_grad_norm_", self._noting_sharded_clip
        if self._engine is not None:
            yield self._engine.optimizer, CLIPPING, partial(self._noting_engine, self._engine)

    def _noting_kind(self, original: Any) -> Any:
        def noting(tensors: Any, norm_type: float = 2.0, *more: Any, **named: Any) -> Any:
            with self._guard():
                self._kind = f"{float(norm_type):g}"
            return original(tensors, norm_type, *more, **named)

        return noting

    def _noting_clip(self, original: Any) -> Any:
        def noting(
            parameters: Any, max_norm: float, total_norm: Any, *more: Any, **named: Any
        ) -> Any:
            parameters = _listed(parameters)

            def clip(pieces: list[int]) -> Clip:
                norm = math.nan
                if isinstance(total_norm, DTensor):  # a collective, which no hook may call
                    norm_of_shards: Any = total_norm.detach().clone()
                    self.norms[len(self.clips)] = norm_of_shards
                else:
                    norm = float(total_norm)
                return self._first_or_again(float(max_norm), self._kind, norm, pieces)

            call = partial(original, parameters, max_norm, total_norm, *more, **named)
            return self._around(call, lambda: parameters, clip)

        return noting

    def _noting_value(self, original: Any) -> Any:
        def noting(parameters: Any, clip_value: float, *more: Any, **named: Any) -> Any:
            parameters = _listed(parameters)
            call = partial(original, parameters, clip_value, *more, **named)
            return self._around(
                call,
                lambda: parameters,
                lambda pieces: self._first_or_again(float(clip_value), "value", math.nan, pieces),
            )

        return noting

    def _noting_engine(self, engine: ZeroEngine, original: Any) -> Any:
        def noting(given: Any, total_norm: Any, *more: Any, **named: Any) -> Any:
            call = partial(original, given, total_norm, *more, **named)
            limit = float(engine.optimizer.clip_grad)
            if limit <= 0:
                return call()

            def clip(pieces: list[int]) -> Clip:  # one, in a call for each partition
                before = self.clips.pop().pieces if self.clips else ()
                return Clip(limit, "2", float(total_norm), (*before, *pieces))

            return self._around(call, lambda: engine.clipped(given), clip)

        return noting

    def _around(
        self,
        call: Callable[[], Any],
        parameters: Callable[[], Iterable[torch.Tensor]],
        clip: Callable[[list[int]], Clip],
    ) -> Any:
        """Make a call that clips, and record it by `clip`, which is given numbers of pieces.

        parameters: returns those whose gradients are clipped.
        """
        pieces: list[int] = []
        these: set[int] = set()
        with self._guard():
            these = {id(one) for one in parameters()}
            pieces = self._copied("reduced", these)
        result = call()
        with self._guard():
            self._copied("clipped", these)
            mine = {id(one) for one in self._model.parameters()}
            others = self._engine is None and bool(pieces) and not these <= mine
            self.clips.append(replace(clip(pieces), others=others))
        return result

    def _first_or_again(self, limit: float, kind: str, norm: float, pieces: list[int]) -> Clip:
        """Return the record; a gradient that was clipped before is not judged again."""
        before = {number for clip in self.clips for number in clip.pieces}
        return Clip(limit, "again" if before & set(pieces) else kind, norm, tuple(pieces))

    def _noting_sharded_clip(self, original: Any) -> Any:
        def noting(module: Any, max_norm: float, norm_type: float = 2.0) -> Any:
            count = len(self.clips)
            pieces: list[int] = []
            with self._guard():
                pieces = self._copied("reduced", None)
            norm = original(module, max_norm, norm_type)
            with self._guard():
                if len(self.clips) == count:  # with NO_SHARD its own clip is recorded already
                    self._copied("clipped", None)
                    kind = f"{float(norm_type):g}"
                    self.clips.append(Clip(float(max_norm), kind, float(norm), tuple(pieces)))
            return norm

        return noting


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
