"""Registration and look-up of causes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from ..errors import UsageError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Known bug that explains a violation, as text and in words."""

    text: str
    """Name in journals and fingerprints. A family has fields in braces."""
    of: tuple[str, ...]
    """Obligations under which it is named, next to `continuation`, which has the cause of any step.
    Empty: ranks hang or crash."""
    shows: str
    """Its appearance in what was observed, one sentence."""
    usual: str
    """The usual reason, one sentence."""
    says: str = ""
    """Clause of a violation that has this cause; fields in braces are those of `said`."""
    tier: int = 1
    """1: the bug was computed and compared; 2: asked where no cause of tier 1 explains the
    violation; 3: a hint where nothing else does."""
    aliases: tuple[str, ...] = ()
    """Older texts, which known issues may still use."""
    attributed: str = ""
    """Regular expression, found in the attribution of a violation with this cause: the operation
    that is wrong, in the words of attribution. Empty: attribution does not know it."""
    texts: tuple[str, ...] = ()
    """Every text: one, or those of the members of a family."""


_CAUSES: dict[str, Cause] = {}
_BY_TEXT: dict[str, tuple[str, Cause]] = {}


@dataclass(frozen=True)
class CauseFamily:
    """Causes whose text has fields, such as a dtype."""

    template: str

    def __call__(self, **fields: str) -> str:
        """Return the text with these fields."""
        return self.template.format(**fields)


def cause(
    text: str,
    *,
    shows: str,
    usual: str,
    says: str = "",
    of: tuple[str, ...] = (),
    tier: int = 1,
    aliases: tuple[str, ...] = (),
    attributed: str = "",
) -> str:
    """Register a cause and return its text, which is the value of its constant."""
    _add(
        Cause(
            text=text,
            of=of,
            shows=shows,
            usual=usual,
            says=says,
            tier=tier,
            aliases=aliases,
            attributed=attributed,
            texts=(text,),
        )
    )
    return text


def family(
    template: str,
    *,
    shows: str,
    usual: str,
    of: tuple[str, ...] = (),
    tier: int = 1,
    attributed: str = "",
    **fields: tuple[str, ...],
) -> CauseFamily:
    """Register causes whose text has fields in braces. fields: the values of each."""
    made = CauseFamily(template)
    texts = tuple(
        made(**dict(zip(fields, some, strict=True))) for some in product(*fields.values())
    )
    _add(
        Cause(
            text=template,
            of=of,
            shows=shows,
            usual=usual,
            tier=tier,
            attributed=attributed,
            texts=texts,
        )
    )
    return made


def _add(one: Cause) -> None:
    _CAUSES[one.text] = one
    for text in (*one.texts, *one.aliases):
        if text in _BY_TEXT:
            raise ValueError(f"two causes are called {text!r}")
        _BY_TEXT[text] = (one.texts[0] if text in one.aliases else text, one)


def registered() -> tuple[Cause, ...]:
    """Return all causes, families as one each, in the order of their files."""
    return tuple(_CAUSES.values())


def find(text: str) -> Cause | None:
    """Return the cause of this text or older text, or None."""
    found = _BY_TEXT.get(text)
    return None if found is None else found[1]


def said(texts: Iterable[str], **fields: object) -> dict[str, str]:
    """Return what a violation says of each of its causes, where there is something to say."""
    found = ((text, find(text)) for text in texts)
    return {text: one.says.format(**fields) for text, one in found if one is not None and one.says}


def current(text: str) -> str:
    """Return today's text of a cause, given it or an older one.

    Raises UsageError, with the nearest text, for one that is not registered.
    """
    if text not in _BY_TEXT:
        raise UsageError(f"unknown cause {text!r}{did_you_mean(text, _BY_TEXT)}")
    return _BY_TEXT[text][0]


def texts(causes: Iterable[Cause] | None = None) -> frozenset[str]:
    """Return every text of some causes, or of all."""
    return frozenset(text for one in causes or registered() for text in one.texts)
