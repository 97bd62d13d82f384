"""Where metrics go: lines of JSON, Prometheus, TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from ..errors import UsageError
from .options import JobMetrics
from .records import (
    CheckedStep,
    CheckpointTime,
    JobRecord,
    OutOfMemory,
    RankMemory,
    StepSeconds,
    TimedStep,
)


class MetricsSink(Protocol):
    """Takes the records of a job."""

    def write(self, record: JobRecord) -> None: ...
    def close(self) -> None: ...


def open_sinks(options: JobMetrics, rank: int) -> list[MetricsSink]:
    """Open what the options ask for; ranks other than 0 only have lines of their own.

    Raises UsageError for a folder that cannot be written, or a port that is taken.
    """
    folder = Path(options.folder)
    sinks: list[MetricsSink] = [JsonLines(folder, rank)]
    if rank == 0 and options.prometheus is not None:
        sinks.append(Prometheus(*options.served_at()))
    if rank == 0 and options.tensorboard:
        sinks.append(TensorBoard(folder))
    return sinks


class JsonLines:
    """One record to a line of `metrics.jsonl`; of another rank, `metrics-rank-N.jsonl`.

    Lines are added to a file that is there. A rank that has nothing to say makes none.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._place = folder / ("metrics.jsonl" if rank == 0 else f"metrics-rank-{rank}.jsonl")
        self._file: Any = None
        if rank == 0:
            self._open()

    def _open(self) -> None:
        try:
            self._place.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._place.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"metrics cannot be written to {self._place}: {error}") from None

    def write(self, record: JobRecord) -> None:
        """Write a line at once, so that a job that dies leaves it behind."""
        if self._file is None:
            self._open()
        self._file.write(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class Figure(NamedTuple):
    """One number of a record, with its label, if it has one, and what the label is of."""

    name: str
    what: str
    value: float
    label: str = ""
    of: str = ""


def figures_of(record: JobRecord) -> Iterator[Figure]:
    """Yield the numbers of a record."""
    if isinstance(record, StepSeconds):
        if not record.measured:
            yield Figure("step_seconds", "time of a step on rank 0", record.seconds)
        if record.between is not None:
            yield Figure("between_steps_seconds", "time between two steps", record.between)
    elif isinstance(record, CheckpointTime):
        what = f"time of the last {record.what} of a checkpoint"
        yield Figure(f"checkpoint_{record.what}_seconds", what, record.seconds)
    elif isinstance(record, TimedStep):
        yield from _of_timed(record)


def _of_timed(record: TimedStep) -> Iterator[Figure]:
    for name, what, value in (
        ("tokens", "tokens of a step, of all ranks", record.tokens or None),
        ("tokens_per_second", "tokens a second, of all ranks", record.tokens_per_second),
        ("waited_share", "share of the step waited in collectives", record.waited),
        ("link_share", "share waited in collectives while all ranks are there", record.link),
        ("overlap_share", "share of the time of collectives that is hidden", record.overlap),
        ("forward_share", "share of the step in forwards", record.forward),
        ("update_share", "share of the step from optimizer.step on", record.update),
        ("copied_share", "share of the step in copies between devices", record.copied),
    ):
        if value is not None:
            yield Figure(name, what, value)
    for kind in record.collectives:
        yield Figure("collective_calls", "calls in a step", kind.calls, "kind", kind.kind)
        sent = kind.calls * kind.bytes
        yield Figure("collective_bytes", "bytes in a step", sent, "kind", kind.kind)
        if kind.waited is not None:
            what = "share of the step waited in them"
            yield Figure("collective_waited_share", what, kind.waited, "kind", kind.kind)
    for rank, share in enumerate(record.idle):
        yield Figure("idle_share", "share of the step it waits for ranks", share, "rank", str(rank))
    for name in RankMemory.__struct_fields__:
        sizes = [size for one in record.memory if (size := getattr(one, name)) is not None]
        if sizes:
            what = "bytes on the rank that has the most"
            yield Figure("memory_bytes", what, max(sizes), "of", name)


class Prometheus:
    """Server of the last figures, as gauges, and of counts."""

    def __init__(self, address: str, port: int) -> None:
        import prometheus_client as client

        self._client: Any = client
        self._registry = client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._steps = self._counter("steps", "steps taken")
        self._broken = self._counter("out_of_memory", "times that rank 0 ran out of memory")
        self._checked = self._counter("checked_steps", "steps checked")
        self._wrong = self._counter("wrong_steps", "checked steps that are wrong")
        try:
            self._server, self._thread = client.start_http_server(
                port, addr=address, registry=self._registry
            )
        except OSError as error:
            raise UsageError(f"metrics cannot be served at {address}:{port}: {error}") from None

    def _counter(self, name: str, what: str) -> Any:
        return self._client.Counter(f"zerocheck_{name}", what, registry=self._registry)

    def write(self, record: JobRecord) -> None:
        """Update the gauges that the record has figures for."""
        if isinstance(record, StepSeconds):
            self._steps.inc()
        elif isinstance(record, OutOfMemory):
            self._broken.inc()
        elif isinstance(record, CheckedStep):
            self._checked.inc()
            self._wrong.inc(bool(record.violated))
        for figure in figures_of(record):
            gauge = self._gauges.get(figure.name)
            if gauge is None:
                labels = (figure.label,) if figure.label else ()
                gauge = self._client.Gauge(
                    f"zerocheck_{figure.name}", figure.what, labels, registry=self._registry
                )
                self._gauges[figure.name] = gauge
            (gauge.labels(figure.of) if figure.label else gauge).set(figure.value)

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()


class TensorBoard:
    """Scalars in event files."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def write(self, record: JobRecord) -> None:
        """Add a scalar for each figure, at the record's step."""
        for figure in figures_of(record):
            name = f"zerocheck/{figure.name}" + (f"/{figure.of}" if figure.of else "")
            self._writer.add_scalar(name, figure.value, record.step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
