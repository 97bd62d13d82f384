"""Options of a run, checked before anything starts. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ...case.features import FEATURES
from ...case.schema import MAX_WORLD_SIZE, OptimizerKind
from ...catalogue import BUILT_IN, check_factory, check_spelling
from ...errors import UsageError, did_you_mean, unknown
from ...machine.devices import CPU, check_device
from ...machine.hosts import Hosts
from ...machine.launcher import has_launcher
from ...protocol.verdicts import EQUIVALENCE, OBLIGATION_SETS, OBLIGATIONS, Obligation
from ..known_issues.entries import KnownIssue, load
from .profiles import PROFILES
from .run_shard import RunShard

Ranks = Literal["processes", "torchrun"]
RANKS: tuple[Ranks, ...] = get_args(Ranks)
BACKENDS = ("gloo", "nccl")
SEED_LIMIT = 1 << 62

OPTIMIZERS: tuple[OptimizerKind, ...] = tuple(
    one for one in get_args(OptimizerKind) if one != "user"
)
"""Names of the optimizers that zerocheck brings. A class of the user's goes by its location."""
NOT_JUDGED = {
    "lbfgs": "it calls the model several times in one step",
    "lion": "torch has none; name the class that you have, path/to/file.py:Lion",
    "sparseadam": "it takes sparse gradients",
}
"""Optimizers that users ask for, with the reason for which none is judged."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run. Values left out come from the profile.

    implementations: built-in names, package.module:Name, path/to/file.py:Name or paths of DeepSpeed
    configs; world_sizes: numbers of ranks to draw from; max_cases: cases per implementation at
    most; features: only cases that have all of them; model: the user's own,
    `path/to/file.py:factory`, in place of drawn ones; optimizer: of every case, its
    name or the location of a class of the user's, None for the one that an implementation fixes,
    else AdamW; known_issues: files of known issues in addition to
    ours, and "none" for not ours; shrink: look for the smallest case of each finding; timeout:
    seconds that a collective of a launcher's ranks may take; device: cpu, cuda or cuda:N; backend:
    of the process group on GPUs, gloo or nccl, None for what fits; hosts: of those ranks, as in a
    case, None for any; shard: the part of the cases to take, None for all; reuse: journals of other
    runs, whose outcomes are taken. Raises UsageError for values that cannot be used.
    """

    implementations: tuple[str, ...] = tuple(BUILT_IN)
    profile: str = "quick"
    world_sizes: tuple[int, ...] = ()
    seed: int = 0
    max_cases: int | None = None
    obligations: tuple[Obligation, ...] = EQUIVALENCE
    features: tuple[str, ...] = ()
    report_dir: Path = field(default=Path("zerocheck-report"))
    ranks: Ranks = "processes"
    device: str = CPU
    backend: str | None = None
    known_issues: tuple[str, ...] = ()
    shrink: bool = True
    model: str | None = None
    optimizer: str | None = None
    timeout: float = 60.0
    hosts: Hosts | None = None
    shard: RunShard | None = None
    reuse: tuple[Path, ...] = ()
    issues: tuple[KnownIssue, ...] = field(init=False, default=())
    """What stands in the files of known issues."""
    world_sizes_given: bool = field(init=False, default=False)
    """Whether the user chose them; otherwise they are the profile's."""

    def __post_init__(self) -> None:
        for name in self.implementations:
            check_spelling(name)
        if self.profile not in PROFILES:
            raise unknown("profile", self.profile, PROFILES)
        for name in self.features:
            if name not in FEATURES:
                raise UsageError(
                    f"unknown feature {name!r}{did_you_mean(name, FEATURES)} "
                    "(`zerocheck list` shows all)"
                )
        if self.optimizer in NOT_JUDGED:
            reason, allowed = NOT_JUDGED[self.optimizer], ", ".join(sorted(OPTIMIZERS))
            raise UsageError(
                f"optimizer {self.optimizer!r} is not judged: {reason} (allowed: {allowed})"
            )
        if self.optimizer is not None and ":" in self.optimizer:
            check_factory(self.optimizer, "optimizer")
        elif self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)
        for obligation in self.obligations:
            if obligation not in OBLIGATIONS:
                raise unknown("obligation", obligation, OBLIGATIONS)
        if self.model is not None:
            check_factory(self.model)
        check_ranks(self.ranks)
        check_device(self.device)
        check_backend(self.backend, self.device)
        for size in self.world_sizes:
            _check_integer("world size", size, 1, MAX_WORLD_SIZE)
        check_timeout(self.timeout)
        _check_integer("seed", self.seed, 0, SEED_LIMIT - 1)
        if self.max_cases is not None:
            _check_integer("max cases", self.max_cases, 1, 1 << 31)
        object.__setattr__(self, "world_sizes_given", bool(self.world_sizes))
        self._set("issues", load(self.known_issues))
        self._fill_in()

    def _fill_in(self) -> None:
        """Set defaults for empty options; repeated values count once."""
        profile = PROFILES[self.profile]
        self._set("implementations", dict.fromkeys(self.implementations or BUILT_IN))
        self._set("world_sizes", dict.fromkeys(self.world_sizes or profile.world_sizes))
        given = set(self.obligations)
        self._set("obligations", [o for o in OBLIGATIONS if o in given] or EQUIVALENCE)
        self._set("features", dict.fromkeys(self.features))

    def _set(self, name: str, values: Iterable[object]) -> None:
        object.__setattr__(self, name, tuple(values))

    def leaving_out(self, obligations: Collection[Obligation]) -> RunOptions:
        """Return these options without the given obligations."""
        left = copy(self)
        left._set("obligations", [o for o in self.obligations if o not in obligations])
        return left

    @property
    def cases(self) -> int:
        """Number of cases per implementation; a covering array may take more."""
        count = PROFILES[self.profile].cases
        return count if self.max_cases is None else min(count, self.max_cases)


def check_ranks(given: str) -> None:
    """Raise UsageError for an unknown kind of ranks."""
    if given not in RANKS:
        raise unknown("kind of ranks", given, RANKS)


def choose_ranks(given: str | None) -> Ranks:
    """Return the requested kind of ranks, else a launcher's if it started this process.

    Raises UsageError for an unknown kind.
    """
    if given is None:
        return "torchrun" if has_launcher() else "processes"
    check_ranks(given)
    return "torchrun" if given == "torchrun" else "processes"


def check_timeout(given: float) -> None:
    """Raise UsageError for a number of seconds that cannot be a timeout."""
    if not 1.0 <= given <= 86_400.0:
        raise UsageError(f"--timeout {given:g} is out of range (allowed: 1 to 86400 seconds)")


def check_backend(given: str | None, device: str) -> None:
    """Raise UsageError for an unknown backend, or one that this device does not have."""
    if given is None:
        return
    if given not in BACKENDS:
        raise unknown("backend", given, BACKENDS)
    if given == "nccl" and device == CPU:
        raise UsageError("--backend nccl is for GPUs, and the device is the cpu (allowed: gloo)")


def parse_obligations(text: str) -> tuple[Obligation, ...]:
    """Parse `"gradient,update"` or `"equivalence"`. Raises UsageError for other names."""
    chosen: list[Obligation] = []
    for part in (part.strip() for part in text.split(",")):
        if part in OBLIGATION_SETS:
            chosen += OBLIGATION_SETS[part]
            continue
        known = [obligation for obligation in OBLIGATIONS if obligation == part]
        if not known:
            raise unknown("obligation", part, [*OBLIGATION_SETS, *OBLIGATIONS])
        chosen += known
    return tuple(chosen)


def _check_integer(what: str, given: object, lowest: int, highest: int) -> None:
    if isinstance(given, bool) or not isinstance(given, int):
        raise UsageError(f"{what} {given!r} is not a whole number")
    if not lowest <= given <= highest:
        raise UsageError(f"{what} {given} is out of range (allowed: {lowest} to {highest})")
