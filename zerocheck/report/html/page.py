"""HTML page made of the counts of a run."""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections import Counter
from functools import cache
from typing import Any

import jinja2

from ...foreign_text import printable
from ...protocol.verdicts import Status
from ...run.records.case_counts import case_count
from ...run.records.tally import FAILING, Tally, run_exit_code, why
from .. import communication, footprint
from ..coverage import not_exercised, pairs_cell, refused_rows, unexercised, vacuous_rows
from ..known_faults import faults_sentence
from ..known_issues import left_out_lines, stale_lines, unverified_lines
from ..loads import cell_lines, tried_lines
from ..sections import LEAKED, NOT_REPRODUCED, environment_rows, leak_lines, placement
from . import bands, margins
from .choice import choice_rows
from .faults import SHORT, FaultView, fault_views
from .findings import shown
from .heat import LEGEND, heat_rows
from .matrix import kind_of, matrix, titles


def render(counted: Tally) -> str:
    """Render the whole report as HTML, with style, script and pictures in it."""
    parts = _parts(counted)
    script = _environment().get_template("page.js").render()
    parts |= {"script": script, "policy": _policy(script)}
    return _environment().get_template("page.html.j2").render(**parts)


def _policy(script: str) -> str:
    """Return the content security policy: nothing is loaded, and no other script is run."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def _parts(counted: Tally) -> dict[str, Any]:
    every = counted.implementations
    started, finished = counted.started, counted.finished
    failing = why(counted)
    rows, faults = matrix(counted), fault_views(counted)
    return {
        "verdict": _verdict(counted, failing),
        "why": failing,
        "started": started,
        "when": _when(started.started) if started is not None else "",
        "seconds": finished.seconds if finished is not None else None,
        "outcomes": counted.outcomes,
        "exit_code": run_exit_code(counted),
        "obligations": titles(counted),
        "rows": rows,
        "findings": [shown(one) for one in counted.findings],
        "unreproduced": [shown(one) for one in counted.unreproduced],
        "leaked": (LEAKED, NOT_REPRODUCED),
        "leaks": list(leak_lines(counted)),
        "faults": faults,
        "filters": _filters(faults),
        "fault_links": {
            row.name: [
                (number, one.title)
                for number, one in enumerate(faults, 1)
                if row.name in one.implementations
            ]
            for row in rows
        },
        "figures": _figures(counted, len(faults)),
        "severities": SHORT,
        "choices": choice_rows(counted, rows),
        "strips": margins.strips(counted),
        "strip_ticks": margins.ticks(),
        "strip_size": (margins.WIDTH, margins.HEIGHT),
        "stale": [stale_lines(one) for one in counted.stale],
        "left_out": [*left_out_lines(counted), *unverified_lines(counted)],
        "charts": bands.charts(counted),
        "ticks": bands.ticks(counted),
        "ranks": bands.RANKS,
        "across": [bands.across(ranks) for ranks in bands.RANKS],
        "categories": bands.CATEGORIES,
        "chart_size": (bands.WIDTH, bands.HEIGHT),
        "weighed": _table(
            footprint.TITLE, footprint.EXPLAINED, footprint.HEADERS, footprint.rows(every)
        ),
        "communication": _communication(counted),
        "loads": _loads(counted),
        "tried": tried_lines(counted.loads),
        "pairs": [
            (name, pairs_cell(i.covered), f"{i.covered.refused_count:,}", len(i.covered.ignored))
            for name, i in every.items()
            if i.covered.counted
        ],
        "not_exercised": not_exercised(counted),
        "features": heat_rows(counted),
        "legend": LEGEND,
        "missing": {
            name: i.covered.not_exercised for name, i in every.items() if i.covered.not_exercised
        },
        "refused": list(refused_rows(counted)),
        "vacuous": list(vacuous_rows(counted)),
        "semantics": {
            name: {"shown": ", ".join(i.tiers), "placement": "; ".join(placement(i)), **i.semantics}
            for name, i in every.items()
            if i.semantics
        },
        "environment": environment_rows(counted),
    }


def _verdict(counted: Tally, failing: tuple[str, ...]) -> tuple[str, str]:
    """Return (class, headline) of the run."""
    if failing:
        count = len(counted.findings)
        return "bad", f"{count} finding{'s' if count != 1 else ''}" if count else "The run fails"
    if not counted.complete:
        return "known", f"Not finished: {counted.cases} of {counted.planned} cases"
    shown = faults_sentence(counted)
    if not shown:
        return "good", "All obligations hold"
    return "known", f"No new finding. {shown}"


def _figures(counted: Tally, faults: int) -> list[dict[str, str]]:
    """Return the three figures of the first screen, each with the section that has more."""
    passed = counted.statuses["holds"]
    found = len(counted.findings)
    words = f"new finding{'' if found == 1 else 's'}"
    if faults:
        words += f", {faults} known fault{'' if faults == 1 else 's'}"
    left = unexercised(counted)
    nowhere = len(left.nowhere) + len(left.unasked)
    return [
        _figure("obligations", f"{passed:,}", f"of {case_count(counted.cases)} passed"),
        _figure("findings" if found else "known" if faults else "obligations", str(found), words),
        _figure("coverage", str(nowhere), "features or sets of obligations exercised nowhere"),
    ]


def _figure(anchor: str, number: str, words: str) -> dict[str, str]:
    return {"anchor": anchor, "number": number, "words": words}


def _filters(faults: list[FaultView]) -> dict[str, list[str]]:
    """Return what the known faults can be filtered by, and the values that there are."""
    return {
        "severity": list(dict.fromkeys(one.severity for one in faults)),
        "implementation": sorted({name for one in faults for name in one.implementations}),
        "obligation": sorted({name for one in faults for name in one.obligations}),
    }


def _when(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def _table(title: str, words: str, headers: Any, rows: Any) -> dict[str, Any] | None:
    return {"title": title, "words": words, "headers": headers, "rows": rows} if rows else None


def _communication(counted: Tally) -> list[dict[str, Any]]:
    """Return each implementation's communication per step, in Psi, next to the paper's number."""
    bars = []
    for name, implementation in counted.implementations.items():
        one = footprint.on_most_ranks(implementation)
        if one is not None:
            bars.append(
                {
                    "name": name,
                    "ranks": one.ranks,
                    "psi": round(one.middle.psi, 2),
                    "paper": communication.paper(one),
                    "why": "; ".join(communication.differences(one)) or "as the paper says",
                    "microbatches": one.microbatches,
                }
            )
    return bars


def _loads(counted: Tally) -> list[dict[str, Any]]:
    """Return a grid of world sizes for all implementations together, and one for each."""
    grids = []
    some = {name: i.loads for name, i in counted.implementations.items() if i.loads.pairs}
    if len(some) > 1:
        some = {"all implementations": counted.loads, **some}
    for name, loads in some.items():
        cells = [
            [_load(loads.pairs.get((saved, loaded), Counter())) for loaded in loads.loaded]
            for saved in loads.saved
        ]
        grids.append({"name": name, "saved": loads.saved, "loaded": loads.loaded, "cells": cells})
    return grids


def _load(verdicts: Counter[Status]) -> tuple[str, str]:
    """Return (class, words) of the loads of one pair of world sizes."""
    if not verdicts.total():
        return "none", ""
    some: tuple[Status, ...] = (*FAILING, "known")
    worst: Status = next((one for one in some if verdicts[one]), "holds")
    return kind_of(worst), " + ".join(cell_lines(verdicts))


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("zerocheck.report.html", "."),
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
