"""report.html as text: whole, small, self-contained, and every value escaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hand_made import (
    HOSTILE,
    KNOWN,
    case,
    failed,
    finding,
    finished,
    held,
    hostile_finding,
    stale,
    started,
)

from zerocheck.report import html
from zerocheck.report.html import bands
from zerocheck.run.records.records import Record
from zerocheck.run.records.tally import tally

VOID = {"meta", "input", "line", "polygon", "rect", "circle"}


class Page(HTMLParser):
    """Reads a page: its elements must be closed in order; ids, links, text and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [given["id"]] if given.get("id") else []  # type: ignore[list-item]
        for name in ("src", "href", "xlink:href", "action"):
            self.addresses += [given[name]] if given.get(name) else []  # type: ignore[list-item]
        assert not [name for name in given if name.startswith("on")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def hostile() -> list[Record]:
    return [
        started(HOSTILE),
        case(0, HOSTILE, "violated", gradient="violated"),
        case(1, HOSTILE, "unsupported", reason=HOSTILE),
        hostile_finding(),
        finished(1),
    ]


RUNS = {
    "held": held(),
    "failed": failed(),
    "hostile": hostile(),
    "known": [started(), case(0), finding(known=KNOWN), stale(), finished(0)],
    "interrupted": [started(), case(0)],
    "empty": [],
}


@pytest.mark.parametrize("name", RUNS)
def test_it_is_whole_and_needs_nothing_else(name: str) -> None:
    text = html.render(tally(RUNS[name]))
    page = Page(text)
    assert len(text) < 1_000_000
    assert len(set(page.ids)) == len(page.ids)
    within = {address.removeprefix("#") for address in page.addresses}
    assert all(address.startswith("#") for address in page.addresses)
    assert within <= set(page.ids)
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org)", text.split("<main")[0])


def test_every_value_is_escaped() -> None:
    text = html.render(tally(hostile()))
    assert "<b>" not in text and "\x1b" not in text and "\u202e" not in text
    assert "&lt;b&gt;" in text and "[red]x[/red]" in text


def test_the_verdict_stands_at_the_top() -> None:
    def headline(run: str) -> str:
        found = re.search(r"<h1>(.*?)</h1>", html.render(tally(RUNS[run])))
        assert found is not None
        return found.group(1)

    assert headline("held") == "All obligations hold"
    assert headline("failed") == "2 findings"
    assert headline("interrupted") == "Not finished: 1 of 4 cases"


def test_a_finding_says_where_it_parts_and_how_far() -> None:
    words = " ".join(" ".join(Page(html.render(tally(failed()))).words).split())
    for message in ("parts at step 1, gradient, ranks: 2", "3e+07 times the bound", "96 of 128"):
        assert message in words
    assert "zerocheck replay zerocheck-report/findings/zero2-gradient.json" in words


def test_what_is_behind_a_cell() -> None:
    page = Page(html.render(tally(failed())))
    assert "of-0-zero2" in page.ids and "world-3" in page.words


@pytest.mark.parametrize("precision", bands.COPIES)
def test_bands_follow_the_formulas(precision: str) -> None:
    charts = [one for one in bands.charts(tally(held())) if one.precision == precision]
    p, g, k = bands.COPIES[precision]
    for chart in charts:
        for ranks, (parameters, gradients, optimizer) in zip(bands.RANKS, chart.steps, strict=True):
            assert optimizer == k / (ranks if chart.stage > 0 else 1)
            assert gradients == g / (ranks if chart.stage > 1 else 1)
            assert parameters == p / (ranks if chart.stage > 2 else 1)
    assert [chart.stage for chart in charts] == [0, 1, 2, 3]


def test_ranks_lie_on_the_slider_or_between() -> None:
    assert bands.across(1) == 0 and bands.across(64) == bands.WIDTH
    assert bands.across(4) < bands.across(5) < bands.across(6)


def test_a_reason_has_a_line_for_each_rank() -> None:
    answer = finding(reason="hung after 5 s\n  rank 0 waited\n\trank 1 finished\x1b[31m")
    text = html.render(tally([*failed()[:3], answer, finished(1)]))
    assert "<dd>hung after 5 s\nrank 0 waited\nrank 1 finished\\x1b[31m</dd>" in text
