"""Report report.html: the whole report in one file that needs nothing else.

The text in it is that of the other formats. Every value is escaped by jinja2; style and script are
files next to the template, included in the page unchanged.

- `bands.py`: memory of a rank as three bands over N, by the formulas, next to measured values
- `choice.py`: table for whoever chooses: faults by severity, memory and communication
- `faults.py`: known faults: one card for each, with severity, place, and what to do
- `findings.py`: finding as fields of a page: place, size, cause, and the command to replay it
- `heat.py`: heat map of the coverage: feature by implementation
- `margins.py`: strips of how near to its bound each case came
- `matrix.py`: conformance matrix, and the details of each of its cells
- `page.css`: style of the page
- `page.html.j2`: template of the page
- `page.js`: script of the page
- `page.py`: HTML page made of the counts of a run
"""

from .page import render

__all__ = ["render"]
