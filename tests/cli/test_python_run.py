"""`zerocheck.run`, as users call it: in a script, in a notebook, in a test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from documents import example
from hand_made import ENVIRONMENT, finding, finished, held, started
from test_cli import emitting, with_engine

import zerocheck
from zerocheck.case.schema import Case
from zerocheck.errors import UsageError
from zerocheck.run.findings.case_file import write
from zerocheck.run.records.records import CaseFile, Finding

ROOT = Path(zerocheck.__file__).parent.parent
FEW = "world_sizes=(2,), max_cases=2, obligations='gradient'"

SCRIPT = """
import torch
import zerocheck
from torch import nn
from torch.distributed.fsdp import fully_shard

print("top of the script")
scale = 1.0


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


def tiny():
    def batch(generator):
        return torch.rand(2, 4, generator=generator), torch.rand(2, 3, generator=generator)

    return Tiny(), batch, nn.functional.mse_loss


class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


def sharded(model, case, mesh):
    assert type(model).__name__ == "Tiny" and scale == 1.0
    fully_shard(model, mesh=mesh)
    return zerocheck.Built(model, torch.optim.AdamW(zerocheck.groups(model, case)))


def unsharded(model, case, mesh):
    return zerocheck.Built(model, torch.optim.AdamW(zerocheck.groups(model, case)))
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ran(*arguments: str, given: str | None = None, code: int = 0) -> str:
    """Run Python in the current directory, and return what it prints."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "reference")])
    done = subprocess.run(
        [sys.executable, *arguments],
        input=given,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_script_without_a_guard() -> None:
    """Its functions, model and finding; rank processes do not run it again."""
    call = f"""
result = zerocheck.run(sharded, unsharded, model=tiny, {FEW}, quiet=True)
assert result.exit_code == 1
assert "__main__:unsharded: 1 finding in 2 cases: 2 violated" in result.verdict
(finding,) = result.findings
assert finding.obligation == "gradient" and finding.causes == ("local gradient only",)
assert finding.replay() == 1
assert finding.replay(sharded) == 0
few = dict(world_sizes="2", max_cases=2, obligations="update", report_dir="own")
own = zerocheck.run("ddp", model=tiny, optimizer=Signs, **few)
assert own.exit_code == 0, own
"""
    Path("script.py").write_text(SCRIPT + call)
    output = ran("script.py")
    assert output.count("top of the script") == 1
    assert "result.findings[0].replay() on the result of zerocheck.run" in output
    assert "--implementation FILE.py:unsharded --model FILE.py:tiny" in output
    assert "reproduced bit for bit" in output
    assert "__main__:sharded: holds (the file is of __main__:unsharded)" in output
    report = Path("zerocheck-report")
    assert (report / "report.html").is_file()
    case_file = next(report.glob("findings/*.json"))
    message = ran(
        *("-m", "zerocheck", "replay", str(case_file)),
        *("--implementation", "__main__:unsharded", "--model", "__main__:tiny"),
        code=2,
    )
    assert "'__main__:unsharded' is of a notebook or a script that ran" in message


NOTEBOOK = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
cells = {"__name__": "__main__"}
exec(compile(SCRIPT, "/tmp/cells/1.py", "exec"), cells)
exec(compile(FIRST, "/tmp/cells/2.py", "exec"), cells)
exec(compile(SECOND, "/tmp/cells/3.py", "exec"), cells)
"""


def test_cells_of_a_notebook() -> None:
    """No file, other threads, and a cell that is run again with another definition."""
    first = """
def crashes(model, case, mesh):
    return undefined
result = zerocheck.run(crashes, model=tiny, world_sizes=[1], obligations=["gradient"])
print(result._repr_html_())
"""
    second = f"""
class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x))

def crashes(model, case, mesh):
    assert len(list(model.parameters())) == 4
    return sharded(model, case, mesh)
again = zerocheck.run(crashes, model=tiny, {FEW})
print(again)
print(result.findings[0].replay())
"""
    cells = f"SCRIPT, FIRST, SECOND = {SCRIPT!r}, {first!r}, {second!r}\n{NOTEBOOK}"
    output = ran("-", given=cells)
    assert "in crashes (/tmp/cells/2.py:3)" in output
    assert "<pre>CRASHED __main__:crashes: the ranks crashed: NameError" in output
    assert "__main__:crashes: stopped after" in output
    assert "all obligations hold. 2 cases" in output
    # What the first result has is the function of the first run.
    assert "reproduced: crashed again\n1\n" in output


def test_in_a_test_of_pytest() -> None:
    """A function of the test file by its name, and one within a test by its code."""
    call = f"""
def test_names(tmp_path):
    result = zerocheck.run(sharded, "fsdp2", model=tiny, {FEW}, report_dir=tmp_path)
    assert result.exit_code == 0, str(result)
    assert result.page == tmp_path / "report.html"

def test_code():
    def inner(model, case, mesh):
        return sharded(model, case, mesh)
    assert zerocheck.run([inner], model=tiny, {FEW}).exit_code == 0
"""
    Path("test_it.py").write_text(SCRIPT + call)
    assert "2 passed" in ran("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py")


def test_the_example_of_the_page() -> None:
    Path("pyproject.toml").write_text("[tool.zerocheck]\nmax_cases = 3\n")
    output = ran("-", given=example("cell.py"))
    assert "all obligations hold. " in output and "0 zerocheck-report/report.html" in output


def test_a_file_that_runs_zerocheck_while_it_is_imported(tmp_path: Path) -> None:
    Path("loops.py").write_text(f"{SCRIPT}\nzerocheck.run(sharded)\n")
    message = ran("-m", "zerocheck", "run", "loops.py:sharded", "--world-sizes", "1", code=2)
    assert "loops.py does not import: UsageError: zerocheck.run starts rank processes" in message
    assert 'put what it runs under `if __name__ == "__main__":`' in message


# What is handed on, without rank processes


def build(model: Any, case: Any, mesh: Any) -> None:
    """Implementation at the top of a module."""


def test_arguments_are_the_options_of_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = with_engine(monkeypatch, emitting(held()))
    (tmp_path / "known.toml").write_text("")
    result = zerocheck.run(
        "zero1",
        build,
        profile="ci",
        world_sizes=range(1, 3),
        seed=7,
        max_cases=3,
        obligations="gradient,update",
        optimizer="sgd",
        known_issues=tmp_path / "known.toml",
        shrink=False,
        report_dir=tmp_path / "out",
        features="clip",
        shard="1/2",
        quiet=True,
    )
    (options,) = asked
    assert options.implementations[0] == "zero1"
    assert options.implementations[1].endswith("test_python_run.py:build")
    assert (options.profile, options.world_sizes, options.seed) == ("ci", (1, 2), 7)
    assert (options.max_cases, options.obligations) == (3, ("gradient", "update"))
    assert (options.optimizer, options.shrink, options.features) == ("sgd", False, ("clip",))
    assert options.known_issues == (str(tmp_path / "known.toml"),)
    assert str(options.shard) == "1/2" and options.ranks == "processes"
    assert result.page == options.report_dir / "report.html" == tmp_path / "out" / "report.html"


def test_options_of_the_project_and_the_first_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = with_engine(monkeypatch, emitting(held()))
    (tmp_path / "pyproject.toml").write_text("[tool.zerocheck]\nseed = 5\n")
    assert zerocheck.run().exit_code == 0
    assert (asked[0].profile, asked[0].seed) == ("smoke", 5)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ([], {"max_case": 3}, "unknown argument of zerocheck.run, 'max_case'; did you mean 'max_"),
        ([], {"profile": "quik"}, "unknown profile 'quik'; did you mean 'quick'?"),
        ([], {"profile": 3}, "profile is a string, not 3"),
        ([], {"world_sizes": 3}, "world_sizes is a list of whole numbers, not 3"),
        ([], {"world_sizes": (1, 2.0)}, "world_sizes is a list of whole numbers, not [1, 2.0]"),
        ([], {"seed": "x"}, "seed 'x' is not a whole number"),
        ([], {"features": ["tyed"]}, "unknown feature 'tyed'; did you mean 'tied'?"),
        ([], {"obligations": ["updates"]}, "unknown obligation 'updates'; did you mean 'update'"),
        ([], {"quiet": True, "verbose": True}, "--quiet and --verbose are opposites"),
        ([], {"model": 3}, "got 3 (int); needed is a function that returns (model, batch)"),
        ([], {"optimizer": 3}, "got 3 (int); needed is a class, its name path/to/file.py:Class"),
        (["fsdp"], {}, "unknown implementation 'fsdp'; did you mean 'fsdp2'?"),
        ([3], {}, "got 3 (int); needed is a class, a function build(model, case, mesh)"),
        ([[]], {}, "zerocheck.run got an empty list"),
        (["no.py:build"], {}, "there is no file 'no.py'"),
        (["__main__:build"], {}, "'__main__:build' is of a notebook or a script that ran"),
    ],
)
def test_wrong_arguments(names: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        zerocheck.run(*names, **options)
    assert message in str(refused.value)
    assert not Path("zerocheck-report").exists()


def test_an_object_that_cannot_be_sent() -> None:
    lock = threading.Lock()

    def locked(model: Any, case: Any, mesh: Any) -> None:
        lock.acquire()

    with pytest.raises(UsageError, match="locked cannot be sent to rank processes: TypeError"):
        zerocheck.run(locked)


def test_an_interrupt_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with_engine(monkeypatch, emitting(held()[:-1], then=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        zerocheck.run("zero1")
    assert Path("zerocheck-report/report.html").is_file()


def with_finding(monkeypatch: pytest.MonkeyPatch, record: Finding) -> None:
    with_engine(monkeypatch, emitting([started("zero2"), record, finished(1)], 1))


def test_a_result_in_a_notebook_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    with_finding(monkeypatch, finding(title="<b>wrong</b>", case_file=""))
    result = zerocheck.run("zero1", quiet=True)
    page = result._repr_html_()
    assert "<b>" not in page and "&lt;b&gt;wrong" in page
    assert '<a href="zerocheck-report/report.html">' in page
    assert repr(result) == "<zerocheck.run: 1 finding, exit code 1, zerocheck-report/report.html>"
    with pytest.raises(UsageError, match="has no case to replay"):
        result.findings[0].replay()


def test_a_finding_keeps_its_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next run in the directory moves the file, and writes another one in its place."""

    def written(seed: int) -> Path:
        file = CaseFile(
            implementation="zero2",
            case=Case(seed=seed),
            status="violated",
            judgement=None,
            environment=ENVIRONMENT,
        )
        (tmp_path / "findings" / "case.json").unlink(missing_ok=True)
        return write(tmp_path / "findings", "case", file)

    with_finding(monkeypatch, finding(case_file=str(written(1))))
    result = zerocheck.run("zero1", quiet=True)
    written(2)
    replayed = []
    monkeypatch.setattr(
        "zerocheck.cli.python_run.start_replay",
        lambda read, name, own: replayed.append((read().case.seed, name)) or 0,
    )
    result.findings[0].replay()
    result.findings[0].replay("zero1")
    assert replayed == [(1, "zero2"), (1, "zero1")]
