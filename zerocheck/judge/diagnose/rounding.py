"""Causes of a wrong gradient of which something was rounded to a narrower format.

The terms before the sum over ranks, its result, or the terms to one bit, their sign.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ... import causes as bugs
from ...floating_point import Enclosure, Format
from .. import bounds
from ..pieces import Enclosing, Positions, some, split
from .evidence import Candidate, Evidence, Terms, enclosed_sum, enclosing, everything

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Iterate over gradients with rounded terms: microbatches or sums, divided before or after.

    Or with rounded results, or each rank's sum of microbatches is taken in that format, or the sign
    of the terms.

    The local gradients are known bit for bit, and so is what they are rounded to; only the sum over
    ranks is enclosed, as it is for a right gradient.
    """
    world, count = evidence.passes.gradients.shape[:2]
    mean = evidence.semantics.average == "mean"
    given: list[tuple[str, Terms]] = [("", _in_all)]
    if count > 1:
        given.append((" of each microbatch", everything))
    for name, dtype in NARROW.items():
        for words, terms in given:
            for divided in (False, True) if mean and world > 1 else (False,):
                sent = partial(_rounded, terms, dtype, world if divided else 1)
                divisor = evidence.divisor / world if divided else evidence.divisor
                yield Candidate(
                    bugs.REDUCED_IN(format=name),
                    f"the gradients{words} were rounded to {name} before they were reduced",
                    [enclosed_sum(evidence, sent, divisor, exactly_given=True)],
                )
        if count > 1:
            yield Candidate(
                bugs.ACCUMULATED_IN(format=name),
                f"each rank summed its microbatches in {name}",
                [
                    enclosed_sum(
                        evidence, partial(_added, dtype), evidence.divisor, exactly_given=True
                    )
                ],
            )
        for words, terms in given:
            yield from _results(evidence, words, terms, name)
    yield from _signs(evidence, "each rank's gradient", _in_all)
    if count > 1:
        yield from _signs(evidence, "the gradient of each microbatch", everything)


def _results(evidence: Evidence, words: str, terms: Terms, name: str) -> Iterator[Candidate]:
    """Iterate over gradients of which the result of the reduction was rounded to this format.

    Where a mean could be rounded before its division, that too.
    """
    world, count = evidence.passes.gradients.shape[:2]
    forms = [("reduced gradient", f"was rounded to {name}", 1, False)]
    if evidence.semantics.average == "mean" and world & (world - 1):
        forms.append(("sum of the gradients over ranks", f"was rounded to {name}", world, False))
    if count > 1 and terms is everything:
        forms.append(("reduced gradient", f"was rounded to {name}, and so was each sum", 1, True))
    for what, happened, later, sums in forms:
        yield Candidate(
            bugs.RESULT_ROUNDED_TO(format=name),
            f"the {what}{words} {happened}",
            [_rounded_results(evidence, terms, NARROW[name], later, sums)],
        )


def _rounded_results(
    evidence: Evidence, terms: Terms, dtype: torch.dtype, later: int, sums: bool
) -> Enclosing:
    """Enclose the sum of results of reductions that were rounded to this dtype, one of each term.

    later: what each is divided by after it was rounded. A result in [a, b] is rounded to
    [round(a), round(b)], since rounding is monotonic. The results of several microbatches are then
    added, with a rounding each, and 2 of a division; sums: and each sum is rounded to the dtype.
    """

    def at(positions: Positions | None) -> Enclosure:
        made = terms(some(evidence.passes.gradients, positions).to(torch.float64))
        world, count = made.shape[:2]
        low = made.new_zeros(made.shape[2])
        high, size = low.clone(), low.clone()
        formats, noise = evidence.formats.at(positions), evidence.noise
        if isinstance(noise, torch.Tensor):
            noise = some(noise, positions)
        divisor, roundings = evidence.divisor / later, count - 1 + (2 if later > 1 else 0)

        def enclosure(exact: torch.Tensor, absolute: torch.Tensor, format: Format) -> Enclosure:
            return bounds.gradient(exact, absolute, 2 * world + 4, format)

        def added(exact: torch.Tensor, absolute: torch.Tensor, format: Format) -> Enclosure:
            return bounds.gradient(exact, absolute, roundings, format)

        for number in range(count):
            one = made[:, number] / divisor
            exact, bound = formats.enclose(enclosure, one.sum(0), one.abs().sum(0))
            bound = bound + noise / divisor
            least, most = ((exact + by).to(dtype).to(torch.float64) for by in (-bound, bound))
            low, high = low + least, high + most
            if sums:
                low, high = (one.to(dtype).to(torch.float64) for one in (low, high))
            size += torch.maximum(least.abs(), most.abs())
        middle, half = (low + high) / 2 / later, (high - low) / 2 / later
        if not roundings:
            return Enclosure(middle, half)
        return Enclosure(middle, half + formats.enclose(added, middle, size / later)[1])

    return enclosing(evidence, at)


def of_uses(evidence: Evidence, wrong: torch.Tensor) -> Iterator[Candidate]:
    """Iterate over gradients of which autograd added the uses of a parameter in narrow formats.

    In the declared format of the reduction, or in any where none is declared. Microbatches are then
    added in the format that is declared for it. Where each wrong element (mask `wrong`) has one
    use, it is rounded as its sum is, and nothing shows this cause.
    """
    if evidence.added_in is None:
        return
    for name, dtype in NARROW.items():
        if evidence.semantics.reduce not in ("own", "fp32", name):
            continue
        terms = evidence.added_in(dtype).gradients
        if _as_sums(terms, evidence.passes.gradients, wrong, dtype):
            continue
        added: Terms = _in_all
        if evidence.semantics.accumulate_dtype == name:
            added = partial(_added, dtype)
        yield Candidate(
            bugs.USES_ADDED_IN(format=name),
            f"what each use of a parameter gives was rounded to {name} before autograd added them",
            [enclosed_sum(evidence, added, evidence.divisor, given=terms, exactly_given=True)],
        )


def _as_sums(
    terms: torch.Tensor, sums: torch.Tensor, wrong: torch.Tensor, dtype: torch.dtype
) -> bool:
    """Return True if the wrong elements of local gradients are the sums in this dtype."""
    return all(
        torch.equal(terms[..., here][..., mask], sums[..., here][..., mask].to(dtype).to(terms))
        for here in split(len(wrong))
        if bool((mask := wrong[here]).any())
    )


def _signs(evidence: Evidence, words: str, terms: Terms) -> Iterator[Candidate]:
    """Iterate over the sum and the means of the signs of local gradients, which are exact."""
    world = evidence.passes.gradients.shape[0]
    for divisor in dict.fromkeys((1.0, float(world), float(evidence.divisor))):
        yield Candidate(
            bugs.SIGN_BEFORE_THE_REDUCTION,
            f"the sign was taken of {words}, and not of the reduced one",
            [enclosed_sum(evidence, partial(_sign, terms), divisor, exactly_given=True)],
        )


def reductions(evidence: Evidence, wrong: torch.Tensor) -> Iterator[Candidate]:
    """Sum over ranks in a narrower format, as an enclosure.

    It explains much, so it is used where no other candidate explains anything, and reported where
    it could be refuted: most of the wrong elements (mask `wrong`) cannot be 0 so.

    Terms near the smallest number of the format could be rounded to anything.
    """
    given = evidence.formats.parts[0][0]
    for name, dtype in NARROW.items():
        format = Format.of(dtype)
        if format.u > given.u:
            enclosing = enclosed_sum(
                evidence, partial(_cast, dtype), evidence.divisor, added_in=format
            )
            if _could_be_refuted(enclosing, wrong):
                yield Candidate(
                    bugs.REDUCED_IN(format=name),
                    f"the gradients were summed over ranks in {name}",
                    [enclosing],
                )


def _could_be_refuted(enclosing: Enclosing, wrong: torch.Tensor) -> bool:
    apart = 0
    for here in split(enclosing.size):
        exact, bound = enclosing.at(here)
        apart += int(((exact.abs() > bound) & wrong[here]).sum())
    return 2 * apart > int(wrong.sum())


def _cast(dtype: torch.dtype, local: torch.Tensor) -> torch.Tensor:
    return local.to(dtype)


def _added(dtype: torch.dtype, local: torch.Tensor) -> torch.Tensor:
    total = local[:, 0].to(dtype)
    for number in range(1, local.shape[1]):
        total += local[:, number].to(dtype)
    return total.unsqueeze(1)


def _in_all(local: torch.Tensor) -> torch.Tensor:
    total = local[:, 0].clone()
    for number in range(1, local.shape[1]):
        total += local[:, number]  # one after the other, as autograd adds them
    return total.unsqueeze(1)


def _sign(terms: Terms, local: torch.Tensor) -> torch.Tensor:
    return terms(local).sign()


def _rounded(terms: Terms, dtype: torch.dtype, divisor: int, local: torch.Tensor) -> torch.Tensor:
    sent = terms(local)
    return (sent / divisor if divisor > 1 else sent).to(dtype)
