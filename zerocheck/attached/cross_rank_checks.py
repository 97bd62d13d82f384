"""Checks that need all ranks: ownership, copies, norms, and agreement between ranks.

Ranks send little for it: places and hashes of their shards, and their findings. For a copy that
differs, one tensor is fetched from two ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from .. import causes as bugs
from ..judge.compare import different_bits
from ..judge.diagnose.publish import SENTENCES, causes
from ..judge.ownership import tiling_fault
from ..optimizers import OPTIMIZERS, STATES, states_of
from ..protocol.verdicts import Judgement, Obligation, Violation, statuses_of
from .holdings import UNWRAPPED
from .norms import Holder, Norms
from .rank_checks import merged
from .step_record import AFTER, BEFORE, Fetch, RankVerdict, ShardPiece, element_of


def judge_together(told: Sequence[RankVerdict], fetch: Fetch) -> Judgement:
    """Judge the data of all ranks on a checked step. told[r]: the message of rank r."""
    with torch.no_grad():
        return _JointJudge(told, fetch).judgement()


@dataclass
class _JointJudge:
    told: Sequence[RankVerdict]
    fetch: Fetch
    violations: dict[Obligation, Violation] = field(default_factory=dict)
    exercised: set[Obligation] = field(default_factory=set)
    shares: dict[Obligation, float] = field(default_factory=dict)

    def judgement(self) -> Judgement:
        self.step = self.told[0].seen.number
        self.holders: dict[tuple[object, ...], list[Holder]] = {}
        for rank, one in enumerate(self.told):
            for number, piece in enumerate(one.seen.pieces):
                self.holders.setdefault(piece.place, []).append((rank, number))
        self._note("ownership", self._ownership())
        self._note("update", self._agreement())
        self._own()
        self._note("update", self._never_updated())
        self._copies()
        if any(one.seen.clips for one in self.told):
            share, violation = Norms(self.told).check()
            self._note("clip", violation)
            self.shares["clip"] = max(share, self.shares.get("clip", 0.0))
        return Judgement(
            statuses=statuses_of(self.violations, self.exercised),
            share=self.shares,
            violations=tuple(self.violations.values()),
            tier="state only",
        )

    def _note(self, obligation: Obligation, violation: Violation | None) -> None:
        self.exercised.add(obligation)
        if violation is not None:
            self.violations.setdefault(obligation, violation)

    def _piece(self, holder: Holder) -> ShardPiece:
        return self.told[holder[0]].seen.pieces[holder[1]]

    def _violation(self, obligation: Obligation, role: str, text: str, cause: str) -> Violation:
        return Violation(
            obligation=obligation,
            step=self.step,
            role=role,
            tensors=(),
            ranks=(),
            explanation=text,
            causes=(cause,),
        )

    def _ownership(self) -> Violation | None:
        """Check that the shards of parameters and moments tile their tensors."""
        for role in ("parameter", *STATES):
            shapes: dict[str, tuple[int, ...]] = {}
            held: dict[str, list[tuple[int, object]]] = {}
            for rank, one in enumerate(self.told):
                for number, piece in enumerate(one.seen.pieces):
                    if f"{AFTER}.{role}" not in one.hashes[number]:
                        continue
                    shape = shapes.setdefault(piece.name, piece.entry.shape)
                    if shape != piece.entry.shape:
                        text = f"{piece.name} has the shape {list(shape)} on one rank and "
                        text += f"{list(piece.entry.shape)} on another"
                        found = self._violation("ownership", role, text, bugs.SHAPES_DIFFER)
                        return replace(found, tensors=(piece.name,), ranks=(rank,))
                    held.setdefault(piece.name, []).append((rank, piece.entry))
            for name, shards in held.items():
                problem = tiling_fault(shards, shapes[name])  # type: ignore[arg-type]
                if problem:
                    ranks = tuple(sorted({rank for rank, _ in shards}))
                    text = f"{role} {name!r}: {problem}"
                    found = self._violation("ownership", role, text, "")
                    return replace(found, tensors=(name,), ranks=ranks, causes=())
        return None

    def _agreement(self) -> Violation | None:
        """Check that all ranks took one and the same step."""
        seen = [one.seen for one in self.told]
        for what, values in (
            ("took a step", [one.ran > 0 and not one.skipped for one in seen]),
            ("scale their losses", [one.scaling for one in seen]),
        ):
            some = tuple(rank for rank, value in enumerate(values) if value)
            if 0 < len(some) < len(values):
                text = f"only some ranks {what} (ranks {', '.join(map(str, some))} of {len(seen)})"
                found = self._violation("update", "step", text, bugs.RANKS_DISAGREE)
                return replace(found, ranks=some)
        scales = {one.loss_scale for one in seen}
        if len(scales) > 1:
            text = f"ranks have different loss scales ({', '.join(f'{s:g}' for s in scales)})"
            return self._violation("update", "loss_scale", text, bugs.RANKS_DISAGREE)
        return self._decision() or self._options() or self._counts()

    def _decision(self) -> Violation | None:
        """Check that a GradScaler skips a step if and only if the gradient is not finite."""
        seen = [one.seen for one in self.told]
        if not all(one.scaling for one in seen) or any(one.finite is None for one in seen):
            return None
        finite, skipped = all(one.finite for one in seen), seen[0].skipped
        if skipped == (not finite):
            return None
        words = ("skipped though the gradient is finite", bugs.STEP_SKIPPED)
        if not skipped:
            words = ("not skipped though the gradient is not finite", bugs.STEP_NOT_SKIPPED)
        return self._violation("update", "step", f"the step was {words[0]}", words[1])

    def _options(self) -> Violation | None:
        """Check that each parameter group has equal options on all ranks."""
        for rank, one in enumerate(self.told):
            for number, (mine, first) in enumerate(
                zip(one.seen.options, self.told[0].seen.options, strict=False)
            ):
                for name in OPTIMIZERS[mine.kind].fields.group:
                    here, there = getattr(mine, name), getattr(first, name)
                    if here != there:
                        text = f"parameter group {number} has {name} {there:g} on rank 0 and "
                        text += f"{here:g} on rank {rank}"
                        found = self._violation("update", "step", text, bugs.RANKS_DISAGREE)
                        return replace(found, ranks=(rank,), observed=here, expected=there)
        return None

    def _counts(self) -> Violation | None:
        """Check that each parameter has one step count, on all ranks that have a part of it."""
        known: dict[str, tuple[int, float]] = {}
        for rank, one in enumerate(self.told):
            for piece, count in zip(one.seen.pieces, one.seen.after, strict=True):
                if count is None:
                    continue
                first, other = known.setdefault(piece.name, (rank, count))
                if count != other:
                    text = f"the optimizer's step count of {piece.name} is {other:g} on rank "
                    text += f"{first} and {count:g} on rank {rank}"
                    found = self._violation("update", "step", text, bugs.STEP_COUNT)
                    return replace(
                        found, tensors=(piece.name,), ranks=(rank,), observed=count, expected=other
                    )
        return None

    def _own(self) -> None:
        """Add the violations that ranks found in their own shards.

        A rank whose copy is right on another rank is left to `_copies`: its finding is that its
        copy differs.
        """
        for one in self.told:
            for obligation, share in one.shares.items():
                known: Obligation = obligation  # type: ignore[assignment]
                self.exercised.add(known)
                self.shares[known] = max(share, self.shares.get(known, 0.0))
        found: dict[Obligation, list[Violation]] = {}
        for rank, one in enumerate(self.told):
            for violation in one.violations:
                if not self._right_elsewhere(rank, violation):
                    found.setdefault(violation.obligation, []).append(violation)
        for obligation, several in found.items():
            whole = merged(several)
            assert whole is not None
            same = [one for one in several if one.role == whole.role]
            ranks = tuple(sorted({rank for one in same for rank in one.ranks}))
            # Copies of the same elements count once.
            if len(ranks) > 1 and all(one.tensors == whole.tensors for one in same):
                whole = replace(whole, wrong=same[0].wrong, total=same[0].total)
            self._note(obligation, replace(whole, ranks=ranks))

    def _right_elsewhere(self, rank: int, violation: Violation) -> bool:
        if not violation.tensors:
            return False
        for number, piece in enumerate(self.told[rank].seen.pieces):
            if piece.name != violation.tensors[0]:
                continue
            for other, _ in self.holders[piece.place]:
                same = [o for o in self.told[other].violations if o.obligation == "update"]
                if other != rank and violation.obligation == "update" and not same:
                    return self._differs(rank, other, number)
        return False

    def _differs(self, rank: int, other: int, number: int) -> bool:
        place = self.told[rank].seen.pieces[number].place
        there = next(n for r, n in self.holders[place] if r == other)
        mine, its = self.told[rank].hashes[number], self.told[other].hashes[there]
        return any(its[what] != mine[what] for what in mine if what in its)

    def _never_updated(self) -> Violation | None:
        """Check that each optimized parameter with a gradient has optimizer state on some rank."""
        seen = self.told[0].seen
        if seen.skipped or not seen.ran:
            return None
        for holders in self.holders.values():
            told = [(self._piece(h), self.told[h[0]].hashes[h[1]]) for h in holders]
            if any(f"{AFTER}.{role}" in hashes for _, hashes in told for role in STATES):
                continue
            for (rank, _), (piece, hashes) in zip(holders, told, strict=True):
                if not states_of(seen.options[piece.group].optimizer):
                    continue  # it has none with these options
                if piece.group >= 0 and "gradient" in hashes and piece.local != (0,):
                    text = f"{piece.name} has a gradient, and no rank has a state of it: it was "
                    text += "not updated"
                    found = self._violation("update", "parameter", text, bugs.NEVER_UPDATED)
                    return replace(found, tensors=(piece.name,), ranks=(rank,))
        return None

    def _copies(self) -> None:
        """Check that replicas are equal bit for bit: before the step, gradients, and after it."""
        if len(self.told) == 1:
            return
        self.exercised.add("publish")
        parted = False
        for when in (BEFORE, "gradient", AFTER):
            if when == AFTER and parted:
                return  # it comes from that
            if when == "gradient" and not self._all_gave_one():
                continue
            roles = ("",) if when == "gradient" else ("parameter", *STATES)
            for role in roles:
                what = f"{when}.{role}" if role else when
                different = [*self._different(what)]
                if different:
                    obligation: Obligation = "publish" if role else "gradient"
                    self._note(obligation, self._copy(what, role or "gradient", different))
                    # A reduced gradient is the same even of parameters that are not.
                    parted |= when == BEFORE

    def _all_gave_one(self) -> bool:
        """Return True if every rank reached the point at which its gradient is observed."""
        return all(one.seen.ran or one.seen.skipped for one in self.told)

    def _different(self, what: str) -> Iterator[tuple[Holder, Holder]]:
        """Yield (right, wrong) for every copy that differs from most ranks', or the lowest's."""
        for holders in self.holders.values():
            told = {h: self.told[h[0]].hashes[h[1]].get(what) for h in holders}
            here = {holder: one for holder, one in told.items() if one is not None}
            if what == "gradient" and 0 < len(here) < len(told):
                here = {holder: one or "none" for holder, one in told.items()}
            if len(set(here.values())) < 2:
                continue
            common = Counter(here.values()).most_common(1)[0][0]
            right = next(holder for holder, one in here.items() if one == common)
            for holder, one in here.items():
                if one != common:
                    yield right, holder

    def _copy(self, what: str, role: str, different: list[tuple[Holder, Holder]]) -> Violation:
        right, wrong = different[0]
        piece = self._piece(wrong)
        ranks = tuple(sorted({holder[0] for _, holder in different}))
        names = tuple(dict.fromkeys(self._piece(holder).name for _, holder in different))
        if role == "gradient":
            text = "the gradient that the optimizer was given differs between ranks that hold the "
            text += "same parameters: not all of them took part in its reduction, or it was "
            text += "changed after it"
            known: tuple[str, ...] = ("copies of the gradient differ",)
        else:
            text = f"copies of {role} differ between ranks; they must agree bit for bit"
            known = (bugs.COPIES_DIFFER,)
        if what.startswith(BEFORE):
            text = f"before the step, {text}: they parted in a step that was not checked"
        if not what.startswith(AFTER) and self.told[0].seen.what.startswith(UNWRAPPED):
            text += (
                "; neither DDP nor FSDP wraps this model: where each rank trains one of its own, "
            )
            text += "as in a pipeline, attach with group="
        if len({*ranks, right[0]}) == len(self.told) == 2:
            text += " (of two ranks, either can be the wrong one)"
        violation = Violation(
            obligation="gradient" if role == "gradient" else "publish",
            step=self.step,
            role=role,
            tensors=names,
            ranks=ranks,
            explanation=text,
            causes=known,
        )
        ours, theirs = self.fetch(right[0], what, right[1]), self.fetch(wrong[0], what, wrong[1])
        if ours is None or theirs is None:
            lacking = [h[0] for h, one in ((right, ours), (wrong, theirs)) if one is None]
            text += f"; rank {lacking[0]} has none of {piece.name}"
            return replace(violation, explanation=text)
        mask = different_bits(theirs, ours)
        where = mask.nonzero().reshape(-1)
        error = (theirs[where].double() - ours[where].double()).abs().nan_to_num(nan=torch.inf)
        worst = int(where[int(error.argmax())])
        if role != "gradient":
            known, text = self._known(what, wrong, theirs, ours, where, text)
        return replace(
            violation,
            element=element_of(piece, worst),
            observed=float(theirs[worst]),
            expected=float(ours[worst]),
            bound=0.0,
            wrong=int(mask.sum()),
            total=mask.numel(),
            causes=known,
            explanation=text,
        )

    def _known(
        self,
        what: str,
        wrong: Holder,
        theirs: torch.Tensor,
        ours: torch.Tensor,
        where: torch.Tensor,
        text: str,
    ) -> tuple[tuple[str, ...], str]:
        """Return the causes that explain a differing copy, and the text of the finding.

        If no cause of copies explains it, they are the causes that the copy's own rank found.
        """
        earlier = None
        if what.startswith(AFTER):
            earlier = self.fetch(wrong[0], what.replace(AFTER, BEFORE, 1), wrong[1])
        found = causes(theirs[where], ours[where], None if earlier is None else earlier[where])
        if found != (bugs.COPIES_DIFFER,):
            return found, text + "".join(f"; {SENTENCES[o]}" for o in found if o in SENTENCES)
        own = [one for one in self.told[wrong[0]].violations if one.obligation == "update"]
        if own and own[0].causes:
            return own[0].causes, f"{text}; in this step, on rank {wrong[0]}: {own[0].explanation}"
        return found, text
