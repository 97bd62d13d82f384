from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hand_made_checkpoints import save_dcp, state

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one training state, written by 2 and 3 ranks in several ways."""
    directory = tmp_path_factory.mktemp("written")
    subprocess.run([sys.executable, HERE / "writing.py", directory], check=True, timeout=240)
    return directory


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory of torch.distributed.checkpoint of one process, to be damaged."""
    return save_dcp(state(), tmp_path / "saved")
