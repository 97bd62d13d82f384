"""conformance.md: which feature was judged for which obligation, and what came of it."""

from __future__ import annotations

import re

import msgspec
from hand_made import HOSTILE, KNOWN, case, failed, finding, finished, started

from zerocheck.case.features import features
from zerocheck.case.schema import Case
from zerocheck.report.conformance import render
from zerocheck.run.records.tally import tally


def row(text: str, implementation: str, feature: str) -> dict[str, str]:
    """Cells of one feature by obligation."""
    part = text.split(f"### {implementation}\n")[1].split("### ")[0]
    lines = [
        [c.strip() for c in line.split("|")[1:-1]] for line in part.splitlines() if "|" in line
    ]
    (found,) = [line for line in lines if line[0] == feature]
    return dict(zip(lines[0], found, strict=True))


def test_a_feature_has_its_cases_by_obligation() -> None:
    text = render(tally(failed()))
    assert "torch 2.13.0" in text.split("\n\n")[1]
    cells = row(text, "zero2", "world-3")
    assert cells["loss"] == "1"
    assert "**1 violated**" in "".join(row(text, "zero2", f"world-{n}")["gradient"] for n in (2, 3))
    assert "## Findings" in text and "world-9-up" not in text


def test_what_could_not_fail_is_not_counted() -> None:
    held = case(0)
    vacuous = msgspec.structs.replace(held.judgement, vacuous=("gradient",))
    text = render(tally([started(), msgspec.structs.replace(held, judgement=vacuous), finished(0)]))
    size = next(name for name in features(held.case) if name.startswith("world-"))
    assert row(text, "zero2", size)["gradient"] == "–"
    assert row(text, "zero2", size)["loss"] == "1"


def test_known_faults_of_several_implementations_are_one_line() -> None:
    issues = [
        finding(number=number, implementation=name, known=KNOWN)
        for number, name in enumerate(("ddp", "fsdp2"))
    ]
    text = render(tally([started("ddp", "fsdp2"), *issues, finished(0)]))
    lines = [line for line in text.splitlines() if re.search(r"ddp \d+, fsdp2 \d+", line)]
    assert "## Known faults" in text and len(lines) == 1


def test_hostile_names_are_escaped() -> None:
    text = render(tally([started(HOSTILE), case(0, HOSTILE, reason=HOSTILE), finished(0)]))
    assert "<script" not in text and features(Case())[0] in text
