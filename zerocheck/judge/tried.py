"""Obligations: a checkpoint whose writer was killed, or whose files were damaged, does no harm."""

from __future__ import annotations

from collections.abc import Sequence

from ..case.schema import Case
from ..drive.observation import RankSeen
from ..models.network import build_model
from .assemble import Fetch, Observation
from .checkpoint import Checkpoint, compare_loaded
from .layout import Layout
from .ownership import Ownership
from .state import State
from .verdict import Resume, Violation


def tried(
    case: Case,
    leg: Case,
    seen: Sequence[RankSeen],
    fetch: Fetch,
    saved: Checkpoint,
    done: str,
) -> tuple[Resume, Violation | None]:
    """(obligation, violation or None) of a leg that only loads.

    leg: the case of the leg; saved: what the checkpoint held, or would have held; done: the damage.

    A load that refuses has done its duty, except where a killed writer was to replace an older
    checkpoint: that one must still load. What is loaded must be one of the checkpoints, whole.
    """
    last = case.resume[-1]
    of: Resume = "durability" if last.killed is not None else "damage"
    refused = [rank.refused for rank in seen]
    step = saved.step
    if any(refused):
        if not all(refused):
            ranks = tuple(rank for rank, text in enumerate(refused) if not text)
            text = "some ranks refused the checkpoint and others loaded it"
            return of, _violation(of, step, ranks, text, ("ranks disagree",))
        if of == "durability" and last.over:
            text = (
                "a writer was killed while it replaced a checkpoint, and now neither the new nor "
                f"the old one loads: {refused[0]}"
            )
            return of, _violation(of, step, (), text, ("older checkpoint lost",))
        return of, None
    if not done and of == "damage":
        return of, None  # there was nothing to damage
    layout = Layout.of(build_model(leg), leg)
    observation = Observation(layout, seen, fetch, leg.training.first)
    at = leg.training.first - 1
    wrong = Ownership(observation).check(at, "state")
    if wrong is None:
        loaded = State.observed(observation, at)
        wrong = compare_loaded(saved, loaded, observation, layout, leg)
        older = saved.older if of == "durability" else None
        if wrong is not None and older is not None:
            same = compare_loaded(older, loaded, observation, layout, leg) is None
            wrong = None if same else wrong
    if wrong is None:
        return of, None
    if of == "damage":
        text = f"the checkpoint was damaged ({done}), and it was loaded without a word"
        return of, _violation(of, step, (), text, (last.damage,), wrong)
    text = "what was loaded after a writer was killed is neither the old nor the new checkpoint"
    return of, _violation(of, step, (), text, ("part of a checkpoint",), wrong)


def _violation(
    of: Resume,
    step: int,
    ranks: tuple[int, ...],
    text: str,
    causes: tuple[str, ...],
    wrong: Violation | None = None,
) -> Violation:
    return Violation(
        obligation=of,
        step=step,
        role="checkpoint" if wrong is None else wrong.role,
        tensors=() if wrong is None else wrong.tensors,
        ranks=ranks,
        explanation=text if wrong is None else f"{text}; {wrong.explanation}",
        causes=causes,
        observed=None if wrong is None else wrong.observed,
        expected=None if wrong is None else wrong.expected,
        wrong=0 if wrong is None else wrong.wrong,
        total=0 if wrong is None else wrong.total,
    )
