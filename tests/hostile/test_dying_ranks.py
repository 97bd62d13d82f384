"""A rank that dies in a checked step: the others end as soon as without zerocheck."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import datetime, os, sys
import torch, torch.distributed as dist
import zerocheck

rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), 2, rank == 0)
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=90)
)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
check = zerocheck.attach(model, optimizer, every=1)
for step in range(4):
    with check.step():
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        if step == 2 and rank == 1:
            os._exit(9)
        optimizer.zero_grad()
"""


def test_the_others_notice(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    command = [sys.executable, "-c", SCRIPT]
    given: Any = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), port], **given) for rank in range(2)]
    try:
        assert ranks[1].wait(timeout=120) == 9
        _, error = ranks[0].communicate(timeout=45)
        assert ranks[0].returncode and "closed by peer" in error, error
    finally:
        for rank in ranks:
            rank.kill()
