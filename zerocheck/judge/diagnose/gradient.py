"""Known causes of a wrong gradient, each computed and compared, none guessed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import itemgetter

import torch
from torch.utils.checkpoint import CheckpointError

from ... import causes as bugs
from ...floating_point import ETA, Enclosure
from ...protocol.verdicts import Explanation
from ..compare import exactly
from ..local import Scale
from ..pieces import Enclosing, Positions, some, split
from ..precision import declared
from . import factors, hosts, memory_order, placement, ranks, replicas, rounding, tensor_parallel
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
    wrong_tensors,
)
from .unwritten import unwritten

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
    narrow = evidence.semantics.reduce in rounding.NARROW
    if narrow:  # the others have its roundings in their enclosures, so that much explains it
        found = [c for c in rounding.of_uses(evidence, wrong) if explains(c, evidence, wrong)]
    if not found:
        found = [c for c in candidates(evidence, wrong) if explains(c, evidence, wrong)]
    if not found:
        rescaled = _rescaled_losses(evidence)
        found = next((alike for alike in rescaled if explains(alike[0], evidence, wrong)), [])
    if not found:
        found = [c for c in _in_losses(evidence) if explains(c, evidence, wrong)][:1]
    if not found:
        found = [c for c in _weighted_otherwise(evidence) if explains(c, evidence, wrong)]
    if not found:
        found = [c for c in _drawn_again(evidence) if explains(c, evidence, wrong)]
    if not found:
        found = [c for c in placement.shifted(evidence, wrong) if explains(c, evidence, wrong)]
    if not found:
        found = [c for c in rounding.candidates(evidence) if explains(c, evidence, wrong)]
    if not found and not narrow:
        found = [c for c in rounding.of_uses(evidence, wrong) if explains(c, evidence, wrong)]
    if not found and declared(evidence.semantics):
        found = [c for c in rounding.reductions(evidence, wrong) if explains(c, evidence, wrong)][
            :1
        ]
    if not found:
        mixed = (
            ranks.scaled_on_some(evidence, wrong)
            or ranks.raced(evidence, wrong)
            or ranks.left_out(evidence, wrong)
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
        return UNEXPLAINED
    sentences = sentences_of(found)
    if ranks.could_be_raced(evidence, sentences):
        sentences[bugs.REDUCTION_NOT_WAITED_FOR] = ranks.LATE
    return Explanation.of(sentences, sentences)


def candidates(evidence: Evidence, wrong: torch.Tensor) -> Iterator[Candidate]:
    yield from _past_wrapper(evidence)
    yield from factors.candidates(evidence)
    yield from ranks.candidates(evidence)
    yield from replicas.candidates(evidence)
    yield from tensor_parallel.candidates(evidence)
    yield from hosts.candidates(evidence)
    yield from placement.candidates(evidence, wrong)
    some_terms = [*_local(evidence), *_last_microbatch(evidence)]
    yield from some_terms
    yield from memory_order.candidates(evidence, some_terms)
    world, count = evidence.passes.gradients.shape[:2]
    divide = count if evidence.semantics.divide == "gradient" else 1
    mean = world if evidence.semantics.average == "mean" else 1
    # Of one microbatch too: what is done to it is told from other causes in cases that have more.
    yield from _microbatches(evidence, mean * divide)
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


def _local(evidence: Evidence) -> Iterator[Candidate]:
    """Gradient of each rank alone, never reduced."""
    world, count = evidence.passes.gradients.shape[:2]
    if world == 1:
        return
    divide = count if evidence.semantics.divide == "gradient" else 1
    for name, divisor in ((bugs.LOCAL_GRADIENT_ONLY, 1), (bugs.LOCAL_GRADIENT_OVER_W, world)):
        words, more = "", ""
        if divisor > 1:
            words = f", divided by W = {world}"
            more = ", or the reduction was not waited for"
        yield Candidate(
            name,
            f"each rank holds its own local gradient{words}: it was never reduced over ranks"
            + more,
            [enclosed_sum(evidence, itemgetter(rank), divide * divisor) for rank in range(world)],
        )
    if count > 1:
        yield Candidate(
            bugs.LAST_MICROBATCH_OF_THE_LOCAL_GRADIENT_OVER_W,
            f"each rank holds its own gradient of the last of {count} microbatches, divided by W",
            [
                enclosed_sum(evidence, lambda terms, rank=rank: terms[rank, -1], divide * world)  # type: ignore[misc]
                for rank in range(world)
            ],
        )
        again = _divided_again(world, count)
        yield Candidate(
            bugs.LOCAL_GRADIENT_OVER_W_ACCUMULATOR_RESCALED,
            "each rank holds its own local gradient, never reduced over ranks, and each microbatch "
            f"divides the sum of those before it by W = {world} once more",
            [
                enclosed_sum(evidence, lambda terms, rank=rank: terms[rank] * again, divide * world)  # type: ignore[misc]
                for rank in range(world)
            ],
        )


def _last_microbatch(evidence: Evidence) -> Iterator[Candidate]:
    """Gradient of the last microbatch alone."""
    world, count = evidence.passes.gradients.shape[:2]
    if count == 1:
        return
    divide = count if evidence.semantics.divide == "gradient" else 1
    mean = world if evidence.semantics.average == "mean" else 1
    for name, factor in (
        (bugs.LAST_MICROBATCH_ONLY, 1),
        (bugs.LAST_MICROBATCH_ONLY_TIMES_GA, count),
    ):
        words = "" if factor == 1 else f", and it is not divided by {count}"
        yield Candidate(
            name,
            f"only the last of {count} microbatches counts{words}",
            [enclosed_sum(evidence, lambda terms: terms[:, -1], mean * divide / factor)],
        )


def _kept(evidence: Evidence, previous: torch.Tensor, roundings: int) -> Enclosing:
    """Sum of the right gradient and the previous one."""

    def at(positions: Positions | None) -> Enclosure:
        exact, bound = evidence.right.at(positions)
        before = some(previous, positions)
        kept = exact + before.to(torch.float64)
        error = slack(evidence, roundings, kept.abs() + before.abs(), positions)
        return Enclosure(kept, 2 * bound + error)

    return enclosing(evidence, at)


def _microbatches(evidence: Evidence, divisor: float) -> Iterator[Candidate]:
    """Microbatches that are missing, doubled, not reduced or scaled."""
    world, count = evidence.passes.gradients.shape[:2]
    for name, words, weight in (
        (bugs.MICROBATCH_DROPPED, "is missing from the sum", 0.0),
        (bugs.MICROBATCH_DOUBLED, "is in the sum twice", 2.0),
    ):
        for number in range(count):
            weights = torch.ones(count, 1, dtype=torch.float64)
            weights[number] = weight
            yield Candidate(
                name,
                f"microbatch {number} {words}",
                [enclosed_sum(evidence, partial(torch.mul, weights), divisor)],
            )
    if count > 3:
        weights = torch.zeros(count, 1, dtype=torch.float64)
        weights[[0, -1]] = 1.0
        yield Candidate(
            bugs.MICROBATCH_DROPPED,
            f"only the first and the last of {count} microbatches are in the sum",
            [enclosed_sum(evidence, partial(torch.mul, weights), divisor)],
        )
    if world == 1 or count == 1:
        return
    yield Candidate(
        bugs.ACCUMULATOR_RESCALED,
        "each microbatch divides the sum of those before it by W once more",
        [enclosed_sum(evidence, partial(torch.mul, _divided_again(world, count)), divisor)],
    )
    for number in range(count):
        yield Candidate(
            bugs.ONE_MICROBATCH_REDUCED,
            f"only microbatch {number} was reduced over ranks",
            [
                enclosed_sum(evidence, partial(_one_reduced, number, rank), divisor / world)
                for rank in range(world)
            ],
        )
        yield Candidate(
            bugs.ONE_MICROBATCH_NOT_REDUCED,
            f"microbatch {number} was not reduced over ranks, and the others were",
            [
                enclosed_sum(evidence, partial(_one_apart, number, rank), divisor / world)
                for rank in range(world)
            ],
        )


def _divided_again(world: int, count: int) -> torch.Tensor:
    """Weights (microbatches, 1) where each further microbatch divides the sum by W."""
    powers = [float(world) ** (number + 1 - count) for number in range(count)]
    return torch.tensor(powers, dtype=torch.float64).view(-1, 1)


def _one_reduced(number: int, rank: int, terms: torch.Tensor) -> torch.Tensor:
    """Terms of a rank, with the mean over ranks for one microbatch."""
    local = terms[rank].clone()
    local[number] = terms[:, number].sum(0) / len(terms)
    return local


def _one_apart(number: int, rank: int, terms: torch.Tensor) -> torch.Tensor:
    """Terms of a rank for one microbatch, with the mean over ranks for all others."""
    mixed = terms.sum(0) / len(terms)
    mixed[number] = terms[rank, number]
    return mixed


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
