"""Bundle of one step, violated or recorded: JSON and safetensors, and no code.

    step-1501/
      bundle.json         format, environment, the verdict if it was judged
      rank-0.json         what rank 0 saw, but the tensors
      rank-0.safetensors  them: before.*, reduced, clipped, gradient, after.*, each by parameter;
                          with reference= inputs, random states and buffers of the model too

Each rank writes its own files. Where ranks have disks of their own, they are gathered by hand.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from ..case.codec import parse
from ..case.schema import MAX_WORLD_SIZE
from ..checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from ..checkpoint.source import Stored
from ..contract.semantics import Semantics
from ..errors import UsageError
from ..machine.devices import CPU
from ..protocol.verdicts import Judgement
from ..run.execute.environment import environment
from ..run.records.journal import encode
from ..run.records.records import Environment
from .record.calls import StoredForward, restored, stored
from .record.ranks import AllRanks
from .record.step_record import ELSEWHERE, Key, Observed, StepSummary

FORMAT = 4
NAME = "bundle.json"

T = TypeVar("T")

_environment = cache(environment)


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """Content of bundle.json."""

    attached: int
    """The format of the bundle."""
    world_size: int
    number: int
    what: str
    environment: Environment
    judgement: Judgement | None = None
    """None: the step was recorded, and not judged."""
    semantics: dict[str, str] = {}

    @property
    def declared(self) -> Semantics:
        """The declared semantics."""
        return Semantics(**self.semantics)  # type: ignore[arg-type]


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """Content of rank-N.json.

    calls: of the model, None where they cannot be stored; device: of the run, such as "cuda:1".
    """

    summary: StepSummary
    calls: tuple[StoredForward, ...] | None = ()
    device: str = CPU


def free_place(wanted: Path) -> Path:
    """Return a folder that does not exist yet: the one wanted, or it with a number at its end."""
    place, again = wanted, 1
    while place.exists():
        again += 1
        place = wanted.with_name(f"{wanted.name}-{again}")
    return place


def write(
    place: Path, observed: Observed, judgement: Judgement, semantics: Semantics, ranks: AllRanks
) -> None:
    """Write the bundle; every rank calls this. bundle.json comes last and makes it complete."""
    write_rank(place, observed)
    ranks.gather(b"")
    if ranks.rank == 0:
        write_head(place, observed, judgement, semantics)


def write_rank(place: Path, observed: Observed) -> None:
    """Write what one rank observed."""
    summary = observed.summary
    place.mkdir(mode=0o700, parents=True, exist_ok=True)  # it can hold samples of the training
    tensors = {
        f"{what}/{summary.pieces[number].name}/{number}": tensor
        for (what, number), tensor in observed.values.items()
    }
    calls, more = stored(observed.forwards)
    tensors |= more
    tensors |= {f"buffer/{name}": one.cpu().contiguous() for name, one in observed.buffers.items()}
    write_safetensors(place / f"rank-{summary.rank}.safetensors", tensors)
    (place / f"rank-{summary.rank}.json").write_bytes(
        encode(Rank(summary=summary, calls=calls, device=observed.device))
    )


def write_head(
    place: Path, observed: Observed, judgement: Judgement | None, semantics: Semantics
) -> None:
    """Write bundle.json, from what one of the ranks observed."""
    bundle = Bundle(
        attached=FORMAT,
        world_size=observed.summary.world_size,
        number=observed.summary.number,
        what=observed.summary.what,
        environment=_environment(observed.device),
        judgement=judgement,
        semantics={name: str(one) for name, one in vars(semantics).items()},
    )
    (place / NAME).write_bytes(msgspec.json.format(encode(bundle), indent=2))


def is_bundle(path: Path) -> bool:
    """Return True if a path names a bundle: its folder, or the bundle.json in it."""
    return path.name == NAME or (path / NAME).is_file()


def read(path: Path) -> tuple[Bundle, list[Observed]]:
    """Read a bundle and each rank's record. Tensors are mapped, not loaded.

    Raises UsageError, with what is wrong where, for what is missing, damaged or of another format.
    """
    folder = path.parent if path.name == NAME else path
    bundle = _json(folder / NAME, Bundle)
    if bundle.attached != FORMAT:
        raise UsageError(
            f"{path} has bundle format {bundle.attached}; this zerocheck knows format {FORMAT}"
        )
    if not 1 <= bundle.world_size <= MAX_WORLD_SIZE:
        raise UsageError(
            f"{path} is damaged: its world size is {bundle.world_size} "
            f"(allowed: 1 to {MAX_WORLD_SIZE})"
        )
    return bundle, [read_rank(folder, rank, bundle.world_size) for rank in range(bundle.world_size)]


def read_rank(folder: Path, rank: int, world_size: int) -> Observed:
    """Read what one rank observed. Raises UsageError as `read` does."""
    path = folder / f"rank-{rank}.safetensors"
    for one in (path, path.with_suffix(".json")):
        if not one.is_file():
            raise UsageError(
                f"there is no {one}: the bundle has two files for each of its {world_size} ranks, "
                "on the machine of that rank; copy them here"
            )
    record = _json(path.with_suffix(".json"), Rank)
    _check(path.with_suffix(".json"), record.summary, rank, world_size)
    file = SafetensorsFile(path)
    if file.findings:
        worst = file.findings[0]
        raise UsageError(f"{path} is damaged: {worst.where}: {worst.detail}")
    values: dict[Key, torch.Tensor] = {}
    buffers, others = {}, {}
    for key in file.tensors:
        name = str(key[0])
        what, _, rest = name.partition("/")
        if what == "buffer":
            buffers[rest] = file.read(key)
        elif what.startswith("forward "):
            others[name] = file.read(key)
        else:
            values[what, _number(path, record.summary, name, file.tensors[key])] = file.read(key)
    if record.calls is None:
        return Observed(record.summary, values, device=record.device)
    try:
        return Observed(
            record.summary, values, restored(record.calls, others), buffers, record.device
        )
    except KeyError as error:
        raise UsageError(f"{path} is damaged: it has no tensor {error}") from None


def _check(path: Path, summary: StepSummary, rank: int, world_size: int) -> None:
    """Raise UsageError for data of one rank that are inconsistent."""
    count = len(summary.pieces)
    wrong = ""
    if (summary.rank, summary.world_size) != (rank, world_size):
        wrong = f"it is of rank {summary.rank} of {summary.world_size}, not {rank} of {world_size}"
    elif {len(summary.before), len(summary.after)} != {count}:
        wrong = f"it has {count} pieces and another number of step counts"
    for piece in summary.pieces:
        if not isinstance(getattr(torch, piece.dtype.removeprefix("torch."), None), torch.dtype):
            wrong = f"unknown dtype {piece.dtype!r}"
        elif not ELSEWHERE <= piece.group < len(summary.options):
            wrong = f"{piece.name} is in group {piece.group} of {len(summary.options)}"
    if wrong:
        raise UsageError(f"{path} is damaged: {wrong}")


def _number(path: Path, summary: StepSummary, name: str, tensor: Stored) -> int:
    """Return the number of the piece that a tensor belongs to, from the end of its name.

    Raises UsageError if there is none, or one of another size.
    """
    number = name.rpartition("/")[2]
    at = int(number) if number.isascii() and number.isdigit() and len(number) < 9 else -1
    if not 0 <= at < len(summary.pieces):
        raise UsageError(f"{path} is damaged: {name!r} names no piece of {len(summary.pieces)}")
    if tensor.numel != math.prod(summary.pieces[at].local):
        raise UsageError(
            f"{path} is damaged: {name!r} has {tensor.numel} elements, and its piece the shape "
            f"{list(summary.pieces[at].local)}"
        )
    return at


def _json(path: Path, kind: type[T]) -> T:
    try:
        raw: Any = parse(path.read_bytes(), source=str(path))
        return msgspec.convert(raw, kind, strict=False)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is not of a bundle: {error}") from None
