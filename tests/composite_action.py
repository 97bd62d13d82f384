"""Composite actions of this repository, run as GitHub does.

Steps with `run` are run by bash, with nothing but their `env` and what the runner sets. The
actions for caches and artifacts are replaced by what GitHub documents of them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass
class Outcome:
    """What a job shows of an action."""

    failed: bool = False
    log: str = ""
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    """By step, of those that have an id."""


@dataclass
class Runner:
    """A repository on GitHub, with what its runs leave behind."""

    folder: Path
    programs: Path
    """Folder with stand-ins, before everything else in PATH."""
    environment: dict[str, str]
    """Variables of the stand-ins."""
    caches: dict[str, Path] = field(default_factory=dict)
    """By key, oldest first."""
    artifacts: list[str] = field(default_factory=list)
    """Names, of one run of the workflow."""

    def run(self, action: Path, inputs: dict[str, str], **contexts: Any) -> Outcome:
        """Run an action in a job of its own. contexts: github, matrix."""
        definition = yaml.safe_load(action.read_text(encoding="utf-8"))
        assert set(inputs) <= set(definition["inputs"])
        defaults = {name: spec.get("default", "") for name, spec in definition["inputs"].items()}
        temporary = self.folder / "runner"
        temporary.mkdir(exist_ok=True)
        values = {
            "matrix": None,
            **contexts,
            "inputs": {**defaults, **inputs},
            "runner": {"temp": str(temporary)},
            "steps": {},
        }
        outcome = Outcome()
        for step in definition["runs"]["steps"]:
            condition = step.get("if", "")
            if outcome.failed and "always()" not in condition:
                continue
            if condition and not evaluate(condition, values):
                continue
            code, outputs = self._step(step, values, action.parent, outcome)
            outcome.failed |= code != 0
            if "id" in step:
                outcome.outputs[step["id"]] = outputs
                result = "failure" if code else "success"
                values["steps"][step["id"]] = {"outputs": outputs, "outcome": result}
        return outcome

    def _step(
        self, step: dict[str, Any], values: dict[str, Any], action: Path, outcome: Outcome
    ) -> tuple[int, dict[str, str]]:
        if "uses" in step:
            arguments = {key: filled(text, values) for key, text in step["with"].items()}
            {
                "actions/cache/restore": self._restore,
                "actions/cache/save": self._save,
                "actions/upload-artifact": self._upload,
            }[step["uses"].partition("@")[0]](arguments)
            return 0, {}
        output = self.folder / "output"
        output.write_text("")
        environment = {
            **self.environment,
            **{key: filled(text, values) for key, text in step.get("env", {}).items()},
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "RUNNER_TEMP": values["runner"]["temp"],
            "GITHUB_ACTION_PATH": str(action),
            "GITHUB_OUTPUT": str(output),
        }
        assert step["shell"] == "bash"
        process = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.folder / "checkout",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=60,
        )
        outcome.log += process.stdout
        lines = output.read_text().splitlines()
        return process.returncode, dict(line.split("=", 1) for line in lines)

    def _restore(self, arguments: dict[str, str]) -> None:
        """Restore the cache of the key, or the newest whose key begins with a restore key."""
        prefixes = [arguments["key"], *arguments.get("restore-keys", "").split()]
        for prefix in prefixes:
            for key in reversed(self.caches):
                if key.startswith(prefix):
                    target = self.folder / "checkout" / arguments["path"]
                    shutil.copytree(self.caches[key], target, dirs_exist_ok=True)
                    return

    def _save(self, arguments: dict[str, str]) -> None:
        key = arguments["key"]
        assert "," not in key and len(key) <= 512
        self.caches[key] = self.folder / "caches" / str(len(self.caches))
        shutil.copytree(self.folder / "checkout" / arguments["path"], self.caches[key])

    def _upload(self, arguments: dict[str, str]) -> None:
        name = arguments["name"]
        assert name not in self.artifacts, "GitHub refuses a second artifact of this name"
        assert not re.search(r'["<>|*?:\\/\r\n]', name), "GitHub refuses these characters"
        self.artifacts.append(name)


def filled(text: str, values: dict[str, Any]) -> str:
    """Return a text with the values of its expressions."""

    def value(match: re.Match[str]) -> str:
        result = evaluate(match[1], values)
        return str(result).lower() if isinstance(result, bool) else str(result)

    return re.sub(r"\$\{\{ (.*?) \}\}", value, text)


def evaluate(expression: str, values: dict[str, Any]) -> Any:
    """Return the value of an expression; what a context does not have is empty, as on GitHub."""

    def look(path: str) -> Any:
        value: Any = values
        for name in path.split("."):
            value = value.get(name, "") if isinstance(value, dict) else ""
        return value

    text = expression.replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"\b[a-z]+(?:\.[\w-]+)+", lambda match: f"look({match[0]!r})", text)
    functions = {"look": look, "always": lambda: True, "toJSON": json.dumps}
    return eval(text, {"__builtins__": {}, "matrix": values["matrix"], **functions})
