"""Our own sharders, and the faults planted in them, on a device that is not the CPU: everything
that they make is there, and nothing is mixed with the CPU. See on_a_device.py for the stand-in."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from slices import sliced

from zerocheck.faults.registry import FAULTS

SCRIPT = Path(__file__).parent / "on_a_device.py"
MAKERS = ("clipping", "dtypes", "forward", "loss_scaling", "ownership", "padding", "restoring")
"""Files of faults that make tensors of their own, or take another optimizer."""


def ran(names: Collection[str]) -> dict[str, dict[str, Any]]:
    """What came of each, by name."""
    command = [sys.executable, str(SCRIPT), *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {one["name"]: one for one in lines}


NAMES = ["zero1", "zero2", "zero3"]
PLANTED_ALL = [
    fault.where
    for fault in FAULTS.values()
    if fault.parent in NAMES
    and fault.where.startswith(tuple(f"zerocheck.faults.{name}:" for name in MAKERS))
]
PLANTED = sliced(PLANTED_ALL, PLANTED_ALL[::16])


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What came of them, and of FSDP2 with and without offloading, in one process."""
    return ran([*NAMES, *PLANTED, "fsdp2", "fsdp2=pageable"])


def test_all_is_on_the_device_and_step_counts_on_the_cpu(found: dict[str, dict[str, Any]]) -> None:
    assert len(PLANTED_ALL) > 20
    for name in (*NAMES, *PLANTED):
        assert found[name]["wrong"] == "", name
        devices = dict(found[name]["devices"])
        # Where torch's AdamW has them; a fault of loading may lose them.
        assert devices.pop("step", ["cpu"]) == ["cpu"], name
        assert all(one == ["standin"] for one in devices.values()), (name, devices)
    roles = {"parameter", "step", "gradient", "exp_avg", "exp_avg_sq", "buffer", "padding"}
    assert all(roles <= set(found[name]["devices"]) for name in NAMES)


def test_fsdp2_has_on_the_cpu_what_it_offloads(found: dict[str, dict[str, Any]]) -> None:
    """Shards, gradients and states; units are gathered on the device, where the buffers are."""
    for name, place in (("fsdp2", "standin"), ("fsdp2=pageable", "cpu")):
        assert found[name]["wrong"] == "", name
        devices = found[name]["devices"]
        for role in ("parameter", "gradient", "exp_avg", "exp_avg_sq"):
            assert devices[role] == [place], (name, role)
        assert found[name]["devices"]["buffer"] == ["standin"]


@pytest.mark.long
def test_what_is_left_on_the_cpu_is_seen(tmp_path: Path) -> None:
    """The checker itself: one sharder mixes devices, one keeps its moments on the CPU."""
    file = tmp_path / "forgets.py"
    file.write_text(
        "import torch\n"
        "from zerocheck.adapters.textbook.zero1 import Zero1\n"
        "class Mixes(Zero1):\n"
        "    def _reduce(self):\n"
        "        super()._reduce()\n"
        "        for one in self.optimizer.owned:\n"
        "            one.gradient.add_(torch.zeros(one.gradient.shape))\n"
        "class Keeps(Zero1):\n"
        "    def shards(self):\n"
        "        for one in super().shards():\n"
        "            yield one\n"
        "            if one.role == 'exp_avg':\n"
        "                cpu = torch.zeros(one.tensor.shape)\n"
        "                yield type(one)(one.name, one.role, cpu, one.shape, one.index)\n"
    )
    found = ran([f"{file}:Mixes", f"{file}:Keeps"])
    assert "at least two devices" in found[f"{file}:Mixes"]["wrong"]
    assert found[f"{file}:Keeps"]["devices"]["exp_avg"] == ["cpu", "standin"]
