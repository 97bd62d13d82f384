"""Optimizers: what a step of each computes, and what can go wrong in it.

- `adamw/`: AdamW
- `specification.py`: interface of an optimizer
"""

from __future__ import annotations

from .adamw.optimizer import AdamW
from .specification import OptimizerSpecification, StateRole

ADAMW: OptimizerSpecification = AdamW()

STATES: tuple[StateRole, ...] = ADAMW.states
"""Roles of the states of all optimizers that have the shape of their parameter."""
