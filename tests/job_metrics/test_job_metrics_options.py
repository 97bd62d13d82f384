"""Options of metrics: what is refused, and how."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerocheck
from zerocheck.errors import UsageError
from zerocheck.job_metrics import options

PORTS = '(allowed: a port from 1 to 65535, or an address and a port such as "0.0.0.0:9400")'

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"folder": ""}, "metrics is '' (allowed: a folder, or JobMetrics)"),
    ({"folder": 3}, "metrics is 3 (allowed: a folder, or JobMetrics)"),
    ({"every": 1}, "every is 1 (allowed: an int from 2 on)"),
    ({"every": "9"}, "every is '9' (allowed: an int from 2 on)"),
    ({"every": None}, "every is None (allowed: an int from 2 on)"),
    ({"data_ranks": 0}, "data_ranks is 0 (allowed: an int from 1 on)"),
    ({"prometheus": 0}, f"prometheus is 0 {PORTS}"),
    ({"prometheus": "9400"}, f"prometheus is '9400' {PORTS}"),
    ({"prometheus": "::x"}, f"prometheus is '::x' {PORTS}"),
    ({"prometheus": True}, f"prometheus is True {PORTS}"),
]


@pytest.mark.parametrize(("given", "text"), WRONG)
def test_a_wrong_value(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as error:
        zerocheck.JobMetrics(**{"folder": "metrics", **given})
    assert str(error.value) == text


def test_what_attach_is_given() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="metrics is True"):
        zerocheck.attach(model, torch.optim.AdamW(model.parameters()), metrics=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"prometheus": 9000}, {"tensorboard": True}])
def test_a_package_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"is not installed: pip install 'zerocheck-sharding\[metrics\]'"
    ):
        zerocheck.JobMetrics("metrics", **given)


def test_it_is_served_to_its_own_host_unless_an_address_is_given() -> None:
    pytest.importorskip("prometheus_client")
    assert zerocheck.JobMetrics("m", prometheus=9400).served_at() == ("127.0.0.1", 9400)
    assert zerocheck.JobMetrics("m", prometheus="0.0.0.0:9400").served_at() == ("0.0.0.0", 9400)
