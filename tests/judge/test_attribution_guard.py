"""A bug in attribution costs a sentence, and no verdict."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_case import CASE

from zerocheck.judge.attribution.guard import FAILED, guarded
from zerocheck.judge.obligations import gradient


def test_an_error_becomes_a_sentence() -> None:
    def broken() -> str:
        raise IndexError("out of range")

    assert guarded(broken) == f"{FAILED}: IndexError: out of range"
    assert guarded(lambda: "it is 0") == "it is 0"


def test_a_verdict_stays(observe: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(gradient, "attribution", broken)
    judgement = observe("zero2+average-becomes-sum", CASE).judge()
    first = judgement.violations[0]
    assert first.obligation == "gradient" and first.causes == ("gradient x W",)
    assert first.attribution == f"{FAILED}: ZeroDivisionError: division by zero"
