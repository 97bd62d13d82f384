"""Enclosures in numbers, for bounds that are worked out by hand from their derivation.

Inputs are short binary numbers, whose products and sums are exact in float64.
"""

from __future__ import annotations

import pytest
import torch

from zerocheck.floating_point import Enclosure

U, ETA = 2.0**-24, 2.0**-149
u, eta = 2.0**-8, 2.0**-133
"""Of fp32, and of bf16."""
SECOND_ORDER = 1.000001


def of(*numbers: float) -> torch.Tensor:
    """Return a vector in float64."""
    return torch.tensor(numbers, dtype=torch.float64)


def is_enclosed(made: Enclosure, exact: float, bound: float) -> None:
    """Assert exact, and bound times the second order: not 1e-9 more and not less."""
    assert float(made.exact) == exact
    assert float(made.bound) == pytest.approx(bound * SECOND_ORDER, rel=1e-9, abs=0.0)
