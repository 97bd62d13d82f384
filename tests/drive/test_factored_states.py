"""Factored states are recorded with an element for each of their parameter's."""

from __future__ import annotations

import torch

from zerocheck.case.schema import Optimizer
from zerocheck.contract import Shard
from zerocheck.drive.recorder import expanded

OPTIONS = Optimizer(kind="adafactor")
ROWS = torch.arange(4.0).unsqueeze(-1)
COLUMNS = torch.arange(3.0).unsqueeze(0)
WHOLE = (4, 3)
PART = (slice(1, 3), slice(0, 3))


def _recorded(
    role: str, state: torch.Tensor, index: tuple[slice, ...] | slice | None = None
) -> torch.Tensor | None:
    return expanded(Shard("w", role, state, WHOLE, index), OPTIONS).tensor


def test_states_of_a_whole_parameter() -> None:
    for index in (None, slice(0, 12)):
        for role, state in (("row_var", ROWS), ("col_var", COLUMNS)):
            found = _recorded(role, state, index)
            assert found is not None and torch.equal(found, state.expand(WHOLE))


def test_states_of_some_rows() -> None:
    wanted = ROWS.expand(WHOLE)[1:3]
    for state in (ROWS[1:3], ROWS):  # the rank's, or those of all ranks
        found = _recorded("row_var", state, PART)
        assert found is not None and torch.equal(found, wanted)
    found = _recorded("col_var", COLUMNS, PART)
    assert found is not None and torch.equal(found, COLUMNS.expand(2, 3))


def test_what_is_no_factored_state_or_does_not_fit_stays() -> None:
    other = torch.ones(5)
    for role in ("parameter", "step", "exp_avg", "row_var"):
        assert _recorded(role, other) is other
    assert _recorded("row_var", ROWS[:2], slice(0, 6)) is not None
    assert expanded(Shard("w", "gradient", None, WHOLE), OPTIONS).tensor is None
