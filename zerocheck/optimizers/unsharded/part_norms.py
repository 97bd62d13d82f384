"""Step of a whole parameter in which a norm, a mean or a sum over all of it is that of a part."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NORM, _SUM, _MEAN = "aten::linalg_vector_norm", "aten::sum", "aten::mean"


class NormedPart(NamedTuple):
    """Part of a parameter. dim, start, size: where; number: of the norm in a step, None for all."""

    dim: int
    start: int
    size: int
    number: int | None


class PartNorms(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that takes what is reduced over a whole parameter from a part, to the scale of all."""

    def __init__(self, shape: torch.Size, part: NormedPart) -> None:
        """Start the mode. shape: of the parameter."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._shape, self._part, self._number = shape, part, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), func._schema.name
        if name not in (_NORM, _SUM, _MEAN) or result.dim() or args[0].shape != self._shape:
            return result
        number, self._number = self._number, self._number + 1
        if self._part.number not in (None, number):
            return result
        dim, start, size, _ = self._part
        result = func(args[0].narrow(dim, start, size), *args[1:], **kwargs)
        share = self._shape[dim] / size
        if name == _MEAN:
            return result
        if name == _SUM:
            return result * share
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        return result * share ** (1 / order)
