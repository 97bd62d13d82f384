"""Replay of the bundle of a checked step: one process, no ranks.

No code of the user runs, unless a model is named, to judge gradients too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import ExitCode, UsageError
from ..machine.devices import CPU, kind_of, placed
from ..protocol.verdicts import Judgement, Violation
from ..ranks.device import check_there
from ..user_code import import_user_code
from .bundle import Bundle, read
from .checks.cross_rank_checks import judge_all_ranks
from .checks.joint_context import JointContext
from .checks.rank_checks import judge_rank
from .checks.script_changes import ScriptChanges, change_of
from .checks.slices import SliceContext
from .record.ranks import Total
from .record.ranks_own import own_of_ranks
from .record.run_parameters import RunParameter, run_parameters
from .record.step_record import ACCUMULATED, GIVEN, Observed, Point
from .text import violated_text
from .verdict.exchange import with_gradient
from .verdict.full_gradient import Full, but_for_a_factor, joined, why_not, with_weights
from .verdict.reduced_gradient import (
    NO_FACTOR,
    Judged,
    ScriptFactor,
    compare_shards,
    exhibit,
    faults,
    first_right,
    put,
    script_factor,
    share_of,
    total_of,
    violation,
    worst,
)
from .verdict.reference import Local, Reference

FULL = ("gradient", "loss")
"""Obligations that are judged with a model only."""


class LocalGradients(NamedTuple):
    """Local gradients of all ranks of a bundle; reason: why there are none."""

    tensors: Sequence[RunParameter] = ()
    of_ranks: Sequence[Local] = ()
    reason: str = ""

    def total(self, tensor: RunParameter) -> Total:
        """Return their total of one tensor."""
        return total_of([share_of(local, tensor) for local in self.of_ranks])


class ReplayedBundle:
    """Result of a replay, compared with the verdict in the bundle."""

    def __init__(
        self,
        path: Path,
        bundle: Bundle,
        ranks: Sequence[Observed],
        judgement: Judgement,
        local: LocalGradients,
    ) -> None:
        """Create the result. ranks: what each observed; local: of the model, if it was named."""
        self.path = path
        self.bundle = bundle
        self.ranks = ranks
        self.judgement = judgement
        self.local = local

    @property
    def text(self) -> str:
        """The finding, if there is one, and a sentence that compares the verdicts."""
        texts = [self.verdict]
        if self.judgement.violations:
            texts.insert(0, violated_text(self.bundle.what, self.judgement, str(self.path)) + "\n")
        return "\n".join(texts)

    @property
    def verdict(self) -> str:
        """One sentence on the verdicts. Without a model the gradient is left out on both sides."""
        number, note = self.bundle.number, ""
        if self.bundle.judgement is None:
            names = ", ".join(one.obligation for one in self.judgement.violations)
            return f"step {number} was recorded and not judged: " + (
                f"it violates {names}" if names else "all that can be judged of it holds"
            )
        was, now = self.bundle.judgement.violations, self.judgement.violations
        if self.bundle.judgement.tier == "full" and self.judgement.tier != "full":
            was, now = (tuple(v for v in one if v.obligation not in FULL) for one in (was, now))
            note = f" (its gradient was not judged again: {self.local.reason})"
        if note and not was and not now:
            return f"step {number} violates the gradient alone{note}"
        if [_kind(one) for one in was] == [_kind(one) for one in now]:
            return f"reproduced: the same verdict on step {number}{note}"
        if [one.obligation for one in was] == [one.obligation for one in now]:
            return f"reproduced: step {number} violates the same obligations{note}"
        before = ", ".join(one.obligation for one in was) or "nothing"
        again = ", ".join(one.obligation for one in now) or "nothing"
        return f"not reproduced: step {number} violated {before}, now it violates {again}{note}"

    @property
    def exit_code(self) -> ExitCode:
        """FAILS if something is violated, else HOLDS."""
        return ExitCode.FAILS if self.judgement.violations else ExitCode.HOLDS


def _kind(violation: Violation) -> tuple[object, ...]:
    """Return what identifies a violation, without numbers and the worst element.

    The bound of a gradient is an estimate, and depends on the number of threads.
    """
    return (
        violation.obligation,
        violation.role,
        {*violation.tensors},
        violation.ranks,
        violation.causes,
    )


def replay(path: Path, model: str | None = None, device: str | None = None) -> ReplayedBundle:
    """Judge a bundle again.

    model: `path/to/file.py:factory`, the model before it is wrapped; device: on which it is called
    for the gradient, None for the kind that the run was on.

    Raises UsageError for a bundle that is not whole, a model that is not that of the run, or a
    device that is not here.
    """
    try:
        bundle, ranks = read(path)
        context = _joint_context(ranks)
        judgement = judge_all_ranks(context)
    except UsageError:
        raise
    except Exception as error:  # data from elsewhere that do not go together lead anywhere
        raise UsageError(
            f"{str(path)!r} cannot be judged ({type(error).__name__}: {error}): it is damaged; if "
            "nobody changed it since it was written, please report it"
        ) from error
    local = LocalGradients(reason="it needs --model")
    if model is not None:
        tokens = bundle.declared.weight == "token"
        local = _local_gradients(ranks, model, device, tokens=tokens)
        full = Full(reason=local.reason) if local.reason else _gradient(bundle, ranks, local)
        judgement = with_gradient(judgement, full, context)
    return ReplayedBundle(path, bundle, ranks, judgement, local)


def _joint_context(ranks: list[Observed]) -> JointContext:
    verdicts = [judge_rank(one) for one in ranks]

    def fetch(rank: int, what: str, number: int) -> torch.Tensor | None:
        return ranks[rank].values.get((what, number))

    return JointContext(verdicts, fetch)


def _chosen(was: str, asked: str | None) -> tuple[torch.device, str]:
    """Return the device for the calls of the model, and why they cannot be replayed or "".

    was: the kind of the run's device. Dropout masks of a GPU are repeated on a GPU only, since the
    generator is another.
    """
    if asked is not None:
        check_there(asked)
    kind = kind_of(asked or was)
    if kind != was:
        return torch.device(CPU), f"the run was on {was}, this is the {kind}"
    try:
        check_there(kind)
    except UsageError as error:
        return torch.device(CPU), f"the run was on {was}; {error}"
    return (placed(kind) if asked in (None, kind) else torch.device(asked)), ""


def _local_gradients(
    ranks: Sequence[Observed], model: str, on: str | None, *, tokens: bool
) -> LocalGradients:
    """Compute the local gradients of all ranks in this process, one after the other."""
    every = [one.summary for one in ranks]
    reason = why_not(every)
    if not reason and any(
        not one.forwards and one.summary.samples_on in (-1, one.summary.rank) for one in ranks
    ):
        reason = "the bundle does not hold what the model was called with"
    pieces = [one.pieces for one in every]
    if not reason and any(piece.left_out for mine in pieces for piece in mine):
        own = own_of_ranks(every, [SliceContext(one).hashes for one in ranks])
        reason = f"{own[0]} differs between ranks, which one process does not repeat" if own else ""
    if any(one.stages > 1 for one in every):
        reason = reason or "the stages of a pipeline are several models"
    device, why = _chosen(kind_of(ranks[0].device), on)
    if reason or why:
        return LocalGradients(reason=reason or why)
    reference = Reference(import_user_code(model), device)
    tensors = run_parameters(every)
    reference.check({one.name: one.shape for one in tensors})
    if lacking := next(filter(None, (reference.lacks(one.hooks) for one in every)), ""):
        return LocalGradients(reason=lacking)
    for tensor in tensors:
        whole = torch.zeros(torch.Size(tensor.shape).numel())
        for one in reversed(ranks):
            for number, piece in enumerate(one.summary.pieces):
                if piece.name == tensor.name:
                    put(whole, piece.entry, one.values["before.parameter", number].float())
        reference.load(tensor.name, whole, tensor.torch_dtype, trains=tensor.trains)
    found = [
        reference.local(one.forwards, one.buffers, tokens=tokens, casts=one.summary.casts)
        for one in ranks
    ]
    reason = next((one.reason for one in found if one.reason), "")
    return LocalGradients(tensors, found, reason)


def _gradient(bundle: Bundle, ranks: list[Observed], local: LocalGradients) -> Full:
    """Judge the gradient as in full_gradient.py, with all ranks in this process."""
    tensors, locals_, _ = local
    every = [one.summary for one in ranks]
    semantics = bundle.declared
    changes = ScriptChanges(every, [change_of(SliceContext(one)) for one in ranks])

    def judged_at(
        wanted: Iterable[Point], factor: ScriptFactor = NO_FACTOR
    ) -> dict[Point, list[Judged]]:
        points = {point: [Judged(0.0, {}, (), ()) for _ in ranks] for point in wanted}
        for tensor in tensors:
            if tensor.trains:
                total = local.total(tensor)
                for point, judged in points.items():
                    for rank, one in enumerate(ranks):
                        part = compare_shards(one, tensor, total, semantics, point, factor)
                        judged[rank] = joined(judged[rank], part)
        return points

    points = judged_at(changes.points(semantics))
    at, found = first_right(points, every[0], semantics)
    factor = script_factor(points, every[0], semantics) if faults(found) else NO_FACTOR
    if factor != NO_FACTOR:
        right = but_for_a_factor(judged_at((GIVEN,), factor)[GIVEN], factor, every[0], semantics)
        if right is not None:
            return with_weights(right, every[0], [one.tokens for one in locals_], semantics, None)
    asked = worst(found, tensors)
    shown = [exhibit(one, mine, asked, at) for one, mine in zip(ranks, locals_, strict=True)]
    share = max(one.share for one in found)
    full = Full(share, violation(found, asked, shown, every[0], semantics))
    tokens = [one.tokens for one in locals_]
    return with_weights(full, every[0], tokens, semantics, changes if at == ACCUMULATED else None)
