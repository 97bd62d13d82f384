"""Report report.html: the whole report in one file that needs nothing else.

`page` renders it; `matrix`, `findings`, `bands` and `drift` say what its parts show, as plain data.
The text in it is that of the other formats. Every value is escaped by jinja2; style and script are
files beside the template and stand in the page as they are.
"""

from .page import render

__all__ = ["render"]
