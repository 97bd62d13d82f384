"""report.html in Chromium: opened, clicked through, read by keyboard, on a phone, in the dark.

Without Chromium the tests are skipped with the reason; where ZEROCHECK_BROWSER is "required", as in
CI, that is a failure. Pictures are written to the folder that ZEROCHECK_PICTURES names, if it does.
"""

from __future__ import annotations

import lzma
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browsing import NoBrowser, browser, complaints, opened
from hand_made import KNOWN, case, finding, finished, started
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from zerocheck.protocol.verdicts import MeasuredBytes
from zerocheck.report import html
from zerocheck.run.records.journal import read
from zerocheck.run.records.records import CaseFinished, Record
from zerocheck.run.records.tally import tally

LONG = Path(__file__).parents[2] / "reports" / "conformance" / "seed-0.ndjson.xz"
"""1,075 cases over thirteen implementations."""


HANG = msgspec.structs.replace(KNOWN, fingerprint="ddp / hung", reason="ranks mix up", page="")


def measured(number: int, ranks: int) -> CaseFinished:
    one = case(number, mesh=(ranks,))
    assert one.judgement is not None
    held = 4000 + 12000 // ranks
    measured_bytes = MeasuredBytes(
        copy=(4000, 4000, 8000), held=held, total=held * ranks, sent=9000.0, trained=4000,
        elements=1000, stage=2, predicted=True,
    )  # fmt: skip
    return msgspec.structs.replace(
        one, judgement=msgspec.structs.replace(one.judgement, measured_bytes=measured_bytes)
    )


def records() -> list[Record]:
    return [
        started("zero2", "ddp"),
        measured(0, 2),
        measured(1, 8),
        case(2, "zero2", "violated", gradient="violated"),
        case(3, "ddp", mesh=(3,)),
        finding(),
        finding(number=1, implementation="ddp", known=KNOWN),
        finding(number=2, implementation="ddp", known=HANG, obligation=None, status="hung"),
        finished(1),
    ]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html.render(tally(records())), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    (folder / "journal.ndjson").write_bytes(lzma.decompress(LONG.read_bytes()))
    path = folder / "report.html"
    path.write_text(html.render(tally(read(folder / "journal.ndjson"))), encoding="utf-8")
    return path


def start(page: Path, **window: Any) -> Iterator[Any]:
    try:
        with browser(**window) as driver:
            opened(driver, page)
            yield driver
            assert complaints(driver) == []
    except NoBrowser as error:
        if os.environ.get("ZEROCHECK_BROWSER") == "required":
            pytest.fail(f"a browser is required here: {error}")
        pytest.skip(f"no browser: {error}")


@pytest.fixture
def desktop(page: Path) -> Iterator[Any]:
    yield from start(page)


def picture(driver: Any, name: str) -> None:
    """A picture of the window. One that is blank is small."""
    folder = os.environ.get("ZEROCHECK_PICTURES")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(Path(folder, f"{name}.png")))
    assert len(driver.get_screenshot_as_png()) > 10_000


def one(driver: Any, selector: str) -> Any:
    return driver.find_element(By.CSS_SELECTOR, selector)


def test_a_cell_opens_what_is_behind_it(desktop: Any) -> None:
    picture(desktop, "desktop")
    drill = one(desktop, "#of-0-zero2")
    assert not drill.get_attribute("open")
    one(desktop, "td.bad a[data-obligation='gradient']").click()
    assert drill.get_attribute("open")
    marked = drill.find_elements(By.CSS_SELECTOR, "[data-of].chosen")
    assert {element.get_attribute("data-of") for element in marked} == {"gradient"}
    column = one(drill, ".features th.chosen").get_property("cellIndex")
    cells = drill.find_elements(By.CSS_SELECTOR, ".features td.chosen")
    assert cells and {cell.get_property("cellIndex") for cell in cells} == {column}
    names = drill.find_elements(By.CSS_SELECTOR, ".features tbody th")
    titles = {name.get_property("textContent"): name.get_attribute("title") for name in names}
    assert titles["world-2"] == "2 ranks" and all(titles.values())
    assert "world-2" in drill.text
    desktop.get(desktop.current_url.split("#")[0] + "#of-1-ddp")
    desktop.refresh()
    assert one(desktop, "#of-1-ddp").get_attribute("open")


@pytest.mark.long
def test_the_bands_follow_stage_precision_and_ranks(desktop: Any) -> None:
    def shown() -> list[Any]:
        return [c for c in desktop.find_elements(By.CSS_SELECTOR, ".chart") if c.is_displayed()]

    (chart,) = shown()
    assert chart.get_attribute("data-stage") == "3"
    assert "0.25 parameters + 0.25 gradients + 1.50 optimizer = 2.00 bytes" in chart.text
    one(desktop, "input[value='fp32']").click()
    (chart,) = shown()
    assert "0.50 parameters + 0.50 gradients + 1.00 optimizer = 2.00 bytes" in chart.text
    one(desktop, "input[name=stage][value='2']").click()
    (chart,) = shown()
    assert "4.00 parameters + 0.50 gradients + 1.00 optimizer = 5.50 bytes" in chart.text
    assert "zero2" in chart.text and len(chart.find_elements(By.TAG_NAME, "circle")) == 2
    slider = one(desktop, "#ranks")
    before = one(desktop, ".chart:not([hidden]) .marker").get_attribute("x1")
    slider.send_keys(Keys.END)
    assert one(desktop, "#n").text == "64"
    assert slider.get_attribute("aria-valuetext") == "64 ranks"
    (chart,) = shown()
    assert chart.find_element(By.CSS_SELECTOR, ".marker").get_attribute("x1") != before
    one(desktop, "input[value='mixed precision']").click()
    (chart,) = shown()
    assert "2.00 parameters" in chart.text and "2 Ψ + 14 Ψ/N" in chart.text


def test_known_faults_are_filtered_by_keyboard(desktop: Any) -> None:
    def titles() -> list[str]:
        every = desktop.find_elements(By.CSS_SELECTOR, ".fault h3")
        return [title.text for title in every if title.is_displayed()]

    assert titles() == ["upstream divides by nothing", "ranks mix up"]
    search = one(desktop, "#filter input[type=search]")
    search.send_keys("MIX up")
    assert titles() == ["ranks mix up"] and one(desktop, "#shown").text == "1 of 2"
    search.send_keys(Keys.ENTER)  # sends no form
    assert titles() == ["ranks mix up"]
    search.clear()
    search.send_keys(" ")
    assert len(titles()) == 2
    choice = one(desktop, "#filter select[name=severity]")
    choice.send_keys("crash")
    assert titles() == ["ranks mix up"]
    choice.send_keys(Keys.HOME)
    one(desktop, "#filter select[name=obligation]").send_keys("gradient")
    assert titles() == ["upstream divides by nothing"]
    picture(desktop, "faults")


def test_a_cell_of_the_heat_map_says_why(desktop: Any) -> None:
    rows = desktop.find_elements(By.CSS_SELECTOR, ".heat tbody tr")
    cells = {
        row.find_element(By.TAG_NAME, "th").text: row.find_elements(By.TAG_NAME, "td")
        for row in rows
    }
    zero2, ddp = cells["world-3"][1:]
    assert "bad" not in ddp.get_attribute("class")
    assert zero2.get_attribute("title").startswith("world-3: not drawn")


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("width", [390, 1280])
def test_the_matrix_is_whole_on_a_long_run(long_page: Path, width: int) -> None:
    for driver in start(long_page, width=width):
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        wide, inner = driver.execute_script(
            "const box = document.querySelector('#obligations .wide');"
            "return [box.scrollWidth, box.clientWidth]"
        )
        assert wide <= inner + 1
        picture(driver, f"long-{width}")


@pytest.mark.long
def test_everything_is_reached_by_keyboard(desktop: Any) -> None:
    reached = set()
    for _ in range(90):
        one(desktop, "body").send_keys(Keys.TAB)
        active = desktop.switch_to.active_element
        reached.add((active.tag_name, active.get_attribute("id") or active.text))
        if active.get_attribute("id") == "ranks":
            break
    assert ("a", "Skip to the report") in reached or any(tag == "a" for tag, _ in reached)
    assert {"a", "summary", "button", "input"} <= {tag for tag, _ in reached}
    link = one(desktop, "td.bad a")
    link.send_keys(Keys.ENTER)
    assert one(desktop, "#of-0-zero2").get_attribute("open")


def test_the_replay_line_is_copied_or_selected(desktop: Any) -> None:
    button = one(desktop, "button[data-copy]")
    button.click()
    for _ in range(50):
        if button.text != "Copy":
            break
    assert button.text in ("Copied", "Selected")
    selected = desktop.execute_script("return getSelection().toString()")
    assert button.text == "Copied" or selected == button.get_attribute("data-copy")


def test_a_reader_is_told_names_and_roles(desktop: Any) -> None:
    unnamed = desktop.execute_script(
        "return [...document.querySelectorAll('svg[role=img], section, nav, [role=region]')]"
        ".filter((e) => !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')))"
        ".map((e) => e.outerHTML.slice(0, 80))"
    )
    assert unnamed == []
    levels = desktop.execute_script(
        "return [...document.querySelectorAll('h1, h2, h3, h4')].map((e) => Number(e.tagName[1]))"
    )
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.mark.every(2)
@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone_nothing_is_wider_than_the_screen(page: Path, dark: bool) -> None:
    for driver in start(page, width=390, height=844, dark=dark):
        picture(driver, "phone-dark" if dark else "phone")
        wide = driver.execute_script("return document.documentElement.scrollWidth")
        assert wide <= 390
        back = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(20, 23, 26)") == dark
        sizes = driver.execute_script(
            "return [...document.querySelectorAll('figure:not([hidden]) svg text')]"
            ".filter(text => text.getBoundingClientRect().width)"
            ".map(text => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a)"
        )
        assert sizes and min(sizes) >= 9, sizes  # pixels: legible


def contrast(one: str, other: str) -> float:
    """WCAG 2.1: (lighter + 0.05) / (darker + 0.05) of relative luminances; "rgb(r, g, b)"."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[4:-1].split(",")]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.every(2)
@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out(page: Path, dark: bool) -> None:
    """4.5 to 1 at least (WCAG 2.1, 1.4.3)."""
    for driver in start(page, dark=dark):
        picture(driver, "dark" if dark else "light")
        for selector in ("td.good a", "td.bad a", "td.none a", "header h1", "dt", "p"):
            for element in driver.find_elements(By.CSS_SELECTOR, selector)[:1]:
                ink, paper = driver.execute_script(
                    "let e = arguments[0], ink = getComputedStyle(e).color, paper;"
                    "do { paper = getComputedStyle(e).backgroundColor; e = e.parentElement; }"
                    "while (paper === 'rgba(0, 0, 0, 0)'); return [ink, paper];",
                    element,
                )
                assert contrast(ink, paper) >= 4.5, (selector, ink, paper)


@pytest.mark.long
def test_on_paper_everything_is_open(desktop: Any) -> None:
    desktop.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert not desktop.find_elements(By.CSS_SELECTOR, "details:not([open])")
    desktop.execute_script("dispatchEvent(new Event('afterprint'))")
    assert desktop.find_elements(By.CSS_SELECTOR, "details:not([open])")


@pytest.mark.long
def test_a_long_run_is_one_small_page(long_page: Path) -> None:
    assert long_page.stat().st_size < 1_000_000
    for driver in start(long_page):
        picture(driver, "long")
        assert len(driver.find_elements(By.CSS_SELECTOR, "tbody tr")) > 300
        assert one(driver, "#resume table").is_displayed()
