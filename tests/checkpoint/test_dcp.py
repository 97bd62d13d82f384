"""Damaged directories of torch.distributed.checkpoint: each damage is seen, in the right place."""

from __future__ import annotations

import dataclasses
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made_checkpoints import BIAS, WEIGHT, detail, edit_index, flip, found, save_dcp, state
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from zerocheck.checkpoint.examine import examine
from zerocheck.checkpoint.text import render
from zerocheck.errors import UsageError

INDEX = ".metadata"
NAME = f"model.{WEIGHT}"


def chunks(index: Any) -> list[ChunkStorageMetadata]:
    return index.state_dict_metadata[NAME].chunks  # type: ignore[no-any-return]


def data_file(directory: Path) -> Path:
    (path,) = directory.glob("*.distcp")
    return path


def test_what_torch_writes_is_right(saved: Path) -> None:
    assert not examine(saved).findings


def sharded(written: Path, to: Path) -> Path:
    return Path(shutil.copytree(written / "fsdp2-3-nested", to))


def test_a_gap(written: Path, tmp_path: Path) -> None:
    directory = sharded(written, tmp_path / "gap")

    def drop(index: Any) -> None:
        gone = chunks(index).pop(1)
        del index.storage_data[MetadataIndex(NAME, gone.offsets)]

    edit_index(directory, drop)
    report = examine(directory)
    assert ("tiling", f"model {WEIGHT}") in found(report)
    assert detail(report, "tiling", f"model {WEIGHT}") == (
        "no chunk holds 15 of 35 elements, first [3, 0]"
    )
    # The bytes of the chunk belong to nothing now.
    assert found(report) == {("tiling", f"model {WEIGHT}"), ("files", "__1_0.distcp")}


def test_an_overlap(written: Path, tmp_path: Path) -> None:
    directory = sharded(written, tmp_path / "overlap")

    def move(index: Any) -> None:
        old = chunks(index)[1]
        new = ChunkStorageMetadata(torch.Size([2, 0]), old.sizes)
        chunks(index)[1] = new
        place = index.storage_data.pop(MetadataIndex(NAME, old.offsets))
        index.storage_data[MetadataIndex(NAME, new.offsets)] = place

    edit_index(directory, move)
    report = examine(directory)
    assert found(report) == {("tiling", f"model {WEIGHT}")}
    assert {one.detail for one in report.findings} == {
        "chunk [0:3, 0:5] and chunk [2:5, 0:5] overlap",
        "no chunk holds some elements, first [5, 0]",
    }


def test_out_of_bounds(written: Path, tmp_path: Path) -> None:
    directory = sharded(written, tmp_path / "bounds")

    def shrink(index: Any) -> None:
        index.state_dict_metadata[NAME].size = torch.Size([6, 5])

    edit_index(directory, shrink)
    report = examine(directory)
    assert "chunk [6:7, 0:5] is out of the bounds [6, 5]" in {
        one.detail for one in report.findings if one.check == "tiling"
    }


def no_place(index: Any) -> None:
    del index.storage_data[MetadataIndex(NAME, [0, 0])]


def place_for_nothing(index: Any) -> None:
    index.storage_data[MetadataIndex("model.gone")] = next(iter(index.storage_data.values()))


def other_dtype(index: Any) -> None:
    entry = index.state_dict_metadata[NAME]
    entry.properties = dataclasses.replace(entry.properties, dtype=torch.bfloat16)


def other_place(index: Any) -> None:
    """Two chunks of different shapes exchange their places."""
    one, other = MetadataIndex(NAME, [0, 0]), MetadataIndex(f"model.{BIAS}", [0])
    places = index.storage_data
    places[one], places[other] = places[other], places[one]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (no_place, ("files", f"{NAME} at [0, 0]")),
        (place_for_nothing, ("files", "model.gone")),
        (other_dtype, ("readable", f"model {WEIGHT}")),
        (other_place, ("readable", f"model {WEIGHT}")),
    ],
)
def test_an_index_that_does_not_fit(
    saved: Path, change: Callable[[Any], None], expected: tuple[str, str]
) -> None:
    edit_index(saved, change)
    assert expected in found(examine(saved))


def test_a_missing_file(written: Path, tmp_path: Path) -> None:
    directory = sharded(written, tmp_path / "missing")
    (directory / "__2_0.distcp").unlink()
    report = examine(directory)
    assert "missing" in detail(report, "files", "__2_0.distcp")
    assert len(report.findings) == 1, report.findings
    (described,) = report.checkpoints
    assert sum(report.intact.values()) < sum(role.tensors for role in described.roles)


def test_damage_is_named_with_its_file_and_rows(written: Path, tmp_path: Path) -> None:
    directory = sharded(written, tmp_path / "damaged")
    for name in ("__0_0.distcp", "__2_0.distcp"):
        path = directory / name
        flip(path, path.stat().st_size // 2)
    report = examine(directory)
    damaged = [one for one in report.findings if one.check == "readable"]
    assert damaged
    assert all(
        re.search(r"rows \d+ to \d+ of \d+ in __[02]_0.distcp: ", one.detail) for one in damaged
    )
    (described,) = report.checkpoints
    missing = {role.role: role.tensors - report.intact[role.role] for role in described.roles}
    assert sum(missing.values()) == len({one.where for one in damaged})
    assert "tensors without a finding: " in render(report)


def test_a_truncated_file(saved: Path) -> None:
    path = data_file(saved)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    report = examine(saved)
    assert detail(report, "files", path.name) == f"truncated: {size - 100} bytes of {size}"
    assert any(check == "readable" for check, _ in found(report))


def test_an_empty_file(saved: Path) -> None:
    data_file(saved).write_bytes(b"")
    assert ("files", data_file(saved).name) in found(examine(saved))


def test_a_file_that_is_too_long(saved: Path) -> None:
    with data_file(saved).open("ab") as file:
        file.write(b"more")
    report = examine(saved)
    assert detail(report, "files", data_file(saved).name) == "4 bytes behind its last record"


def test_files_of_another_save(saved: Path) -> None:
    shutil.copy(data_file(saved), saved / "__7_0.distcp")
    (saved / ".metadata.tmp").write_bytes(b"")
    assert found(examine(saved)) == {("files", "__7_0.distcp"), ("files", ".metadata.tmp")}


def test_a_save_that_did_not_end(saved: Path) -> None:
    (saved / INDEX).unlink()
    report = examine(saved)
    assert found(report) == {("files", INDEX)}
    assert {"tiling", "finite", "steps", "moments", "bounded"} <= set(report.unchecked)


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_truncated_index(saved: Path, length: int) -> None:
    path = saved / INDEX
    path.write_bytes(path.read_bytes()[:length])
    assert found(examine(saved)) == {("files", INDEX)}


def test_every_flipped_bit_of_a_tensor_is_seen(saved: Path) -> None:
    """The checksum of torch.save sees it, which torch.load does not look at."""
    index = pickle.loads((saved / INDEX).read_bytes())
    place = index.storage_data[MetadataIndex(NAME, [0, 0])]
    path = data_file(saved)
    whole = path.read_bytes()
    value = state()["model"][WEIGHT].numpy().tobytes()
    start = whole.index(value, place.offset)
    assert start + len(value) < place.offset + place.length
    for byte in (0, 1, 70, len(value) - 1):
        for bit in (0, 7):
            flip(path, start + byte, bit)
            assert found(examine(saved)) == {("readable", f"model {WEIGHT}")}
            path.write_bytes(whole)


def test_a_record_without_checksums(tmp_path: Path) -> None:
    """As `set_crc32_options(False)` writes it: every CRC-32 is 0, and none is held to it."""
    tree = state()
    tree["model"][WEIGHT][1, 2] = torch.nan
    torch.serialization.set_crc32_options(False)
    try:
        save_dcp(tree, tmp_path / "saved")
    finally:
        torch.serialization.set_crc32_options(True)
    assert found(examine(tmp_path / "saved")) == {("finite", f"model {WEIGHT}")}


def test_a_file_outside_of_the_directory_is_not_read(saved: Path) -> None:
    shutil.move(data_file(saved), saved.parent / "outside.distcp")

    def outside(index: Any) -> None:
        for place in index.storage_data.values():
            place.relative_path = "../outside.distcp"

    edit_index(saved, outside)
    report = examine(saved)
    assert "outside" in detail(report, "files", "../outside.distcp")
    assert ("readable", f"model {WEIGHT}") in found(report)


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harmed"),)


@pytest.mark.parametrize(
    ("where", "name"), [("planner_data", "pathlib"), ("storage_meta", "pathlib")]
)
def test_an_index_that_runs_code_is_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    edit_index(saved, lambda index: setattr(index, where, Harm()))
    with pytest.raises(UsageError, match=r"asks for (builtins\.getattr|pathlib)"):
        examine(saved)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'touch harmed'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"ctorch.distributed.checkpoint.metadata\nos\n.",
    ],
)
def test_names_that_are_not_admitted(saved: Path, code: bytes) -> None:
    (saved / INDEX).write_bytes(code)
    with pytest.raises(UsageError, match="which no index of torch"):
        examine(saved)


def test_a_memo_index_takes_no_memory(saved: Path) -> None:
    """One flipped bit makes REDUCE a LONG_BINPUT: C's unpickler would fill 60 GB here."""
    (saved / INDEX).write_bytes(b"\x80\x04N" + b"r\xff\xff\xff\xef" + b".")
    assert found(examine(saved)) == {("files", INDEX)}


@pytest.mark.parametrize("value", [3, [], {"state_dict_metadata": {}}])
def test_another_pickle_is_damage(saved: Path, value: object) -> None:
    (saved / INDEX).write_bytes(pickle.dumps(value))
    assert found(examine(saved)) == {("files", INDEX)}


class Mine:
    """Of the user."""


def test_an_entry_of_a_users_class_is_left_out_and_said(tmp_path: Path) -> None:
    save_dcp({**state(), "mine": Mine()}, tmp_path / "saved")
    report = examine(tmp_path / "saved")
    assert not report.findings
    assert any("test_dcp.Mine" in note for note in report.notes)
