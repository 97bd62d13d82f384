"""Jobs of a resumed case, one per training segment, and actions on checkpoints between."""

from __future__ import annotations

import glob
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ...case.schema import Case, DamageKind, Disturbance
from ...case.segments import only_loads, samples_before, segments_of
from ...drive.checkpoints import listing_of
from ...protocol.jobs import LoadCheckpoint, Measure, Observe, SegmentCheckpoints, SegmentJob
from ...protocol.observations import CheckpointObservation, RankObservation
from ...ranks.result import JobResult
from .rank_replies import decode_reply


class Segments:
    """Jobs for the ranks of each training segment, with the directories of their checkpoints.

    Each segment saves into a directory of its own, in a temporary one that `remove` removes. done:
    the damage done to a checkpoint, in words; missing: see `look`.
    """

    def __init__(self, implementation: str, case: Case, *, trace: bool = False) -> None:
        self.case = case
        self.done = ""
        self.missing: tuple[str, ...] = ()
        self._implementation = implementation
        self._trace = trace
        self._cases = segments_of(case)
        self._path = Path(tempfile.mkdtemp(prefix="zerocheck-")) if case.resume else None

    def __len__(self) -> int:
        return len(self._cases)

    def job(self, number: int) -> SegmentJob:
        """Return the job for the ranks of a segment; segment k loads what segment k - 1 saved."""
        segment = self._cases[number]
        into = self.case.resume[number - 1].into if number else ""
        name = into or self._implementation
        if self._path is None:
            return Observe(name, segment, trace=self._trace)
        mixes = bool(segment.resume) and segment.resume[0].damage == "mix"
        checkpoints = SegmentCheckpoints(
            save=str(self._path / str(number)) if segment.resume else "",
            older=str(self._path / "older") if mixes else "",
            load=str(self._loaded(number)) if number else "",
            samples=samples_before(self.case, number),
        )
        kind = LoadCheckpoint if number and only_loads(self.case, number) else Observe
        return kind(name, segment, checkpoints, trace=self._trace)

    def measuring(self) -> Measure:
        """Return the job in which the steps are measured, without any checkpoint.

        Nothing is delayed: a collective that begins on another thread lets go of its memory there,
        unobserved.
        """
        case = msgspec.structs.replace(self.case, resume=(), disturbance=Disturbance())
        return Measure(self._implementation, case, trace=self._trace)

    def control(self, number: int) -> SegmentJob | None:
        """Return the job of segment `number` with the undamaged checkpoint, if it only loads.

        Without it a load that is wrong anyway would pass for damage.
        """
        if not number or self._path is None or not only_loads(self.case, number):
            return None
        return _with_checkpoints(self.job(number), load=str(self._path / str(number - 1)))

    def killed(self, number: int, saved: CheckpointObservation) -> SegmentJob | None:
        """Return the job of segment `number` again, if the next loads a killed writer's files.

        saved: of the rank to be killed, from the run of the segment in which it was not.
        """
        if number >= len(self.case.resume) or self.case.resume[number].killed is None:
            return None
        share = self.case.resume[number].killed
        assert share is not None and self._path is not None
        save = self._path / f"{number}-killed"
        shutil.rmtree(save, ignore_errors=True)
        shutil.rmtree(listing_of(save), ignore_errors=True)
        return _with_checkpoints(
            self.job(number), save=str(save), kill=(self.victim(number), share * saved.save_seconds)
        )

    def look(self, number: int) -> None:
        """Note which files of the older checkpoint a killed writer removed.

        Files that it wrote over still exist, or there is a new one whose name begins with
        theirs. Nothing is recorded where no older checkpoint was saved.
        """
        assert self._path is not None
        left = self._path / f"{number}-killed"
        listings = listing_of(left).glob("*")
        names = {line for one in listings for line in one.read_text(encoding="utf-8").splitlines()}
        self.missing = tuple(
            name
            for name in sorted(names)
            if not any((left / name).parent.glob(f"{glob.escape(Path(name).name)}*"))
        )

    def victim(self, number: int) -> int:
        """Return the rank of a segment that is killed."""
        return self.case.seed % self._cases[number].world_size

    def damage(self, number: int) -> None:
        """Damage the checkpoint of a segment as the next one asks for."""
        if number >= len(self.case.resume) or self._path is None:
            return
        kind = self.case.resume[number].damage
        if kind != "none":
            self.done = damage(
                self._path / str(number), kind, self.case.seed, older=self._path / "older"
            )

    def remove(self) -> None:
        """Remove all checkpoints."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)

    def _loaded(self, number: int) -> Path:
        assert self._path is not None
        killed = self.case.resume[number - 1].killed is not None
        return self._path / (f"{number - 1}-killed" if killed else str(number - 1))


def without_waiting(result: JobResult) -> JobResult:
    """Return the result of a segment that only loads, with replies for the ranks that waited.

    Where some ranks refused the checkpoint and the others hung, as these wait for them, the latter
    get a reply that says so.
    """
    if result.outcome != "hung":
        return result
    replies = [decode_reply(one) for one in result.payloads if one]
    if not replies or not all(
        isinstance(one, RankObservation) and one.checkpoint.refused for one in replies
    ):
        return result
    waited = RankObservation(checkpoint=CheckpointObservation(waited=True))
    payloads = tuple(one or msgspec.msgpack.encode(waited) for one in result.payloads)
    return replace(result, outcome="finished", payloads=payloads)


def _with_checkpoints(job: SegmentJob, **changes: Any) -> SegmentJob:
    checkpoints = msgspec.structs.replace(job.checkpoints, **changes)
    return msgspec.structs.replace(job, checkpoints=checkpoints)


def damage(directory: Path, kind: DamageKind, seed: int, *, older: Path) -> str:
    """Damage one file of a checkpoint; return the damage in words ("" if none is possible).

    older: another checkpoint of the same training, from which `mix` takes a file. Empty files are
    skipped, and so are files that are equal in both checkpoints. Where one file is all that
    differs, nothing can be mixed: with it in place the older checkpoint would be there, whole.
    """
    source = random.Random(seed)
    files = _files(directory)
    if kind == "mix":
        return _mix(directory, files, older, source)
    if not files:
        return ""
    path = _hit(files, source)
    name = path.relative_to(directory)
    size = path.stat().st_size
    if kind == "remove":
        path.unlink()
        return f"{name} removed"
    if kind == "truncate":
        kept = int(source.random() * size)
        os.truncate(path, kept)
        return f"{name} cut to {kept} of {size} bytes"
    return flip(path, int(source.random() * size * 8), str(name))


def flip(path: Path, bit: int, name: str) -> str:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
    return f"bit {bit % 8} of byte {bit // 8} of {name} flipped"


def _mix(directory: Path, files: list[Path], older: Path, source: random.Random) -> str:
    """Replace a file by the one with its name in the older checkpoint."""
    others = {path.name: path for path in _files(older)}
    fitting = [
        path
        for path in files
        if path.name in others and others[path.name].read_bytes() != path.read_bytes()
    ]
    if not fitting or (len(fitting) == 1 and {path.name for path in files} == set(others)):
        return ""
    path = _hit(fitting, source)
    shutil.copyfile(others[path.name], path)
    return f"{path.relative_to(directory)} replaced by that of the checkpoint before"


def _hit(files: Sequence[Path], source: random.Random) -> Path:
    """Return the file that a byte drawn from all of them is of: mostly one that holds tensors."""
    left = source.random() * sum(path.stat().st_size for path in files)
    for path in files:
        left -= path.stat().st_size
        if left < 0:
            return path
    return files[-1]


def _files(directory: Path) -> list[Path]:
    """Return the files of the directory that are not empty."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
