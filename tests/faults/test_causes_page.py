"""Page of all causes: up to date, and each cause with the planted faults that show it."""

from __future__ import annotations

from pathlib import Path

from zerocheck.causes.registry import find, registered
from zerocheck.faults.causes_page import page, shown_by

PAGE = Path(__file__).parents[2] / "docs" / "causes.md"


def test_the_page_is_up_to_date() -> None:
    """If it is not: python -m zerocheck.faults.causes_page > docs/causes.md"""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_cause_is_there_with_its_faults() -> None:
    text = page()
    assert text.count("\n### ") == len(registered())
    one = find("norm without some parameters")
    assert one is not None and shown_by(one) == ["norm-without-head"]
    assert "### reduced in …\n" in text and "### flip, truncate, remove, mix\n" in text
