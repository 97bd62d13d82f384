"""Numbers in the text of a finding that are not those of its case."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from zerocheck.case.schema import Case
from zerocheck.protocol.verdicts import Violation

OF_OTHER_CASES = re.compile(
    r"on \d+ ranks with \d+ microbatch(es)?: .*"
    r"|in \d+ of the \d+ cases tried[^;]*"
    r"|unlike \d+ of the \d+ failing cases",
    re.MULTILINE,
)
"""What says itself that it is of other cases: a title or line that begins so, or a clause."""

ORDINALS = {"second": 1, "third": 2, "fourth": 3}


def contradictions(text: str, case: Case, violation: Violation | None) -> list[str]:
    """Return what contradicts a case and its violation in the text of their finding."""
    return list(_contradictions(OF_OTHER_CASES.sub("", text), case, violation))


def _contradictions(text: str, case: Case, violation: Violation | None) -> Iterator[str]:
    count = case.training.microbatches
    worlds = {case.world_size, *(math.prod(segment.mesh) for segment in case.resume)}
    for pattern, right in (
        (r"(?<!step )\b(\d+) ranks?\b(?! \d)", {*worlds, *case.mesh}),
        (r"(?<![\w.])(\d+) microbatch", {count}),
        (r"the (?:first|last) of (\d+)", {count}),
        (r"(?<![\w.])(\d+) blocks?\b", {len(case.model.blocks)}),
        (r"(?<![\w.])(\d+) steps?\b", {case.training.steps}),
        (r"sqrt\((\d+)\)", {case.world_size, *case.mesh}),
    ):
        for match in re.finditer(pattern, text):
            if int(match[1]) not in right:
                yield f"{match[0]!r}: the case has {sorted(right)}"
    for match in re.finditer(r"\branks? (\d+(?:(?:, | and | to )\d+)*)", text):
        for rank in map(int, re.findall(r"\d+", match[1])):
            if rank >= max(worlds):
                yield f"{match[0]!r}: there are {max(worlds)} ranks"
    yield from _unequal(text, _numbers(case))
    if violation is not None:
        yield from _of_violation(text, case, violation)


def _numbers(case: Case) -> Mapping[str, float]:
    numbers = {"W": case.world_size, "GA": case.training.microbatches, "T": case.axes.size("tp")}
    numbers |= {"R": case.axes.size("replicate"), "S": case.axes.size("shard")}
    return numbers


def _unequal(text: str, numbers: Mapping[str, float]) -> Iterator[str]:
    """Yield equations such as "W = GA = 3" that are wrong."""
    symbol = "|".join(numbers)
    term = rf"(?:1/)?(?:sqrt)?\(?(?:{symbol})(?:[ /](?:{symbol}))?\)?"
    for match in re.finditer(rf"\b{term}(?: = {term})* = ([\d.]+)\b", text):
        *terms, value = match[0].split(" = ")
        for each in terms:
            formula = re.sub(rf"({symbol}) ({symbol})", r"\1*\2", each)
            wanted = eval(formula, {"sqrt": math.sqrt}, dict(numbers))
            if not math.isclose(wanted, float(value), rel_tol=1e-3):
                yield f"{match[0]!r}: {each} is {wanted:g}"


def _of_violation(text: str, case: Case, violation: Violation) -> Iterator[str]:
    observed, expected = violation.observed, violation.expected
    for pattern, invert in (
        (r"([\d.]+) times too large", False),
        (r"([\d.]+) times too small", True),
        (r"every tensor: every local gradient counts ([\d.]+) times", False),
    ):
        for match in re.finditer(pattern, text):
            if not expected or observed is None:
                yield f"{match[0]!r}: there is no such element"
                continue
            factor = expected / observed if invert else observed / expected
            if not math.isclose(abs(factor), float(match[1]), rel_tol=1e-2):
                yield f"{match[0]!r}: the element shows {factor:g}"
    for match in re.finditer(r"\bstep (\d+)", text):
        if int(match[1]) != violation.step:
            yield f"{match[0]!r}: it is step {violation.step}"
    for match in re.finditer(r"from the (\w+) step on", text):
        if ORDINALS[match[1]] != violation.step:
            yield f"{match[0]!r}: it is step {violation.step}"
    beyond = "and the forward and backward of the next" in text
    if not case.resume and "smallest" in text and beyond != (violation.step >= case.training.steps):
        yield f"{case.training.steps} steps, and step {violation.step} is wrong"
