"""Faults that show sometimes: what they give depends on the moment."""

from __future__ import annotations

RACES = [
]  # fmt: skip
