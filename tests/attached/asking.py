"""What the tests on ranks share."""

from __future__ import annotations

from typing import Any

from borrowing import Ask as Ask


def held(answer: dict[str, Any]) -> set[str]:
    """The obligations that hold. Nothing may be violated."""
    assert answer.get("violations") == [], answer
    return {o for o, status in answer["statuses"].items() if status == "holds"}
