"""An exception of user code as data, and which exceptions are only echoes of another rank's end."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from functools import cache
from importlib.util import find_spec

from zerocheck.errors import UsageError
from zerocheck.ranks.messages import Raised

_TEXT_LIMIT = 20_000
_OWN_FRAME = os.path.join("zerocheck", "ranks", "worker.py") + '"'
_ECHO = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused"
    r"|Socket closed|Timed out waiting|remote process exited|DistNetworkError",
    re.IGNORECASE,
)

_FRAME = re.compile(r'^ *File "(?P<path>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)', re.M)
_TYPED = re.compile(r"<(stdin|string|cell|ipython-input).*>")
"""Names that Python and notebooks give to code without a file."""
_FIRST = re.compile(r"\(most recent call first\)")
_STANDARD = re.compile(re.escape(sysconfig.get_path("stdlib")) + r"[/\\](?!site-packages)")

_TIMEOUT = re.compile(r"Timed out waiting|collective operation timeout", re.IGNORECASE)


def describe(error: BaseException, *, harness: bool = False, before: str = "") -> Raised:
    """Type, message and traceback, the latter without the harness's own frames on top.

    before: text before the message.
    """
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    try:
        first, _, rest = (text := str(error)).partition("\n")
        if first.rstrip().endswith(":") and error.__cause__ is not None:  # as of torch's pipelines
            text = f"{first} {error.__cause__!r}\n{rest}"
    except Exception as second:  # a __str__ of the user's
        text = f"<no message: str() raised {type(second).__name__}>"
    text = f"{before} ({text})" if before and text else before or text
    # Notes are advice: see `advise` of contract/refusals.py.
    text = "\n".join([text, *map(str, getattr(error, "__notes__", ()))])
    inner = error.__traceback__
    if inner is not None and not harness:
        inner = inner.tb_next or inner
    try:
        lines = "".join(traceback.format_exception(kind, error, inner))
    except Exception as second:
        lines = f"<no traceback: formatting it raised {type(second).__name__}>"
    return Raised(
        type_name=module + kind.__qualname__,
        text=_clip(text),
        traceback=_clip(lines),
        harness=harness,
    )


def is_usage_error(error: Raised) -> bool:
    """Return True if a rank says that what the user asked for cannot be had."""
    return error.type_name == f"{UsageError.__module__}.{UsageError.__qualname__}"


def is_echo(error: Raised) -> bool:
    """Return True if gloo says here only that another rank is gone."""
    return _ECHO.search(error.text) is not None


def is_timeout(error: Raised) -> bool:
    """Return True for a collective that timed out, or the echo of another rank's that did."""
    return _TIMEOUT.search(error.text) is not None


def trim_stack(text: str) -> str:
    """faulthandler's text without the harness's own frames below the target."""
    lines = []
    ours = False
    for line in text.splitlines():
        if not line.startswith("  "):
            ours = False
            if line.startswith("Extension modules:"):
                continue
        elif _OWN_FRAME in line:
            ours = True
        if not ours:
            lines.append(line)
    return "\n".join(lines).strip()


@cache
def _not_the_users() -> tuple[str, ...]:
    """Folders of torch, of zerocheck and of Python's own library."""
    torch = find_spec("torch")
    places = list(torch.submodule_search_locations or ()) if torch is not None else []
    places.append(os.path.dirname(os.path.dirname(__file__)))
    return tuple(os.path.join(place, "") for place in places)


def place_in_users_code(text: str) -> str:
    """`"average (my_ddp.py:11)"`: the innermost call of a user's file in a traceback or in a stack
    of faulthandler; empty where there is none, as in what zerocheck brings. If there is no file of
    the user's, what was typed without one counts, and then an installed package."""
    frames = [
        match
        for match in _FRAME.finditer(text)
        if not match["path"].startswith((*_not_the_users(), "<frozen"))
        and not _STANDARD.match(match["path"])
    ]
    typed = [frame for frame in frames if _TYPED.match(frame["path"])]
    files = [frame for frame in frames if not frame["path"].startswith("<")]
    own = [frame for frame in files if "site-packages" not in frame["path"]]
    frames = own or typed or files
    if not frames:
        return ""
    # A traceback ends with the innermost call, faulthandler begins with it.
    match = frames[0] if _FIRST.search(text) else frames[-1]
    path = match["path"]
    near = os.path.relpath(path) if path.startswith(os.path.join(os.getcwd(), "")) else path
    return f"{match['name']} ({near}:{match['line']})"


def _clip(text: str) -> str:
    """Keep both ends: the call that failed is at one, the message at the other."""
    # Lone surrogates cannot be sent.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    return f"{text[:half]}\n... {len(text) - _TEXT_LIMIT} characters left out ...\n{text[-half:]}"
