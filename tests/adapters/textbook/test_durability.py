"""Writers that are killed, or cannot write, leave the old checkpoint or the new one, whole."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from slices import sliced
from torch.distributed.device_mesh import DeviceMesh

from zerocheck.adapters.textbook.checkpoint.chunk import Chunk
from zerocheck.adapters.textbook.checkpoint.directory import Writer, verify
from zerocheck.adapters.textbook.checkpoint.transfer import find_verified, read, write
from zerocheck.adapters.textbook.zero3 import Zero3
from zerocheck.case.schema import Case, Model
from zerocheck.errors import CheckpointError

from ..driver import in_ranks
from .disturbing import disturbed, fail, kill
from .resuming import Job, save_all

OLD, NEW = 1.0, 2.0


def _write(mesh: DeviceMesh, directory: str, value: float, writer: type[Writer] = Writer) -> None:
    """Every rank writes its part of two tensors, all of it of one value."""
    rank, count = mesh.get_rank(), mesh.size()
    chunks = [
        Chunk(key, torch.full((3,), value), 3 * rank, 3 * count) for key in ("model.a", "model.b")
    ]
    write(writer(directory), chunks, f"{value}".encode(), mesh.get_group())


def _value(mesh: DeviceMesh, directory: str, numel: int) -> float:
    """The one value of the checkpoint."""
    group = mesh.get_group()
    found = find_verified(directory, group)
    keys = ("model.a", "model.b")
    chunks = [Chunk(key, torch.zeros(numel), 0, numel) for key in keys]
    read(found, chunks, group)
    values = {float(Path(found.path, "training.json").read_bytes())}
    for chunk in chunks:
        values |= set(chunk.tensor.tolist())
    (value,) = values
    return value


def _values(mesh: DeviceMesh, directories: list[str], numel: int) -> list[float]:
    return [_value(mesh, directory, numel) for directory in directories]


def _operations(mesh: DeviceMesh, directory: str) -> list[str]:
    """The file operations of a save over an older one."""
    _write(mesh, directory, OLD)
    with disturbed(None, kill) as seen:
        _write(mesh, directory, NEW)
    return seen.names


def _killed(
    mesh: DeviceMesh, directory: str, at: int, rank: int, writer: type[Writer] = Writer
) -> None:
    _write(mesh, directory, OLD)
    with disturbed(at if rank == mesh.get_rank() else None, kill):
        _write(mesh, directory, NEW, writer)


def _kills(
    folder: Path, count: int, at: Sequence[int], rank: int = 0, writer: type[Writer] = Writer
) -> list[float]:
    """What loads after a rank was killed at each of these operations."""
    directories = [str(folder / f"killed{rank}.{number}") for number in at]
    for number, directory in zip(at, directories, strict=True):
        with pytest.raises(RuntimeError):
            in_ranks(count, _killed, directory, number, rank, writer)
    return in_ranks(1, _values, directories, 3 * count)[0]


def test_a_writer_killed_at_any_operation(tmp_path: Path) -> None:
    (names,) = in_ranks(1, _operations, str(tmp_path / "counted"))
    assert {"open", "write", "fsync", "os.mkdir", "os.rename", "os.remove", "os.rmdir"} <= {*names}
    replaced = len(names) - 1 - names[::-1].index("os.rename")
    tried = [n for n in range(len(names)) if not n % sliced(1, 12) or 0 <= n - replaced <= 1]
    values = _kills(tmp_path, 1, tried)
    assert values == [OLD if number <= replaced else NEW for number in tried]
    # The next save makes good what they left.
    for number in tried[:: sliced(7, 2)]:
        directory = tmp_path / f"killed0.{number}"
        in_ranks(1, _write, str(directory), NEW)
        assert len(list(directory.glob("generation-*"))) == 1
        assert sorted(path.name for path in directory.iterdir())[1:] == ["latest", "lock"]
        verify(directory)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_ranks_killed(tmp_path: Path, rank: int) -> None:
    """The other one does not wait for ever."""
    names = in_ranks(2, _operations, str(tmp_path / "counted"))[rank]
    values = _kills(tmp_path, 2, range(0, len(names), sliced(8, 16)), rank)
    assert {*values} <= {OLD, NEW} and values[0] == OLD


def test_flipped_bits_of_a_checkpoint_are_refused(tmp_path: Path) -> None:
    """At random, in all files that two ranks wrote, in proportion to their sizes."""
    case = Case(model=Model(inputs=3, width=2, blocks=(), outputs=2))
    in_ranks(2, save_all, [Job(Zero3, case, str(tmp_path))])
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file() and path.stat().st_size]
    sizes = [path.stat().st_size for path in files]
    draw = random.Random(0)
    for path in draw.choices(files, sizes, k=sliced(10_000, 1_000)):
        right = path.read_bytes()
        bit = draw.randrange(8 * len(right))
        wrong = bytearray(right)
        wrong[bit // 8] ^= 1 << bit % 8
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError):
            verify(tmp_path)
        path.write_bytes(right)
    verify(tmp_path)


class _NamesFirst(Writer):
    """The fault: the pointer names a generation whose manifest is not written yet."""

    def commit(self, files):  # type: ignore[no-untyped-def]
        assert self._fresh is not None
        self.publish(self._fresh.name, "0" * 64)
        super().commit(files)


def test_a_writer_that_names_first_is_caught(tmp_path: Path) -> None:
    (names,) = in_ranks(1, _operations, str(tmp_path / "counted"))
    with pytest.raises(RuntimeError, match=r"manifest\.json"):
        _kills(tmp_path, 1, range(len(names) - 12, len(names), 3), writer=_NamesFirst)


def _failing(mesh: DeviceMesh, directory: str, rank: int) -> list[tuple[str, float, str]]:
    """For every operation of this rank: what it was, what loads after it failed, what was said."""
    _write(mesh, directory, OLD)
    with disturbed(None, fail) as seen:
        _write(mesh, directory, OLD)
    count = torch.tensor(len(seen.names))
    torch.distributed.broadcast(count, rank)
    answer = []
    for at in range(int(count)):
        message = ""
        with disturbed(at if mesh.get_rank() == rank else None, fail) as seen:
            try:
                _write(mesh, directory, NEW)
            except CheckpointError as error:
                message = str(error)
        value = _value(mesh, directory, 3 * mesh.size())
        answer.append((seen.names[at] if mesh.get_rank() == rank else "", value, message))
        _write(mesh, directory, OLD)
    return answer


@pytest.mark.every(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path, rank: int) -> None:
    """A full disk, a read-only one: every rank says so, and the old one loads."""
    answer = in_ranks(2, _failing, str(tmp_path), rank)
    refused = 0
    for one, other in zip(*answer, strict=True):
        assert one[1:] == other[1:]
        if one[2]:
            assert "made to fail" in one[2] and f"rank {rank}" in one[2]
            refused += 1
        else:
            assert one[1] == NEW
    assert refused > len(answer[0]) // 2
    assert any("Errno 28" in message for _, _, message in answer[0])
    # Only where the name is replaced and cannot be synced: to open the directory, and the sync.
    assert [value for _, value, message in answer[0] if message].count(NEW) == (
        2 if rank == 0 else 0
    )


def _second_writer(mesh: DeviceMesh, directory: str) -> list[str]:
    """What a training is told that saves where another one is saving."""
    group = mesh.get_group()
    _write(mesh, directory, OLD)
    other = Writer(directory)
    if mesh.get_rank() == 0:
        other.begin()
    torch.distributed.barrier(group)
    with pytest.raises(CheckpointError) as error:
        _write(mesh, directory, NEW)
    other.end()
    return [str(error.value)]


def test_every_rank_of_a_second_writer_is_told(tmp_path: Path) -> None:
    answer = in_ranks(2, _second_writer, str(tmp_path))
    assert answer[0] == answer[1] and "another training is saving" in answer[0][0]
    assert in_ranks(1, _values, [str(tmp_path)], 6) == [[OLD]]


def _refusals(mesh: DeviceMesh, directory: str) -> list[str]:
    """What every rank is told of each file that is damaged."""
    _write(mesh, directory, OLD)
    answer = []
    for path in sorted(path for path in Path(directory).rglob("*") if path.is_file()):
        right = path.read_bytes()
        if not right:
            continue
        _damage(mesh, lambda path=path, right=right: path.write_bytes(right[:-2] + b"??"))
        with pytest.raises(CheckpointError) as error:
            _value(mesh, directory, 3 * mesh.size())
        answer.append(str(error.value))
        _damage(mesh, lambda path=path, right=right: path.write_bytes(right))
    _damage(mesh, lambda: shutil.rmtree(directory))
    with pytest.raises(CheckpointError) as error:
        _value(mesh, directory, 3)
    return [*answer, str(error.value)]


def _damage(mesh: DeviceMesh, do: Callable[[], object]) -> None:
    torch.distributed.barrier()
    if mesh.get_rank() == 0:
        do()
    torch.distributed.barrier()


def test_every_rank_refuses_what_one_finds_damaged(tmp_path: Path) -> None:
    answer = in_ranks(3, _refusals, str(tmp_path / "checkpoint"))
    assert answer[0] == answer[1] == answer[2]
    assert all("damaged" in words for words in answer[0][:-1]) and len(answer[0]) >= 7
    assert "there is no whole checkpoint" in answer[0][-1]
