"""Comparison of the same step in two jobs: round-off or a bug, tensor by tensor.

Two jobs on other numbers of ranks, with other sharding or kernels, never give the same bits. So
their steps are not held against each other: each is held against its own reference, and what both
say is compared. They begin with the same state, bit for bit; each job's update follows from its own
gradient, within derived bounds; and with the model each job's gradient is that of its own samples,
and the sums of both jobs' local gradients agree. What is left of a difference is then round-off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from ..errors import ExitCode, UsageError, few
from ..foreign_text import one_line
from ..optimizers import STATES
from ..protocol.observations import Entry
from .checks.script_changes import REPORTED
from .record.run_parameters import RunParameter, run_parameters
from .record.step_record import AFTER, BEFORE, GroupOptions, Observed
from .replay import ReplayedBundle, replay
from .text import first_of
from .verdict.reduced_gradient import enclosure, put

SHOWN = 10
"""Tensors in the table, at most."""


class Job:
    """Step of one of the two jobs."""

    def __init__(self, name: str, replayed: ReplayedBundle) -> None:
        self.name = name
        self.replayed = replayed
        summaries = [rank.summary for rank in replayed.ranks]
        self.tensors = {one.name: one for one in run_parameters(summaries)}
        self._pieces: dict[str, list[tuple[Observed, int, Entry]]] = {}
        for rank in replayed.ranks:
            for number, piece in enumerate(rank.summary.pieces):
                self._pieces.setdefault(piece.name, []).append((rank, number, piece.entry))

    def whole(self, what: str, tensor: RunParameter) -> torch.Tensor | None:
        """Put a tensor together from the shards of all ranks: flat float32; None without any."""
        found = None
        for rank, number, entry in self._pieces[tensor.name]:
            value = rank.gradient(number)
            if what != "gradient":
                value = rank.values.get((what, number))
            if value is not None:
                if found is None:
                    found = torch.zeros(torch.Size(tensor.shape).numel())
                put(found, entry, value.float())
        return found


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison.

    differences: what the two jobs do differently, in sentences; unjudged: why gradients were not
    judged, or ""; rows: (tensor, relative difference of the gradients, of the parameters after).
    """

    jobs: tuple[Job, Job]
    states: int
    differences: tuple[str, ...]
    unjudged: str
    rows: tuple[tuple[str, float, float], ...]

    @property
    def exit_code(self) -> ExitCode:
        """FAILS if one of the steps is wrong, or the two are not the same step."""
        wrong = any(job.replayed.judgement.violations for job in self.jobs)
        return ExitCode.FAILS if wrong or self.differences else ExitCode.HOLDS

    @property
    def text(self) -> str:
        """Report of the comparison: both steps, the largest differences, and the verdict."""
        lines = []
        for job in self.jobs:
            bundle = job.replayed.bundle
            ranks = f"{bundle.world_size} rank{'s' if bundle.world_size > 1 else ''}"
            what = f"step {bundle.number} of {job.replayed.path}, {bundle.what} on {ranks}"
            lines.append(f"{job.name}: {what}")
            lines.append(f"   {self._of_job(job)}")
        lines.append(f"both begin with the same state: {self.states} tensors, bit for bit")
        lines += self.differences
        names = ("tensor", "gradients differ by", "parameters after by")
        rows = sorted(self.rows, key=lambda row: -max(row[1:]))[:SHOWN]
        shown = [(name, f"{gradient:.2e}", f"{after:.2e}") for name, gradient, after in rows]
        lines += ["", tabulate(shown, names, tablefmt="simple", disable_numparse=True), ""]
        if len(self.rows) > SHOWN:
            lines.append(f"and {len(self.rows) - SHOWN} more tensors that differ by less")
        return "\n".join([*map(str.rstrip, "\n".join(lines).splitlines()), self.verdict])

    @property
    def verdict(self) -> str:
        """One sentence."""
        wrong = [job.name for job in self.jobs if job.replayed.judgement.violations]
        if wrong:
            return f"a bug: the step of {' and '.join(wrong)} is wrong"
        if self.differences:
            return "not the same step: the two jobs do something else"
        largest = max((max(row[1:]) for row in self.rows), default=0.0)
        if self.unjudged:
            text = "each job's update is right for its own gradient; gradients differ by up to "
            return f"{text}{largest:.2e} of their size and are not judged: {self.unjudged}"
        return f"round-off: both steps are right, and differ by up to {largest:.2e} of their size"

    @staticmethod
    def _of_job(job: Job) -> str:
        judgement = job.replayed.judgement
        if judgement.violations:
            first = first_of(judgement)
            return one_line(f"VIOLATED {first.obligation}: {first.explanation}")
        return f"{', '.join(o for o, s in judgement.statuses.items() if s == 'holds')} hold"


def compare_bundles(
    one: Path, other: Path, model: str | None = None, device: str | None = None
) -> Comparison:
    """Compare the step of two bundles.

    model, device: as in `replay`. Raises UsageError for bundles that are not whole, of other
    models, or that do not begin with the same state.
    """
    first = Job("A", replay(one, model, device))
    second = Job("B", replay(other, model, device))
    tensors, others = first.tensors, second.tensors
    for name in tensors.keys() ^ others.keys():
        raise UsageError(f"the two jobs train other models: only one has the parameter {name}")
    for name, tensor in tensors.items():
        if tensor.shape != others[name].shape:
            shapes = f"{list(tensor.shape)} and {list(others[name].shape)}"
            raise UsageError(f"the two jobs train other models: {name} has the shapes {shapes}")
    states = _check_states(first, second, tensors)
    unjudged = first.replayed.local.reason or second.replayed.local.reason
    differences = [*_options(first, second)]
    if not unjudged:
        differences += [*_samples(first, second, tensors), *_changes(first, second)]
    rows = tuple(
        (name, *(_distance(job_a, job_b) for job_a, job_b in pairs))
        for name, tensor in tensors.items()
        if (pairs := [*_pairs(first, second, tensor)])
    )
    return Comparison((first, second), states, tuple(differences), unjudged, rows)  # type: ignore[arg-type]


def _check_states(one: Job, other: Job, tensors: dict[str, RunParameter]) -> int:
    """Return the number of tensors of the state. Raises UsageError if they are not the same."""
    count, wrong = 0, []
    for role in ("parameter", *STATES):
        for name, tensor in tensors.items():
            mine = one.whole(f"{BEFORE}.{role}", tensor)
            theirs = other.whole(f"{BEFORE}.{role}", tensor)
            if mine is None and theirs is None:
                continue
            count += 1
            if mine is None or theirs is None or not torch.equal(mine, theirs):
                wrong.append(f"{role} of {name}")
    if wrong:
        raise UsageError(
            f"the two steps do not begin with the same state: {few(wrong)}, of {count} "
            "tensors; load both jobs from one checkpoint, and compare the first step after it"
        )
    return count


def _options(one: Job, other: Job) -> Iterator[str]:
    """Yield options of the optimizer that are not the same in both jobs, by parameter."""
    mine, theirs = _options_by_name(one), _options_by_name(other)
    for field in GroupOptions.__struct_fields__:
        names = [
            name
            for name, options in mine.items()
            if name in theirs and getattr(options, field) != getattr(theirs[name], field)
        ]
        if names and field != "rates":
            was, now = getattr(mine[names[0]], field), getattr(theirs[names[0]], field)
            yield f"{field} of {few(names)} is {was!r} in A and {now!r} in B"


def _options_by_name(job: Job) -> dict[str, GroupOptions]:
    return {
        piece.name: rank.summary.options[piece.group]
        for rank in job.replayed.ranks
        for piece in rank.summary.pieces
        if piece.group >= 0
    }


def _samples(one: Job, other: Job, tensors: dict[str, RunParameter]) -> Iterator[str]:
    """Yield a sentence if the local gradients of the two jobs do not add up to the same."""
    wrong = []
    for name, tensor in tensors.items():
        if not tensor.trains:
            continue
        mine, theirs = (
            enclosure(job.local.total(tensor), tensor, job.ranks[0].summary, job.bundle.declared)
            for job in (one.replayed, other.replayed)
        )
        if bool(((mine.exact - theirs.exact).abs() > mine.bound + theirs.bound).any()):
            wrong.append(name)
    if wrong:
        yield (
            f"the samples or the losses are not the same: local gradients of {few(wrong)} add "
            "up to something else in A and in B"
        )


def _changes(one: Job, other: Job) -> Iterator[str]:
    """Yield a sentence if scripts change gradients in other ways after their reduction."""
    done = [job.replayed.judgement.unjudged.get("gradient", "") for job in (one, other)]
    mine, theirs = (text.removeprefix(f"{REPORTED}: ") or "it changes nothing" for text in done)
    if mine != theirs:
        yield f"{REPORTED} is not the same: in A {mine}, in B {theirs}"


def _pairs(
    one: Job, other: Job, tensor: RunParameter
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the gradients of both jobs, and their parameters after the step."""
    for what in ("gradient", f"{AFTER}.parameter"):
        mine, theirs = one.whole(what, tensor), other.whole(what, tensor)
        if mine is None or theirs is None:
            return
        yield mine, theirs


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of an element, relative to the largest one."""
    size = float(torch.maximum(one.abs(), other.abs()).max()) if one.numel() else 0.0
    return float((one - other).abs().max()) / size if size else 0.0
