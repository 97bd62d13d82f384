"""State in the files of a checkpoint or an export, with digests as a record has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from os.path import exists
from pathlib import Path

import msgspec
import torch

from ...checkpoint.contents import MODEL, Contents, Item, contents_of
from ...checkpoint.examine import examine, report_on
from ...checkpoint.formats import folder_of, open_checkpoint
from ...checkpoint.result import CheckpointProblem, CheckpointReport
from ...checkpoint.source import DamagedCheckpoint
from ...checkpoint.tiling import problems
from ...optimizers import STATES
from ...protocol.observations import Entry
from ..record.digests import WholeDigest, digest_of, whole_of
from .loaded import compare_states
from .saved_state import NAME, WEIGHTS, LiveState, SavedState, has_record, read_saved


class WeightsInFiles(Mapping[str, torch.Tensor]):
    """Weights in files, each read when it is asked for; raises DamagedCheckpoint."""

    def __init__(self, path: Path) -> None:
        self.contents = contents_of(path, open_checkpoint(path))
        self._items = self.contents.named(MODEL)

    def __getitem__(self, name: str) -> torch.Tensor:
        return read(self.contents, self._items[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def read(contents: Contents, item: Item) -> torch.Tensor:
    """Read a tensor of a checkpoint. Raises DamagedCheckpoint, for a gap too."""
    torn = next(problems(item.stored), "")
    if torn:
        raise DamagedCheckpoint(torn)
    return contents.read(item)


def digest(name: str, tensor: torch.Tensor, *, rounds: bool = False) -> WholeDigest:
    """Return the digest of a whole tensor. rounds: as in `digest_of`."""
    entry = Entry(name, tuple(tensor.shape), 0, tensor.numel())
    whole = whole_of([digest_of(tensor, entry, rounds=rounds)])
    return whole or WholeDigest(entry.shape, str(tensor.dtype), (), 0, 0)


def recorded_or_read(path: Path) -> SavedState:
    """Return the record in a folder, else the state that the files at a path hold."""
    if has_record(folder_of(path)) or not exists(path):
        return read_saved(folder_of(path))
    return _state(contents_of(path, open_checkpoint(path)))


def _state(contents: Contents, record: SavedState | None = None) -> SavedState:
    """Return the state in a checkpoint: tensors that can be read, and step counts.

    record: tells which of the model's tensors are buffers; what it does not have is left out.
    """
    tensors: dict[str, dict[str, WholeDigest]] = {}
    for item in contents.items.values():
        role = _role(item, record)
        with suppress(DamagedCheckpoint):
            if role:
                whole = digest(item.name, read(contents, item), rounds=record is None)
                tensors.setdefault(role, {})[item.name] = whole
    return SavedState(
        step=0 if record is None else record.step,
        world_size=1 if record is None else record.world_size,
        tensors=tensors,
        buffers={},
        counts=contents.steps,
        options=(),
        random=(),
    )


def _role(item: Item, record: SavedState | None) -> str:
    if item.role != MODEL:
        return item.role if item.role in STATES else ""
    if record is None:
        return "parameter"
    return next((role for role in WEIGHTS if item.name in record.tensors.get(role, {})), "")


def examined(path: Path) -> CheckpointReport:
    """Examine a checkpoint, and compare it with the record that `check.saved` wrote with it.

    The record was made at the call: a save that goes on while training changes the state differs.
    Raises UsageError for a path without a checkpoint.
    """
    folder = folder_of(path)
    if not has_record(folder):
        return examine(path)
    record, source = read_saved(folder), open_checkpoint(path)
    contents = contents_of(path, source, record.members)
    adapter = _without_adapter(record, {*contents.named(MODEL)})
    if adapter is None:
        return _compared(report_on(contents), contents, record)
    contents = contents_of(path, source, adapter.members)
    report = report_on(contents)
    left = len(record.tensors["parameter"]) - len(adapter.tensors["parameter"])
    note = f"an adapter: {left} parameters that training recorded are not in it"
    report = msgspec.structs.replace(report, notes=(*report.notes, note))
    return _compared(report, contents, adapter)


def _without_adapter(record: SavedState, names: set[str]) -> SavedState | None:
    """Return the record of an adapter alone, which a checkpoint has without its name.

    What is trained must be in it. names: of the weights in the checkpoint. Returns None where they
    are those of the record.
    """
    known = record.weights
    trained = {name for role in {*record.tensors} - {*WEIGHTS} for name in record.tensors[role]}
    parts = {part for name in known for part in name.split(".")} if names - {*known} else ()
    for part in sorted(parts):
        short = {name: ".".join(word for word in name.split(".") if word != part) for name in known}
        if names <= {*short.values()}:
            names = names | {short[name] for name in trained}
            tensors = {
                role: {
                    short[name]: each for name, each in named.items() if short.get(name) in names
                }
                for role, named in record.tensors.items()
            }
            counts = {short[n]: c for n, c in record.counts.items() if short.get(n) in names}
            members = tuple(tuple(short.get(n, "") for n in group) for group in record.members)
            return msgspec.structs.replace(record, tensors=tensors, counts=counts, members=members)
    return None


def _compared(report: CheckpointReport, contents: Contents, record: SavedState) -> CheckpointReport:
    """Add what differs from the record; what the report says to be damaged is left out."""
    now = _state(contents, record)
    numbered = contents.numbered
    lacks = any(each.check == "files" for each in report.findings)

    def judged(role: str, name: str, numel: int) -> bool:
        if name in now.tensors.get(role, {}):
            return True
        if role in WEIGHTS:  # examine says what is there in parts
            damaged = (MODEL, name) in contents.items
            return not (lacks or damaged or contents.parts_of(name, numel, record.weights))
        return not (numbered or lacks or (role, name) in contents.items)

    tensors = {
        role: {name: one for name, one in named.items() if judged(role, name, one.numel)}
        for role, named in record.tensors.items()
    }
    counts = {} if numbered or lacks else record.counts
    kept = msgspec.structs.replace(record, tensors=tensors, counts=counts)
    wrong = compare_states(kept, LiveState(now), data=False, random=False, options=False)
    findings = tuple(
        CheckpointProblem(check="recorded", where=each.role, detail=each.explanation)
        for each in wrong
    )
    count = sum(map(len, tensors.values()))
    text = f"{count} tensors against the digests of step {record.step} in {NAME}"
    return msgspec.structs.replace(
        report,
        findings=(*report.findings, *findings),
        checked=(*report.checked, "recorded"),
        verified=(*report.verified, text),
    )
