"""Options of the metrics of a job, checked."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import UsageError
from ..version import install_extra

PORTS = 65535


@dataclass(frozen=True)
class JobMetrics:
    """Metrics that `zerocheck.attach` takes of a job, and where they go.

    folder      of `metrics.jsonl`, which rank 0 writes; made where it is not there
    every       the collectives of one step in so many are timed; 100 keeps the price below 1 %
    prometheus  port on which rank 0 serves the metrics to its own host, or "0.0.0.0:9400" to serve
                all hosts by IPv4; needs the package prometheus_client
    tensorboard write event files into the folder, too; needs the package tensorboard
    data_ranks  how many ranks read tokens of their own, where neighbours share them (tensor
                parallelism); default: all

    Raises UsageError for a wrong value, and for a package that is not installed.
    """

    folder: str | Path
    every: int = 100
    prometheus: int | str | None = None
    tensorboard: bool = False
    data_ranks: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | Path) or not str(self.folder):
            raise UsageError(f"metrics is {self.folder!r} (allowed: a folder, or JobMetrics)")
        for name, least in (("every", 2), ("data_ranks", 1)):
            value = getattr(self, name)
            if value is None and name != "every":
                continue
            if type(value) is not int or value < least:
                raise UsageError(f"{name} is {value!r} (allowed: an int from {least} on)")
        if self.prometheus is not None:
            self.served_at()
        for package, wanted in (
            ("prometheus_client", self.prometheus is not None),
            ("tensorboard", self.tensorboard),
        ):
            if wanted and find_spec(package) is None:
                raise UsageError(
                    f"{package} is not installed: {install_extra('metrics')}, or leave out "
                    f"{package.partition('_')[0]}="
                )

    def served_at(self) -> tuple[str, int]:
        """Return the address and the port of `prometheus`. Raises UsageError for a wrong one."""
        given = self.prometheus
        address, _, port = given.rpartition(":") if isinstance(given, str) else ("", "", given)
        if isinstance(port, str) and port.isascii() and port.isdigit() and address:
            port = int(port)
        if type(port) is not int or not 0 < port <= PORTS:
            raise UsageError(
                f"prometheus is {given!r} (allowed: a port from 1 to {PORTS}, or an address and a "
                'port such as "0.0.0.0:9400")'
            )
        return address or "127.0.0.1", port


def metrics_options(given: str | Path | JobMetrics | None) -> JobMetrics | None:
    """Return the options of `metrics=`. Raises UsageError for what is none."""
    return given if given is None or isinstance(given, JobMetrics) else JobMetrics(given)
