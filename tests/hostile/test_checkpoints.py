"""Checkpoints from elsewhere: damaged, malicious or mixed, and none of them executes anything."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.metadata as metadata
from checkpoint.hand_made_checkpoints import edit_index, plain, save_dcp, state
from hostile.trials import damaged, mutated, refused, trial
from safetensors.torch import save_file
from slices import sliced

from zerocheck.checkpoint.dcp_metadata import Broken, read_metadata
from zerocheck.errors import UsageError

TRIALS = 100
FORMS = ("dcp/.metadata", "dcp/__0_0.distcp", "new.pt", "old.pt", "model.safetensors", "index")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One training state in each format that is read."""
    place = tmp_path_factory.mktemp("saved")
    tree = state()
    save_dcp(tree, place / "dcp")
    torch.save(tree, place / "new.pt")
    torch.save(tree, place / "old.pt", _use_new_zipfile_serialization=False)
    save_file(tree["model"], place / "model.safetensors")
    (place / "index").mkdir()
    save_file(tree["model"], place / "index" / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(tree["model"], "model-00001-of-00001.safetensors")
    (place / "index" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return place


@pytest.mark.parametrize("form", FORMS)
def test_damaged(saved: Path, tmp_path: Path, form: str) -> None:
    """Bits flipped, bytes cut, doubled, zeroed or replaced: a report or a refusal."""
    shutil.copytree(saved, tmp_path / "here")
    path = tmp_path / "here" / form
    if form == "index":
        path = path / "model.safetensors.index.json"
    given = path if path.suffix in (".pt", ".safetensors") else path.parent
    data = path.read_bytes()
    for number in range(sliced(TRIALS, 12)):
        path.write_bytes(damaged(data, f"{form} {number}"))
        trial("checkpoint", given)
    path.write_bytes(data)
    assert trial("checkpoint", given).exit_code == 0


class _Payload:
    """A pickle that leaves a file behind where it is executed."""

    def __init__(self, call: Callable[..., object], *args: object) -> None:
        self.call = (call, args)

    def __reduce__(self) -> Any:
        return self.call


def payloads() -> Iterator[_Payload]:
    yield _Payload(os.system, "touch executed")
    yield _Payload(eval, "open('executed', 'w')")
    yield _Payload(exec, "open('executed', 'w')")
    yield _Payload(open, "executed", "w")
    yield _Payload(Path.touch, Path("executed"))
    yield _Payload(__import__, "antigravity")
    yield _Payload(getattr, Path, "touch")
    yield _Payload(torch.hub.load, "x/y", "z")
    yield _Payload(torch.load, "x")


@pytest.mark.parametrize("number", range(len(list(payloads()))))
def test_nothing_is_executed(saved: Path, tmp_path: Path, number: int) -> None:
    """A payload in the index, in an entry of it, and in both forms of torch.save."""
    payload = list(payloads())[number]
    shutil.copytree(saved / "dcp", tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(payload))
    refused("checkpoint", tmp_path / "dcp")
    shutil.copy(saved / "dcp" / ".metadata", tmp_path / "dcp")
    edit_index(tmp_path / "dcp", lambda index: setattr(index, "planner_data", payload))
    refused("checkpoint", tmp_path / "dcp")
    for form in (True, False):
        torch.save({"model": payload}, tmp_path / "a.pt", _use_new_zipfile_serialization=form)
        trial("checkpoint", tmp_path / "a.pt")
    assert not (tmp_path / "executed").exists()


def nested(depth: int) -> tuple[object, ...]:
    """A tuple of two references to one of two references, and so on: hashed as a tree."""
    value: tuple[object, ...] = ()
    for _ in range(depth):
        value = (value, value)
    return value


def set_item(key: object) -> bytes:
    """A pickle of a dict with a key that may be of any size."""
    return b"\x80\x02}" + pickle.dumps(key, 2)[2:-1] + b"K\x00s."


def cascade(depth: int) -> bytes:
    """A pickle of indices that have others in their fields, as a key of a dict."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    text = b"\x80\x02}" + name + b")\x81q\x00"
    for number in range(depth):
        held, made = bytes([number]), bytes([number + 1])
        text += name + b")\x81q" + made
        text += b"}(X\x03\x00\x00\x00fqnh" + held + b"X\x06\x00\x00\x00offseth" + held + b"ub"
    return text + b"K\x00s."


ENDLESS = {
    "a key": set_item(nested(60)),
    "a key of set": b"\x80\x02cbuiltins\nset\n(]" + pickle.dumps(nested(60), 2)[2:-1] + b"atR.",
    "an argument": b"\x80\x02ctorch.serialization\n_get_layout\n("
    + pickle.dumps(nested(60), 2)[2:-1]
    + b"tR.",
    "indices": cascade(60),
    "marks": b"(" * 3_000_000 + b".",
}
"""Pickles that took hours, or seconds for each megabyte."""


@pytest.mark.parametrize("name", ENDLESS)
def test_work_is_bounded_by_the_size(saved: Path, tmp_path: Path, name: str) -> None:
    data = ENDLESS[name]
    shutil.copytree(saved / "dcp", tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(data)
    (tmp_path / "old.pt").write_bytes(data)
    with (
        zipfile.ZipFile(saved / "new.pt") as archive,
        zipfile.ZipFile(tmp_path / "new.pt", "w") as out,
    ):
        for record in archive.namelist():
            out.writestr(record, data if record.endswith("/data.pkl") else archive.read(record))
    began = time.monotonic()
    for given in ("dcp", "old.pt", "new.pt"):
        trial("checkpoint", tmp_path / given)
    assert time.monotonic() - began < 20.0


def test_records_that_unpack_to_more_than_the_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps({}))
        archive.writestr("a/data/0", bytes(1 << 24))
    assert "its records are larger than the file" in trial("checkpoint", tmp_path / "a.pt").output


def test_a_damaged_archive_without_checksums(tmp_path: Path) -> None:
    """Nothing verified it before its pickle was read."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(b"XX" + data[2:])  # the header of the first record, data.pkl
    trial("checkpoint", tmp_path / "a.pt")


def built(module: str, name: str, state: object) -> bytes:
    """A pickle that looks a name up and fills in what it finds (BUILD)."""
    return b"c" + f"{module}\n{name}\n".encode() + pickle.dumps(state, 2)[2:-1] + b"b."


@pytest.mark.parametrize(
    ("module", "name", "state"),
    [
        ("torch.distributed.checkpoint.metadata", "Metadata", {"version": "owned"}),
        ("torch.distributed.checkpoint.metadata", "Metadata", (None, {"version": "owned"})),
        ("torch.distributed.checkpoint.metadata", "TensorProperties", (1, 2, 3, 4, 5)),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", (None, {"x": 1})),
        ("torch", "Size", (None, {"numel": 1})),
        ("torch.serialization", "_get_layout", {"cache": {}}),
        ("torch.serialization", "_get_layout", (None, {"cache": {}})),
        ("torch", "float32", {"x": 1}),
        ("collections", "OrderedDict", (None, {"x": 1})),
        ("pathlib", "PosixPath", (None, {"x": 1})),
        ("builtins", "dict", {"x": 1}),
    ],
)
def test_no_class_is_changed(tmp_path: Path, module: str, name: str, state: object) -> None:
    """BUILD on an admitted class set attributes of it, for all that is read afterwards."""
    before = vars(metadata.Metadata).copy(), torch.serialization._get_layout.__dict__.copy()  # type: ignore[attr-defined]
    path = tmp_path / ".metadata"
    path.write_bytes(built(module, name, state))
    with pytest.raises((Broken, UsageError)):
        read_metadata(path)
    after = vars(metadata.Metadata).copy(), torch.serialization._get_layout.__dict__.copy()  # type: ignore[attr-defined]
    assert before == after


def test_only_fields_are_filled_in(tmp_path: Path) -> None:
    """An instance gets the fields of its class, and no other attribute, not its class either."""
    path = tmp_path / ".metadata"
    for name in ("__class__", "__setstate__", "items"):
        made = metadata.Metadata({})
        vars(made)[name] = 1
        path.write_bytes(pickle.dumps(made))
        with pytest.raises(Broken, match="fields"):
            read_metadata(path)
    made = metadata.Metadata({})
    path.write_bytes(pickle.dumps(made))
    assert read_metadata(path) == metadata.Metadata({}, storage_data={})


def header(entries: object) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        header({"a": {"dtype": "F32", "shape": [1 << 70], "data_offsets": [0, 1 << 72]}}),
        header({"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 8]}}),
        header({"a": {"dtype": "F32", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}}),
        header({"a": {"dtype": "F32", "shape": [0, 1 << 80], "data_offsets": [0, 0]}}),
        header({"a": {"dtype": "F32", "shape": [1] * 5000, "data_offsets": [0, 4]}}) + bytes(4),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-(1 << 40), 4 - (1 << 40)]}}),
        header({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}) + bytes(4),
        header({"a": {"dtype": "F\x1b", "shape": [1], "data_offsets": [0, 4]}}) + bytes(4),
        header(b'{"a": 1e999999}'),
        header(b"\xff\xfe{}"),
        ((1 << 63) + 1).to_bytes(8, "little") + b"{}",
        b"",
    ],
    ids=range(13),
)
def test_safetensors(tmp_path: Path, data: bytes) -> None:
    """Deep JSON, shapes over 64 bits, zero with huge dims, ranges out of the file."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    assert trial("checkpoint", path).exit_code == 1


def _all_sizes(size: int) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        for entry in index.state_dict_metadata.values():
            if isinstance(entry, metadata.TensorStorageMetadata):
                entry.size = torch.Size([size] * len(entry.size))
                for chunk in entry.chunks:
                    chunk.sizes = entry.size

    return change


def _all_paths(name: str) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        for place in index.storage_data.values():
            place.relative_path = name

    return change


@pytest.mark.parametrize(
    "change",
    [
        _all_sizes(1 << 40),
        _all_sizes(1 << 62),
        _all_sizes(-1),
        _all_paths("a\x00b"),
        _all_paths("x" * 5000),
        _all_paths("loop"),
        _all_paths("../../../../etc/passwd"),
        _all_paths("/dev/zero"),
        _all_paths("."),
        _all_paths("fifo"),
    ],
    ids=range(10),
)
def test_an_index(saved: Path, tmp_path: Path, change: Callable[[Any], None]) -> None:
    """Sizes of 2^40, paths that no file can have, links to themselves, ways out."""
    place = shutil.copytree(saved / "dcp", tmp_path / "dcp")
    (place / "loop").symlink_to("loop")
    os.mkfifo(place / "fifo")
    edit_index(place, change)
    assert trial("checkpoint", place).exit_code == 1
    trial("checkpoint", place, saved / "dcp")


def test_paths(tmp_path: Path) -> None:
    """A link to itself, a FIFO and a name that is too long are no checkpoints."""
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.pt").symlink_to("a.pt")
    (tmp_path / "folder" / "model.safetensors.index.json").mkdir()
    for name in ("loop", "fifo", "x" * 5000, "folder"):
        refused("checkpoint", name)


def _itself() -> object:
    tree: dict[str, Any] = {"model": {"w": torch.ones(1)}}
    tree["again"] = tree
    return tree


def _laughs() -> object:
    tree: Any = [1]
    for _ in range(60):
        tree = [tree, tree]
    return {"model": {"w": torch.ones(1)}, "laughs": tree}


def _deep() -> object:
    tree: Any = {"w": torch.ones(1)}
    for _ in range(200):
        tree = {"a": tree}
    return tree


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "tree",
    [
        _itself(),
        _laughs(),
        _deep(),
        {"model": {"w": torch.ones(1)}, "n": 10**5000},
        {"model": {"w": torch.ones(1), 10**5000: torch.ones(1)}},
        {"model": {"w": torch.zeros(1).expand(1 << 40)}},
        {"model": {"w": torch.empty(3, device="meta")}},
        {"model": {"w": torch.eye(2).to_sparse()}},
        {"model": {"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}},
        {"model": {"w": torch.ones(1)}, "optim": {"state": {"²": {"step": 10**400}}}},
        {"optim": {"state": {0: {"step": 1e308, "exp_avg": torch.ones(1)}}, "param_groups": [{}]}},
        {"optim": {"state": {0: {"step": float("nan")}}, "param_groups": [{"params": [[]]}]}},
        {"optim": {"state": {0: {"step": torch.ones(3)}}, "param_groups": [{"betas": [None, ""]}]}},
        {},
        [],
        None,
        torch.ones(2),
    ],
    ids=range(17),
)  # fmt: skip
def test_state_dicts(tmp_path: Path, tree: object) -> None:
    """State dicts that contain themselves, explode, or have tensors without values."""
    torch.save(tree, tmp_path / "a.pt")
    trial("checkpoint", tmp_path / "a.pt", "--json", "a.json")
    trial("checkpoint", tmp_path / "a.pt", tmp_path / "a.pt")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_right_indices_are_read(saved: Path, tmp_path: Path, protocol: int) -> None:
    """What torch writes is admitted in each form of pickles."""
    data = pickle.loads((saved / "dcp" / ".metadata").read_bytes())
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(data, protocol))
    assert read_metadata(path) == data


def test_what_is_verified(saved: Path, tmp_path: Path) -> None:
    """Each format says what it lets be verified, and what it does not."""
    message = {
        form: trial("checkpoint", saved / form).output for form in ("new.pt", "old.pt", "dcp")
    }
    assert "verified: every record of torch.save against its CRC-32" in message["new.pt"]
    assert "cannot be verified: values (these files of torch.save have no" in message["old.pt"]
    assert "cannot be verified: that all files are of one save" in message["dcp"]
    safetensors = trial("checkpoint", saved / "model.safetensors", "--json", "a.json").output
    assert "cannot be verified: values (safetensors has no checksums)" in safetensors
    assert json.loads((tmp_path / "a.json").read_text())["unverifiable"]


def _two_files(place: Path, steps: tuple[float, float]) -> Path:
    """A directory of two files, each with the states of one parameter, by torch's own writer."""
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(0)
    for number, step in enumerate(steps):
        kinds = {
            "exp_avg": torch.zeros(2),
            "exp_avg_sq": torch.zeros(2),
            "step": torch.tensor(step),
        }
        tree = {f"optim.state.p{number}.{kind}": value for kind, value in kinds.items()}
        dcp.save(tree, checkpoint_id=place / str(number), no_dist=True)
    index = pickle.loads((place / "0" / ".metadata").read_bytes())
    other = pickle.loads((place / "1" / ".metadata").read_bytes())
    for one in other.storage_data.values():
        one.relative_path = "__1_0.distcp"
    index.state_dict_metadata |= other.state_dict_metadata
    index.storage_data |= other.storage_data
    index.planner_data |= other.planner_data
    (place / "1" / "__0_0.distcp").rename(place / "0" / "__1_0.distcp")
    (place / "0" / ".metadata").write_bytes(pickle.dumps(index))
    return place / "0"


def test_files_of_two_steps(tmp_path: Path) -> None:
    """One file of another step: the finding names the files."""
    assert trial("checkpoint", _two_files(tmp_path / "same", (3.0, 3.0))).exit_code == 0
    result = trial("checkpoint", _two_files(tmp_path / "mixed", (3.0, 4.0)))
    assert (
        "different saves: each has one step count (__0_0.distcp 3, __1_0.distcp 4)" in result.output
    )


def test_files_of_two_dates(tmp_path: Path) -> None:
    """A file that was put there after the index, which a save writes last, is noted."""
    place = _two_files(tmp_path, (3.0, 3.0))
    times = (place / ".metadata").stat().st_mtime + 3600
    os.utime(place / "__1_0.distcp", (times, times))
    result = trial("checkpoint", place)
    assert result.exit_code == 0
    assert "note: __1_0.distcp was changed at" in result.output


def test_files_of_two_saves(tmp_path: Path) -> None:
    """With a manifest of the save a file of another one of the same step is found."""
    place = _two_files(tmp_path, (3.0, 3.0))
    files = {
        path.name: {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in place.iterdir()
    }
    (place / "manifest.json").write_text(json.dumps({"files": files, "format": 1}))
    result = trial("checkpoint", place)
    assert result.exit_code == 0 and "verified: every file against manifest.json" in result.output
    files["__1_0.distcp"]["sha256"] = "0" * 64
    (place / "manifest.json").write_text(json.dumps({"files": files, "format": 1}))
    damaged = trial("checkpoint", place).output
    assert "__1_0.distcp: it is damaged or of another save" in damaged
    assert "checked: every file against manifest.json" in damaged and "verified: " not in damaged
    for text in ("", "[" * 100_000, "{}", '{"files": {"../x": {"size": 1, "sha256": ""}}}'):
        (place / "manifest.json").write_text(text)
        trial("checkpoint", place)


def test_drawn_trees(tmp_path: Path) -> None:
    """State dicts with values of other types in any place."""

    for number in range(sliced(TRIALS, 25)):
        tree = mutated(plain(), f"tree {number}")
        torch.save(tree, tmp_path / "a.pt")
        trial("checkpoint", tmp_path / "a.pt")
