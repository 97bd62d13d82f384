"""What the tests of rank processes share."""

from __future__ import annotations

import json
from collections.abc import Callable

from zerocheck.ranks import JobResult

TARGET = "ranks_targets:run"
Ask = Callable[..., JobResult]


def answers(result: JobResult) -> list[object]:
    """What the ranks returned."""
    assert result.outcome == "finished", result.summary()
    return [json.loads(payload or b"null") for payload in result.payloads]
