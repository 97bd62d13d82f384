"""The pages of the faults of torch and DeepSpeed: each has its script and its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zerocheck.run.known_issues import ours

FINDINGS = Path(__file__).parent.parent / "reports" / "findings"
INDEX = (FINDINGS / "README.md").read_text(encoding="utf-8")
PAGES = sorted(path.name for path in FINDINGS.glob("*.md") if path.name != "README.md")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_its_script_and_its_line(name: str) -> None:
    text = (FINDINGS / name).read_text(encoding="utf-8")
    (script,) = re.findall(r"alone:\*\*\s`python (\w+\.py)`", text)
    assert (FINDINGS / script).is_file()
    only = "torch and DeepSpeed only" if name.startswith("deepspeed") else "torch only"
    assert only in (FINDINGS / script).read_text(encoding="utf-8").splitlines()[0]
    (line,) = [line for line in INDEX.splitlines() if f"]({name})" in line]
    title = text.splitlines()[0].removeprefix("# ")
    assert line.startswith(f"| [{title}](")
    known = any(issue.page == f"reports/findings/{name}" for issue in ours())
    assert line.endswith("| yes |" if known else "|  |")


def test_every_script_has_a_page_and_the_readme_counts_them() -> None:
    told = "".join((FINDINGS / name).read_text(encoding="utf-8") for name in PAGES)
    for path in FINDINGS.glob("*.py"):
        assert f"`python {path.name}`" in told
    readme = (FINDINGS.parent.parent / "README.md").read_text(encoding="utf-8")
    (count,) = re.findall(r"found\s+(\d+)\s+faults", readme)
    assert int(count) == len(PAGES)
