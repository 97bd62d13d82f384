"""Variables of a launcher that is gone: zerocheck says what it waits for, and ends on a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

PORT = "29517"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_it_says_what_it_waits_for_and_can_be_ended(tmp_path: Path, rank: str) -> None:
    stale = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    with subprocess.Popen(
        [sys.executable, "-m", "zerocheck", "run", "zero2", "--max-cases", "1"],
        cwd=tmp_path, env={**os.environ, **stale}, text=True, stderr=subprocess.PIPE,
    ) as run:  # fmt: skip
        assert run.stderr is not None
        late = threading.Timer(120, run.kill)
        late.start()
        line = next((one for one in run.stderr if one.startswith("waiting: ")), "")
        assert f"127.0.0.1:{PORT}" in line and f"RANK={rank}" in line, line
        assert "unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT" in line
        run.send_signal(signal.SIGTERM)
        text = run.communicate(timeout=15)[1]
        late.cancel()
    assert run.returncode in (3, 130), text
    assert "Traceback" not in text
