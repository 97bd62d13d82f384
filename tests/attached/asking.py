"""What the tests on ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Ask = Callable[..., list[dict[str, Any]]]


def held(told: dict[str, Any]) -> set[str]:
    """The obligations that hold. Nothing may be violated."""
    assert told.get("violations") == [], told
    return {o for o, status in told["statuses"].items() if status == "holds"}
