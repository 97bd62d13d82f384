"""Harness around a checkpoint: before the load, at the load, at the save."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..case.schema import Case, Optimizer
from ..case.segments import in_background, samples_read
from ..contract.implementation import KEPT, Implementation, Kept, Saving
from ..contract.shard import OF_NO_STATE, Shard
from ..contract.start import scramble
from ..errors import UsageError, did_you_mean, unknown
from ..machine.devices import drawn_from, random_state
from ..optimizers import SCALAR_NAMES, factored
from ..protocol.jobs import SegmentCheckpoints
from ..protocol.observations import CheckpointObservation
from .randomness import ON_CPU
from .recorder import Recorder, state_roles

NO_CHECKPOINTS = SegmentCheckpoints()


def resumes(implementation: type[Implementation]) -> bool:
    """Return True if the implementation can save and load checkpoints."""
    return (
        implementation.save is not Implementation.save
        and implementation.load is not Implementation.load
    )


def exports(subject: Implementation) -> bool:
    """Return True if the implementation can export its library's state."""
    return subject.exports and type(subject).export is not Implementation.export


def kept(name: str, implementation: type[Implementation]) -> tuple[Kept, ...]:
    """Return the further contents that the implementation's checkpoints keep.

    Raises UsageError for a word that does not exist.
    """
    if isinstance(implementation.keeps, str):
        raise UsageError(
            f"{name}: `keeps` is the string {implementation.keeps!r}; needed is a tuple of strings"
        )
    for word in implementation.keeps:
        if word not in KEPT:
            raise unknown(f"word in {name}.keeps", word, KEPT)
    return tuple(word for word in KEPT if word in implementation.keeps)


class Position:
    """Loader state of a rank, as far as checkpoints need it: the samples read so far."""

    def __init__(self, samples: int = 0) -> None:
        self.samples = samples

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.samples = int(state["samples"])


class Checkpoints:
    """Checkpoints that one rank reads and writes in one training segment, by its job."""

    def __init__(
        self,
        case: Case,
        segment: SegmentCheckpoints = NO_CHECKPOINTS,
        *,
        rank: int = 0,
        device: torch.device = ON_CPU,
    ) -> None:
        self.case = case
        self.segment = segment
        self.rank = rank
        self._device = device
        self._samples: list[int] = []
        self._random: dict[str, bytes] = {}
        self._seconds = 0.0
        self._loader = Position()
        self._saving: Saving | None = None
        self._began = 0.0

    def observation(self) -> CheckpointObservation:
        """Return what was observed of the segment's checkpoints."""
        return CheckpointObservation(
            samples=tuple(self._samples), random=self._random, save_seconds=self._seconds
        )

    @property
    def loads(self) -> bool:
        """True if the segment begins with a load."""
        return bool(self.segment.load)

    def scramble(self, model: nn.Module) -> None:
        """Overwrite the model's weights and buffers, so that a load that omits some is detected."""
        if self.loads:
            scramble(model, self.case)

    def load(self, subject: Implementation) -> None:
        """Load into an implementation that was just built."""
        subject.load(self.segment.load, self._loader)
        self._samples.append(self._loader.samples)
        self._random["loaded"] = self._random_state()

    def save_older(self, subject: Implementation, recorder: Recorder) -> None:
        """Write the checkpoint that the next one is to replace, if the case has one.

        It is the only one that may be saved before the first step.
        """
        directory = self.segment.older or (
            self.segment.save if self.case.resume and self.case.resume[0].over else ""
        )
        if directory:
            self._at(self.case.training.first)
            saving = subject.save(directory, self._loader)
            if saving is not None:
                saving.result()
            recorder.take(
                self.case.training.first - 1, "saved", subject.shards(), state_roles(self.case)
            )
            if self.segment.kill is not None:
                self._list(Path(directory))

    def _list(self, directory: Path) -> None:
        """Record the files of the older checkpoint in a place that outlives a killed rank."""
        names = [str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()]
        sidecar = listing_of(directory)
        sidecar.mkdir(exist_ok=True)
        (sidecar / str(self.rank)).write_text("\n".join(names), encoding="utf-8")

    def save(self, subject: Implementation, recorder: Recorder) -> None:
        """Write the segment's checkpoint, or begin to; record state that saving must not change."""
        if not self.segment.save:
            return
        last = self.case.training.steps
        if exports(subject):
            roles = state_roles(self.case) - {"master"}
            whole = _whole(subject.export(), roles, self.case.optimizer)
            recorder.take(last - 1, "export", whole, roles)
        self._at(last)
        self._random["saved"] = self._random_state()
        self._samples.append(self._loader.samples)
        self._began = time.monotonic()
        self._arm()
        self._saving = subject.save(self.segment.save, self._loader)
        recorder.take(last - 1, "saved", subject.shards(), state_roles(self.case))
        if not in_background(self.case):
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint is written."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None
        if self._began:
            self._seconds, self._began = time.monotonic() - self._began, 0.0
            if self.segment.kill is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _arm(self) -> None:
        """Arrange for the system to kill this rank after a delay: no code of ours runs then."""
        if self.segment.kill is not None and self.segment.kill[0] == self.rank:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, self.segment.kill[1]))

    def _random_state(self) -> bytes:
        """Return the state of the generator from which forwards draw."""
        return drawn_from(random_state(self._device), self._device)

    def _at(self, step: int) -> None:
        """Set the loader to its position before a step."""
        read = samples_read(self.case, step - self.case.training.first)
        self._loader.samples = self.segment.samples + read


def listing_of(directory: Path) -> Path:
    """Return the folder next to a checkpoint where each rank lists the older one's files."""
    return directory.with_name(f"{directory.name}.files")


def _whole(
    exported: Mapping[tuple[str, str], torch.Tensor], roles: Collection[str], options: Optimizer
) -> list[Shard]:
    """Return exported tensors as whole shards. Raises UsageError for an unknown role."""
    shards = []
    of_parameters = factored(options)
    for (name, role), tensor in exported.items():
        if role in SCALAR_NAMES:
            continue  # they follow from the step count
        if role not in roles:
            raise unknown("role in what export() gave", role, sorted(roles))
        shape = tensor.shape
        if of_parameters and role not in OF_NO_STATE and (name, "parameter") in exported:
            shape = exported[name, "parameter"].shape
        shards.append(Shard(name, role, tensor.detach(), tuple(shape)))
    return shards


def gist(error: BaseException) -> str:
    """Return an error's type and message, shortened to 500 characters.

    An error that quotes the tracebacks of ranks, as dcp's does, is shortened to its text before
    them and the error at the end of the first one.
    """
    message, quotes, rest = str(error).partition("Traceback (most recent call last)")
    if quotes:
        ends = (line for line in rest.splitlines()[1:] if line and not line.startswith(" "))
        message = ": ".join(filter(None, (message.strip(), next(ends, ""))))
    return f"{type(error).__name__}: {message}"[:500]


TIE_LOST = "parameter of its own has lost the tie"
"""Last words of the error of an implementation that asks for a tied parameter by its other name."""


class MissingStateError(KeyError):
    """Raised when `restore` asks for a key that the state does not have.

    Its names are those of `model.named_parameters()` of the model that the implementation was made
    with, before it was wrapped. A tied parameter stands there once, under its first name.
    """

    def __str__(self) -> str:
        return str(self.args[0])


class RestoreState(dict[tuple[str, str], torch.Tensor]):
    """Mapping {(name, role): whole tensor}; a missing key raises MissingStateError."""

    def __init__(self, state: Mapping[tuple[str, str], torch.Tensor], model: nn.Module) -> None:
        """Wrap the state. model: the unwrapped model that the state belongs to."""
        super().__init__(state)
        first: dict[nn.Parameter, str] = {}
        self._tied_to: dict[str, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if first.setdefault(parameter, name) != name:
                self._tied_to[name] = first[parameter]

    def __missing__(self, key: Any) -> torch.Tensor:
        raise MissingStateError(self._message(key))

    def _message(self, key: Any) -> str:
        if not (isinstance(key, tuple) and len(key) == 2):
            return f"the state has keys (name, role), not {key!r}"
        name, role = key
        if name in self._tied_to:
            return (
                f"{name!r} is tied to {self._tied_to[name]!r} in the model that was given, and is "
                f"in the state under that name only: an implementation that has it as a {TIE_LOST}"
            )
        names = dict.fromkeys(known for known, _ in self)
        if name not in names:
            nearest = did_you_mean(str(name), names)
            return f"no {name!r} in the state{nearest} (names of the model before it was wrapped)"
        roles = [one for known, one in self if known == name]
        if roles == ["parameter"]:
            return f"{name!r} is frozen: its state is the parameter alone, without {role!r}"
        nearest = did_you_mean(str(role), roles)
        return f"{name!r} has no {role!r} in the state{nearest} (it has {', '.join(roles)})"
