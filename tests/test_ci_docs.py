"""What docs/ci.md and docs/ci-reference.md say can be done as they say it."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import blocks

from zerocheck.case.features import FEATURES, GROUPS
from zerocheck.cli import main
from zerocheck.errors import UsageError
from zerocheck.run.plan.settings import SETTINGS, project_settings

ROOT = Path(__file__).parent.parent
WORKFLOWS_PAGE = ROOT / "docs" / "ci.md"
REFERENCE_PAGE = ROOT / "docs" / "ci-reference.md"
PAGES = "".join(page.read_text(encoding="utf-8") for page in (WORKFLOWS_PAGE, REFERENCE_PAGE))
PROJECT = ROOT / "tests" / "example_project"
WORKFLOW = PROJECT / ".github" / "workflows" / "conformance.yml"
WORKFLOWS: dict[str, Any] = {
    text: yaml.safe_load(text) for language, text in blocks(WORKFLOWS_PAGE) if language == "yaml"
}
"""Parsed, by their text."""
BY_NAME = {workflow["name"]: workflow for workflow in WORKFLOWS.values()}
CPU = {"PIP_EXTRA_INDEX_URL": "https://download.pytorch.org/whl/cpu"}
ACTION = "OWNER/zerocheck"
CHECKED = ROOT / "docs" / "what-is-checked.md"

COMMANDS = [
    command.removesuffix("|| true").strip()
    for command in re.findall(r"(?m)^ +(?:- run: )?(zerocheck .*)$", PAGES)
]


def settings_block() -> str:
    return next(text for _, text in blocks(REFERENCE_PAGE) if text.startswith("# pyproject.toml\n"))


def steps(workflow: Any) -> list[list[Any]]:
    return [job["steps"] for job in workflow["jobs"].values()]


def test_workflow_of_the_example_project_is_on_the_page() -> None:
    assert WORKFLOW.read_text(encoding="utf-8") in WORKFLOWS
    assert list(BY_NAME["conformance"]["jobs"]) == ["tests", "pairs", "next-torch"]


def test_workflows_install_what_they_use() -> None:
    """From the one git URL, or by the action, where OWNER is replaced once."""
    extra = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["test"]
    assert "zerocheck-sharding" in extra  # not on an index: `.[test]` alone cannot be installed
    for text, workflow in WORKFLOWS.items():
        assert text.count("OWNER") == 1
        for job in steps(workflow):
            runs = [step.get("run", "") for step in job]
            if any(step.get("uses", "").startswith(f"{ACTION}/comment@") for step in job):
                assert len(job) == 1  # its token can write, so it runs nothing else
                continue
            assert CPU.items() <= workflow["env"].items()
            assert [step["uses"].partition("@")[0] for step in job[:2]] == [
                "actions/checkout",
                "actions/setup-python",
            ]
            if any(step.get("uses", "").startswith(f"{ACTION}@") for step in job):
                assert "pip install ." in runs
                continue
            assert "pip install \"$ZEROCHECK\" '.[test]'" in runs
            assert re.fullmatch(
                rf"zerocheck-sharding @ git\+https://github\.com/{ACTION}@\w+",
                workflow["env"]["ZEROCHECK"],
            )


def test_workflow_for_forks_names_the_checks_of_the_other_one() -> None:
    (of_forks,) = steps(BY_NAME["zerocheck comment"])[0]
    # YAML 1.1 reads the key `on` as true.
    (name,) = BY_NAME["zerocheck comment"][True]["workflow_run"]["workflows"]
    checks = {
        step["with"]["name"]
        for job in steps(BY_NAME[name])
        for step in job
        if step.get("uses", "").startswith(f"{ACTION}@")
    }
    assert set(of_forks["with"]["names"].split()) == checks


@pytest.mark.parametrize("action", ["action.yml", "comment/action.yml"])
def test_inputs_of_the_actions_are_those_that_they_have(action: str) -> None:
    definition = yaml.safe_load((ROOT / action).read_text(encoding="utf-8"))
    used = f"{ACTION}/{action}".removesuffix("/action.yml")
    for workflow in WORKFLOWS.values():
        for step in (step for job in steps(workflow) for step in job):
            if step.get("uses", "").partition("@")[0] == used:
                required = {n for n, spec in definition["inputs"].items() if spec.get("required")}
                assert required <= set(step["with"]) <= set(definition["inputs"])
    if action == "action.yml":
        rows = re.findall(r"(?m)^\| `([\w-]+)` \| .* \| (.*) \|$", PAGES)
        defaults = {name: spec.get("default") for name, spec in definition["inputs"].items()}
        assert [name for name, _ in rows if name in defaults] == [
            "implementation", "arguments", "name", "comment", "report-dir",
        ]  # fmt: skip
        for name, shown in rows:
            if default := defaults.get(name):
                assert shown.strip("`").strip('"') == default


def test_jobs_of_shards_take_each_case_once() -> None:
    """The matrix has all shards that its command counts, and the other job takes all of them."""
    jobs = BY_NAME["shards"]["jobs"]
    shards, merge = jobs["shards"], jobs["conformance"]
    taken, merged = (
        next(step["run"] for step in job["steps"] if step.get("run", "").startswith("zerocheck"))
        for job in (shards, merge)
    )
    count = taken.partition(" --shard ${{ matrix.shard }}/")[2]
    assert shards["strategy"]["matrix"]["shard"] == list(range(1, int(count) + 1))
    assert taken.partition(" --shard")[0] == merged.partition(" --reuse")[0]
    upload, download = shards["steps"][-1], merge["steps"][-2]
    assert upload["with"]["name"] == "shard-${{ matrix.shard }}"
    assert download["with"]["pattern"] == "shard-*"
    assert merged.endswith(f" --reuse {download['with']['path']}")


def test_there_are_commands() -> None:
    assert {command.split()[1] for command in COMMANDS} == {"run", "report"}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_taken(command: str) -> None:
    _, name, *args = shlex.split(command)
    main.commands[name].make_context(name, args)  # an option that there is not raises


def test_settings_are_taken(tmp_path: Path) -> None:
    table = tomllib.loads(settings_block())["tool"]["zerocheck"]
    assert list(table) == list(SETTINGS)
    (tmp_path / "pyproject.toml").write_text(settings_block())
    assert set(project_settings(tmp_path)) == set(SETTINGS)
    (tmp_path / "pyproject.toml").write_text(settings_block().replace("seed", "sead"))
    with pytest.raises(UsageError, match="did you mean 'seed'"):
        project_settings(tmp_path)


def test_groups_are_named() -> None:
    assert set(GROUPS) == {"basic", *(feature.dimension for feature in FEATURES.values())}
    text = " ".join(PAGES.split())
    groups = re.search(r"The groups are ([\w, ]+) for the obligations of checkpoints", text)
    assert groups is not None
    assert re.findall(r"\w+", groups.group(1).replace(" and ", " ")) == [
        group for group in GROUPS if group != "resume"
    ] + ["resume"]
    for obligation, group in re.findall(r"`MyFSDP-(\w+)-(\w+)`", PAGES):
        assert group in GROUPS and f"| {obligation} |" in CHECKED.read_text()
