"""Filters of warnings in the processes of zerocheck."""

from __future__ import annotations

import sys
import warnings


def relax_warnings() -> None:
    """Show the warnings that -W or PYTHONWARNINGS made errors.

    torch issues deprecation warnings while it is imported, and so do its functions that zerocheck
    looks at. They are no faults of the code under test.
    """
    if any("error".startswith(option.partition(":")[0].strip()) for option in sys.warnoptions):
        warnings.simplefilter("default")
