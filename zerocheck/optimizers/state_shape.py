"""Shape of an optimizer's state: that of its parameter, or with one value along some of its dims.

Adafactor keeps a mean for each row and one for each column of a matrix. Wherever states are
compared, such a state is expanded: each element of the parameter has the value that its update
reads. So a rank that holds another value is found at its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..case.schema import ShapeKind, UserOptimizer


class StateShape(NamedTuple):
    """Dims of a parameter, counted from the end, along which a state has one value.

    It is without them, or keeps them with size 1.
    """

    reduced: tuple[int, ...] = ()
    keeps_dims: bool = False

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the state of a parameter, or of a part of one."""
        sizes = [1 if dim - len(shape) in self.reduced else n for dim, n in enumerate(shape)]
        if self.keeps_dims:
            return tuple(sizes)
        return tuple(n for dim, n in enumerate(sizes) if dim - len(shape) not in self.reduced)

    def empty(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a state of a parameter without values, of its dtype."""
        if not self.reduced:
            return torch.empty_like(parameter)
        return torch.empty(self.of(parameter.shape), dtype=parameter.dtype, device=parameter.device)

    def expanded(self, state: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return a view of a state with an element for each of its parameter's.

        Raises ValueError for a state of another shape.
        """
        if not self.reduced or tuple(state.shape) == tuple(shape):
            return state
        ones = StateShape(self.reduced, keeps_dims=True).of(shape)
        if tuple(state.shape) not in (ones, StateShape(self.reduced).of(shape)):
            raise ValueError(
                f"a state has the shape {tuple(state.shape)}, of a parameter of shape "
                f"{tuple(shape)}; needed is {self.of(shape)}"
            )
        return state.reshape(ones).expand(tuple(shape))

    def contracted(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of an expanded state in its own shape: the first value along each dim."""
        first = tuple(
            slice(0, 1) if dim - whole.dim() in self.reduced else slice(None)
            for dim in range(whole.dim())
        )
        return whole[first].reshape(self.of(whole.shape)).clone()


ShapeOf = Callable[[str, int], StateShape | None]
"""Shape of a state by its role, of a parameter with so many dims; None where it has none."""

WHOLE = StateShape()
ROWS = StateShape((-1,), keeps_dims=True)
COLUMNS = StateShape((-2,), keeps_dims=True)


def shape_of_user_state(user: UserOptimizer, role: str, dims: int) -> StateShape | None:
    """Return the shape of a state of the user's optimizer, as inspection found it."""
    for one in user.states:
        if one.name == role:
            reduced = _reduced(dims).get(one.of_matrices if dims > 1 else one.of_vectors)
            return None if reduced is None else StateShape(reduced, one.keeps_dims)
    return None


def _reduced(dims: int) -> dict[ShapeKind, tuple[int, ...]]:
    """Return the dims that each kind of shape is without, of a parameter with so many dims."""
    return {"whole": (), "rows": (-1,), "columns": (-2,), "number": tuple(range(-dims, 0))}


def shape_kind(state: object, shape: Sequence[int]) -> tuple[ShapeKind, bool] | None:
    """Return the kind of a state's shape and whether it keeps dims, None for any other shape."""
    if not isinstance(state, torch.Tensor):
        return None
    for kind, reduced in _reduced(len(shape)).items():
        for keeps_dims in (False, True):
            if tuple(state.shape) == StateShape(reduced, keeps_dims).of(shape):
                return kind, keeps_dims and bool(reduced)
    return None
