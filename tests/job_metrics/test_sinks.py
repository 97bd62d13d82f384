"""What the sinks write, read back by what reads it elsewhere."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import msgspec
import pytest
import torch
from hand_made_figures import STEP
from torch import nn

import zerocheck
from zerocheck.errors import UsageError
from zerocheck.job_metrics.records import CheckedStep, JobRecord, StepSeconds
from zerocheck.job_metrics.sinks import Prometheus, figures_of


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        port: int = one.getsockname()[1]
        return port


def trained(place: Path, **options: object) -> zerocheck.Attached:  # type: ignore[name-defined]
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    metrics = zerocheck.JobMetrics(place, **options)  # type: ignore[arg-type]
    check = zerocheck.attach(model, optimizer, metrics=metrics, directory=place / "kept")
    for _ in range(12):
        with check.step():
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
    return check


def test_each_record_is_read_back() -> None:
    for record in (STEP, StepSeconds(1, 0.5), CheckedStep(1, ("update",), ("decay twice",), 0.1)):
        assert msgspec.json.decode(msgspec.json.encode(record), type=JobRecord) == record
    assert len({(one.name, one.of) for one in figures_of(STEP)}) == len([*figures_of(STEP)])


def test_prometheus(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families as families

    port = free_port()
    check = trained(tmp_path, prometheus=port)
    with pytest.raises(UsageError, match=f"cannot be served at 127.0.0.1:{port}"):
        Prometheus("127.0.0.1", port)
    with pytest.raises(ConnectionError), socket.create_connection(("127.0.0.2", port), timeout=5):
        pass
    served = urllib.request.urlopen(f"http://localhost:{port}").read().decode()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families(served)
        for sample in family.samples
    }
    assert found["zerocheck_steps_total",] == 12
    assert (
        found["zerocheck_checked_steps_total",] == 3 and not found["zerocheck_wrong_steps_total",]
    )
    assert found["zerocheck_memory_bytes", "parameters"] == 40
    assert 0 < found["zerocheck_forward_share",] < 1 and found["zerocheck_step_seconds",] > 0
    check._meter.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://localhost:{port}")


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained(tmp_path, tensorboard=True)._meter.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert "zerocheck/memory_bytes/parameters" in events.Tags()["scalars"]
    steps = [one.step for one in events.Scalars("zerocheck/step_seconds")]
    assert steps == [4, 11, 12]  # not those that are checked, timed or weighed
    assert events.Scalars("zerocheck/memory_bytes/parameters")[0].value == 40


def test_lines_are_added_to_those_of_the_job_before(tmp_path: Path) -> None:
    for _ in range(2):
        trained(tmp_path)._meter.close()
    steps = [msgspec.json.decode(one) for one in (tmp_path / "metrics.jsonl").open("rb")]
    assert [one["step"] for one in steps if one["kind"] == "step"] == [*range(1, 13)] * 2
