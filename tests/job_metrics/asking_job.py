"""What the tests on ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

AskJob = Callable[..., list[dict[str, Any]]]
