"""The workspace of torch's kernel for sums: as an H200 took it, and of which calls."""

from __future__ import annotations

import pytest
import torch
from test_caching_allocator import ALLOCATED, events

from zerocheck.memory.kernel_workspace import bytes_of_columns, workspace_of

SUM = "aten.sum.dim_IntList"
ROWS = 16 * 197
"""Positions of the recorded vision transformer."""


@pytest.mark.parametrize("name", ["pictures-ddp", "pictures-fsdp2", "pictures-fp32"])
@pytest.mark.parametrize(("columns", "calls"), [(768, 16), (2304, 8), (3072, 8)])
def test_sums_take_what_was_recorded(name: str, columns: int, calls: int) -> None:
    """4 blocks in 2 steps: once each for the biases of qkv and up, twice for out and down."""
    sizes = [size for action, size, _, _ in events(name) if action == ALLOCATED]
    assert sizes.count(bytes_of_columns(ROWS, columns, 4)) == calls


def test_what_takes_none() -> None:
    assert bytes_of_columns(63, 768, 4) == 0  # too few rows for the threads of a block
    assert bytes_of_columns(1000, 768, 4) == 0  # each thread sums fewer than 256 values
    assert bytes_of_columns(4096, 2**20, 4) == 0  # enough blocks without a division of the rows
    rows = torch.empty(ROWS, 768, device="meta")
    assert workspace_of(SUM, (rows, [0], True)) == bytes_of_columns(ROWS, 768, 4)
    assert workspace_of(SUM, (rows.view(16, 197, 768), [1, 0])) == bytes_of_columns(ROWS, 768, 4)
    for operator, args in (
        (SUM, (rows, [1])),
        (SUM, (rows, [0, 1])),
        (SUM, (rows.t(), [0])),
        (SUM, (rows[:0], [0])),
        (SUM, (rows, None)),
        ("aten.sum.default", (rows,)),
        ("aten.mm.default", (rows, rows)),
    ):
        assert workspace_of(operator, args) == 0, (operator, args[1:])


def test_odd_columns_are_read_one_by_one() -> None:
    odd = torch.empty(ROWS, 769, device="meta")
    assert workspace_of(SUM, (odd, [0])) == bytes_of_columns(ROWS, 769, 1)
    assert workspace_of(SUM, (torch.empty(ROWS, 770, device="meta"), [0])) == bytes_of_columns(
        ROWS, 770, 2
    )
