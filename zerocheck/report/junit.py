"""Report junit.xml: one test case per implementation and obligation, for CI servers."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime

from ..foreign_text import printable
from ..protocol.verdicts import TITLES, Obligation
from ..run.records.finding_text import finding_text
from ..run.records.tally import FAILING, Cell, ImplementationTally, Tally
from .known_issues import known_issue_text, stale_text
from .text import cell_text

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def clean(text: str) -> str:
    """Replace the characters that an XML document may not hold."""
    return _NOT_XML.sub("\ufffd", printable(text))


def render(counted: Tally) -> str:
    """Render the whole report as JUnit XML."""
    suites = ET.Element("testsuites", name="zerocheck")
    for implementation in counted.implementations.values():
        suites.append(_suite(counted, implementation))
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _suite(counted: Tally, implementation: ImplementationTally) -> ET.Element:
    cases = [
        _testcase(counted, implementation, obligation, cell)
        for obligation, cell in implementation.cells.items()
    ]
    suite = ET.Element(
        "testsuite",
        name=clean(implementation.name),
        tests=str(len(cases)),
        failures=str(sum(case.find("failure") is not None for case in cases)),
        errors="0",
        skipped=str(sum(case.find("skipped") is not None for case in cases)),
        time=f"{implementation.seconds:.3f}",
    )
    if counted.started is not None:
        moment = datetime.fromtimestamp(counted.started.started, UTC)
        suite.set("timestamp", moment.strftime("%Y-%m-%dT%H:%M:%S"))
    suite.extend(cases)
    return suite


def _testcase(
    counted: Tally, implementation: ImplementationTally, obligation: Obligation, cell: Cell
) -> ET.Element:
    case = ET.Element(
        "testcase",
        classname=clean(f"zerocheck.{implementation.name}"),
        name=obligation,
        time=f"{implementation.seconds / len(implementation.cells):.3f}",
    )
    if cell.status in FAILING:
        failure = ET.SubElement(case, "failure", type=cell.status, message=cell_text(cell))
        findings = counted.findings_of(implementation.name, obligation)
        failure.text = clean("\n\n".join(map(finding_text, findings)) or TITLES[obligation])
    elif stale := stale_text(counted, implementation.name, obligation):
        failure = ET.SubElement(case, "failure", type="stale", message="a known issue is stale")
        failure.text = clean(stale)
    elif not cell.checked and obligation in implementation.without:
        skipped = ET.SubElement(case, "skipped", type=cell.status)
        skipped.text = clean(implementation.without[obligation])
    elif not cell.checked:
        # A failure and not a skip: it makes the run exit with 1 too.
        failure = ET.SubElement(case, "failure", type=cell.status, message="nothing was checked")
        failure.text = clean(f"{TITLES[obligation]}: {cell_text(cell)}")
    elif cell.status == "known":
        # As pytest writes what is expected to fail.
        skipped = ET.SubElement(case, "skipped", type="known", message=cell_text(cell))
        skipped.text = clean(known_issue_text(counted, implementation.name, obligation))
    else:
        output = ET.SubElement(case, "system-out")
        output.text = f"{cell_text(cell)}; largest share of the bound {cell.share:.3g}"
    return case
