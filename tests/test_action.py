"""The action, and the one for pull requests of forks, run as GitHub does."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from composite_action import Outcome, Runner
from markdown_it import MarkdownIt
from test_example_project import NAME, PLANTED, PROJECT, SOUND

ROOT = Path(__file__).parent.parent
ACTION = ROOT / "action.yml"
OF_FORKS = ROOT / "comment" / "action.yml"
BOT = "github-actions[bot]"

ZEROCHECK = """#!/bin/bash
printf '%s\\n' "$@" > "$CALLS/$1"
case "$1" in
  run)
    directory="${!#}"
    if [ "$RUN" -ne 2 ]; then  # wrong usage writes nothing
      mkdir -p "$directory"
      echo "$COMMENT" > "$directory/comment.md"
      echo "$REPORTED" > "$directory/report.json"
    fi
    exit "$RUN" ;;
  report) cat "${!#}/report.json" > "$CALLS/base"; exit "$REPORT" ;;
esac
"""
PYTHON = """#!/bin/sh
case "$*" in
  "-m pip "*) echo "$@" > "$CALLS/pip" ;;
  *) exec {} "$@" ;;
esac
"""


class Repository:
    """The repository me/my, whose pull request 7 goes to main."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkout = folder / "checkout"
        self.calls = folder / "calls"
        programs = folder / "programs"
        for path in (self.checkout, self.calls, programs):
            path.mkdir()
        stand_in = Path(__file__).parent / "gh_stand_in.py"
        self.programs = {
            "zerocheck": ZEROCHECK,
            "gh": f'#!/bin/sh\nexec {sys.executable} {stand_in} "$@"\n',
            "python": PYTHON.format(sys.executable),
        }
        self.environment = {
            "CALLS": str(self.calls),
            "GITHUB_STATE": str(folder / "state.json"),
            "RUN": "0",
            "REPORT": "0",
            "COMMENT": "### zerocheck: all obligations hold",
            "REPORTED": "{}",
        }
        self.state: dict[str, Any] = {"login": BOT, "read_only": False}
        self.state |= {"comments": [], "pulls": [], "artifacts": [], "archives": {}}
        self.runner = Runner(folder, programs, self.environment)

    def job(
        self, event: str = "pull_request", branch: str = "main", **options: Any
    ) -> tuple[int | None, Outcome]:
        """Run the action in a job of its own.

        Returns the exit code that it reports, None if it does not come to one, and all the rest.
        options: inputs, `matrix`, `job`, `new_run` (False: another job of the last run of the
        workflow), and variables of the stand-ins.
        """
        matrix, name = options.pop("matrix", None), options.pop("job", "conformance")
        if options.pop("new_run", True):
            self.runner.artifacts.clear()
        self.environment.update(
            {key: options.pop(key) for key in list(options) if key in self.environment}
        )
        is_pull = event == "pull_request"
        github = {
            "event_name": event,
            "event": {"pull_request": {"number": 7}} if is_pull else {},
            "base_ref": branch if is_pull else "",
            "ref_name": "7/merge" if is_pull else branch,
            "ref_type": "branch",
            "sha": "c0ffee",
            "workflow": "zerocheck",
            "job": name,
            "token": "token",
            "repository": "me/my",
        }
        inputs = {key.replace("_", "-"): value for key, value in options.items()}
        inputs = {"implementation": "my.py:fsdp", **inputs}
        outcome = self.run(ACTION, inputs, github=github, matrix=matrix)
        code = outcome.outputs.get("check", {}).get("exit-code")
        assert code is None or outcome.failed == (code != "0")
        return None if code is None else int(code), outcome

    def run(self, action: Path, inputs: dict[str, str], **contexts: Any) -> Outcome:
        for name, text in self.programs.items():
            (self.folder / "programs" / name).write_text(text)
            (self.folder / "programs" / name).chmod(0o755)
        state = self.folder / "state.json"
        state.write_text(json.dumps(self.state))
        for call in self.calls.iterdir():
            call.unlink()
        outcome = self.runner.run(action, inputs, **contexts)
        self.state = json.loads(state.read_text())
        return outcome

    def called(self, program: str) -> list[str] | None:
        """Return the arguments of the last call of a command, None if there was none."""
        file = self.calls / program
        return file.read_text().splitlines() if file.exists() else None

    @property
    def comments(self) -> list[str]:
        return [comment["body"] for comment in self.state["comments"]]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_inputs_are_declared_and_reach_scripts_by_their_environment() -> None:
    for path in (ACTION, OF_FORKS):
        text = path.read_text(encoding="utf-8")
        definition = yaml.safe_load(text)
        assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(definition["inputs"])
        for step in definition["runs"]["steps"]:
            assert "${{" not in step.get("run", "")


@pytest.mark.parametrize(
    ("base", "run", "report", "code"),
    [
        (False, 0, 0, 0),
        (False, 1, 0, 1),  # without a base the run decides
        (True, 1, 0, 0),  # violated before: not the fault of this pull request
        (True, 0, 1, 1),
        (True, 2, 0, 2),  # wrong usage: nothing to compare
        (True, 3, 0, 3),
        (True, 1, 2, 1),  # a base of another version: the run decides
        (True, 0, 2, 0),
    ],
)
def test_verdict(repository: Repository, base: bool, run: int, report: int, code: int) -> None:
    if base:
        repository.job("push", REPORTED="of the base")
    result, outcome = repository.job(RUN=str(run), REPORT=str(report), REPORTED="of the change")
    assert result == code
    assert (repository.called("report") is not None) == (base and run <= 1)
    if repository.called("report"):
        assert repository.called("base") == ["of the base"]
        assert ("cannot be compared" in outcome.log) == (report == 2)


def test_comment_is_replaced(repository: Repository) -> None:
    for text in ("### zerocheck: 1 finding", "### zerocheck: all obligations hold"):
        repository.job(COMMENT=text)
        mark, body = repository.comments[0].split("\n", 1)
        assert re.fullmatch(r"<!-- zerocheck: [\w.-]+ -->", mark) and body == f"{text}\n"
    assert len(repository.comments) == 1
    repository.job(comment="false", COMMENT="### zerocheck: later")
    assert "later" not in repository.comments[0]


def test_first_of_two_comments_is_replaced(repository: Repository) -> None:
    """Two runs at once can each write a comment."""
    body = "<!-- zerocheck: conformance -->\n### zerocheck: 1 finding"
    repository.state["comments"] = [
        {"id": number, "user": {"login": BOT}, "body": body} for number in range(2)
    ]
    repository.job(name="conformance")
    assert "all obligations hold" in repository.comments[0]
    assert repository.comments[1:] == [body]


@pytest.mark.parametrize(("run", "code"), [(0, 0), (1, 1)])
def test_token_of_a_fork_changes_no_verdict(repository: Repository, run: int, code: int) -> None:
    repository.state["read_only"] = True
    result, outcome = repository.job(RUN=str(run))
    assert result == code
    assert "::notice title=zerocheck::The comment could not be written" in outcome.log
    assert not repository.comments


@pytest.mark.parametrize("run", ["2", "3"])
def test_run_without_a_comment(repository: Repository, run: str) -> None:
    """The comment of the last run is not left as if it were of this one, nor is a committed one."""
    repository.job(COMMENT="### zerocheck: all obligations hold")
    committed = repository.checkout / "zerocheck-report"
    committed.mkdir(exist_ok=True)
    (committed / "comment.md").write_text("### zerocheck: committed\n")
    assert repository.job(RUN=run, COMMENT="")[0] == int(run)
    (comment,) = repository.comments
    if run == "2":
        assert "### zerocheck: no report" in comment
    assert "committed" not in comment and "obligations hold" not in comment


@pytest.mark.parametrize(
    ("login", "body"),
    [
        ("mallory", "<!-- zerocheck: conformance -->\nlooks like ours"),
        ("github-actions", "<!-- zerocheck: conformance -->\nanother bot"),
        (BOT, "<!-- zerocheck: conformance-2 -->\nof another check"),
        (BOT, "<!-- zerocheck: conformance --> and more\nnot the mark alone"),
        (BOT, "of another action, about <!-- zerocheck: conformance -->\n"),
    ],
)
def test_foreign_comment_is_left_alone(repository: Repository, login: str, body: str) -> None:
    foreign = {"id": 0, "user": {"login": login}, "body": body}
    deleted = {"id": 1, "user": None, "body": body}
    repository.state["comments"] = [foreign, deleted]
    for _ in range(2):
        repository.job(name="conformance")
    assert repository.comments[:2] == [body, body]
    assert len(repository.comments) == 3
    assert repository.comments[2].startswith("<!-- zerocheck: conformance -->\n### zerocheck: ")


MATRIX = [
    {"job": "conformance"},
    {"job": "other"},
    {"implementation": "my.py:other"},
    {"implementation": "my.py fsdp"},  # the same letters as the first
    {"matrix": {"torch": "2.13"}},
    {"matrix": {"torch": "2.14"}},
    {"name": "mine"},
    {"name": "mine-2"},
    {"implementation": "päckchen.py:fsdp/" + "x" * 300},
]


def test_jobs_of_a_matrix_are_apart(repository: Repository) -> None:
    for options in MATRIX:
        repository.job("push", REPORTED=json.dumps(options), **options)
    repository.runner.artifacts.clear()
    for options in MATRIX:
        repository.job(**options, new_run=False)
        assert repository.called("base") == [json.dumps(options)]
    assert len(set(repository.runner.artifacts)) == len(MATRIX)
    assert len(repository.comments) == len(set(repository.comments)) == len(MATRIX)


@pytest.mark.parametrize("name", ["a b", "a/b", "a\nb", "$(touch x)", "x" * 81, "ä"])
def test_wrong_name(repository: Repository, name: str) -> None:
    code, outcome = repository.job(name=name)
    assert code is None and outcome.failed
    assert "::error title=zerocheck::name is " in outcome.log and "allowed are" in outcome.log
    assert not (repository.checkout / "x").exists() and not repository.runner.artifacts


def test_empty_implementation(repository: Repository) -> None:
    code, outcome = repository.job(implementation=" \n")
    assert code is None and outcome.failed and repository.called("run") is None
    assert "implementation is empty" in outcome.log


def test_committed_baseline_is_not_trusted(repository: Repository) -> None:
    for folder in (repository.checkout, repository.folder / "runner"):
        (folder / "zerocheck-baseline").mkdir(parents=True)
        (folder / "zerocheck-baseline" / "report.json").write_text("committed")
    assert repository.job(RUN="1", REPORT="0")[0] == 1
    assert repository.called("report") is None


def test_committed_report_is_no_baseline(repository: Repository) -> None:
    (repository.checkout / "zerocheck-report").mkdir()
    (repository.checkout / "zerocheck-report" / "report.json").write_text("committed")
    assert repository.job("push", RUN="2")[0] == 2
    assert not repository.runner.caches


@pytest.mark.parametrize(
    ("event", "run", "is_kept"),
    [("push", "1", True), ("push", "3", False), ("pull_request", "0", False)],
)
def test_kept_baseline(repository: Repository, event: str, run: str, is_kept: bool) -> None:
    repository.job(event, RUN=run)
    assert bool(repository.runner.caches) == is_kept


@pytest.mark.parametrize("other", ["main-2", "main-", "main/2", "mai", "main,2", "Main"])
def test_baseline_is_that_of_the_branch(repository: Repository, other: str) -> None:
    repository.job("push", other)
    repository.job(RUN="1")
    assert repository.called("report") is None
    repository.job("push", REPORTED="of main")
    repository.job("push", other, REPORTED="of the other")
    repository.job()
    assert repository.called("base") == ["of main"]


def test_words_are_not_expanded(repository: Repository) -> None:
    (repository.checkout / "committed").touch()
    repository.job(
        implementation="* $(touch x)\n`touch x`", arguments='--profile ci "a b" ~ ;touch x \\'
    )
    words = ["*", "$(touch", "x)", "`touch", "x`", "--profile", "ci", '"a', 'b"', "~"]
    words += [";touch", "x", "\\"]
    assert repository.called("run") == ["run", *words, "--report-dir", "zerocheck-report"]
    assert not (repository.checkout / "x").exists()


def test_installation(repository: Repository) -> None:
    repository.job()
    assert repository.called("pip") is None  # this environment has it
    # A committed folder is not what is installed, and another project has the command.
    (repository.checkout / "zerocheck_sharding-9.dist-info").mkdir()
    repository.programs["python"] = PYTHON.format(f"{sys.executable} -S")
    repository.job()
    assert repository.called("pip") == [f"-m pip install {ROOT}"]


@pytest.mark.long
def test_with_zerocheck_itself(repository: Repository) -> None:
    """A planted bug, on a pull request of the example project to a sound base, then wrong usage."""
    shutil.copytree(PROJECT, repository.checkout, dirs_exist_ok=True)
    program = Path(sysconfig.get_path("scripts")) / "zerocheck"
    repository.programs["zerocheck"] = f'#!/bin/sh\nexec {program} "$@"\n'
    repository.environment |= {
        "PYTHONPATH": str(repository.checkout),
        "HOME": str(repository.folder),
    }
    options = {
        "name": "conformance",
        "implementation": NAME,
        "arguments": "--max-cases 2 --world-sizes 2 --obligations gradient --no-shrink",
    }
    code, outcome = repository.job("push", **options)
    assert code == 0, outcome.log
    file = repository.checkout / "example_sharder" / "sharding.py"
    file.write_text(file.read_text().replace(SOUND, PLANTED))
    code, outcome = repository.job(**options)
    assert code == 1, outcome.log
    assert "### zerocheck: 1 finding, 1 of them new\n" in repository.comments[0]
    code, outcome = repository.job(**options | {"arguments": "--sead 1"})
    assert code == 2 and "No such option '--sead'" in outcome.log
    assert "### zerocheck: no report\n" in repository.comments[0]


def pull(number: int, head: str = "abc", source: str = "forker:patch") -> dict[str, Any]:
    return {"number": number, "head": {"sha": head}, "source": source}


LINK = zipfile.ZipInfo("comment.md")
LINK.create_system, LINK.external_attr = 3, 0o120777 << 16
"""A symbolic link, as zip has it."""

Members = dict[Any, Any]


def archive(folder: Path, members: Members) -> str:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    path = folder / "artifact.zip"
    path.write_bytes(data.getvalue())
    return str(path)


def comment_of_fork(
    repository: Repository, members: Members | None, names: str = "conformance"
) -> Outcome:
    """Run the action for forks; members: files of the artifact, None for one that is no archive."""
    repository.state["pulls"] = repository.state["pulls"] or [pull(7)]
    path = archive(repository.folder, members or {})
    if members is None:
        Path(path).write_bytes(b"PK\x03\x04 no archive")
    artifact = {"name": "zerocheck-conformance", "created_at": "2026-01-02"}
    older = {**artifact, "id": 4, "created_at": "2026-01-01"}  # of an earlier attempt
    repository.state["artifacts"] = [older, {**artifact, "id": 5}, older]
    repository.state["archives"] = {"5": path}
    event = {
        "id": 31,
        "head_sha": "abc",
        "head_branch": "patch",
        "head_repository": {"owner": {"login": "forker"}},
    }
    github = {"token": "token", "repository": "me/my", "event": {"workflow_run": event}}
    outcome = repository.run(OF_FORKS, {"names": names}, github=github)
    assert not outcome.failed, outcome.log
    return outcome


def test_comment_of_a_fork(repository: Repository) -> None:
    comment_of_fork(repository, {"comment.md": "### zerocheck: 1 finding\n- 4 times too large\n"})
    (comment,) = repository.comments
    assert comment == (
        "<!-- zerocheck: conformance -->\n"
        "This is what the code of a fork reported:\n"
        "\n"
        "    ### zerocheck: 1 finding\n"
        "    - 4 times too large\n"
    )
    comment_of_fork(repository, {"comment.md": "### zerocheck: fixed\n"})
    assert len(repository.comments) == 1 and "fixed" in repository.comments[0]


HOSTILE = [
    "@everyone [approved](https://example.org) <img src=x> ![](https://example.org/x)",
    "\n\n# approved\n",
    "a\r# approved\r\n# approved",
    "a\u2028# approved\x0b# approved\x0c# approved\x85# approved",
    "```\n# approved\n~~~\n# approved",
    "\t# approved\n \t # approved",
    "<!-- zerocheck: conformance -->\n-->\n# approved",
    "\x00# approved",
    b"\xff\r# approved",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_a_fork_is_no_markup(repository: Repository, text: str | bytes) -> None:
    comment_of_fork(repository, {"comment.md": text})
    (comment,) = repository.comments
    tokens = MarkdownIt().parse(comment)
    kinds = [token.type for token in tokens]
    assert kinds == ["html_block", "paragraph_open", "inline", "paragraph_close", "code_block"]
    assert tokens[0].content == "<!-- zerocheck: conformance -->\n"
    assert tokens[2].content == "This is what the code of a fork reported:"


def test_artifact_of_a_fork_is_no_more_than_text(repository: Repository) -> None:
    """Nothing is extracted, links are not followed, and little is read."""
    comment_of_fork(repository, {LINK: "state.json"})
    assert repository.comments[0].endswith("\n    state.json\n")
    comment_of_fork(repository, {"comment.md": "y" * 10_000_000, "../checkout/x": "", "x": ""})
    assert len(repository.comments[0]) < 21_000
    comment_of_fork(repository, {"comment.md": "y\n" * 10_000})
    assert len(repository.comments[0].splitlines()) < 45
    assert not list(repository.checkout.iterdir())


@pytest.mark.parametrize("members", [{}, {"report.json": "{}"}, None])
def test_artifact_without_a_comment(repository: Repository, members: Members | None) -> None:
    outcome = comment_of_fork(repository, members)
    assert "### zerocheck: no report" in repository.comments[0]
    assert "Traceback" not in outcome.log


@pytest.mark.parametrize(
    "pulls",
    [
        [pull(7, head="later")],  # pushed again since: another run comments
        [pull(8, source="mallory:patch")],
        [pull(7), pull(9)],  # to two bases: which of them ran is not known
    ],
)
def test_pull_request_is_that_of_the_commit(
    repository: Repository, pulls: list[dict[str, Any]]
) -> None:
    repository.state["pulls"] = pulls
    outcome = comment_of_fork(repository, {"comment.md": "text"})
    assert "is not the head of exactly one open pull request" in outcome.log
    assert not repository.comments


def test_only_named_artifacts_are_posted(repository: Repository) -> None:
    outcome = comment_of_fork(repository, {"comment.md": "text"}, names="other\nconformance *")
    assert "No comment of other: the run has no artifact zerocheck-other." in outcome.log
    assert "No comment of *:" in outcome.log
    assert len(repository.comments) == 1
