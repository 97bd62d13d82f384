"""Another fault under the conditions of an entry of known issues is reported, for every entry."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from borrowing import borrowed
from collected import whole_run
from hand_made import VIOLATION, case

from zerocheck.case.schema import Case, TrainingSegment
from zerocheck.case.shapes import parameter_shapes
from zerocheck.protocol.verdicts import Obligation, Violation
from zerocheck.ranks.pool import Pool
from zerocheck.run.known_issues.entries import OURS, KnownIssue, matching, ours
from zerocheck.run.known_issues.scope import is_of, most_bytes, ranks_of
from zerocheck.run.records.records import CaseFinished, Finding

replace = msgspec.structs.replace
ISSUES = ours()
VIOLATIONS = [issue for issue in ISSUES if issue.obligation is not None]
CRASHES = [issue for issue in ISSUES if issue.obligation is None]

HERE = Path(__file__).parent


def planted(
    folder: Path, pool: Pool, base: str, of: str, subject: str, **options: Any
) -> tuple[list[Finding], list[Finding]]:
    """Run a subject with known issues of what it is a subclass of: (findings, known).

    of: how the rest of their fingerprints begins.
    """
    known = folder / "known.toml"
    entries = OURS.read_text(encoding="utf-8").split("\n[[issue]]\n")[1:]
    name = f'"{HERE / subject} / '
    same = [one for one in entries if one.startswith(f'fingerprint = "{base} / {of}')]
    text = []
    for one in same:
        lines = one.partition("[issue.case]")[0].splitlines()
        kept = [line for line in lines if not line.startswith(("sometimes =", "case ="))]
        text += ["[[issue]]", *kept, "sometimes = true"]
    known.write_text("\n".join(text).replace(f'"{base} / ', name), encoding="utf-8")
    listed = {"known_issues": ("none", str(known)), "report_dir": folder, **options}
    _, records = whole_run(pool, str(HERE / subject), **listed)
    return records.tally.findings, records.tally.known


@pytest.mark.long
def test_a_wrong_gradient_on_a_shard_axis_of_one_rank_is_found(tmp_path: Path, pool: Pool) -> None:
    """There FSDP1 reduces nothing, which is known; half of each gradient x 3 is not."""
    found, known = planted(
        tmp_path,
        pool,
        "fsdp1",
        "gradient",
        "planted_under_known.py:HalfTripled",
        features=("one-shard",),
        world_sizes=(2, 3),
        max_cases=4,
        obligations=("gradient",),
        shrink=False,
    )
    assert sum(one.cases for one in found) >= 2 and not known


@pytest.mark.long
def test_a_save_that_deletes_the_older_checkpoint_is_found(tmp_path: Path, pool: Pool) -> None:
    """That dcp writes over it file by file is known."""
    found, _ = planted(
        tmp_path,
        pool,
        "ddp",
        "durability / checkpoint",
        "planted_under_known.py:DeletesTheOlder",
        features=("resume-killed", "resume-over"),
        world_sizes=(2,),
        max_cases=8,  # a kill may come too late to show it
        obligations=("durability",),
    )
    assert "older checkpoint removed" in {cause for one in found for cause in one.causes}


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.long
def test_ranks_that_can_load_no_universal_checkpoint_are_found(
    tmp_path: Path, deepspeed_pool: Pool
) -> None:
    """That one without elements cannot is known, with the same error."""
    with borrowed(deepspeed_pool, patience_s=10.0) as pool:
        found, known = planted(
            tmp_path,
            pool,
            "deepspeed1",
            "",
            "planted_deepspeed.py:CannotLoad",
            features=("universal-checkpoint",),
            world_sizes=(3,),
            max_cases=3,
            obligations=("roundtrip",),
            shrink=False,
        )
    assert found and not known


def case_of(issue: KnownIssue) -> Case:
    """Its own case, or that of another entry of the same fault that has all its features."""
    if issue.case is not None:
        return issue.case
    last = TrainingSegment(mesh=(2,), killed=0.5, over="resume-over" in issue.features)
    universal = "universal-checkpoint" in issue.features
    return Case(
        resume=(replace(last, over=True),),
        options={"deepspeed.universal": True} if universal else {},
    )


def own_violation(issue: KnownIssue) -> tuple[CaseFinished, Violation]:
    """A violation that the entry covers, made of what it says."""
    parts = issue.fingerprint.split(" / ", 3)
    of = case_of(issue)
    role, causes = parts[2], tuple(parts[3].split("+")) if len(parts) > 3 else ()
    if len(parts) == 3:  # the role of a gradient and of a loss is left out of a fingerprint
        role, causes = parts[1], tuple(parts[2].split("+"))
    names = [n for n in parameter_shapes(of.model) if is_of(issue.tensors, of, n)]
    violation = replace(
        VIOLATION,
        obligation=parts[1],
        role=role,
        causes=causes,
        tensors=tuple(names) if issue.tensors else ("stem.weight",),
        ranks=ranks_of(issue.ranks, of) if issue.ranks else (0,),
        error=issue.error,
        observed=float(most_bytes(issue.surplus, of)),
        expected=0.0,
        parts=(),
    )
    finished = replace(case(status="violated"), implementation=issue.implementation, case=of)
    return finished, violation


def others(issue: KnownIssue, violation: Violation) -> Iterator[tuple[str, Violation]]:
    """Violations of other faults, which show in the same obligation of the same case."""
    yield "unexplained", replace(violation, causes=())
    yield "another cause", replace(violation, causes=("gradient x W",))
    yield (
        "another role",
        replace(violation, role="loss_scale")
        if "*" not in issue.roles
        else (replace(violation, causes=("gradient x W",))),
    )
    elsewhere: Obligation = "publish" if issue.obligation == "loss" else "loss"
    yield "another obligation", replace(violation, obligation=elsewhere)
    unexplained = replace(violation, causes=(), tensors=("head.bias",))
    yield "another fault next to it", replace(violation, parts=(violation, unexplained))
    if issue.tensors:
        yield "another tensor", replace(violation, tensors=(*violation.tensors, "no.such"))
    if issue.ranks:
        every = tuple(range(case_of(issue).world_size))
        yield "other ranks", replace(violation, ranks=every)
    if issue.error:
        yield "another refusal", replace(violation, error="OSError: no space left on device")
    if issue.surplus:
        yield "more bytes", replace(violation, observed=(violation.observed or 0.0) + 1e6)


@pytest.mark.parametrize("issue", VIOLATIONS, ids=lambda issue: issue.fingerprint)
def test_another_violation_is_no_known_issue(issue: KnownIssue) -> None:
    finished, violation = own_violation(issue)
    assert issue.matches(finished, violation), "the entry must cover what it says"
    for what, other in others(issue, violation):
        assert not matching(ISSUES, finished, other), what
    elsewhere = replace(finished, implementation="zero2")
    assert not matching(ISSUES, elsewhere, violation)


@pytest.mark.parametrize("issue", VIOLATIONS, ids=lambda issue: issue.fingerprint)
def test_an_entry_names_its_cause(issue: KnownIssue) -> None:
    without_role = issue.obligation in ("gradient", "loss")  # the role says the same
    assert len(issue.fingerprint.split(" / ")) > (2 if without_role else 3)


@pytest.mark.parametrize("issue", CRASHES, ids=lambda issue: issue.fingerprint)
def test_another_crash_is_no_known_issue(issue: KnownIssue) -> None:
    assert issue.says and issue.features
    status, error = issue.fingerprint.split(" / ")[1:]

    def crash(error: str, *words: str) -> CaseFinished:
        record: dict[str, Any] = {"error": error, "title": words[0], "detail": "\n".join(words)}
        of = {"implementation": issue.implementation, "case": case_of(issue)}
        return replace(case(status=status), **record, **of)

    assert issue.matches(crash(error, *issue.says), None)
    assert not matching(ISSUES, crash(error, "rank 1 lost its way"), None)
    assert not matching(ISSUES, crash("OSError", *issue.says), None)
