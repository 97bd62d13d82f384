"""Obligations on a checkpoint whose writer was killed, or whose files were damaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from .. import causes as bugs
from ..case.schema import Case
from ..models.network import build_model
from ..protocol.observations import RankObservation
from ..protocol.verdicts import Explanation, Gave, Resume, Violation, with_parts
from .assemble import Fetch, Observation
from .checkpoint import Checkpoint, compare_loaded
from .compare import different_bits
from .layout import ParameterLayout
from .ownership import Ownership
from .state import State

SegmentObservations = tuple[Sequence[RankObservation], Fetch]
"""Observations of all ranks in one segment, and their tensors: see `judge.case.judge`."""


class LoadAttempt(NamedTuple):
    """Result of a segment that only loads."""

    of: Resume
    gave: Gave
    wrong: Violation | None = None


def control(
    segment: Case, loaded: SegmentObservations, saved: Checkpoint
) -> tuple[Resume, Violation | None]:
    """Judge a segment that only loads, without kill or damage: (roundtrip, violation or None)."""
    observations, _ = loaded
    ranks = tuple(rank for rank, one in enumerate(observations) if one.checkpoint.refused)
    if ranks:
        refusal = observations[ranks[0]].checkpoint.refused
        text = f"the checkpoint is whole, and its load refused it: {refusal}"
        violation = _violation("roundtrip", saved.step, ranks, text, (bugs.REFUSED,))
        error = _error(refusal)
        return "roundtrip", msgspec.structs.replace(violation, error=error)
    return "roundtrip", _compared(segment, loaded, saved)


def tried(
    case: Case,
    segment: Case,
    loaded: SegmentObservations,
    saved: Checkpoint,
    done: str,
    missing: Sequence[str] = (),
) -> LoadAttempt:
    """Judge the load of a checkpoint whose writer was killed, or that was damaged.

    segment: the case of the segment; saved: what the checkpoint held, or would have held; done:
    what was done, in words, or ""; missing: files of the older checkpoint that are not there any
    more.

    A load that refuses has done its duty, except where a killed writer was to replace an older
    checkpoint: that one must still load. What is loaded must be one of the checkpoints, whole.
    """
    observations, _ = loaded
    last = case.resume[-1]
    of: Resume = "durability" if last.killed is not None else "damage"
    refused = [rank.checkpoint.refused for rank in observations]
    step = saved.step
    if any(refused):
        if not all(refused):
            ranks = tuple(rank for rank, text in enumerate(refused) if not text)
            words = next(text for text in refused if text).splitlines()[0][:150]
            then = "loaded it"
            if any(rank.checkpoint.waited for rank in observations):
                then += ", or waited for them"
            text = f"some ranks refused the checkpoint ({words}) and others {then}"
            return LoadAttempt(
                of, "wrong", _violation(of, step, ranks, text, (bugs.RANKS_DISAGREE,))
            )
        if of == "durability" and last.over:
            text = (
                "a writer was killed while it replaced a checkpoint, and now neither the new nor "
                f"the old one loads: {refused[0]}"
            )
            how = "removed" if missing else "written over"
            text += f"; its files were {how}"
            causes = (bugs.OLDER_CHECKPOINT_LOST, bugs.OLDER_CHECKPOINT(how=how))
            violation = _violation(of, step, (), text, causes)
            return LoadAttempt(
                of, "lost", msgspec.structs.replace(violation, error=_error(refused[0]))
            )
        return LoadAttempt(of, "none")
    if not done and of == "damage":
        return LoadAttempt(of, "unharmed")  # there was nothing to damage
    wrong = _compared(segment, loaded, saved, attributed=False)
    if wrong is None:
        return LoadAttempt(of, "new" if done else "unharmed")
    older = saved.older if of == "durability" else None
    if older is not None and _compared(segment, loaded, older, attributed=False) is None:
        return LoadAttempt(of, "older")
    if of == "damage":
        text = f"the checkpoint was damaged ({done}), and it was loaded without a word"
        violation = _violation(of, step, (), text, (last.damage,), wrong)
        mixes = last.damage == "mix"
    else:
        text = "what was loaded after a writer was killed is neither the old nor the new checkpoint"
        violation = _violation(of, step, (), text, (bugs.PART_OF_A_CHECKPOINT,), wrong)
        mixes = True
    if mixes and not _of_saved_states(segment, loaded, saved):
        part = (
            violation.tensors,
            Explanation(
                f"{text}; some elements are of no state that was",
                (bugs.ELEMENTS_OF_NO_SAVED_STATE,),
            ),
        )
        violation = with_parts(violation, [part])
    return LoadAttempt(of, "wrong", violation)


def _error(refused: str) -> str:
    """Return a rank's exception on loading the checkpoint: its type and its first line."""
    return refused.splitlines()[0][:150]


def _of_saved_states(segment: Case, loaded: SegmentObservations, saved: Checkpoint) -> bool:
    """Return True if every loaded element is that of a state of the saving training."""
    observation = _observed(segment, loaded)
    at = segment.training.first - 1
    if Ownership(observation).check(at, "state") is not None:
        return False
    state = State.observed(observation, at)
    states = [saved.state, *saved.others.values(), *([saved.older.state] if saved.older else [])]
    for role in ("parameter", *state.moments):
        vectors = [one.parameter if role == "parameter" else one.moment(role) for one in states]
        here = state.parameter if role == "parameter" else state.moment(role)
        different = different_bits(here, vectors[0])
        for vector in vectors[1:]:
            different &= different_bits(here, vector)
        if role != "parameter":
            different &= observation.layout.trainable
        if bool(different.any()):
            return False
    return True


def _observed(segment: Case, loaded: SegmentObservations) -> Observation:
    return Observation(
        ParameterLayout.of(build_model(segment), segment), *loaded, segment.training.first
    )


def _compared(
    segment: Case, loaded: SegmentObservations, saved: Checkpoint, *, attributed: bool = True
) -> Violation | None:
    """Compare the loaded state with a checkpoint."""
    observation = _observed(segment, loaded)
    layout = observation.layout
    at = segment.training.first - 1
    wrong = Ownership(observation).check(at, "state")
    if wrong is not None:
        return msgspec.structs.replace(wrong, obligation="roundtrip")
    state = State.observed(observation, at)
    return compare_loaded(saved, state, observation, layout, segment, attributed=attributed)


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
