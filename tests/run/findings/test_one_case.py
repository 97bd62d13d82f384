"""A finding speaks of one case: the one that `replay` runs, in its text and on every page."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from case_numbers import contradictions
from collected import Collect, whole_run

from zerocheck.case.schema import Case, Training
from zerocheck.protocol.verdicts import Violation
from zerocheck.ranks.pool import Pool
from zerocheck.report import comment
from zerocheck.report.write import FORMATS, write_reports
from zerocheck.run.findings.case_file import read
from zerocheck.run.records.finding_text import finding_text
from zerocheck.run.records.records import Finding
from zerocheck.run.replay import replay

SUBJECTS = f"{Path(__file__).parents[1] / 'subjects.py'}"
FAULTS = "zerocheck.faults"

PLANTED: dict[str, Mapping[str, Any]] = {
    f"{SUBJECTS}:not_averaged": {},
    f"{SUBJECTS}:not_averaged_from_3_ranks": {},
    f"{SUBJECTS}:RaisesInMicrobatches": {},
    f"{FAULTS}.accumulation:NotDividedByGa": {},
    f"{FAULTS}.accumulation:LastMicrobatchOnly": {},
    f"{FAULTS}.gradient:SyncFirstStepOnly": {},
    f"{FAULTS}.gradient:SubgroupDivisor": {},
    f"{FAULTS}.replicas:DividedByReplicasTwice": {"features": ("two-axes",), "world_sizes": (2, 4)},
    f"{FAULTS}.clipping:ReplicatedCountedWTimes": {"features": ("clip",)},
    f"{FAULTS}.update:DecayOnExcluded": {"features": ("some-decay",)},
    f"{FAULTS}.ownership:ShardsOverlap": {},
    f"{FAULTS}.forward:SamplesOfRank0": {},
    f"{FAULTS}.checkpoints:StepCountLost": {"obligations": ("roundtrip",)},
    f"{FAULTS}.memory:CopyKept": {"obligations": ("persistent",)},
    "fsdp2+half-group": {},
    "fsdp2+gather-stale": {},
}
"""Bugs with another factor on each number of ranks or microbatches, that need three ranks, a second
step or a feature, and one for each kind of obligation."""


def findings(pool: Pool, name: str, folder: Path, **asked: Any) -> tuple[list[Finding], Collect]:
    options = {"world_sizes": (1, 2, 3), "max_cases": 12, "report_dir": folder, **asked}
    code, records = whole_run(pool, name, **options)
    assert code == 1
    return records.tally.findings, records


SHOWN = Violation(
    obligation="gradient",
    step=1,
    role="gradient",
    tensors=("head.weight",),
    ranks=(0, 1),
    explanation="",
    observed=0.5,
    expected=0.25,
)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("gradient is 2 times too large: summed over 2 ranks, not averaged", False),
        ("gradient is 2 times too large: summed over 3 ranks, not averaged", True),
        ("gradient is 3 times too large", True),
        ("gradient is 2 times too small", True),
        ("on 3 ranks with 5 microbatches: gradient is 3 times too large", False),
        ("every local gradient counts 2 times (W = 2)", False),
        ("every local gradient counts 2 times (W = GA = 2)", True),
        ("every local gradient counts 0.333333 times (1/W = 0.333333)", True),
        ("it is 1.414 times (sqrt(W) = 1.41421)", False),
        ("gradient of every tensor: every local gradient counts 3 times", True),
        ("microbatches 0 to 4 of 5 microbatches", True),
        ("where       step 1, role gradient, ranks 0, 1", False),
        ("where       step 0, role gradient", True),
        ("where       step 1, ranks 1 and 2", True),
        ("extent      only from the third step on", True),
        ("extent      in 9 of the 31 cases tried: those on 3 ranks or more; on rank 1", False),
        ("smallest    2 ranks, no blocks, 1 step and the forward and backward of the next", False),
        ("smallest    2 ranks, no blocks, 1 step", True),
        ("smallest    2 ranks, 1 block, 1 step and the forward and backward of the next", True),
    ],
)
def test_numbers_of_another_case_are_seen(text: str, wrong: bool) -> None:
    case = Case(mesh=(2,), training=Training(steps=1))
    assert bool(contradictions(text, case, SHOWN)) == wrong


@pytest.mark.every(12)
@pytest.mark.parametrize("name", PLANTED)
def test_all_numbers_are_of_the_case_to_replay(name: str, tmp_path: Path, pool: Pool) -> None:
    shown, records = findings(pool, name, tmp_path, **PLANTED[name])
    write_reports(records, tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())["findings"]
    assert any(finding.size for finding in shown)
    for finding, in_json in zip(shown, data, strict=True):
        file = read(Path(finding.case_file))
        assert file.title == in_json["title"] == finding.title
        assert not contradictions(finding_text(finding), file.case, finding.violation)
        for page in set(FORMATS) - {"report.json", "conformance.md"}:
            text = html.unescape((tmp_path / page).read_text()).replace("\\", "")
            assert finding.title in text, page
            assert page == comment.FILE or finding.variant in text, page
        violation = finding.violation
        if violation is not None:
            assert in_json["violation"]["explanation"] == violation.explanation
            # What explains the smallest case alone is named only where a variant refutes it.
            refuted = finding.title.startswith("on ")
            assert refuted or not finding.causes or finding.title == violation.explanation
        again = replay(file, implementation=name, ranks=pool)
        titles = {replayed.title for replayed in again.findings}
        assert finding.title in titles or finding.title in again.verdict
