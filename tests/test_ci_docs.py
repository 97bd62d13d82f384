"""What docs/ci.md says can be done as it stands there."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from zerocheck.case.features import FEATURES, GROUPS
from zerocheck.cli import main
from zerocheck.errors import UsageError
from zerocheck.run.plan.settings import SETTINGS, project_settings

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
WORKFLOW = ROOT / "tests" / "example_project" / ".github" / "workflows" / "conformance.yml"

CHECKED = ROOT / "docs" / "what-is-checked.md"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found.group(1)


COMMANDS = [
    command.removesuffix("|| true").strip()
    for command in re.findall(r"(?m)^ +(?:- run: )?(zerocheck .*)$", PAGE)
]


def test_the_workflow_is_that_of_the_example_project() -> None:
    assert block("yaml") == WORKFLOW.read_text(encoding="utf-8")
    _, jobs = block("yaml").split("\njobs:\n")
    assert re.findall(r"(?m)^  ([\w-]+):$", jobs) == ["tests", "pairs", "next-torch"]
    for job in re.split(r"(?m)^  [\w-]+:$", jobs)[1:]:
        head, steps = job.split("    steps:\n")
        assert "    runs-on: ubuntu-latest\n" in head
        assert steps.startswith("      - uses: actions/checkout@")
        assert set(re.findall(r"(?m)^      - (\w+):", steps)) == {"uses", "run"}
    assert "\t" not in block("yaml")


def test_the_jobs_of_shards_take_each_case_once() -> None:
    """The matrix has all shards that its command counts, and the other job takes all of them."""
    _, shards = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (listed,) = re.findall(r"shard: \[([\d, ]+)\]", shards)
    taken, merged = re.findall(r"- run: (zerocheck run .*)", shards)
    (count,) = re.findall(r"--shard \$\{\{matrix\.shard\}\}/(\d+)", taken)
    assert [int(one) for one in listed.split(",")] == list(range(1, int(count) + 1))
    assert taken.partition(" --shard")[0] == merged.partition(" --reuse")[0]
    (path,) = re.findall(r"          path: (\w+)\n      - run: zerocheck", shards)
    assert merged.endswith(f" --reuse {path}")
    assert (
        re.search(r"name: shard-\$\{\{matrix\.shard\}\}", shards) and "pattern: shard-*" in shards
    )


def test_there_are_commands() -> None:
    assert {command.split()[1] for command in COMMANDS} == {"run", "report"}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_taken(command: str) -> None:
    _, name, *args = shlex.split(command)
    main.commands[name].make_context(name, args)  # an option that there is not raises


def test_settings_are_taken(tmp_path: Path) -> None:
    table = tomllib.loads(block("toml"))["tool"]["zerocheck"]
    assert list(table) == list(SETTINGS)
    (tmp_path / "pyproject.toml").write_text(block("toml"))
    assert set(project_settings(tmp_path)) == set(SETTINGS)
    (tmp_path / "pyproject.toml").write_text(block("toml").replace("seed", "sead"))
    with pytest.raises(UsageError, match="did you mean 'seed'"):
        project_settings(tmp_path)


def test_groups_are_named() -> None:
    assert set(GROUPS) == {"basic", *(feature.dimension for feature in FEATURES.values())}
    text = " ".join(PAGE.split())
    groups = re.search(r"The groups are ([\w, ]+) for the obligations of checkpoints", text)
    assert groups is not None
    assert re.findall(r"\w+", groups.group(1).replace(" and ", " ")) == [
        group for group in GROUPS if group != "resume"
    ] + ["resume"]
    for obligation, group in re.findall(r"`MyFSDP-(\w+)-(\w+)`", PAGE):
        assert group in GROUPS and f"| {obligation} |" in CHECKED.read_text()
