"""The show: a training script of some 50 lines under torchrun; its fault begins in mid-run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import zerocheck

HERE = Path(__file__).parent
SCRIPT = HERE / "train_attached.py"
ROOT = HERE.parent.parent


def test_the_next_checked_step_catches_it(tmp_path: Path) -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 70
    path = [str(Path(zerocheck.__file__).parent.parent), str(ROOT / "reference")]
    environment = {**os.environ, "PYTHONPATH": ":".join(path), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [
            *(*program, "--nproc-per-node", "2", str(SCRIPT), "fsdp2", "40"),
            *("--every", "10", "--fault", "decay_twice", "--begins", "15"),
            *("--recorder", "1GiB"),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    message = done.stderr
    assert done.returncode != 0
    found = "update: parameter is wrong: weight decay was applied twice"
    assert f"step 15: {found}" in message
    assert "15 is the first wrong one: steps 11 to 14 were recorded and hold" in message
    assert message.count(f"5 of 20 steps checked, 1 of them wrong\n  from step 15: {found}") == 1
    assert message.count("VIOLATED FSDP2 with AdamW: parameter is wrong: weight decay") == 1
    replay = next(line for line in message.splitlines() if line.startswith("  replay"))
    command = replay.split()[2:]
    assert command == ["replay", "zerocheck-attach/step-15"]
    again = subprocess.run(
        [sys.executable, "-m", "zerocheck", *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 1, again.stderr
    assert "  cause       weight decay twice" in again.stdout
    assert "reproduced: the same verdict on step 15" in again.stdout
