"""How much of what is long is run: a slice in `tox`, all of it in `tox -e conformance`."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

VARIABLE = "ZEROCHECK_TESTS"
WHOLE = os.environ.get(VARIABLE) == "whole"


def sliced(whole: T, part: T) -> T:
    """`whole` where everything is run, else `part`."""
    return whole if WHOLE else part
