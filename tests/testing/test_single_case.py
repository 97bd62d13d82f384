"""Verdicts on single cases: findings, case files, what is not supported, known issues."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerocheck.case.schema import Block, Case, Model, Training
from zerocheck.errors import UsageError
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute import shared_ranks
from zerocheck.run.findings import case_file as casefile
from zerocheck.run.findings.bug import Bug
from zerocheck.run.plan.options import RunOptions
from zerocheck.testing import single_case
from zerocheck.testing.single_case import SingleCaseJudge

ARTICLE = "zerocheck.faults.article:ArticleStage1"
LISTED = f"{ARTICLE} / gradient / local gradient only"
SMALL = Case(mesh=(3,), training=Training(steps=1))


@pytest.fixture(autouse=True)
def ranks(session_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of all tests in place of those that `shared_ranks` would start."""
    monkeypatch.setattr(shared_ranks, "_pool", session_pool)


def judge(name: str, **options: object) -> SingleCaseJudge:
    return SingleCaseJudge(RunOptions(implementations=(name,), **options))  # type: ignore[arg-type]


def test_a_case_that_holds(tmp_path: Path) -> None:
    verdict = judge("zero2").verdict(SMALL, tmp_path)
    assert not verdict.text and not verdict.unsupported
    assert verdict.notes == ("clip: not exercised", "buffers: not exercised")
    assert not list(tmp_path.iterdir())


def test_a_violation_is_a_finding_that_can_be_replayed(tmp_path: Path) -> None:
    article = judge(ARTICLE)
    title = f"VIOLATED {ARTICLE}: each rank holds its own local gradient"
    text = article.verdict(Case(mesh=(3,)), tmp_path).text
    assert text.startswith(title)
    assert "  reproduced  1 of 1 times in fresh rank processes\n" in text
    (path,) = tmp_path.iterdir()
    assert text.endswith(f"  replay      zerocheck replay {path} --implementation {ARTICLE}")
    # The next case with this violation is not confirmed, and its file takes the place of the first.
    again = article.verdict(SMALL, tmp_path).text
    assert again.startswith(title) and "reproduced" not in again
    assert [*tmp_path.iterdir()] == [path]
    case_file = casefile.read(path)
    assert case_file.case == SMALL and case_file.status == "violated" and case_file.tries == 0


def test_a_case_that_is_not_supported(tmp_path: Path) -> None:
    transposed = Case(mesh=(2,), model=Model(blocks=(Block(kind="mlp", transposed=True),)))
    verdict = judge("fsdp2").verdict(transposed, tmp_path)
    assert verdict.unsupported.startswith("torch refuses parameters that are not contiguous")
    assert not verdict.text


def test_a_known_issue_is_no_finding(tmp_path: Path) -> None:
    known = tmp_path / "known.toml"
    known.write_text(f'[[issue]]\nfingerprint = "{LISTED}"\nreason = "it is so"\n')
    verdict = judge(ARTICLE, known_issues=(str(known),)).verdict(SMALL, tmp_path)
    assert not verdict.text
    assert verdict.notes[-1] == f"known issue: {LISTED}"


def _shows_nothing(bug: Bug, ranks: Pool, obligations: object) -> None:
    bug.tries = 5


def test_what_fresh_ranks_do_not_show_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_case, "confirm", _shows_nothing)
    with pytest.warns(UserWarning, match="not reproduced in fresh rank processes: each rank"):
        assert not judge(ARTICLE).verdict(SMALL, tmp_path).text


def test_a_case_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2000; allowed: an integer >= 1 and <= 1024"):
        judge("zero2").verdict(Case(mesh=(2000,)), tmp_path)
