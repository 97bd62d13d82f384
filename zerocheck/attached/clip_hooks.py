"""Hooks into the clipping of gradients in a step: what was clipped, to which limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..compat import clip_functions
from .guard import ErrorGuard
from .step_record import Clip
from .zero_engine import CLIPPING, ZeroEngine


class ClipHooks:
    """Record of the clippings of a step, and the functions that make it.

    norms: by the number of their clipping, those that are still sharded.
    """

    def __init__(
        self,
        guard: ErrorGuard,
        copied: Callable[[str, Collection[int] | None], list[int]],
        engine: ZeroEngine | None,
    ) -> None:
        """Prepare the hooks.

        copied(what, ids): copies the gradients of these parameters, of all for None, as `what`, and
        returns the numbers of their pieces.
        """
        self._guard, self._copied, self._engine = guard, copied, engine
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
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            ids = {id(parameter) for parameter in parameters}
            pieces: list[int] = []
            with self._guard():
                pieces = self._copied("reduced", ids)
            result = original(parameters, max_norm, total_norm, *more, **named)
            with self._guard():
                self._copied("clipped", ids)
                norm = math.nan
                if isinstance(total_norm, DTensor):  # a collective, which no hook may call
                    norm_of_shards: Any = total_norm.detach().clone()
                    self.norms[len(self.clips)] = norm_of_shards
                else:
                    norm = float(total_norm)
                self.clips.append(self._clip(float(max_norm), self._kind, norm, pieces))
            return result

        return noting

    def _noting_value(self, original: Any) -> Any:
        def noting(parameters: Any, clip_value: float, *more: Any, **named: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            ids = {id(parameter) for parameter in parameters}
            pieces: list[int] = []
            with self._guard():
                pieces = self._copied("reduced", ids)
            result = original(parameters, clip_value, *more, **named)
            with self._guard():
                self._copied("clipped", ids)
                self.clips.append(self._clip(float(clip_value), "value", math.nan, pieces))
            return result

        return noting

    def _clip(self, limit: float, kind: str, norm: float, pieces: list[int]) -> Clip:
        """Return the record; a gradient that was clipped before is not judged again."""
        before = {number for clip in self.clips for number in clip.pieces}
        return Clip(limit, "again" if before & set(pieces) else kind, norm, tuple(pieces))

    def _noting_engine(self, engine: ZeroEngine, original: Any) -> Any:
        def noting(given: Any, total_norm: Any, *more: Any, **named: Any) -> Any:
            pieces: list[int] = []
            limit = float(engine.optimizer.clip_grad)
            ids: set[int] = set()
            with self._guard():
                ids = {id(master) for master in engine.clipped(given)}
                pieces = self._copied("reduced", ids) if limit > 0 else []
            result = original(given, total_norm, *more, **named)
            with self._guard():
                if limit > 0:
                    self._copied("clipped", ids)
                    before = self.clips.pop().pieces if self.clips else ()
                    self.clips.append(Clip(limit, "2", float(total_norm), (*before, *pieces)))
            return result

        return noting

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
