"""The errors of zerocheck, and the words that help a user out of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ZerocheckError(Exception):
    """Base of all errors that zerocheck raises on purpose."""


class UsageError(ZerocheckError):
    """Something the user gave cannot be used.

    The message says what was given, what is allowed and, where there is one, the nearest right
    spelling. The command line prints it without a traceback and exits with code 2.
    """


class HarnessError(ZerocheckError):
    """zerocheck itself failed (exit code 3). Please report it with the message."""


class Unsupported(ZerocheckError):
    """Raise it in an implementation to say that it cannot run a case, with the reason.

    The case gets the verdict `unsupported` and the reason stands in the report. Any other
    exception gives the verdict `crashed`.
    """


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """`"; did you mean 'fsdp2'?"` for the nearest allowed word, or an empty string."""
    spelled = {name.casefold(): name for name in allowed}
    nearest = difflib.get_close_matches(given.casefold(), list(spelled), n=1, cutoff=0.5)
    return f"; did you mean {spelled[nearest[0]]!r}?" if nearest else ""


def unknown(what: str, given: str, allowed: Iterable[str]) -> UsageError:
    """A UsageError for a name that is not one of `allowed`: `what` is the kind of name."""
    names = sorted(allowed)
    return UsageError(
        f"unknown {what} {given!r}{did_you_mean(given, names)} (allowed: {', '.join(names)})"
    )
