"""Console for text that may be foreign: no markup, no escape sequences, no wrapping."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ..foreign_text import printable


class _PrintableConsole(Console):
    """Console that removes escape sequences from text; styles are still shown."""

    def on_broken_pipe(self) -> None:
        """End as an interrupted run does: rich's own exit code is that of a finding."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise KeyboardInterrupt

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Make the text of every segment printable; `control` has the codes of rich itself."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def new_console(**options: Any) -> Console:
    """Create a console for possibly foreign text, without markup and without wrapping."""
    options = {"highlight": False, "soft_wrap": True, **options}
    console = _PrintableConsole(**options)
    if not console.is_jupyter:
        return console
    # rich would show each line as an output of its own, or move a cursor that is not there.
    return _PrintableConsole(force_jupyter=False, force_terminal=False, **options)
