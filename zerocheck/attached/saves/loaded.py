"""Obligation of a load: what was loaded is what was saved, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ... import causes as bugs
from ...errors import few
from ...optimizers import STATES
from ...protocol.verdicts import Judgement, Obligation, Status, Violation
from ..record.digests import WholeDigest, wrong_ranges
from ..record.ranks import AllRanks, agreed
from ..record.step_record import GroupOptions
from .saved_state import (
    LiveState,
    NextStep,
    SavedState,
    TrainedModel,
    has_record,
    read_saved,
    state_of,
)

ROLES = ("parameter", *STATES, "buffer")
"""Order in which roles are judged: the first that is wrong is named first."""


OTHER = "is not what was saved"


class WrongTensor(msgspec.Struct, frozen=True):
    """Why one tensor is wrong: cause, and the sentence about all tensors of which it is true."""

    cause: str
    text: str
    detail: str = ""


def compare_states(
    saved: SavedState, live: LiveState, *, data: bool, random: bool, options: bool = True
) -> Iterator[Violation]:
    """Yield what differs.

    data, random, options: compare the position in the data, random states, and options of parameter
    groups.
    """
    now = live.saved
    for role in ROLES:
        yield from _of_role(role, saved, now)
    for role, name, ranks in live.copies:
        text = f"{role} of {name} is another on {_ranks(ranks)} than on the first rank that has it"
        yield _violation(now, role, (name,), text, bugs.COPIES_DIFFER, ranks=ranks)
    yield from _counts(saved, now)
    for text in other_options(saved.options, now.options, "{!r} was saved") if options else ():
        yield _violation(now, "options", (), text, "")
    if data and saved.data != now.data:
        text = f"the position in the data is {now.data!r}, and {saved.data!r} was saved"
        yield _violation(now, "data", (), text, "")
    if random:
        yield from _random(saved, now)


def _of_role(role: str, saved: SavedState, now: SavedState) -> Iterator[Violation]:
    """Yield one violation for each way in which tensors of a role are wrong."""
    before, after = saved.tensors.get(role, {}), now.tensors.get(role, {})
    groups: dict[WrongTensor, list[tuple[str, str]]] = {}
    for name, one in before.items():
        found = None
        for live in (after.get(name), *now.buffers.get(name, ())):
            known = [other.blocks for other in saved.buffers.get(name, ())]
            if live is None or live.blocks not in known:
                found = found or judged(role, name, one, live, saved)
        if found is not None:
            group = msgspec.structs.replace(found, detail="")
            groups.setdefault(group, []).append((name, found.detail))
    for wrong, tensors in groups.items():
        names = tuple(name for name, _ in tensors)
        every = len(names) == len(before)
        whole = names[0] if role == "buffer" else "every parameter"
        them = whole if every else few(names)
        what = them if role == "parameter" else f"{role} of {them}"
        details = [detail for _, detail in tensors if detail]
        detail = f": {details[0]}" if details else ""
        cause = wrong.cause
        if every and role == "parameter" and wrong.text == OTHER:
            cause = bugs.NOT_LOADED
        if wrong.cause == bugs.MOMENTS_LOST and not now.counts and saved.counts:
            cause = bugs.OPTIMIZER_STATE_LOST
        yield _violation(now, role, names, f"{what} {wrong.text}{detail}", cause)
    new = tuple(name for name in after if name not in before)
    if new and (before or role == "parameter"):
        text = f"{role} of {new[0]} is in the run, and not in what was saved"
        yield _violation(now, role, new, text, "")


def judged(
    role: str, name: str, one: WholeDigest, live: WholeDigest | None, saved: SavedState
) -> WrongTensor | None:
    """Return what is wrong with a tensor: its value is looked up among all that was saved."""
    lost = bugs.MOMENTS_LOST if role in STATES else ""
    if live is None:
        return WrongTensor(lost, "was saved, and is missing")
    if live.shape != one.shape:
        text = "has another shape than was saved"
        return WrongTensor("", text, f"{list(live.shape)} in place of {list(one.shape)}")
    if live.dtype != one.dtype:
        return WrongTensor("", f"is {live.dtype}, and {one.dtype} was saved")
    if live.blocks == one.blocks:
        return None
    if not live.nonzero:
        return WrongTensor(lost, "is 0")
    for other_role, tensors in saved.tensors.items():
        if other_role != role and _same(tensors.get(name), live):
            cause = bugs.MOMENTS_SWAPPED if {role, other_role} <= {*STATES} else ""
            return WrongTensor(cause, f"holds the {other_role} of the same")
    for other, digest in saved.tensors[role].items():
        if other != name and _same(digest, live):
            return WrongTensor(bugs.TENSORS_EXCHANGED, "holds that of another", f"of {other}")
    if live.total == one.rounded:
        cause = "" if role == "parameter" else bugs.ROUNDED_TO_BF16
        return WrongTensor(cause, "was rounded to bf16")
    ranges = [*wrong_ranges(one.numel, one.blocks, live.blocks)]
    where = few([f"[{low}, {high})" for low, high in ranges], 3)
    if ranges == [(0, one.numel)]:
        return WrongTensor("", OTHER)
    return WrongTensor("", "is what was saved in part only", f"elements in {where} differ")


def _same(one: WholeDigest | None, other: WholeDigest) -> bool:
    return one is not None and one.nonzero > 0 and one.blocks == other.blocks


def _counts(saved: SavedState, now: SavedState) -> Iterator[Violation]:
    wrong = [name for name, count in saved.counts.items() if now.counts.get(name) != count]
    if not wrong or not now.counts:  # without any state, moments are missing too
        return
    name = wrong[0]
    text = f"the step count of {name} is {_number(now.counts.get(name))}, and "
    text += f"{_number(saved.counts[name])} was saved"
    lost = all(now.counts.get(name, 0.0) == 0.0 for name in wrong)
    yield _violation(now, "step", tuple(wrong), text, bugs.STEP_COUNT_LOST if lost else "")


def _number(count: float | None) -> str:
    return "missing" if count is None else f"{count:g}"


def other_options(
    saved: Sequence[GroupOptions], now: Sequence[GroupOptions], words: str
) -> Iterator[str]:
    """Yield which options of parameter groups differ. words: of the saved value."""
    if len(saved) != len(now):
        yield f"the optimizer has {len(now)} parameter groups, and {len(saved)} were saved"
        return
    for number, (before, after) in enumerate(zip(saved, now, strict=True)):
        for field in before.__struct_fields__:
            old, new = getattr(before, field), getattr(after, field)
            if old != new:
                yield f"{field} of parameter group {number} is {new!r}, and {words.format(old)}"


def judge_next_step(
    directory: Path, options: Sequence[GroupOptions], ranks: AllRanks, *, step: int
) -> Violation | None:
    """Judge the options with which the first step after a load begins. Every rank calls this.

    They are those with which the job that saved began its next step, whatever sets them: the same
    script runs there.
    """
    before = NextStep.read(directory) if ranks.rank == 0 else None
    violation: Violation | None = None
    if before is not None and before.step == step:
        words = "it was {!r} when the job that saved began the same step"
        text = next(other_options(before.options, options, words), None)
        if text is not None:
            text += ". If that is intended, use check.loaded(..., options=False)"
            violation = violation_of(
                (step, ranks.size), "options", (), text, bugs.SCHEDULE_NOT_RESTORED
            )
    (violation,) = agreed((violation,), tuple[Violation | None], ranks)
    return violation


def _random(saved: SavedState, now: SavedState) -> Iterator[Violation]:
    for rank, state in enumerate(now.random if now.world_size == saved.world_size else ()):
        before = saved.random[rank]
        wrong = [name for name, digest in before.items() if state.get(name) != digest]
        if not wrong:
            continue
        name = wrong[0]
        owner = [r for r, one in enumerate(saved.random) if one.get(name) == state.get(name)]
        of = f"that of rank {owner[0]}" if owner else "none that was saved"
        text = f"the random state of {name} on rank {rank} is {of}"
        cause = bugs.RANDOM_STATES_OF_OTHER_RANKS if owner else bugs.RANDOM_STATE_NOT_LOADED
        yield _violation(now, "random", (), text, cause, ranks=(rank,))
        return


def _violation(now: SavedState, *what: Any, ranks: tuple[int, ...] = ()) -> Violation:
    return violation_of((now.step, now.world_size), *what, ranks=ranks)


def violation_of(
    place: tuple[int, int],
    role: str,
    tensors: tuple[str, ...],
    text: str,
    cause: str = "",
    *,
    ranks: tuple[int, ...] = (),
    obligation: Obligation = "roundtrip",
) -> Violation:
    """Return the violation. place: step and number of ranks; ranks: those that it names."""
    step, world_size = place
    return Violation(
        obligation=obligation,
        step=step,
        role=role,
        tensors=tensors,
        ranks=ranks or tuple(range(world_size)),
        explanation=text,
        causes=(cause,) if cause else (),
    )


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class JudgedLoad(msgspec.Struct, frozen=True):
    """Verdict on a load or an export, equal on all ranks. text: one line where it holds."""

    step: int
    judgement: Judgement
    text: str = ""

    @classmethod
    def of(cls, obligation: Obligation, step: int, wrong: Sequence[Violation], text: str) -> bytes:
        """Return the verdict of rank 0, encoded for the others."""
        status: Status = "violated" if wrong else "holds"
        judgement = Judgement(
            statuses={obligation: status}, violations=tuple(wrong[:1]), further=tuple(wrong[1:])
        )
        return msgspec.msgpack.encode(cls(step, judgement, text))


def judge_load(
    directory: Path,
    trained: TrainedModel,
    ranks: AllRanks,
    *,
    data: Any,
    random: bool,
    options: bool,
    required: bool,
) -> JudgedLoad | None:
    """Judge what was loaded from a folder. Every rank calls this, in `attempt`.

    required: False to return None where there is no record.
    """
    saved = None
    if ranks.rank == 0 and (required or has_record(directory)):
        saved = read_saved(directory)
    if not ranks.broadcast(b"" if saved is None else b"1"):
        return None
    live = state_of(trained, ranks, step=0, data=data, rounds=False)
    message = b""
    if saved is not None and live is not None:
        now = msgspec.structs.replace(live.saved, step=saved.step)
        live = msgspec.structs.replace(live, saved=now)
        given = data is not None
        found = [*compare_states(saved, live, data=given, random=random, options=options)]
        count = sum(len(tensors) for tensors in saved.tensors.values())
        text = (
            f"zerocheck: {directory}: {count} tensors are what was saved at step {saved.step}, "
            f"bit for bit; saved by {saved.world_size}, loaded by {ranks.size}"
        )
        message = JudgedLoad.of("roundtrip", saved.step, found, text)
    return msgspec.msgpack.decode(ranks.broadcast(message), type=JudgedLoad)
