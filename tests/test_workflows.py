"""Linters of the actions and of every workflow that this project shows."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import PAGES, ROOT, blocks

ACTIONS = [ROOT / "action.yml", *sorted(ROOT.glob("*/action.yml"))]
EXAMPLES = sorted((ROOT / "tests" / "example_project").rglob("workflows/*.yml"))
SCRIPTS = Path(sysconfig.get_path("scripts"))
SHELLCHECK, ZIZMOR, SCHEMAS = (
    SCRIPTS / name for name in ("shellcheck", "zizmor", "check-jsonschema")
)


def lint(*command: str | Path, text: str | None = None) -> str:
    """Return what a linter finds, "" for nothing."""
    process = subprocess.run(
        [*map(str, command)],
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert process.returncode == 0 or process.stdout
    return process.stdout if process.returncode else ""


def schema_errors(schema: str, files: list[Path]) -> str:
    """Check files against one of the schemas of GitHub that check-jsonschema contains."""
    return lint(SCHEMAS, "--verbose", "--builtin-schema", f"vendor.{schema}", *files)


def security_findings(files: list[Path]) -> str:
    config = ROOT / "tests" / "zizmor.yml"
    options = ("--offline", "--no-progress", "--strict-collection", "--config", config)
    return lint(ZIZMOR, *options, *files)


def shell_errors(definition: Any) -> str:
    """Check each script of an action or a workflow, with a word for each expression."""
    scripts = (re.sub(r"\$\{\{.*?\}\}", "value", script) for script in runs(definition))
    return "".join(
        lint(SHELLCHECK, "--shell", "bash", "--external-sources", "-", text=script)
        for script in scripts
    )


def runs(definition: Any) -> Iterator[str]:
    if isinstance(definition, dict):
        for key, value in definition.items():
            if key == "run" and isinstance(value, str):
                yield value
            else:
                yield from runs(value)
    elif isinstance(definition, list):
        for value in definition:
            yield from runs(value)


def errors(action: list[Path], workflows: list[Path]) -> str:
    messages = [
        schema_errors("github-actions", action) if action else "",
        schema_errors("github-workflows", workflows) if workflows else "",
        security_findings([*action, *workflows]),
        *(shell_errors(yaml.safe_load(path.read_text())) for path in (*action, *workflows)),
    ]
    return "".join(messages)


@pytest.fixture
def shown(tmp_path: Path) -> list[Path]:
    """The workflows of the pages, as files of the names that they give."""
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    files = []
    for page in PAGES:
        for language, text in blocks(page):
            if language == "yaml" and "\njobs:\n" in text:
                name = re.match(r"# \.github/workflows/(\S+)\n", text)
                files.append(folder / (name[1] if name else f"{len(files)}.yml"))
                files[-1].write_text(text)
    return files


def test_actions_and_workflows_have_no_errors(shown: list[Path]) -> None:
    assert len(shown) >= 4 and len(ACTIONS) == 2 and EXAMPLES
    assert not errors(ACTIONS, [*EXAMPLES, *shown])


def test_scripts_have_no_errors() -> None:
    scripts = [path for action in ACTIONS[1:] for path in action.parent.glob("*.sh")]
    assert scripts and not lint(SHELLCHECK, *scripts)


def test_outputs_are_those_of_steps_before() -> None:
    """`steps.NAME.outputs.KEY`: an earlier step has that id, and writes that key."""
    for path in ACTIONS:
        definition = yaml.safe_load(path.read_text())
        steps = {step["id"]: step["run"] for step in definition["runs"]["steps"] if "id" in step}
        for name, key in re.findall(r"steps\.([\w-]+)\.outputs\.([\w-]+)", path.read_text()):
            assert f'echo "{key}=' in steps[name]


PLANTED = [
    ("action", '"$GITHUB_ACTION_PATH"\n', "$GITHUB_ACTION_PATH\n", "SC2086"),
    ("action", "shell: bash", "shel: bash", "'shel' was unexpected"),
    ("action", 'exit "$CODE"', "exit ${{ inputs.name }}", "template-injection"),
    ("workflow", "runs-on:", "run-on:", "'runs-on' is a required property"),
    ("workflow", "  pull_request:\n", "  pull_request_target:\n", "dangerous-triggers"),
    ("workflow", "contents: read", "contents: write", "excessive-permissions"),
    ("workflow", 'pip install "$ZEROCHECK"', "pip install $ZEROCHECK", "SC2086"),
]


@pytest.mark.parametrize(("kind", "right", "wrong", "message"), PLANTED)
def test_planted_error_is_detected(
    tmp_path: Path, kind: str, right: str, wrong: str, message: str
) -> None:
    source = ACTIONS[0] if kind == "action" else EXAMPLES[0]
    file = tmp_path / ".github" / "workflows" / source.name
    if kind == "action":
        file = tmp_path / source.name
    file.parent.mkdir(parents=True, exist_ok=True)
    text = source.read_text()
    assert right in text
    file.write_text(text.replace(right, wrong))
    assert message in errors(*(([file], []) if kind == "action" else ([], [file])))
