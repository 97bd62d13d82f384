"""Settings: one table, the files that hold them, and how a wrong one is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from zerocheck.cli import main
from zerocheck.errors import UsageError
from zerocheck.protocol.verdicts import OBLIGATION_SETS
from zerocheck.run.plan.options import RunOptions
from zerocheck.run.plan.settings import SETTINGS, as_options, of_texts, placed, project_settings

ALL = """
[tool.zerocheck]
profile = "ci"
world_sizes = [2, 3]
seed = 7
max_cases = 9
obligations = ["equivalence", "resume"]
optimizer = "sgd"
known_issues = ["known.toml", "none"]
shrink = false
report_dir = "out"
"""


def project(folder: Path, text: str = ALL) -> Path:
    (folder / "pyproject.toml").write_text(text)
    return folder


def test_every_setting_is_an_option_of_a_run() -> None:
    fields = {field.name: field for field in dataclasses.fields(RunOptions)}
    options = {parameter.name: parameter for parameter in main.commands["run"].params}
    for name, setting in SETTINGS.items():
        assert name in fields and f"--{setting.option}" in options[name].opts
    shown = {name: setting.default for name, setting in SETTINGS.items()}
    of_none = RunOptions()
    assert shown["profile"] == of_none.profile and shown["seed"] == str(of_none.seed)
    assert shown["report_dir"] == str(of_none.report_dir) and of_none.shrink
    assert OBLIGATION_SETS[shown["obligations"]] == of_none.obligations
    # What a run can be asked besides belongs to one run, and stands in no file.
    assert {*fields} - {*SETTINGS} == {
        "implementations", "features", "model", "ranks", "device", "issues", "world_sizes_given",
        "hosts", "timeout", "backend", "shard", "reuse",
    }  # fmt: skip


def test_a_project_has_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path)
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    found = project_settings(below)
    assert set(found) == set(SETTINGS)
    assert found["known_issues"] == (str(tmp_path / "known.toml"), "none")
    assert found["report_dir"] == tmp_path / "out"
    (tmp_path / "known.toml").write_text("")
    options = RunOptions(**as_options(found))
    assert options.profile == "ci" and options.world_sizes == (2, 3) and options.seed == 7
    assert options.max_cases == 9 and not options.shrink and options.optimizer == "sgd"
    assert options.obligations == (*OBLIGATION_SETS["equivalence"], *OBLIGATION_SETS["resume"])
    monkeypatch.chdir(tmp_path)
    assert project_settings(below)["report_dir"] == Path("out")


def test_the_nearest_table_counts(tmp_path: Path) -> None:
    below = tmp_path / "below"
    below.mkdir()
    assert project_settings(below) == {}
    project(tmp_path)
    project(below, "[tool.other]\n")
    assert project_settings(below)["seed"] == 7
    project(below, '[tool.zerocheck]\nobligations = "gradient,update"\n')
    assert project_settings(below) == {"obligations": ("gradient", "update")}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('profil = "ci"', "unknown key 'profil'; did you mean 'profile'? (allowed: known_issues,"),
        ('profile = "cj"', "unknown profile 'cj'; did you mean 'ci'?"),
        ("profile = 3", "profile is a string, not 3"),
        ("seed = true", "seed is a whole number, not True"),
        ('seed = "3"', "seed is a whole number, not '3'"),
        ("seed = -1", "seed -1 is out of range"),
        ("world_sizes = 3", "world_sizes is a list of whole numbers, not 3"),
        ("world_sizes = [2, 2.5]", "world_sizes is a list of whole numbers, not [2, 2.5]"),
        ("world_sizes = [0]", "world size 0 is out of range"),
        ('obligations = ["updates"]', "unknown obligation 'updates'; did you mean 'update'?"),
        ("shrink = 1", "shrink is true or false, not 1"),
        ("report_dir = []", "report_dir is a string, not []"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_file(tmp_path: Path, line: str, message: str) -> None:
    project(tmp_path, f"[tool.zerocheck]\n{line}\n")
    with pytest.raises(UsageError) as caught:
        project_settings(tmp_path)
    assert str(caught.value).startswith(
        f"{tmp_path / 'pyproject.toml'}, [tool.zerocheck]: {message}"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [("[tool", "is not TOML"), ("[tool]\nzerocheck = 1\n", "tool.zerocheck is a table, not 1")],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    project(tmp_path, text)
    with pytest.raises(UsageError, match=message):
        project_settings(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("profile", " ci ", "ci"),
        ("world_sizes", "1, 2,8", (1, 2, 8)),
        ("max_cases", "5", 5),
        ("obligations", "memory,gradient", ("memory", "gradient")),
        ("known_issues", "a.toml\n\nnone", ("a.toml", "none")),
        ("shrink", "No", False),
        ("report_dir", "out", Path("out")),
    ],
)
def test_what_is_typed(name: str, text: str, value: Any) -> None:
    assert of_texts({name: text}, "here") == {name: value}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("seed", "x", "here: seed 'x' is not a whole number"),
        ("world_sizes", "1,two", "here: world size 'two' is not a whole number"),
        ("shrink", "nope", "here: unknown value of shrink 'nope'; did you mean 'no'?"),
        ("max_cases", "0", "here: max cases 0 is out of range"),
    ],
)
def test_what_is_typed_wrong(name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        of_texts({name: text}, "here")
    assert str(caught.value).startswith(message)


def test_paths_are_taken_from_the_folder_of_their_file() -> None:
    given = {"report_dir": Path("out"), "known_issues": ("none", "/a.toml", "b.toml"), "seed": 1}
    assert placed(given, Path("/p")) == {
        "report_dir": Path("/p/out"), "known_issues": ("none", "/a.toml", "/p/b.toml"), "seed": 1,
    }  # fmt: skip
