"""Options of `zerocheck faults`, checked before anything starts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..catalogue import check_spelling, extra_of, missing
from ..errors import UsageError, did_you_mean, unknown
from ..faults.fault import Fault
from ..faults.registry import FAULTS, NAMED_FAULTS
from ..machine.devices import CPU
from ..machine.launcher import has_launcher
from ..protocol.verdicts import EQUIVALENCE, MEMORY, OBLIGATIONS, RESUME, Obligation
from ..run.known_issues.entries import NONE
from ..run.plan.options import RunOptions


@dataclass(frozen=True, kw_only=True)
class MatrixOptions:
    """Options of the kill matrix.

    names: faults, none for all; implementation: what faults that can be injected are injected
    into, in place of the parents of the catalogue; shrink: look for the smallest case that shows
    each, at the end; without_names: look for no known cause, so that a row shows what attribution
    says by itself; the others as for RunOptions. Raises UsageError for
    what cannot be used, and under a launcher.
    """

    names: tuple[str, ...] = ()
    implementation: str | None = None
    profile: str = "ci"
    world_sizes: tuple[int, ...] = ()
    seed: int = 0
    max_cases: int | None = None
    obligations: tuple[Obligation, ...] = OBLIGATIONS
    report_dir: Path = field(default=Path("zerocheck-report"))
    shrink: bool = False
    without_names: bool = False
    device: str = CPU
    backend: str | None = None
    faults: tuple[Fault, ...] = field(init=False, default=())
    """The rows of the matrix."""

    def __post_init__(self) -> None:
        if has_launcher():
            raise UsageError(
                "zerocheck faults starts its own ranks: start it without torchrun; one fault runs "
                "on the ranks of torchrun by its name, as in `torchrun ... -m zerocheck run "
                "fsdp2+gather-stale`"
            )
        if self.implementation is not None:
            check_spelling(self.implementation)
            faults = _injected(self.names, self.implementation)
        else:
            faults = _chosen(self.names)
        if self.device != CPU:
            faults = _told_on_gpus(faults)
        object.__setattr__(self, "faults", tuple(faults))
        self.run(self.faults[0])  # checks the rest

    def run(self, fault: Fault) -> RunOptions:
        """Return the options of the run whose cases one row takes.

        They include checkpoints if it is a fault of these.
        """
        sets: tuple[tuple[Obligation, ...], ...] = (RESUME, MEMORY)
        judged = next((one for one in sets if fault.obligation in one), EQUIVALENCE)
        chosen = tuple(one for one in self.obligations if one in judged)
        return RunOptions(
            implementations=(fault.where,),
            profile=self.profile,
            world_sizes=self.world_sizes,
            seed=self.seed,
            max_cases=self.max_cases,
            obligations=chosen or self.obligations,
            report_dir=self.report_dir,
            known_issues=(NONE,),
            device=self.device,
            backend=self.backend,
        )


def _told_on_gpus(faults: list[Fault]) -> list[Fault]:
    """Return the faults without those that only `peak` shows. Raises UsageError if none is left."""
    left = [fault for fault in faults if fault.obligation != "peak"]
    if not left:
        raise UsageError(f"{faults[0].name} is caught by peak, which is checked on the cpu alone")
    return left


def _chosen(names: Iterable[str]) -> list[Fault]:
    """Return faults by name, all but those of extras for no names.

    Raises UsageError for another name, and for one whose extra is not installed.
    """
    for name in names:
        if name not in NAMED_FAULTS:
            raise UsageError(
                f"unknown fault {name!r}{did_you_mean(name, NAMED_FAULTS)} "
                "(`zerocheck faults --list` shows all)"
            )
        extra = extra_of(NAMED_FAULTS[name].where)
        reason = missing(extra) if extra else None
        if reason is not None:
            raise UsageError(f"{name} {reason}")
    return [NAMED_FAULTS[name] for name in dict.fromkeys(names)] or list(FAULTS.values())


def _injected(names: Iterable[str], implementation: str) -> list[Fault]:
    """Return the faults injected at the collectives, once each, on the implementation.

    names: what follows the plus in `IMPLEMENTATION+FAULT`. Raises UsageError for another.
    """
    rows: dict[str, Fault] = {}
    for fault in FAULTS.values():
        _, plus, injection = fault.where.rpartition("+")
        if plus and injection not in rows:
            where = f"{implementation}+{injection}"
            rows[injection] = replace(fault, name=injection, where=where, parent=implementation)
    for name in names:
        if name not in rows:
            raise unknown("fault to inject", name, rows)
    return [rows[name] for name in dict.fromkeys(names)] or list(rows.values())
