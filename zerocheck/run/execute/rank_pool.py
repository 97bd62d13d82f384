"""Rank processes as a run sees them, wherever they are. Imports no torch."""

from __future__ import annotations

from typing import Any, Protocol

from ...ranks.result import JobResult

TARGET = "zerocheck.drive.rank:run"
"""Location of the function that rank processes run."""


class RankPool(Protocol):
    """Rank processes, wherever they run. device: cpu, cuda or cuda:N, as it was asked for."""

    device: str

    def submit(
        self,
        world_size: int,
        payload: bytes,
        *,
        fresh: bool = False,
        hosts: tuple[int, ...] = (),
        memory: int = 0,
        code: str = "",
    ) -> Any: ...
    def wait(self, pending: Any) -> JobResult: ...
    def renew(self) -> None: ...
    def close(self) -> None: ...
