"""Report report.html: the whole report in one file that needs nothing else.

`page` renders it; `matrix`, `findings`, `bands` and `drift` give the content of its parts, as plain
data. The text in it is that of the other formats. Every value is escaped by jinja2; style and
script are files next to the template, included in the page unchanged.
"""

from .page import render

__all__ = ["render"]
