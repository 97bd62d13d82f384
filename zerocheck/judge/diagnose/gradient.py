"""Known causes of a wrong gradient, each computed and compared, none guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import isnan

import torch
from torch.utils.checkpoint import CheckpointError

from ... import causes as bugs
from ...floating_point import ETA, Enclosure
from ...protocol.verdicts import Explanation
from ..compare import exactly
from ..local import Scale
from ..pieces import Enclosing, Positions, some, split
from ..precision import declared
from . import axes, memory_order, placement, ranks, rounding, weights
from .evidence import (
    Candidate,
    Evidence,
    enclosed_sum,
    enclosing,
    everything,
    explains,
    sentences_of,
    slack,
    times,
    weighted,
    wrong_tensors,
)
from .unwritten import unwritten
from .weights import KnownWeights, ReductionSetting

SEEDED_ALIKE = (
    "ranks left their forwards in the same random state, so their dropout masks are equal, though "
    "the harness seeds every rank by itself: the generator was seeded again, and alike"
)


UNEXPLAINED = Explanation("the reduced gradient is not what the declared semantics say")


def causes(evidence: Evidence) -> Explanation:
    """Find all candidates that put every wrong tensor inside the enclosure, on every rank."""
    held = evidence.held
    wrong = wrong_tensors(evidence)
    # In a step that overflows NaN is computed too, and may only stand where it should not.
    if any(bool(part.isnan().any()) for part in held.parts) and evidence.finite:
        return unwritten("the gradient holds NaN")
    found: list[Candidate] = []
    for phase, most in _phases(evidence, wrong):
        found = [*islice((one for one in phase if explains(one, evidence, wrong)), most)]
        if found:
            break
    if not found:
        mixed = (
            ranks.scaled_on_some(evidence, wrong)
            or ranks.raced(evidence, wrong)
            or ranks.left_out(evidence, wrong)
            or axes.unreduced(evidence, wrong)
        )
        if mixed is not None:
            return mixed
        if evidence.alike:
            return Explanation(SEEDED_ALIKE, (bugs.SEED_FOR_ALL,))
        ratio = _common_ratio(evidence, wrong)
        if ratio is not None:
            return Explanation(
                f"gradient is {ratio:.6g} times what it must be", (bugs.GRADIENT_SCALED,)
            )
        return axes.before_an_exchange(evidence, wrong) or UNEXPLAINED
    sentences = sentences_of(found)
    if ranks.could_be_raced(evidence, sentences):
        sentences[bugs.REDUCTION_NOT_WAITED_FOR] = ranks.LATE
    joint = {candidate.name: candidate.joint for candidate in found if candidate.joint}
    said = weights.telling(sentences, evidence.passes.gradients.shape[1], joint)
    return Explanation("; or ".join(dict.fromkeys(said.values())), tuple(sentences), sentences)


def _phases(
    evidence: Evidence, wrong: torch.Tensor
) -> Iterator[tuple[Iterable[Candidate], int | None]]:
    """Iterate over (candidates, how many of those that fit are named), until some fit."""
    narrow = evidence.semantics.reduce in rounding.NARROW
    if narrow:  # the others have its roundings in their enclosures, so that much explains it
        yield rounding.of_uses(evidence, wrong), None
    yield candidates(evidence, wrong), None
    yield from ((alike, None) for alike in _rescaled_losses(evidence))
    yield _in_losses(evidence), 1
    yield _weighted_otherwise(evidence), None
    yield _drawn_again(evidence), None
    yield placement.shifted(evidence, wrong), None
    yield rounding.candidates(evidence), None
    if not narrow:
        yield rounding.of_uses(evidence, wrong), None
    if declared(evidence.semantics):
        yield rounding.reductions(evidence, wrong), 1


def setting(evidence: Evidence) -> ReductionSetting:
    """Return what known weights depend on."""
    world, count = evidence.passes.gradients.shape[:2]
    scaled = evidence.case.training.loss_scale is not None
    return ReductionSetting(
        ranks=world,
        microbatches=count,
        mean=evidence.semantics.average == "mean",
        mesh=evidence.case.axes,
        hosts=evidence.case.hosts,
        loss_scale=evidence.loss_scale if scaled else None,
        axes=evidence.axes,
    )


def candidates(evidence: Evidence, wrong: torch.Tensor) -> Iterator[Candidate]:
    its = setting(evidence)

    def known(*kinds: Callable[[ReductionSetting], Iterator[KnownWeights]]) -> Iterator[Candidate]:
        for one in (one for kind in kinds for one in kind(its)):
            factor = one.factor
            if not isnan(factor):
                made = [times(evidence, factor)]
            else:
                holders = range(1 if one.alike else its.ranks)
                made = [weighted(evidence, one.on(rank)) for rank in holders]
            yield Candidate(one.cause, one.words, made, one.joint)

    yield from _past_wrapper(evidence)
    yield from known(weights.of_axes, weights.factors, weights.of_loss_scale, weights.of_ranks)
    yield from ranks.averaged_over_users(evidence)
    yield from known(weights.of_replicas, weights.of_hosts)
    yield from placement.candidates(evidence, wrong)
    some_terms = [*known(weights.local, weights.last_microbatch)]
    yield from some_terms
    yield from memory_order.candidates(evidence, some_terms)
    # Of one microbatch too: what is done to it is told from other causes in cases that have more.
    yield from known(weights.of_microbatches)
    world, count = its.ranks, its.microbatches
    for before in (evidence.previous, evidence.unclipped_before):
        if before is not None:
            yield Candidate(
                bugs.GRADIENT_OF_THE_PREVIOUS_STEP_KEPT,
                "the gradient of the step before was not cleared: it is in the sum",
                [_kept(evidence, before, 2 * (count + world))],
            )
            # Nothing is computed with it: it is there bit for bit.
            yield Candidate(
                bugs.GRADIENT_OF_THE_PREVIOUS_STEP,
                "it is the gradient of the step before",
                [enclosing(evidence, lambda there, before=before: exactly(some(before, there)))],  # type: ignore[misc]
            )
    zero = enclosing(
        evidence, lambda there: exactly(torch.zeros_like(evidence.right.at(there).exact))
    )
    yield Candidate(bugs.GRADIENT_ZERO, "the gradient is zero", [zero])


def _kept(evidence: Evidence, previous: torch.Tensor, roundings: int) -> Enclosing:
    """Sum of the right gradient and the previous one."""

    def at(positions: Positions | None) -> Enclosure:
        exact, bound = evidence.right.at(positions)
        before = some(previous, positions)
        kept = exact + before.to(torch.float64)
        error = slack(evidence, roundings, kept.abs() + before.abs(), positions)
        return Enclosure(kept, 2 * bound + error)

    return enclosing(evidence, at)


def _rescaled_losses(evidence: Evidence) -> Iterator[list[Candidate]]:
    """Gradients of a scaled loss, instead of scaled gradients: lists of candidates that coincide.

    These round differently all the way through the backward, so the backward is run again; its seed
    depends on the order of the factors.
    """
    if evidence.again is None:
        return
    world, count = evidence.passes.gradients.shape[:2]
    mean = world if evidence.semantics.average == "mean" else 1
    divide = count if evidence.semantics.divide == "gradient" else 1
    causes_of: dict[int, list[tuple[str, str, str]]] = {}
    for letter, number, over, under in (
        ("W", world, bugs.GRADIENT_TIMES_W, bugs.GRADIENT_OVER_W),
        ("microbatches", count, bugs.GRADIENT_TIMES_GA, bugs.GRADIENT_OVER_GA),
    ):
        if number > 1:
            causes_of.setdefault(number, []).append((letter, over, under))
    for number, rows in causes_of.items():
        scales: list[tuple[bool, Scale]] = [
            (True, lambda loss, n=number: loss * n),  # type: ignore[misc]
            (False, lambda loss, n=number: loss / n),  # type: ignore[misc]
            (False, lambda loss, n=number: loss * (1 / n)),  # type: ignore[misc]
        ]
        for more, scale in scales:
            terms = evidence.again(scale).gradients
            made = [enclosed_sum(evidence, everything, mean * divide, given=terms)]
            alike = []
            for letter, over, under in rows:
                words = "multiplied" if more else "divided"
                if more and letter == "W" and evidence.semantics.in_losses:
                    words = "not divided"  # as the semantics say that it is
                sentence = f"the loss was {words} by {number} (= {letter})"
                alike.append(Candidate(over if more else under, sentence, made))
            yield alike


def _in_losses(evidence: Evidence) -> Iterator[Candidate]:
    """Mean over ranks taken elsewhere than the semantics declare: in the losses, or not.

    By a power of two that is exact, so it is nothing wrong; by any other number the backward rounds
    otherwise all the way. What trainers compute: (loss / GA) / W, loss / (GA W), loss * (1 / W).
    """
    world = len(evidence.passes.gradients)
    if evidence.again is None or world == 1 or evidence.semantics.average != "mean":
        return
    if evidence.semantics.in_losses:
        return
    divide = evidence.divisor / world
    scales: tuple[Scale, ...] = (lambda loss: loss / world, lambda loss: loss * (1 / world))
    for scale in scales:
        terms = evidence.again(scale).gradients
        yield Candidate(
            bugs.MEAN_IN_THE_LOSSES,
            "each loss was divided by the number of ranks, and the gradients were summed: the same "
            "mean with other round-off than the declared semantics have; declare "
            "Semantics(divide_ranks='loss')",
            [enclosed_sum(evidence, everything, divide, given=terms)],
        )


def _weighted_otherwise(evidence: Evidence) -> Iterator[Candidate]:
    """Gradients of microbatches weighted equally instead of by tokens, or vice versa."""
    if evidence.otherwise is None or not evidence.case.data.masked:
        return
    world, count = evidence.passes.gradients.shape[:2]
    divisor = world if evidence.semantics.average == "mean" else 1
    divisor *= count if evidence.semantics.divide == "gradient" else 1
    terms = evidence.otherwise().gradients
    if evidence.semantics.weight == "token":
        name = bugs.MEAN_OF_MEANS
        words = (
            "microbatches with different numbers of tokens count alike: it is the mean of the "
            "microbatches' means, and not the mean over tokens"
        )
    else:
        name = bugs.MEAN_OVER_TOKENS
        words = (
            "it is the mean over tokens; the declared semantics (weight='microbatch') are the mean "
            "of the microbatches' means"
        )
    yield Candidate(name, words, [enclosed_sum(evidence, everything, divisor, given=terms)])


def _past_wrapper(evidence: Evidence) -> Iterator[Candidate]:
    """Gradient in which each microbatch counts whole, where it does not go through the wrapper."""
    count = evidence.case.training.microbatches
    if evidence.past_wrapper is None or not evidence.case.data.past_wrapper or count == 1:
        return
    terms = evidence.past_wrapper(float(count)).gradients
    yield Candidate(
        bugs.PAST_WRAPPER_X_GA,
        f"what the loss takes past the wrapper counts {count} times: it is not divided by the "
        f"{count} microbatches",
        [enclosed_sum(evidence, everything, evidence.divisor, given=terms)],
    )


def _drawn_again(evidence: Evidence) -> Iterator[Candidate]:
    """Gradient of blocks that a checkpoint computed again with other random numbers."""
    model = evidence.case.model
    draws = model.user is not None or any(block.dropout > 0 for block in model.blocks)
    if evidence.redrawn is None or not draws:
        return
    try:
        terms = evidence.redrawn().gradients
    except CheckpointError:  # other masks lead to other shapes, as in routing: no code computes it
        return
    yield Candidate(
        bugs.DROPOUT_DRAWN_AGAIN,
        "activation checkpointing computes blocks once more in the backward without the random "
        "state of the forward, so their dropout masks are others",
        [enclosed_sum(evidence, everything, evidence.divisor, given=terms)],
    )


def _common_ratio(evidence: Evidence, wrong: torch.Tensor) -> float | None:
    """Find one factor that explains all wrong tensors, though it has no name.

    Taken where the gradient is largest against its bound, so that round-off hardly moves it; the
    enclosure is widened by what it can move it. Of one element there always is one, which says
    nothing.
    """
    count, clearest = 0, 0.0
    ratio = uncertain = 0.0
    for here in split(evidence.layout.size):
        exact, bound = evidence.right.at(here)
        count += int((wrong[here] & (exact.abs() > bound)).sum())
        clarity = torch.where(wrong[here], exact.abs() / bound.clamp(min=ETA), 0.0)
        best = int(clarity.argmax())
        if float(clarity[best]) > clearest:
            clearest = float(clarity[best])
            ratio = float(evidence.held.whole[here][best].double() / exact[best])
            uncertain = 2 * float(bound[best] / exact[best].abs())
    if count < 2 or clearest < 1e4 or ratio == 0:
        return None

    def at(positions: Positions | None) -> Enclosure:
        exact, bound = times(evidence, abs(ratio), uncertain).at(positions)
        return Enclosure(exact if ratio > 0 else -exact, bound)

    if not explains(Candidate("", "", [enclosing(evidence, at)]), evidence, wrong):
        return None
    return ratio
