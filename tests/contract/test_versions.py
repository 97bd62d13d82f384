"""Checkpoints in folders of their own: the newest whole one is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from zerocheck.contract.versions import WHOLE, fresh, newest


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def written(folder: str, *, whole: bool = True) -> None:
    Path(folder).mkdir(parents=True)
    (Path(folder) / "data").write_text("data")
    if whole:
        (Path(folder) / WHOLE).write_text("all of it")


def test_a_killed_writer_leaves_the_one_before(tmp_path: Path, alone: None) -> None:
    directory = str(tmp_path / "checkpoints")
    first = fresh(directory)
    assert newest(directory) == directory
    written(first)
    second = fresh(directory)
    written(second, whole=False)
    assert newest(directory) == first != second


def test_what_is_older_than_the_newest_whole_one_goes(tmp_path: Path, alone: None) -> None:
    directory = str(tmp_path / "checkpoints")
    for whole in (True, True, False):
        written(fresh(directory), whole=whole)
    third = fresh(directory)
    assert [path.name for path in Path(directory).iterdir()] == ["2"]
    written(third)
    assert newest(directory) == third
