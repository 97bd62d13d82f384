"""A rank that cannot be forked is answered at once, with the reason of the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from hostile.confined import ANOTHER_USER, why_not

HERE = os.path.dirname(__file__)
SCRIPT = f"""
import sys
sys.path[:0] = [{os.path.dirname(os.path.dirname(HERE))!r}, {HERE!r}]
from zerocheck.ranks import Pool
with Pool("ranks_targets:run") as pool:
    pool.wait_until_ready()
    import resource
    resource.prlimit(pool.zygote_pid, resource.RLIMIT_NPROC, (1, 1))
    for _ in range(2):
        try:
            pool.wait(pool.submit(2, b"put 10"))
        except OSError as error:
            print(error.errno, error.strerror, flush=True)
"""


def test_a_fork_that_fails() -> None:
    if why := why_not(f"{ANOTHER_USER} true"):
        pytest.skip(f"no command can be run as another user here: {why}")
    began = time.monotonic()
    done = subprocess.run(
        [*ANOTHER_USER.split(), sys.executable, "-c", SCRIPT],
        capture_output=True, text=True, timeout=100, cwd="/",
    )  # fmt: skip
    words = "11 a rank could not be started: Resource temporarily unavailable"
    assert done.stdout.splitlines() == [words, words], done.stderr
    assert time.monotonic() - began < 60
