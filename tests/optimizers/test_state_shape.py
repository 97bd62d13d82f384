"""States of rows and columns, expanded to the shape of their parameter and back."""

from __future__ import annotations

import pytest
import torch

from zerocheck.case.schema import Optimizer, UserOptimizer, UserState
from zerocheck.optimizers import factored, state_elements
from zerocheck.optimizers.state_shape import (
    COLUMNS,
    ROWS,
    WHOLE,
    StateShape,
    shape_kind,
    shape_of_user_state,
)


@pytest.mark.parametrize("keeps_dims", [False, True])
@pytest.mark.parametrize("reduced", [(), (-1,), (-2,), (-2, -1)])
def test_a_state_is_that_of_its_elements_and_back(
    reduced: tuple[int, ...], keeps_dims: bool
) -> None:
    shape = StateShape(reduced, keeps_dims)
    mean = torch.arange(12.0).view(3, 4)
    if reduced:
        mean = mean.mean(reduced, keepdim=keeps_dims)
    assert tuple(mean.shape) == shape.of((3, 4))
    whole = shape.expanded(mean, (3, 4))
    assert whole.shape == (3, 4)
    for dim in reduced:
        assert torch.equal(whole, whole.narrow(dim, 0, 1).expand(3, 4))
    back = shape.contracted(whole)
    assert torch.equal(back, mean) and back.is_contiguous()


def test_both_forms_are_taken_and_another_shape_is_not() -> None:
    for state in (torch.ones(3), torch.ones(3, 1), torch.ones(3, 4)):
        assert ROWS.expanded(state, (3, 4)).shape == (3, 4)
    with pytest.raises(ValueError, match=r"shape \(4,\), of a parameter of shape \(3, 4\); needed"):
        ROWS.expanded(torch.ones(4), (3, 4))


def test_kinds_of_shapes() -> None:
    found = {
        shape: shape_kind(torch.ones(shape), (5, 3, 4))
        for shape in ((5, 3, 4), (5, 3, 1), (5, 3), (5, 1, 4), (5, 4), (), (3, 4))
    }
    assert found == {
        (5, 3, 4): ("whole", False),
        (5, 3, 1): ("rows", True),
        (5, 3): ("rows", False),
        (5, 1, 4): ("columns", True),
        (5, 4): ("columns", False),
        (): ("number", False),
        (3, 4): None,
    }
    assert shape_kind({}, (3, 4)) is None


def test_elements_of_adafactor() -> None:
    options = Optimizer(kind="adafactor")
    assert factored(options) and not factored(Optimizer())
    assert state_elements(options, "w", (5, 3, 4)) == {"row_var": 15, "col_var": 20}
    assert state_elements(options, "b", (7,)) == {"variance": 7}
    assert state_elements(Optimizer(), "w", (3, 4)) == {"exp_avg": 12, "exp_avg_sq": 12}


def test_states_of_the_user() -> None:
    row = UserState(name="row", of_matrices="rows", of_vectors="none", keeps_dims=True)
    number = UserState(name="scale", of_matrices="number", of_vectors="number")
    user = UserOptimizer(location="a:b", states=(row, number, UserState(name="mean")))
    assert shape_of_user_state(user, "row", 2) == ROWS
    assert shape_of_user_state(user, "row", 1) is None
    assert shape_of_user_state(user, "scale", 3) == StateShape((-3, -2, -1))
    assert shape_of_user_state(user, "mean", 2) == WHOLE
    assert shape_of_user_state(user, "step", 0) is None
    assert COLUMNS.of((3, 4)) == (1, 4)
