"""Guard of attribution: a bug in it costs a sentence, and neither a verdict nor the run."""

from __future__ import annotations

from collections.abc import Callable

from ...protocol.verdicts import Explanation

FAILED = "attribution failed, which is a bug of zerocheck; please report it"


def guarded(attribute: Callable[[], str]) -> str:
    """Return what `attribute` returns, or the error that it raised, as a sentence."""
    return explained(lambda: Explanation(attribute())).text


def explained(attribute: Callable[[], Explanation]) -> Explanation:
    """Return what `attribute` returns, or an explanation of the error that it raised."""
    try:
        return attribute()
    except Exception as error:
        return Explanation(f"{FAILED}: {type(error).__name__}: {error}")
