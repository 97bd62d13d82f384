"""How timed cases read in every format, from records made by hand."""

from __future__ import annotations

import io
import json

from hand_made import case, finished, started
from msgspec.structs import replace
from rich.console import Console

from zerocheck.case.schema import Block
from zerocheck.report import html, json_report, markdown
from zerocheck.report.progress import Detail, ProgressDisplay
from zerocheck.run.records.journal import encode
from zerocheck.run.records.records import CaseFinished, Record
from zerocheck.run.records.tally import tally
from zerocheck.timing.pace import Kind, Pace

BLOCK = Block(kind="mlp")
PACE = Pace(
    steps=3,
    seconds=0.002,
    tokens=12,
    forward=0.25,
    update=0.125,
    kinds=(Kind("all_gather", 4, 512, 640, 0.3), Kind("broadcast", 1, 8, 8, 0.1)),
    overlap=0.5,
    idle=(0.25, 0.05),
    obeys=("bucket", "wrap"),
)
GREEDY = replace(PACE, kinds=(Kind("all_gather", 1, 9e9, 9_000_000_000, 0.5),))


def timed(number: int, pace: Pace | None, *, ranks: int = 2, **given: object) -> CaseFinished:
    one = case(number, "fsdp2", mesh=(ranks,))
    return replace(one, pace=pace, **given)


def records() -> list[Record]:
    seen = replace(PACE, kinds=(Kind("all_gather", 4, 512, 640),), overlap=None, idle=())
    greedy = timed(4, GREEDY, ranks=3)
    model = replace(greedy.case.model, blocks=(BLOCK,))
    return [
        started("fsdp2", "zero2"),
        timed(0, PACE),
        timed(1, replace(PACE, seconds=0.006, copied=0.2)),
        timed(
            2,
            replace(PACE, seconds=0.004),
            save_seconds=(0.5, 0.25),
            load_seconds=(0.125,),
            peak_bytes=4096,
        ),
        timed(3, seen, ranks=4),
        replace(greedy, case=replace(greedy.case, model=model)),
        timed(5, Pace(broken="rank 1 died of SIGKILL")),
        case(6, "zero2"),
        finished(0),
    ]


def console_of(some: list[Record], *, detail: Detail = "normal") -> str:
    console = Console(file=io.StringIO(), width=200)
    progress = ProgressDisplay(console, detail=detail)
    for record in some:
        progress.handle(record)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_times_of_many_implementations_are_left_to_the_report() -> None:
    names = tuple(f"my.py:f{number}" for number in range(5))
    every = [replace(timed(n, PACE), implementation=name) for n, name in enumerate(names)]
    some = [started(*names), *every, finished(0)]
    assert "collectives in a step" not in console_of(some)
    assert "collectives in a step" in console_of(some, detail="verbose")


def test_the_console_says_one_line_and_the_patterns() -> None:
    text = console_of(records())
    assert "fsdp2, 4 ranks: 4 collectives in a step (1 case timed)\n" in text
    assert "gathers too much: one all-gather of 9,000,000,000 bytes" in text
    assert "(in 1 of 5 cases timed)" in text
    two = console_of([started("fsdp2"), timed(0, PACE), finished(0)])
    assert (
        "fsdp2, 2 ranks: 5 collectives in a step, 40 % of it waiting in them, overlap 50 %, "
        "idle 15 % (1 case timed)\n"
    ) in two


def test_markdown_has_a_row_for_each_number_of_ranks() -> None:
    text = markdown.render(tally(records()))
    part = text[text.index("## How it ran") :]
    assert "seconds say little" in part and "without a verdict" in part
    found = [line for line in part.splitlines() if line.startswith("| fsdp2")]
    cells = [" ".join(cell.strip() for cell in row.strip("|").split("|")) for row in found]
    shares = "30 % 0 % 0 % 10 % 50 % 15 %"
    assert cells[0].startswith(f"fsdp2 2 3 9 5 512 {shares}"), cells[0]
    assert cells[0].endswith("25 % 12 % 4 3,000 – –")
    assert cells[2].startswith("fsdp2 4 1 3 4 512 – – – – – – ")
    assert cells[3:5] == ["fsdp2 2 1 4,096 4,096", "fsdp2 2 0.375 1 0.125"]
    assert "rank 1 is waited for most: the others are idle 25 % of the step, it 5 %" in part
    assert "1 case could not be timed: rank 1 died of SIGKILL" in part
    assert "(offload)" not in part


def test_the_page_has_a_price_for_those_who_choose() -> None:
    """On the most ranks that were timed; a dash where nothing was."""
    text = html.render(tally(records()))
    rows = text[text.index('id="choice"') :]
    assert "<td>4 collectives, 2 ms on 4 ranks</td></tr>" in rows
    assert "<td>–</td></tr>" in rows[rows.index('<th scope="row">zero2') :]


def test_what_is_copied_between_devices_is_named() -> None:
    some = [started("fsdp2"), timed(0, replace(PACE, copied=0.6)), finished(0)]
    message = "copies between devices (offload) take 60 % of the step"
    assert message in markdown.render(tally(some))


def test_json_has_all_figures() -> None:
    data = json.loads(json_report.render(tally(records())))
    metrics = data["implementations"]["fsdp2"]["metrics"]
    two, three, four = metrics["by_world_size"]
    assert (two["world_size"], two["cases"], two["steps"]) == (2, 3, 9)
    assert two["shares"] == {"all_gather": 0.3, "broadcast": 0.1}
    assert two["tokens_per_second"] == 3000 and two["step_seconds"] == 0.004
    assert two["idle_by_rank"] == [0.25, 0.05] and two["peak_allocated"] is None
    assert four["shares"] == {"all_gather": None} and four["overlap"] is None
    assert three["gathered"] > 1 and len(metrics["patterns"]) == 1
    assert metrics["not_timed"] == ["rank 1 died of SIGKILL"]
    assert metrics["save_seconds"] == {"count": 2, "median": 0.375}
    assert metrics["measured_peaks"][0]["most"] == 4096
    empty = data["implementations"]["zero2"]["metrics"]
    assert empty["by_world_size"] == [] and empty["load_seconds"] == {"count": 0, "median": None}


def test_where_nothing_was_timed_nothing_is_said_and_journals_stay_small() -> None:
    plain = [started(), case(), finished()]
    assert "How it ran" not in markdown.render(tally(plain))
    assert len(encode(timed(0, PACE))) - len(encode(timed(0, None))) < 400


def test_patterns_are_no_verdict() -> None:
    data = json.loads(json_report.render(tally(records())))
    assert data["exit_code"] == 0 and data["implementations"]["fsdp2"]["cases"]["holds"] == 6


def test_names_in_the_words_are_code_on_the_page() -> None:
    """Backticks are of Markdown, and none is shown by a browser."""
    page = html.render(tally(records()))
    assert "<code>overlap</code> is the share of the time" in page
    shown = page.partition("<main")[2].partition("<script")[0]
    assert "`" not in shown
