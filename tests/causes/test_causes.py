"""Registry of causes: look-up, and no cause is written as text anywhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import zerocheck
from zerocheck import causes
from zerocheck.causes import registry
from zerocheck.causes.registry import cause, current, find, registered, texts
from zerocheck.errors import UsageError
from zerocheck.faults.registry import NAMED_FAULTS
from zerocheck.protocol.verdicts import OBLIGATIONS
from zerocheck.run.known_issues.entries import ours

PACKAGE = Path(zerocheck.__file__).parent
NAMING = ("judge", "faults", "attached", "run/execute/outcome.py")
"""Where causes are named."""

OF_A_CASE = {"flip", "truncate", "remove", "mix", "zeros"}
"""Causes that are values or fields of a case too."""


def named(path: Path) -> Iterator[str]:
    """Texts of causes that a file has as literals, but for sentences: values of a dict."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    sentences = {id(v) for n in ast.walk(tree) if isinstance(n, ast.Dict) for v in n.values}
    known = texts() - OF_A_CASE
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in known and id(node) not in sentences:
            yield f"{path.name}, line {node.lineno}: {node.value}"


def test_causes_are_named_by_their_constants() -> None:
    files = [one for place in NAMING for one in (PACKAGE / place).rglob("*.py")]
    files.append(PACKAGE / "run" / "execute" / "outcome.py")
    assert len(files) > 100
    assert [text for file in files for text in named(file)] == []


def test_a_literal_is_found(tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text("causes = ('local norm',)\nwords = {1: 'gradient zero', 'norm x W': 2}\n")
    assert list(named(file)) == ["judge.py, line 1: local norm", "judge.py, line 2: norm x W"]


def test_every_cause_has_one_constant() -> None:
    constants = {v if isinstance(v, str) else v.template for v in _constants().values()}
    assert constants == {one.text for one in registered()}
    assert len(constants) == len(_constants()) > 200


def _constants() -> dict[str, str | registry.CauseFamily]:
    kinds = (str, registry.CauseFamily)
    found = {k: v for k, v in vars(causes).items() if k.isupper() and isinstance(v, kinds)}
    assert found["GRADIENT_TIMES_W"] == "gradient x W"
    return found


@pytest.mark.parametrize("one", registered(), ids=lambda one: one.text)
def test_what_is_said_of_a_cause(one: registry.Cause) -> None:
    assert set(one.of) <= set(OBLIGATIONS) and one.tier in (1, 2, 3)
    for sentence in (one.shows, one.usual):
        assert sentence.endswith(".") and sentence.count(". ") == 0, sentence


@pytest.mark.parametrize("name", NAMED_FAULTS)
def test_faults_name_registered_causes(name: str) -> None:
    fault = NAMED_FAULTS[name]
    for text in fault.causes:
        one = find(text)
        assert one is not None and text in one.texts
        assert fault.obligation in (*(one.of or (None,)), "continuation")


def test_known_issues_name_registered_causes() -> None:
    """`read` refuses others; here, that the obligation is one under which the cause is named."""
    for issue in ours():
        if issue.obligation is not None:
            named = issue.fingerprint.split(" / ", 2)[2].split("+")
            for text in (text if find(text) else text.split(" / ", 1)[-1] for text in named):
                one = find(text)
                assert one is not None, issue.fingerprint
                assert issue.obligation in (*one.of, "continuation"), issue.fingerprint


def test_families() -> None:
    assert causes.REDUCED_IN(format="bf16") == "reduced in bf16"
    one = find("reduced in fp16")
    assert one is not None and one.text == "reduced in {format}"
    assert find("reduced in fp8") is None


def test_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert current("local norm") == causes.LOCAL_NORM
    with pytest.raises(UsageError, match=r"unknown cause 'locl norm'; did you mean 'local norm'\?"):
        current("locl norm")
    monkeypatch.setattr(registry, "_CAUSES", {})
    monkeypatch.setattr(registry, "_BY_TEXT", {})
    assert cause("new name", shows="A.", usual="B.", aliases=("old name",)) == "new name"
    assert current("old name") == current("new name") == "new name"
    with pytest.raises(ValueError, match="two causes are called 'old name'"):
        cause("old name", shows="A.", usual="B.")
