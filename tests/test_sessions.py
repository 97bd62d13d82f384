"""Pages with a session: what they show is typed in a fresh clone, and printed."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from documents import README
from sessions import LIMIT_S, Session, comparable, fresh_clone, pages_with_sessions, selected
from slices import sliced

PAGES_WITH_SESSIONS = pages_with_sessions()


def test_there_are_sessions() -> None:
    """README has one, and each block that shows an output says which."""
    assert README in PAGES_WITH_SESSIONS
    for page in PAGES_WITH_SESSIONS:
        session = Session.of(page)
        assert len(session.shown()) == sum(step.language == "text" for step in session.steps)


TYPED = [(page, where) for page in PAGES_WITH_SESSIONS for where in ("clone", "outside")]


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(("page", "where"), sliced(TYPED, [(README, "clone")]))
def test_a_page_is_typed(page: Path, where: str, tmp_path: Path) -> None:
    """In an environment that has what the page installs, and nothing else."""
    outside = tmp_path / "outside" if where == "outside" else None
    if outside is not None:
        outside.mkdir()
    session = Session.of(page)
    session.run(fresh_clone(tmp_path), outside)
    for command, step in session.shown():
        assert comparable(step.text) == comparable(selected(command.output, step.show))
    assert [command.output for command in session.failures()] == []


PAGE = """
# A page

```python
# hello.py
print("hello", 12.34567)
print("in 3 s")
print("more")
print("end")
```

```shell
{command}
```

<!-- show: ^hello..^in | ^end -->
```text
hello 12.34999
in 9.2 s
...
end
```
"""


@pytest.mark.parametrize(
    ("command", "holds"),
    [
        ("cd .\npython3 hello.py", True),
        ("python3 hello.py | sed s/end/ende/", False),
        ("python3 hello.py | sed s/more//", False),
        ("python3 hello.py | sed 's/in 3/in about 3/'", False),
    ],
)
def test_what_is_printed_is_compared(command: str, holds: bool, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(command=command))
    session = Session.of(page)
    session.run(tmp_path)
    ((typed, step),) = session.shown()
    assert (comparable(step.text) == comparable(selected(typed.output, step.show))) is holds
    assert (comparable(session.written()) == comparable(page.read_text())) is holds


def test_only_what_installs_is_typed_in_the_clone(tmp_path: Path) -> None:
    clone, outside, page = tmp_path / "clone", tmp_path / "outside", tmp_path / "page.md"
    clone.mkdir()
    outside.mkdir()
    page.write_text("```shell\npwd\n```\n\n```shell\npwd  # pip install\n```\n")
    session = Session.of(page)
    session.run(clone, outside)
    assert [step.output.strip() for step in session.steps] == [str(outside), str(clone)]


def test_a_page_begins_with_the_files_that_it_names(tmp_path: Path) -> None:
    shown = "```python\n# shown.py\nprint(7)\n```\n"
    (tmp_path / "other.md").write_text(shown)
    page = tmp_path / "page.md"
    page.write_text("<!-- files: other.md -->\n\n```shell\npython3 shown.py\n```\n")
    session = Session.of(page)
    session.run(tmp_path)
    assert [step.output for step in session.steps] == ["7\n"] and not session.failures()


def test_a_command_that_fails_is_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```shell\nfalse\n```\n")
    session = Session.of(page)
    session.run(tmp_path)
    assert session.failures() == session.steps


def test_an_output_without_the_line_fails() -> None:
    with pytest.raises(AssertionError, match="no line matches"):
        selected("some\nother\n", "^wanted")
    with pytest.raises(AssertionError, match="no line after"):
        selected("some\nother\n", "^some..^wanted")


def test_the_last_beginning_counts() -> None:
    text = textwrap.dedent("""\
        VIOLATED first
        VIOLATED second
          replay it
        """)
    assert selected(text, "^VIOLATED..^  replay") == "VIOLATED second\n  replay it\n"
